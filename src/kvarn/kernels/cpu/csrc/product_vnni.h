// A tile of weights for R rows, on VPDPBUSD: four columns of 16 rows at once, summed in 32 bits.
#pragma once
#include "product_data.h"

namespace {

// In assembly: GCC copies sums around the intrinsic, and loads the four columns of all 16 lanes before.
INLINE void add_bytes(__m512i& sum, __m512i codes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int32_t*>(four)));
}

template <int BITS, int R>
INLINE void add_block(__m512i (&sum)[R], const uint8_t* t, const int8_t* x) {
#pragma GCC unroll 8
  for (int i = 0; i < BITS; i++) {
    const __m512i codes = _mm512_loadu_si512(t + 64 * i), low = _mm512_set1_epi8(15);
    const __m512i even = BITS == 8 ? codes : _mm512_and_si512(codes, low);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) add_bytes(sum[r], even, x + (i * R + r) * 4);
    if (BITS == 8) continue;
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) add_bytes(sum[r], odd, x + ((4 + i) * R + r) * 4);
  }
}

INLINE __m512 one_for_all(uint32_t bits) { return _mm512_castsi512_ps(_mm512_set1_epi32(int(bits))); }

// total += offsets [16][SPAN] times the sums of the span's codes.
template <int SPAN, int R>
INLINE void add_offsets(__m512 (&total)[R], const uint8_t* t, const uint32_t* sums) {
  if (SPAN == 1) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t));
    const __m512 m = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(m, one_for_all(sums[r]), total[r]);
    return;
  }
  const __m512i both = _mm512_loadu_si512(t);
#if defined(__AVX512BF16__)
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
    total[r] = _mm512_dpbf16_ps(total[r], (__m512bh)both, (__m512bh)_mm512_set1_epi32(int(sums[r])));
#else
  const uint32_t high = 0xffff0000u;
  const __m512 m0 = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  const __m512 m1 = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(high))));
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    total[r] = _mm512_fmadd_ps(m0, one_for_all(sums[r] << 16), total[r]);
    total[r] = _mm512_fmadd_ps(m1, one_for_all(sums[r] & high), total[r]);
  }
#endif
}

template <int BITS, bool OFFSETS, int SPAN, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, int, float* out) {
  const BlockMatrix& w = j.call->matrix;
  const int8_t* x = j.q.codes + first * w.columns;
  const float* ratio = j.q.ratio + first * (j.spans + 1);
  const int32_t* base = j.q.base + first * j.groups;
  const uint32_t* sums = j.q.sums + first * j.spans;
  const int group = SPAN == 2 ? kBlock : w.group;
  __m512 total[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  for (int p = 0; p < j.spans; p++, ratio += R, sums += R) {
    const uint8_t* marks = t + SPAN * group * kTile * BITS / 8;
#pragma GCC unroll 2
    for (int h = 0; h < SPAN; h++, base += R) {
      __m512i sum[R];
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) sum[r] = _mm512_set1_epi32(base[r]);
      for (int b = 0; b < group; b += kBlock, t += 64 * BITS, x += kBlock * R) add_block<BITS, R>(sum, t, x);
      const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(marks + 2 * kTile * h)));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const __m512 whole = _mm512_cvtepi32_ps(sum[r]);
        total[r] = h == 0 ? _mm512_fmadd_ps(total[r], _mm512_set1_ps(ratio[r]), _mm512_mul_ps(whole, d))
                          : _mm512_fmadd_ps(whole, d, total[r]);
      }
    }
    t = marks + 2 * kTile * SPAN;
    if (OFFSETS) add_offsets<SPAN, R>(total, t, sums), t += 2 * kTile * SPAN;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * kTile, _mm512_mul_ps(total[r], _mm512_set1_ps(ratio[r])));
}

}  // namespace
