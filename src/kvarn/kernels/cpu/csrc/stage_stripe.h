// Stripes of 32 columns as floats, for AVX2. Packed codes are looked up in tables of bytes, which cost less than conversions and
// tables of floats.
#pragma once
#include "codecs.h"

namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kPlainLines = 1;  // asked for beside a row of M and 32 columns
#else
constexpr int kPlainLines = 0;
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)

// Lanes of two vectors side by side. VPERM2F128 would be one instruction, and eight operations on Zen 1.
INLINE __m256 low_lanes(__m256 a, __m256 b) { return _mm256_insertf128_ps(a, _mm256_castps256_ps128(b), 1); }
INLINE __m256 high_lanes(__m256 a, __m256 b) { return _mm256_insertf128_ps(b, _mm256_extractf128_ps(a, 1), 0); }

constexpr float kCounts[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The 32 codes of a stripe, a byte each, in order.
template <int C>
INLINE __m256i codes_of_stripe(const uint8_t* m) {
  constexpr int bits = C == kAffine4 || C == kTurbo4 ? 4 : C == kAffine3 || C == kTurbo3 ? 3 : 2;
  if constexpr (bits == 4) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(m));
    const __m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(both), _mm_srli_epi16(both, 4), 1);
    return _mm256_and_si256(x, _mm256_set1_epi8(15));
  } else {
    const __m256i low = _mm256_srlv_epi64(_mm256_set1_epi64x(load<int64_t>(m)), _mm256_setr_epi64x(0, 2, 4, 6));
    const __m256i two = _mm256_and_si256(low, _mm256_set1_epi8(3));
    if constexpr (bits == 2) return two;
    const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(load<int32_t>(m + 8)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_or_si256(two, _mm256_slli_epi16(_mm256_and_si256(high, _mm256_set1_epi8(1)), 2));
  }
}

// n rows of a stripe as floats, out [n][32], asking for a line a row.
template <int C>
INLINE void stage_stripe(const uint8_t* m, int64_t row_stride, int n, float* out, Ahead& ahead) {
  if constexpr (C < kAffine4) {
    for (int k = 0; k < n; k++, m += row_stride, out += 32, ask<kPlainLines>(ahead))
      for (int i = 0; i < 32; i += W) store(out + i, row_vf<C>(m, i));
    return;
  }
  const float* floats = C >= kTurbo4 ? codebook(C) : kCounts;
  __m256i table[4];  // bytes of the floats, the lowest first
#pragma GCC unroll 4
  for (int b = 0; b < 4; b++) {
    alignas(16) uint8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = uint8_t(float_bits(floats[i]) >> (8 * b));
    table[b] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  auto put = [](float* to, __m256i x) {  // four columns of the stripe's first half, and the same of its last
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(x));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16), _mm256_extracti128_si256(x, 1));
  };
  for (int k = 0; k < n; k++, m += row_stride, out += 32) {
    ask<kPlainLines>(ahead);
    const __m256i codes = codes_of_stripe<C>(m), zero = _mm256_setzero_si256();
    const __m256i a = _mm256_shuffle_epi8(table[2], codes), b = _mm256_shuffle_epi8(table[3], codes);
    const __m256i high = _mm256_unpacklo_epi8(a, b), high2 = _mm256_unpackhi_epi8(a, b);
    __m256i low = zero, low2 = zero;  // small whole numbers have nothing there
    if constexpr (C >= kTurbo4) {
      const __m256i c = _mm256_shuffle_epi8(table[0], codes), d = _mm256_shuffle_epi8(table[1], codes);
      low = _mm256_unpacklo_epi8(c, d), low2 = _mm256_unpackhi_epi8(c, d);
    }
    put(out, _mm256_unpacklo_epi16(low, high)), put(out + 4, _mm256_unpackhi_epi16(low, high));
    put(out + 8, _mm256_unpacklo_epi16(low2, high2)), put(out + 12, _mm256_unpackhi_epi16(low2, high2));
  }
}

#endif

}  // namespace
