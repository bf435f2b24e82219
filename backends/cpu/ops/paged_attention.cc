// PagedAttention: checks, work split over threads, onnxruntime glue. The arithmetic is in paged_attention_tile.h.
#include "paged_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

#include "../../common/op_messages.h"
#include "../dispatch.h"

namespace trivet {
namespace {

constexpr TierTable<AttentionKernels> kKernels = TRIVET_TIERS(kAttention);

constexpr int64_t kMaxItemRows = 96;           // rows that share one packed KV tile
constexpr int64_t kMinItemRows = 16;           // below this, packing a tile costs more than an idle thread
constexpr int64_t kTasksPerThread = 4;         // for an even load under causal masking
constexpr int64_t kPrepareTokens = 32;         // most per task of step 1: tokens of a KV block share cache lines
constexpr int64_t kPrepareElements = 1 << 12;  // of Q, K and V that one thread prepares sooner than it wakes another
constexpr int64_t kSerialWork = 1 << 16;       // multiply-adds that one thread does sooner than it wakes another
constexpr int64_t kMaxSplitFloats = 8 << 20;   // memory bound of partition states

enum ScratchSlot : int { kQueries, kItems, kTasks, kSplitItems, kSplitStates, kThreadFloats };

struct AttentionTask {
  int64_t item, partition;
};

// An item whose partitions are tasks of their own.
struct SplitItem {
  int64_t first_task;
  std::atomic<int64_t> unfinished;  // tasks
};

// --- Checks -------------------------------------------------------------------------------------------------------

void check_request(const PagedAttentionParams& p, int64_t r) {
  const int64_t start = p.query_start_loc[r], end = p.query_start_loc[r + 1];
  if (end < start || end > p.num_tokens) throw OpError(messages::query_start(r + 1, end, start, p.num_tokens));
  const int64_t seq_len = p.seq_lens[r];
  if (seq_len < end - start) throw OpError(messages::seq_len(r, seq_len, end - start));
  for (int64_t t = start; t < end; ++t) {
    const int64_t expected = seq_len - (end - t);
    if (p.positions[t] != expected) throw OpError(messages::position(t, p.positions[t], expected, r));
  }
  const int64_t blocks = (seq_len + p.block_size - 1) / p.block_size;
  if (blocks > p.max_blocks) throw OpError(messages::block_columns(blocks, r, seq_len, p.max_blocks));
  for (int64_t b = 0; b < blocks; ++b) {
    const int32_t block = p.block_table[r * p.max_blocks + b];
    if (block < 0 || block >= p.num_blocks) throw OpError(messages::block(r, b, block, p.num_blocks - 1));
  }
}

void check_values(const PagedAttentionParams& p) {
  if (p.query_start_loc[0] != 0) throw OpError(messages::query_start_first(p.query_start_loc[0]));
  for (int64_t r = 0; r < p.num_requests; ++r) check_request(p, r);
  const int64_t last = p.query_start_loc[p.num_requests];
  if (last != p.num_tokens) throw OpError(messages::query_start_last(p.num_requests, last, p.num_tokens));
  const int64_t last_slot = p.num_blocks * p.block_size - 1;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int64_t slot = p.slot_mapping[t];
    if (slot < -1 || slot > last_slot) throw OpError(messages::slot(t, slot, last_slot));
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
    // As many requests as leave every thread several items: an item of many is not split over threads.
    most_sharing_ = std::min(item_tokens_, p_.num_tokens * p_.num_kv_heads / (kTasksPerThread * pool_.num_threads()));
  }

  void run() {
    make_items();
    if (p_.num_tokens > 1) prepare_all();
    const bool few = num_items_ < kTasksPerThread * pool_.num_threads();
    if (few && !shares_ && parallel_ && num_tasks_ > num_items_ && num_tasks_ * state_floats_ <= kMaxSplitFloats) {
      run_split();
    } else {
      run_items();
    }
  }

 private:
  // All queries, keys and values, before any are attended: tokens read the keys of others.
  void prepare_all() {
    queries_ = ThreadScratch::get<float>(kQueries, p_.num_tokens * p_.num_heads * p_.query_stride);
    const int64_t least = ceil_div(kPrepareElements, (p_.num_heads + 2 * p_.num_kv_heads) * p_.head_dim);
    const int64_t share = ceil_div(p_.num_tokens, kTasksPerThread * pool_.num_threads());
    const int64_t tokens = std::min(std::max(share, least), kPrepareTokens);
    for_each(ceil_div(p_.num_tokens, tokens), p_.num_tokens > tokens, [&](int64_t task) {
      const int64_t end = std::min(p_.num_tokens, (task + 1) * tokens);
      for (int64_t t = task * tokens; t < end; ++t) {
        for (int64_t kv_head = 0; kv_head < p_.num_kv_heads; ++kv_head) {
          kernels_.prepare(p_, t, kv_head, queries_ + (t * p_.num_heads + kv_head * p_.group) * p_.query_stride);
          kernels_.store(p_, t, kv_head);
        }
      }
    });
  }

