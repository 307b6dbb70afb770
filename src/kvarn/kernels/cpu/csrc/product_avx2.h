// A tile of weights for R rows, on AVX2, which multiplies bytes in pairs (VPMADDUBSW: one unsigned, one signed, the two
// products added in 16 bits). The integers stay exact:
//   4 bits: a code is at most 15, so eight pairs' sums (8 * 2 * 15 * 127 = 30,480) fit 16 bits: a block of 32 columns.
//   8 bits: code - 128 goes in as its magnitude, its sign into the activation: 2 * 128 * 127 = 32,512 fits.
#pragma once
#include "product_data.h"

namespace {

// One row waits for memory: weights are asked for so many bytes before they are used.
constexpr int kAheadBytes = 2048;

INLINE __m256i four_columns(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

INLINE __m256i codes_at(const uint8_t* t) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t)); }

// Rows whose sums stay in registers, two of them each, beside two operands and what is being added.
template <int R>
constexpr int kTogether = R % 4 == 0 ? 4 : R % 3 == 0 ? 3 : R;

// 4 bits: sum[half][r] += the products of 32 columns of 16 rows of weights at t with row r of a panel x [8][R][4 columns].
template <int R, int N>
INLINE void add_nibbles(__m256i (&sum)[2][N], const uint8_t* t, const int8_t* x) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i pairs[2][N];
#pragma GCC unroll 8
  for (int k = 0; k < 8; k++) {  // of four columns: the low halves of the bytes first, then the high ones
    const uint8_t* at = t + 64 * (k % 4);
    __m256i top = codes_at(at), bottom = codes_at(at + 32);
    if (k >= 4) top = _mm256_srli_epi16(top, 4), bottom = _mm256_srli_epi16(bottom, 4);
    top = _mm256_and_si256(top, low), bottom = _mm256_and_si256(bottom, low);
#pragma GCC unroll 4
    for (int r = 0; r < N; r++) {
      const __m256i four = four_columns(x + (k * R + r) * 4);
      const __m256i a = _mm256_maddubs_epi16(top, four), b = _mm256_maddubs_epi16(bottom, four);
      pairs[0][r] = k == 0 ? a : _mm256_add_epi16(pairs[0][r], a);
      pairs[1][r] = k == 0 ? b : _mm256_add_epi16(pairs[1][r], b);
      asm("" : "+x"(pairs[0][r]), "+x"(pairs[1][r]));  // in this order: else many products come first, and go to the stack
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int r = 0; r < N; r++) {
    sum[0][r] = _mm256_add_epi32(sum[0][r], _mm256_madd_epi16(pairs[0][r], ones));
    sum[1][r] = _mm256_add_epi32(sum[1][r], _mm256_madd_epi16(pairs[1][r], ones));
  }
}

// 8 bits: the same.
template <int R, int N>
INLINE void add_bytes(__m256i (&sum)[2][N], const uint8_t* t, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
      const __m256i centred = _mm256_xor_si256(codes_at(t + 64 * k + 32 * half), _mm256_set1_epi8(-128));
      const __m256i magnitude = _mm256_abs_epi8(centred);
#pragma GCC unroll 4
      for (int r = 0; r < N; r++) {
        const __m256i turned = _mm256_sign_epi8(four_columns(x + (k * R + r) * 4), centred);
        sum[half][r] = _mm256_add_epi32(sum[half][r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, turned), ones));
        asm("" : "+x"(sum[half][r]));
      }
    }
  }
}

// What a code of zero stands for, 16 rows of the h-th group of a span: its offset, and with 4 bits zero * scale away.
template <int BITS, int SPAN>
INLINE void zero_points(vf (&zero)[2], const vf (&scale)[2], const uint8_t* offsets, int h) {
#pragma GCC unroll 2
  for (int v = 0; v < 2; v++) {
    vf offset = bf16_vf(load<vh>(offsets + 2 * W * v));
    if (SPAN == 2) {
      const vu both = load<vu>(offsets + 4 * W * v);
      offset = (vf)(h == 0 ? both << 16 : both & (vu)_mm256_set1_epi32(int(0xffff0000u)));
    }
    zero[v] = BITS == 8 ? offset : fma(scale[v], splat(-8.0f), offset);
  }
}

template <int BITS, bool OFFSETS, int SPAN, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, float* out) {
  const BlockMatrix& w = j.call->matrix;
  constexpr int N = kTogether<R>;
  const int8_t* x = j.q.codes + first * w.columns;
  const float* ratio = j.q.ratio + first * (j.spans + 1);
  const int32_t* base = j.q.base + first * j.groups;
  const int group = SPAN == 2 ? kBlock : w.group;
  vf total[2][R] = {};
  for (int p = 0; p < j.spans; p++, ratio += R) {
    const uint8_t* marks = t + SPAN * group * kTile * BITS / 8;
    if (R <= 2) {
#pragma GCC unroll 20
      for (int line = 0; line < SPAN * (kBlock * kTile * BITS / 8 + 2 * kTile * (OFFSETS ? 2 : 1)); line += 64)
        __builtin_prefetch(t + kAheadBytes + line);
    }
#pragma GCC unroll 2
    for (int h = 0; h < SPAN; h++, base += R, x += group * R, t += group * kTile * BITS / 8) {
      const vf d[2] = {f16_vf(load<vh>(marks + 2 * kTile * h)), f16_vf(load<vh>(marks + 2 * kTile * h + 2 * W))};
      vf zero[2];
      if (OFFSETS) zero_points<BITS, SPAN>(zero, d, marks + 2 * kTile * SPAN, h);
#pragma GCC unroll 1
      for (int from = 0; from < R; from += N) {
        __m256i sum[2][N];
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) sum[0][r] = sum[1][r] = _mm256_setzero_si256();
        for (int b = 0; b < group; b += kBlock) {
          const uint8_t* block = t + b * kTile * BITS / 8;
          if (BITS == 8) add_bytes<R>(sum, block, x + b * R + 4 * from);
          else add_nibbles<R>(sum, block, x + b * R + 4 * from);
        }
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
          const __m256i of_codes = _mm256_set1_epi32(base[from + r]);
          const vf before = splat(ratio[from + r]);
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) {
            const __m256i exact = OFFSETS || BITS == 8 ? sum[v][r] : _mm256_add_epi32(sum[v][r], of_codes);
            const vf whole = (vf)_mm256_cvtepi32_ps(exact);
            vf& all = total[v][from + r];
            all = h == 0 ? fma(all, before, whole * d[v]) : fma(whole, d[v], all);
            if (OFFSETS) all = fma(zero[v], (vf)of_codes, all);
          }
        }
      }
    }
    t = marks + 2 * kTile * SPAN * (OFFSETS ? 2 : 1);
  }
  for (int v = 0; v < 2; v++)
    for (int r = 0; r < R; r++) store(out + r * kTile + v * W, total[v][r] * ratio[r]);
}

}  // namespace
