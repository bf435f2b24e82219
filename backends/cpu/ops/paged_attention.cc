// PagedAttention: checks, work split over threads, onnxruntime glue. The arithmetic is in paged_attention_tile.h.
#include "paged_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../dispatch.h"

namespace trivet {
namespace {

constexpr TierTable<AttentionKernels> kKernels = TRIVET_TIERS(kAttention);

constexpr int64_t kMaxItemRows = 96;          // rows that share one packed KV tile
constexpr int64_t kMinItemRows = 16;          // below this, packing a tile costs more than an idle thread
constexpr int64_t kTasksPerThread = 4;        // for an even load under causal masking
constexpr int64_t kPrepareTokens = 32;        // tokens per task of step 1
constexpr int64_t kSerialWork = 1 << 16;      // multiply-adds that one thread does sooner than it wakes another
constexpr int64_t kMaxSplitFloats = 8 << 20;  // memory bound of partition states

enum ScratchSlot : int { kQueries, kItems, kTasks, kSplitStates, kThreadFloats };

struct AttentionTask {
  int64_t item, partition;
};

// --- Checks -------------------------------------------------------------------------------------------------------

[[noreturn]] void fail(const std::string& what) { throw OpError(what); }

std::string at(const char* name, int64_t index) { return std::string(name) + "[" + std::to_string(index) + "]"; }

void check_range(const char* name, int64_t index, int64_t value, int64_t low, int64_t end) {
  if (value < low || value >= end) {
    fail(at(name, index) + ": expected " + std::to_string(low) + " to " + std::to_string(end - 1) + ", got " +
         std::to_string(value));
  }
}

void check_attribute(bool good, const char* name, const std::string& expected, const std::string& got) {
  if (!good) fail(std::string("attribute '") + name + "': expected " + expected + ", got " + got);
}

void check_request(const PagedAttentionParams& p, int64_t r) {
  const int64_t start = p.query_start_loc[r], end = p.query_start_loc[r + 1];
  if (end < start || end > p.num_tokens) {
    fail(at("query_start_loc", r + 1) + ": expected " + std::to_string(start) + " to " + std::to_string(p.num_tokens) +
         ", got " + std::to_string(end));
  }
  const int64_t seq_len = p.seq_lens[r];
  if (seq_len < end - start) {
    fail(at("seq_lens", r) + ": expected at least the request's " + std::to_string(end - start) +
         " scheduled tokens, got " + std::to_string(seq_len));
  }
  for (int64_t t = start; t < end; ++t) {
    const int64_t expected = seq_len - (end - t);
    if (p.positions[t] != expected) {
      fail(at("positions", t) + ": expected " + std::to_string(expected) + " (the scheduled tokens are the last of " +
           at("seq_lens", r) + " = " + std::to_string(seq_len) + "), got " + std::to_string(p.positions[t]));
    }
  }
  const int64_t blocks = (seq_len + p.block_size - 1) / p.block_size;
  if (blocks > p.max_blocks) {
    fail("block_table: expected at least " + std::to_string(blocks) + " columns for " + at("seq_lens", r) + " = " +
         std::to_string(seq_len) + " and block size " + std::to_string(p.block_size) + ", got " +
         std::to_string(p.max_blocks));
  }
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t block = p.block_table[r * p.max_blocks + b];
    if (block < 0 || block >= p.num_blocks) check_range(at("block_table", r).c_str(), b, block, 0, p.num_blocks);
  }
}

void check_values(const PagedAttentionParams& p) {
  if (p.query_start_loc[0] != 0) fail("query_start_loc[0]: expected 0, got " + std::to_string(p.query_start_loc[0]));
  for (int64_t r = 0; r < p.num_requests; ++r) check_request(p, r);
  if (p.query_start_loc[p.num_requests] != p.num_tokens) {
    fail(at("query_start_loc", p.num_requests) + ": expected the number of tokens, " + std::to_string(p.num_tokens) +
         ", got " + std::to_string(p.query_start_loc[p.num_requests]));
  }
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    check_range("slot_mapping", t, p.slot_mapping[t], -1, p.num_blocks * p.block_size);
  }
}

// --- Work split ---------------------------------------------------------------------------------------------------

int64_t first_partition(const PagedAttentionParams& p, const AttentionItem& item) {
  if (p.sliding_window == 0) return 0;
  return std::max<int64_t>(0, item.first_position - p.sliding_window + 1) / kPartitionKeys;
}