  // The queries of all tokens, those of the item among them. Of a single token each thread prepares what it attends:
  // its cache lines are then where they are needed, and no thread waits meanwhile.
  const float* queries_of(const AttentionItem& item) const {
    if (queries_ != nullptr) return queries_;
    float* queries = ThreadScratch::get<float>(kQueries, p_.num_heads * p_.query_stride);
    kernels_.prepare(p_, item.first_token, item.kv_head, queries + item.kv_head * p_.group * p_.query_stride);
    return queries;
  }

  // Before the item's last partition is attended, which has the key of a single token.
  void store_last(const AttentionItem& item) const {
    if (queries_ == nullptr) kernels_.store(p_, item.first_token, item.kv_head);
  }

  template <class F>
  void for_each(int64_t n, bool parallel, const F& f) {
    if (parallel) return pool_.parallel_for(n, [&](int64_t i, int) { f(i); });
    for (int64_t i = 0; i < n; ++i) f(i);
  }

  void run_items() const {
    const auto next_of = [&](int64_t i, int64_t end) { return i + 1 < end ? &items_[i + 1] : nullptr; };
    if (!parallel_) {
      for (int64_t i = 0; i < num_items_; ++i) run_item(items_[i], next_of(i, num_items_));
    } else if (p_.num_tokens > p_.num_requests) {  // prompts: late tokens see the most keys, so no equal shares
      pool_.parallel_for(num_items_, [&](int64_t i, int) { run_item(items_[i], nullptr); });
    } else {  // neighbours for each thread, so that it knows which item follows
      pool_.parallel_shares(num_items_, [&](int64_t i, int thread) {
        const int64_t begin = ThreadPool::share_begin(num_items_, thread, pool_.num_threads());
        const int64_t end = ThreadPool::share_begin(num_items_, thread + 1, pool_.num_threads());
        run_item(items_[i], i >= begin ? next_of(i, end) : nullptr);
      });
    }
  }

  // Requests from one on that one item serves.
  struct Sharing {
    int64_t requests, partitions, lowest_position;
  };

  bool has_one_token(int64_t r) const { return p_.query_start_loc[r + 1] - p_.query_start_loc[r] == 1; }

  Sharing sharing_from(int64_t r) const {
    Sharing found{1, 0, 0};
    if (p_.sliding_window > 0 || !has_one_token(r)) return found;
    found.lowest_position = p_.positions[p_.query_start_loc[r]];
    found.partitions = found.lowest_position / kPartitionKeys;
    const int32_t* first = p_.block_table + r * p_.max_blocks;
    for (int64_t next = r + 1; next < p_.num_requests && found.requests < most_sharing_; ++next, ++found.requests) {
      if (!has_one_token(next)) break;
      const int64_t lowest = std::min<int64_t>(found.lowest_position, p_.positions[p_.query_start_loc[next]]);
      const int64_t partitions = std::min(found.partitions, lowest / kPartitionKeys);
      const int32_t* blocks = p_.block_table + next * p_.max_blocks;
      const int64_t count = ceil_div(partitions * kPartitionKeys, p_.block_size);
      const int64_t same = std::mismatch(first, first + count, blocks).first - first;
      const int64_t shared = std::min(partitions, same * p_.block_size / kPartitionKeys);
      if (shared == 0) break;
      found.partitions = shared;
      found.lowest_position = lowest;
    }
    return found;
  }

