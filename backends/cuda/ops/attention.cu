// PagedAttention: which kernels do it. In a step of many tokens prepare_kernel makes the queries (norm, rotation,
// scale) and writes keys and values to their slots, then attend_mma or attend_float follows. A step of few tokens is
// split over partitions of the keys, and attend_decode or attend_float does all of it.
#include "attention.cuh"

namespace trivet::cuda {
namespace {

constexpr int64_t kSplitStates = 1 << 14;  // a step with more partial results of a head than this is not split

// A warp per token and head: query heads, then key heads, then value heads.
template <class T, int kEach>
__global__ void __launch_bounds__(kThreads) prepare_kernel(ErrorSink sink, AttentionParams p) {
  extern __shared__ float staged[];  // [kThreads / 32][head_dim]
  wait_for_previous();
  const int64_t token = blockIdx.x, warp = threadIdx.x >> 5, head = blockIdx.y * (kThreads / 32) + warp;
  if (blockIdx.y == 0) check_step(sink, p, token, request_of(p, token));
  if (head >= p.num_heads + 2 * p.num_kv_heads) return;
  float* x = staged + warp * p.head_dim;
  if (head < p.num_heads) {
    float* queries = p.queries + (token * p.num_heads + head) * p.head_dim;
    prepare_head<kEach>(p, token, head, x, [&](int i, float value) { queries[i] = value * p.scale; });
    return;
  }
  const int64_t key_head = head - p.num_heads;
  T* target = slot_of<T>(p, token, key_head / p.num_kv_heads, key_head % p.num_kv_heads);
  if (target == nullptr) return;
  prepare_head<kEach>(p, token, head, x, [&](int i, float value) { target[i] = from_float<T>(value); });
}

template <class T>
cudaError_t prepare(const Launch& on, const ErrorSink& sink, const AttentionParams& p) {
  constexpr int kWarps = kThreads / 32;
  const dim3 grid(static_cast<unsigned>(p.num_tokens),
                  static_cast<unsigned>((p.num_heads + 2 * p.num_kv_heads + kWarps - 1) / kWarps));
  const auto kernel = p.head_dim <= 128   ? prepare_kernel<T, 4>
                      : p.head_dim <= 256 ? prepare_kernel<T, 8>
                                          : prepare_kernel<T, 16>;
  return launch(on, kernel, grid, dim3(kThreads), kWarps * p.head_dim * sizeof(float), sink, p);
}

cudaError_t prepare_for_cache(const Launch& on, const ErrorSink& sink, const AttentionParams& p) {
  if (p.kv_dtype == KvDtype::kFloat32) return prepare<float>(on, sink, p);
  if (p.kv_dtype == KvDtype::kFloat16) return prepare<__half>(on, sink, p);
  if (p.kv_dtype == KvDtype::kBFloat16) return prepare<__nv_bfloat16>(on, sink, p);
  return prepare<E4M3>(on, sink, p);
}

int64_t partitions_of(const AttentionParams& p) {
  return (p.max_blocks * p.block_size + kPartitionKeys - 1) / kPartitionKeys;
}

bool is_split(const AttentionParams& p) {
  return p.num_tokens <= kSplitTokens && p.num_tokens * partitions_of(p) <= kSplitStates;
}

}  // namespace

bool attention_quantizes(const AttentionParams& p) { return is_split(p) && p.head_dim % 32 == 0; }

bool attention_rounds(const AttentionParams& p) { return is_split(p) || attends_on_tensor_cores(p); }

int64_t attention_state_floats(const AttentionParams& p) {
  return is_split(p) ? p.num_tokens * p.num_heads * partitions_of(p) * (p.head_dim + kStateExtra) : 0;
}

int64_t attention_counters(const AttentionParams& p) {
  return is_split(p) ? p.num_tokens * p.num_kv_heads * p.group : 0;
}

cudaError_t paged_attention(const Launch& on, ErrorSink sink, const AttentionParams& p) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (is_split(p)) {
    const int partitions = static_cast<int>(partitions_of(p));
    const auto attend = decodes_on_tensor_cores(p) ? attend_decode : attend_float;
    return attend(on, sink, p, partitions);
  }
  const cudaError_t status = prepare_for_cache(on, sink, p);
  if (status != cudaSuccess) return status;
  return attends_on_tensor_cores(p) ? attend_mma(on, p) : attend_float(on, sink, p, 0);
}

}  // namespace trivet::cuda