int64_t end_partition(const AttentionItem& item) {
  return (item.first_position + item.num_tokens - 1) / kPartitionKeys + 1;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Attention {
 public:
  Attention(const PagedAttentionParams& params, const AttentionKernels& kernels, ThreadPool& pool)
      : p_(params), kernels_(kernels), pool_(pool) {
    const int64_t spread = ceil_div(p_.num_tokens * p_.num_kv_heads, kTasksPerThread * pool_.num_threads());
    const int64_t most = std::max<int64_t>(1, kMaxItemRows / p_.group);
    item_tokens_ = std::clamp(spread, std::min(most, ceil_div(kMinItemRows, p_.group)), most);
    max_rows_ = item_tokens_ * p_.group;
    state_floats_ = max_rows_ * (p_.padded_dim + 2);
  }

  void run() {
    queries_ = ThreadScratch::get<float>(kQueries, p_.num_tokens * p_.num_heads * p_.head_dim);
    make_items();
    for_each(ceil_div(p_.num_tokens, kPrepareTokens), p_.num_tokens > kPrepareTokens, [&](int64_t task) {
      const int64_t end = std::min(p_.num_tokens, (task + 1) * kPrepareTokens);
      for (int64_t t = task * kPrepareTokens; t < end; ++t) {
        kernels_.prepare(p_, t, queries_ + t * p_.num_heads * p_.head_dim);
      }
    });
    const bool few = num_items_ < kTasksPerThread * pool_.num_threads();
    if (few && parallel_ && num_tasks_ > num_items_ && num_tasks_ * state_floats_ <= kMaxSplitFloats) {
      run_split();
    } else {
      for_each(num_items_, parallel_, [&](int64_t i) { run_item(items_[i]); });
    }
  }

 private:
  template <class F>
  void for_each(int64_t n, bool parallel, const F& f) {
    if (parallel) return pool_.parallel_for(n, [&](int64_t i, int) { f(i); });
    for (int64_t i = 0; i < n; ++i) f(i);
  }

  // Late tokens first: they see the most keys, so the short tasks fill up the end.
  void make_items() {
    int64_t bound = 0;
    for (int64_t r = 0; r < p_.num_requests; ++r) {
      bound += ceil_div(p_.query_start_loc[r + 1] - p_.query_start_loc[r], item_tokens_) * p_.num_kv_heads;
    }
    items_ = ThreadScratch::get<AttentionItem>(kItems, bound);
    int64_t work = 0;
    for (int64_t r = 0; r < p_.num_requests; ++r) {
      const int64_t start = p_.query_start_loc[r], end = p_.query_start_loc[r + 1];
      for (int64_t tile = ceil_div(end - start, item_tokens_) - 1; tile >= 0; --tile) {
        const int64_t first = start + tile * item_tokens_;
        const int64_t tokens = std::min(item_tokens_, end - first);
        for (int64_t kv_head = 0; kv_head < p_.num_kv_heads; ++kv_head) {
          items_[num_items_++] = {r, kv_head, first, tokens, p_.positions[first]};
        }
        const AttentionItem& item = items_[num_items_ - 1];
        const int64_t partitions = end_partition(item) - first_partition(p_, item);
        num_tasks_ += partitions * p_.num_kv_heads;
        const int64_t keys = std::min(partitions * kPartitionKeys, item.first_position + tokens);
        work += 2 * keys * tokens * p_.num_heads * p_.head_dim;
      }
    }
    parallel_ = work > kSerialWork;
  }

  AttentionState state_at(float* floats) const { return {floats, floats + max_rows_, floats + 2 * max_rows_}; }

  void clear(const AttentionState& state, int64_t rows) const {
    std::fill_n(state.max, rows, -HUGE_VALF);
    std::fill_n(state.sum, rows, 0.0f);
    std::fill_n(state.acc, rows * p_.padded_dim, 0.0f);
  }

  // Scratch of the calling thread: one packed tile, then two states.
  float* thread_floats(AttentionScratch& scratch) const {
    const int64_t keys = p_.head_dim * kTileKeys, values = kTileKeys * p_.padded_dim, scores = 4 * kTileKeys;
    float* floats = ThreadScratch::get<float>(kThreadFloats, keys + values + scores + 2 * state_floats_);
    scratch = {floats, floats + keys, floats + keys + values};
    return floats + keys + values + scores;
  }

  void run_item(const AttentionItem& item) const {
    AttentionScratch scratch;
    float* states = thread_floats(scratch);
    const AttentionState part = state_at(states), total = state_at(states + state_floats_);
    const int64_t rows = item.num_tokens * p_.group;
    clear(total, rows);
    for (int64_t i = first_partition(p_, item); i < end_partition(item); ++i) {
      kernels_.attend(p_, item, i, i + 1 < end_partition(item), queries_, scratch, part);
      kernels_.merge(p_, rows, part, total);
    }
    kernels_.finish(p_, item, total);
  }

  // Few items, long contexts: partitions run in parallel and are merged, in order, afterwards.
  void run_split() {
    AttentionTask* tasks = ThreadScratch::get<AttentionTask>(kTasks, num_tasks_);
    float* states = ThreadScratch::get<float>(kSplitStates, num_tasks_ * state_floats_);
    int64_t count = 0;
    for (int64_t i = 0; i < num_items_; ++i) {
      for (int64_t k = first_partition(p_, items_[i]); k < end_partition(items_[i]); ++k) tasks[count++] = {i, k};
    }
    // Neighbours in memory go to one thread, a few pieces each.
    const int64_t piece = ceil_div(num_tasks_, kTasksPerThread * pool_.num_threads());
    pool_.parallel_for(ceil_div(num_tasks_, piece), [&](int64_t i, int) {
      AttentionScratch scratch;
      thread_floats(scratch);
      const int64_t end = std::min(num_tasks_, (i + 1) * piece);
      for (int64_t k = i * piece; k < end; ++k) {
        const bool more = k + 1 < end && tasks[k + 1].item == tasks[k].item;
        kernels_.attend(p_, items_[tasks[k].item], tasks[k].partition, more, queries_, scratch,
                        state_at(states + k * state_floats_));
      }
    });
    AttentionScratch scratch;
    const AttentionState total = state_at(thread_floats(scratch));
    for (int64_t i = 0, task = 0; i < num_items_; ++i) {
      const int64_t rows = items_[i].num_tokens * p_.group;
      clear(total, rows);
      for (; task < num_tasks_ && tasks[task].item == i; ++task) {
        kernels_.merge(p_, rows, state_at(states + task * state_floats_), total);
      }
      kernels_.finish(p_, items_[i], total);
    }
  }

  const PagedAttentionParams& p_;
  const AttentionKernels& kernels_;
  ThreadPool& pool_;
  int64_t item_tokens_, max_rows_, state_floats_;
  int64_t num_items_ = 0, num_tasks_ = 0;
  bool parallel_ = false;
  AttentionItem* items_ = nullptr;
  float* queries_ = nullptr;
};

int64_t bytes_of(KvDtype dtype) { return dtype == KvDtype::kFloat32 ? 4 : 2; }

}  // namespace