  // Late tokens first: they see the most keys, so the short tasks fill up the end.
  void make_items() {
    int64_t bound = 0;
    for (int64_t r = 0; r < p_.num_requests; ++r) {
      bound += ceil_div(p_.query_start_loc[r + 1] - p_.query_start_loc[r], item_tokens_) * p_.num_kv_heads;
    }
    items_ = ThreadScratch::get<AttentionItem>(kItems, bound);
    int64_t work = 0;
    for (int64_t r = 0, requests; r < p_.num_requests; r += requests) {
      const int64_t start = p_.query_start_loc[r], end = p_.query_start_loc[r + 1];
      const Sharing sharing = sharing_from(r);
      requests = sharing.requests;
      if (requests > 1) {
        for (int64_t kv_head = 0; kv_head < p_.num_kv_heads; ++kv_head) {
          items_[num_items_++] = {r, kv_head, start, requests, sharing.lowest_position, sharing.partitions};
        }
        shares_ = true;
        work += 2 * requests * (sharing.lowest_position + 1) * p_.num_heads * p_.head_dim;
        continue;
      }
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
    const int64_t keys = p_.head_dim * kTileKeys, values = kTileKeys * p_.padded_dim, scores = kScoreRows * kTileKeys;
    float* floats = ThreadScratch::get<float>(kThreadFloats, keys + values + scores + 2 * state_floats_);
    scratch = {floats, floats + keys, floats + keys + values};
    return floats + keys + values + scores;
  }

  void run_item(const AttentionItem& item, const AttentionItem* following) const {
    const NextPartition next =
        following != nullptr ? NextPartition{following, first_partition(p_, *following)} : NextPartition{};
    AttentionScratch scratch;
    float* states = thread_floats(scratch);
    const AttentionState part = state_at(states), total = state_at(states + state_floats_);
    clear(total, item.num_tokens * p_.group);
    const float* queries = queries_of(item);
    store_last(item);
    const int64_t shared = item.shared_partitions;
    if (shared == 0) return attend_all(item, first_partition(p_, item), next, queries, scratch, part, total);
    const auto own = [&](int64_t i) -> AttentionItem {
      const int64_t token = item.first_token + i;
      return {item.request + i, item.kv_head, token, 1, p_.positions[token]};
    };
    AttentionItem one = own(0);
    attend(item, 0, shared, {&one, shared}, queries, scratch, part, total);
    for (int64_t i = 0; i < item.num_tokens; ++i) {
      const bool last = i + 1 == item.num_tokens;
      const AttentionItem after = last ? one : own(i + 1);
      const int64_t row = i * p_.group;
      attend_all(one, shared, last ? next : NextPartition{&after, shared}, queries, scratch, part,
                 {total.max + row, total.sum + row, total.acc + row * p_.padded_dim});
      one = after;
    }
  }

  void attend(const AttentionItem& item, int64_t first, int64_t end, NextPartition next, const float* queries,
              const AttentionScratch& scratch, const AttentionState& part, const AttentionState& total) const {
    for (int64_t i = first; i < end; ++i) {
      kernels_.attend(p_, item, i, i + 1 < end ? NextPartition{&item, i + 1} : next, queries, scratch, part);
      kernels_.merge(p_, item.num_tokens * p_.group, part, total);
    }
  }

  // The partitions from `first` on, which are all that are left, and the result.
  void attend_all(const AttentionItem& item, int64_t first, NextPartition next, const float* queries,
                  const AttentionScratch& scratch, const AttentionState& part, const AttentionState& total) const {
    attend(item, first, end_partition(item), next, queries, scratch, part, total);
    kernels_.finish(p_, item, total);
  }

  // Few items, long contexts: partitions run in parallel and are merged, in order, by the thread that ends the last
  // one.
  void run_split() {
    AttentionTask* tasks = ThreadScratch::get<AttentionTask>(kTasks, num_tasks_);
    SplitItem* split = ThreadScratch::get<SplitItem>(kSplitItems, num_items_);
    float* states = ThreadScratch::get<float>(kSplitStates, num_tasks_ * state_floats_);
    int64_t count = 0;
    for (int64_t i = 0; i < num_items_; ++i) {
      const int64_t first = first_partition(p_, items_[i]), end = end_partition(items_[i]);
      new (&split[i]) SplitItem{count, end - first};
      for (int64_t k = first; k < end; ++k) tasks[count++] = {i, k};
    }
    // Neighbours in memory go to one thread, a few pieces each.
    const int64_t piece = ceil_div(num_tasks_, kTasksPerThread * pool_.num_threads());
    pool_.parallel_for(ceil_div(num_tasks_, piece), [&](int64_t i, int) {
      AttentionScratch scratch;
      const AttentionState total = state_at(thread_floats(scratch));
      const int64_t end = std::min(num_tasks_, (i + 1) * piece);
      const float* queries = nullptr;
      for (int64_t k = i * piece; k < end; ++k) {
        const AttentionItem& item = items_[tasks[k].item];
        SplitItem& own = split[tasks[k].item];
        const bool last = tasks[k].partition + 1 == end_partition(item);
        if (k == i * piece || k == own.first_task) queries = queries_of(item);
        if (last) store_last(item);
        NextPartition next;
        if (k + 1 < end) next = {&items_[tasks[k + 1].item], tasks[k + 1].partition};
        kernels_.attend(p_, item, tasks[k].partition, next, queries, scratch, state_at(states + k * state_floats_));
        if (own.unfinished.fetch_sub(1) == 1) merge_all(item, states + own.first_task * state_floats_, total);
      }
    });
  }

  void merge_all(const AttentionItem& item, float* states, const AttentionState& total) const {
    const int64_t rows = item.num_tokens * p_.group;
    clear(total, rows);
    for (int64_t k = first_partition(p_, item); k < end_partition(item); ++k, states += state_floats_) {
      kernels_.merge(p_, rows, state_at(states), total);
    }
    kernels_.finish(p_, item, total);
  }

  const PagedAttentionParams& p_;
  const AttentionKernels& kernels_;
  ThreadPool& pool_;
  int64_t item_tokens_, max_rows_, state_floats_, most_sharing_;
  int64_t num_items_ = 0, num_tasks_ = 0;
  bool parallel_ = false;
  bool shares_ = false;  // there are items of several requests
  AttentionItem* items_ = nullptr;
  float* queries_ = nullptr;  // of all tokens; null if there is one: see queries_of()
};

// An int16 cache is read in whole vectors of 16 keys and of 16 elements.
constexpr int64_t kInt16Multiple = 16;

void check_int16(const AttentionAttributes& a, int64_t block_size, const AttentionKernels& kernels) {
  if (!kernels.has_int16)
    throw OpError("kv_layout[0]: an int16 cache needs the tier avx512_vnni: choose another KV cache type");
  if (a.head_dim % kInt16Multiple != 0) {
    throw OpError("attribute 'head_dim': expected a multiple of " + std::to_string(kInt16Multiple) +
                  " for an int16 cache, got " + std::to_string(a.head_dim));
  }
  if (block_size % kInt16Multiple != 0) {
    throw OpError("kv_layout[1]: expected a block size that is a multiple of " + std::to_string(kInt16Multiple) +
                  " for an int16 cache, got " + std::to_string(block_size));
  }
}

void bind_cache(PagedAttentionParams& p, KernelContext& ctx, const AttentionAttributes& attributes,
                const AttentionKernels& kernels) {
  const Tensor cache = ctx.input(PagedAttentionSpec::kKvCache);
  const KvCacheShape shape =
      kv_cache_shape(ctx.input(PagedAttentionSpec::kKvLayout), cache, attributes,
                     {KvDtype::kFloat32, KvDtype::kFloat16, KvDtype::kBFloat16, KvDtype::kInt16});
  if (shape.dtype == KvDtype::kInt16) check_int16(attributes, shape.block_size, kernels);
  p.kv_dtype = shape.dtype;
  p.block_size = shape.block_size;
  p.num_blocks = shape.num_blocks;
  p.stored_dim = shape.stored_dim;
  p.kv_offset = shape.kv_offset;
  p.query_stride = shape.dtype == KvDtype::kInt16 ? p.head_dim / 2 + 1 : p.head_dim;
  const Tensor out = ctx.output(1, cache.shape);
  if (out.data != cache.data && cache.size() > 0) {
    std::memcpy(out.data, cache.data, static_cast<size_t>(cache.size()));  // the caller bound them apart
  }
  const int64_t alignment = shape.dtype == KvDtype::kInt16 ? sizeof(float) : shape.element_bytes;
  if (reinterpret_cast<uintptr_t>(out.data) % static_cast<uintptr_t>(alignment) != 0) {
    throw OpError("kv_cache: expected memory aligned to " + std::to_string(alignment) + " bytes");
  }
  p.kv_cache = out.data;
}

}  // namespace

// --- onnxruntime --------------------------------------------------------------------------------------------------

PagedAttention::PagedAttention(const KernelInfo& info, const SessionContext& session)
    : session(session), attributes(attention_attributes(info)) {}

void PagedAttention::compute(KernelContext& ctx) {
  PagedAttentionParams p{};
  assign(p, attributes);
  assign(p, attention_inputs(ctx, attributes));
  p.padded_dim = (p.head_dim + 15) / 16 * 16;
  const AttentionKernels& kernels = kKernels[session.tier];
  bind_cache(p, ctx, attributes, kernels);
  p.out = ctx.output(0, {p.num_tokens, p.num_heads * p.head_dim}).mutable_as<float>();
  check_values(p);
  if (p.num_tokens > 0) Attention(p, kernels, session.pool).run();
}

}  // namespace trivet
