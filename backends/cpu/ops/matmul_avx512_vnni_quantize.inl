// Quantisation of activations with AVX-512 VNNI; included by matmul_avx512_vnni.cc. See matmul_scalar.cc for the
// definition.

namespace trivet {
namespace {

// Where a row's blocks go.
struct QuantizedRow {
  int8_t* q;
  float* d;
  float* sum;
  int32_t* sums;
};

TRIVET_INLINE __m512i magnitude(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
}

void quantize_block(const float* x, const QuantizedRow& out, int64_t b) {
  const __m512 x0 = _mm512_loadu_ps(x + b * kBlock);
  const __m512 x1 = _mm512_loadu_ps(x + b * kBlock + 16);
  const int bits = _mm512_reduce_max_epi32(_mm512_max_epi32(magnitude(x0), magnitude(x1)));
  auto* q = reinterpret_cast<__m128i*>(out.q + b * kBlock);
  float amax;
  __builtin_memcpy(&amax, &bits, sizeof amax);
  const bool finite = bits < 0x7F800000;
  if (!finite || amax < 0x1p-112f) {
    out.d[b] = finite ? 0.0f : __builtin_nanf("");
    out.sum[b] = out.d[b];
    out.sums[2 * b] = out.sums[2 * b + 1] = 0;
    _mm_storeu_si128(q, _mm_setzero_si128());
    _mm_storeu_si128(q + 1, _mm_setzero_si128());
    return;
  }
  const __m512 inverse = _mm512_set1_ps(127.0f / amax);
  const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse));
  const __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse));
  _mm_storeu_si128(q, _mm512_cvtepi32_epi8(q0));
  _mm_storeu_si128(q + 1, _mm512_cvtepi32_epi8(q1));
  out.sums[2 * b] = _mm512_reduce_add_epi32(q0);
  out.sums[2 * b + 1] = _mm512_reduce_add_epi32(q1);
  out.d[b] = amax / 127.0f;
  out.sum[b] = out.d[b] * static_cast<float>(out.sums[2 * b] + out.sums[2 * b + 1]);
}

// The largest lane of each of four registers.
TRIVET_INLINE __m128i max_of_each(const __m512i v[4]) {
  __m128i m[4];
  for (int i = 0; i < 4; i++) {
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(v[i]), _mm512_extracti64x4_epi64(v[i], 1));
    m[i] = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  }
  const __m128i m01 = _mm_max_epi32(_mm_unpacklo_epi32(m[0], m[1]), _mm_unpackhi_epi32(m[0], m[1]));
  const __m128i m23 = _mm_max_epi32(_mm_unpacklo_epi32(m[2], m[3]), _mm_unpackhi_epi32(m[2], m[3]));
  return _mm_max_epi32(_mm_unpacklo_epi64(m01, m23), _mm_unpackhi_epi64(m01, m23));
}

// 64 elements that fit bytes, in order.
TRIVET_INLINE __m512i pack_bytes(const __m512i v[4]) {
  const __m512i words[2] = {_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3])};
  // Packing works per 128-bit lane: dword 4 L + i of the result is dword L of v[i].
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words[0], words[1]));
}

// Blocks b ... b + 3 at once. False, and nothing done, where one of them is all zero, tiny or not finite.
TRIVET_INLINE bool quantize_four(const float* x, const QuantizedRow& out, int64_t b) {
  __m512i largest[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const float* block = x + (b + i) * kBlock;
    largest[i] = _mm512_max_epi32(magnitude(_mm512_loadu_ps(block)), magnitude(_mm512_loadu_ps(block + 16)));
  }
  const __m128i bits = max_of_each(largest);
  const __m128 amax = _mm_castsi128_ps(bits);
  const __mmask8 bad = _mm_cmp_ps_mask(amax, _mm_set1_ps(0x1p-112f), _CMP_LT_OQ) |
                       _mm_cmpgt_epi32_mask(bits, _mm_set1_epi32(0x7F7FFFFF));
  if (bad != 0) return false;
  const __m128 d = _mm_div_ps(amax, _mm_set1_ps(127.0f));
  float inverse[4];
  _mm_storeu_ps(inverse, _mm_div_ps(_mm_set1_ps(127.0f), amax));
  _mm_storeu_ps(out.d + b, d);
  __m512i halves[2];  // per 128-bit lane: the sum of 16 elements, in every dword
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    __m512i q[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const __m512 scale = _mm512_set1_ps(inverse[2 * i + j / 2]);
      q[j] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + (b + 2 * i) * kBlock + 16 * j), scale));
    }
    const __m512i bytes = pack_bytes(q);
    _mm512_storeu_si512(out.q + (b + 2 * i) * kBlock, bytes);
    __m512i s = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), bytes);
    s = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_BADC));
    halves[i] = _mm512_add_epi32(s, _mm512_shuffle_epi32(s, _MM_PERM_CDAB));
  }
  const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 8, 16, 24, 4, 12, 20, 28);
  const __m512i sums = _mm512_permutex2var_epi32(halves[0], lanes, halves[1]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.sums + 2 * b), _mm512_castsi512_si256(sums));
  const __m128i whole = _mm_add_epi32(_mm512_extracti32x4_epi32(sums, 2), _mm512_extracti32x4_epi32(sums, 3));
  _mm_storeu_ps(out.sum + b, _mm_mul_ps(d, _mm_cvtepi32_ps(whole)));
  return true;
}

void quantize(const float* x, int64_t k, void* q, float* d, float* sum, int32_t* sums) {
  const QuantizedRow out{static_cast<int8_t*>(q), d, sum, sums};
  const int64_t blocks = k / kBlock;
  for (int64_t b = 0; b < blocks; b += 4) {
    // The last four overlap the ones before where the number is not a multiple: they come out the same again.
    const int64_t at = blocks >= 4 && b + 4 > blocks ? blocks - 4 : b;
    if (blocks >= 4 && quantize_four(x, out, at)) continue;
    for (int64_t i = at; i < at + 4 && i < blocks; i++) quantize_block(x, out, i);
  }
}

}  // namespace
}  // namespace trivet