// --- onnxruntime --------------------------------------------------------------------------------------------------

enum Input : size_t {
  kQkv,
  kKvCache,
  kKvLayout,
  kCosSin,
  kPositions,
  kSlotMapping,
  kBlockTable,
  kQueryStartLoc,
  kSeqLens,
  kQNorm,
  kKNorm,
  kSinks
};

const TensorSpec PagedAttention::kInputs[12] = {
    {"qkv", kFloat},       {"kv_cache", kUint8},     {"kv_layout", kInt32},    {"cos_sin", kFloat},
    {"positions", kInt32}, {"slot_mapping", kInt32}, {"block_table", kInt32},  {"query_start_loc", kInt32},
    {"seq_lens", kInt32},  {"q_norm", kFloat, true}, {"k_norm", kFloat, true}, {"sinks", kFloat, true},
};
const TensorSpec PagedAttention::kOutputs[2] = {{"out", kFloat}, {"kv_cache_out", kUint8}};

PagedAttention::PagedAttention(const KernelInfo& info, const SessionContext& session) : session(session), attributes{} {
  PagedAttentionParams& p = attributes;
  p.num_heads = info.attr_int("num_heads");
  p.num_kv_heads = info.attr_int("num_kv_heads");
  p.head_dim = info.attr_int("head_dim");
  p.kv_offset = info.attr_int("kv_offset");
  p.scale = info.attr_float("scale");
  p.sliding_window = info.attr_int("sliding_window");
  p.soft_cap = info.attr_float("soft_cap");
  p.norm_eps = info.attr_float("norm_eps");
  const int64_t interleaved = info.attr_int("rope_interleaved");
  const auto text = [](auto value) { return std::to_string(value); };
  check_attribute(p.num_kv_heads > 0 && p.num_kv_heads <= 1 << 16, "num_kv_heads", "1 to 65536", text(p.num_kv_heads));
  check_attribute(p.num_heads > 0 && p.num_heads <= 1 << 16 && p.num_heads % p.num_kv_heads == 0, "num_heads",
                  "a multiple of num_kv_heads = " + text(p.num_kv_heads), text(p.num_heads));
  check_attribute(p.head_dim > 0 && p.head_dim <= kMaxHeadDim && p.head_dim % 8 == 0, "head_dim",
                  "a multiple of 8 up to " + text(kMaxHeadDim), text(p.head_dim));
  check_attribute(p.kv_offset >= 0 && p.kv_offset < int64_t{1} << 32, "kv_offset", "0 or more", text(p.kv_offset));
  check_attribute(std::isfinite(p.scale), "scale", "a finite number", text(p.scale));
  check_attribute(p.sliding_window >= 0, "sliding_window", "0 or more", text(p.sliding_window));
  check_attribute(std::isfinite(p.soft_cap) && p.soft_cap >= 0, "soft_cap", "a finite number from 0", text(p.soft_cap));
  check_attribute(std::isfinite(p.norm_eps) && p.norm_eps >= 0, "norm_eps", "a finite number from 0", text(p.norm_eps));
  check_attribute(interleaved == 0 || interleaved == 1, "rope_interleaved", "0 or 1", text(interleaved));
  p.rope_interleaved = interleaved == 1;
  p.group = p.num_heads / p.num_kv_heads;
  p.padded_dim = (p.head_dim + 15) / 16 * 16;
}

