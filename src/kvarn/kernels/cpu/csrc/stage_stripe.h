// Stripes of 32 columns as floats or bfloat16, for AVX2. Packed codes are looked up in tables of bytes, which cost less than conversions and
// tables of floats.
#pragma once
#include "codecs.h"

namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)

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

// Byte b of the float that each of 16 codes stands for, in both lanes.
template <int C>
INLINE __m256i byte_table(int b) {
  const float* floats = C >= kTurbo4 ? codebook(C) : kCounts;
  alignas(16) uint8_t bytes[16];
  for (int i = 0; i < 16; i++) bytes[i] = uint8_t(float_bits(floats[i]) >> (8 * b));
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
}
INLINE void store_lanes(void* low, void* high, __m256i x) {
  _mm_storeu_si128(static_cast<__m128i*>(low), _mm256_castsi256_si128(x));
  _mm_storeu_si128(static_cast<__m128i*>(high), _mm256_extracti128_si256(x, 1));
}

// n rows of a stripe as the numbers of staged(C), out [n][32], asking for a line a row. Small whole numbers are bfloat16, in the
// order of split columns: 0 to 7, 16 to 23, 8 to 15, 24 to 31.
constexpr int staged(int codec) { return codec >= kAffine4 && codec < kTurbo4 ? kBF16 : kF32; }
template <int C>
INLINE void stage_stripe(const uint8_t* m, int64_t row_stride, int n, uint8_t* out, Ahead& ahead) {
  if constexpr (C < kAffine4) {
    for (int k = 0; k < n; k++, m += row_stride, out += 128) {
      ask<kPlainLines>(ahead);
      for (int i = 0; i < 32; i += W) store(out + 4 * i, row_vf<C>(m, i));
    }
    return;
  }
  const __m256i first = byte_table<C>(0), second = byte_table<C>(1), third = byte_table<C>(2), fourth = byte_table<C>(3);
  for (int k = 0; k < n; k++, m += row_stride, out += 32 * (staged(C) == kBF16 ? 2 : 4)) {
    ask<kPlainLines>(ahead);
    const __m256i codes = codes_of_stripe<C>(m);
    const __m256i c = _mm256_shuffle_epi8(third, codes), d = _mm256_shuffle_epi8(fourth, codes);
    const __m256i high = _mm256_unpacklo_epi8(c, d), high2 = _mm256_unpackhi_epi8(c, d);  // columns 0 to 7 and 16 to 23; the others
    if constexpr (staged(C) == kBF16) {
      store(out, high), store(out + 32, high2);
    } else {
      const __m256i a = _mm256_shuffle_epi8(first, codes), b = _mm256_shuffle_epi8(second, codes);
      const __m256i low = _mm256_unpacklo_epi8(a, b), low2 = _mm256_unpackhi_epi8(a, b);
      store_lanes(out, out + 64, _mm256_unpacklo_epi16(low, high)), store_lanes(out + 16, out + 80, _mm256_unpackhi_epi16(low, high));
      store_lanes(out + 32, out + 96, _mm256_unpacklo_epi16(low2, high2));
      store_lanes(out + 48, out + 112, _mm256_unpackhi_epi16(low2, high2));
    }
  }
}

#endif

}  // namespace