namespace {

void bind_cache(PagedAttentionParams& p, KernelContext& ctx) {
  const Tensor layout = ctx.input(kKvLayout), cache = ctx.input(kKvCache);
  layout.check_shape({2});
  cache.check_shape({-1, -1});
  const int32_t code = layout.as<int32_t>()[0], block_size = layout.as<int32_t>()[1];
  if (code < 0 || code > 2) fail("kv_layout[0]: expected a KV dtype code from 0 to 2, got " + std::to_string(code));
  if (block_size < 1) fail("kv_layout[1]: expected a block size of at least 1, got " + std::to_string(block_size));
  p.kv_dtype = static_cast<KvDtype>(code);
  p.block_size = block_size;
  p.num_blocks = cache.shape[0];
  const int64_t width = bytes_of(p.kv_dtype);
  const int64_t needed = (p.kv_offset + 2 * p.num_kv_heads * p.head_dim) * block_size * width;
  if (cache.shape[1] < needed || cache.shape[1] % (block_size * width) != 0) {
    fail("kv_cache: expected blocks of at least " + std::to_string(needed) + " bytes, a multiple of " +
         std::to_string(block_size * width) + ", got shape " + cache.shape_text());
  }
  const Tensor out = ctx.output(1, cache.shape);
  if (out.data != cache.data && cache.size() > 0) {
    std::memcpy(out.data, cache.data, static_cast<size_t>(cache.size()));  // the caller bound them apart
  }
  if (reinterpret_cast<uintptr_t>(out.data) % static_cast<uintptr_t>(width) != 0) {
    fail("kv_cache: expected memory aligned to " + std::to_string(width) + " bytes");
  }
  p.kv_cache = out.data;
}

const float* optional_floats(KernelContext& ctx, Input index, int64_t count) {
  if (!ctx.has_input(index)) return nullptr;
  const Tensor tensor = ctx.input(index);
  tensor.check_shape({count});
  return tensor.as<float>();
}

const int32_t* ints(const Tensor& tensor, std::initializer_list<int64_t> shape) {
  tensor.check_shape(shape);
  return tensor.as<int32_t>();
}

}  // namespace

void PagedAttention::compute(KernelContext& ctx) {
  PagedAttentionParams p = attributes;
  const Tensor qkv = ctx.input(kQkv), cos_sin = ctx.input(kCosSin), table = ctx.input(kBlockTable);
  const Tensor seq_lens = ctx.input(kSeqLens);
  qkv.check_shape({-1, (p.num_heads + 2 * p.num_kv_heads) * p.head_dim});
  p.num_tokens = qkv.shape[0];
  p.qkv = qkv.as<float>();
  cos_sin.check_shape({p.num_tokens, -1});
  p.rotary_dim = cos_sin.shape[1];
  p.cos_sin = cos_sin.as<float>();
  if (p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) {
    fail("cos_sin: expected an even rotary_dim of at most head_dim = " + std::to_string(p.head_dim) + ", got shape " +
         cos_sin.shape_text());
  }
  seq_lens.check_shape({-1});
  p.num_requests = seq_lens.shape[0];
  p.seq_lens = seq_lens.as<int32_t>();
  p.positions = ints(ctx.input(kPositions), {p.num_tokens});
  p.slot_mapping = ints(ctx.input(kSlotMapping), {p.num_tokens});
  p.block_table = ints(table, {p.num_requests, -1});
  p.max_blocks = table.shape[1];
  p.query_start_loc = ints(ctx.input(kQueryStartLoc), {p.num_requests + 1});
  p.q_norm = optional_floats(ctx, kQNorm, p.head_dim);
  p.k_norm = optional_floats(ctx, kKNorm, p.head_dim);
  p.sinks = optional_floats(ctx, kSinks, p.num_heads);
  bind_cache(p, ctx);
  p.out = ctx.output(0, {p.num_tokens, p.num_heads * p.head_dim}).mutable_as<float>();
  check_values(p);
  if (p.num_tokens > 0) Attention(p, kKernels[session.tier], session.pool).run();
}

}  // namespace trivet
