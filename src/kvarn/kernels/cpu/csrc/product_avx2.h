// A tile of weights for R rows, on AVX2, which multiplies bytes in pairs (VPMADDUBSW: one unsigned, one signed, the two
// products added in 16 bits). The integers stay exact:
//   4 bits: a code is at most 15, so eight pairs' sums (8 * 2 * 15 * 127 = 30,480) fit 16 bits: a block of 32 columns.
//   8 bits: code - 128 goes in as its magnitude, its sign into the activation: 2 * 128 * 127 = 32,512 fits.
#pragma once
#include "product_data.h"

namespace {

// Weights are asked for so many bytes before they are used.
constexpr int kAheadBytes = 2048;

INLINE __m256i four_columns(const int8_t* x) {
  int32_t four;
  __builtin_memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}

INLINE __m256i codes_at(const uint8_t* t) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t)); }

// Four columns of 16 rows of codes as bytes: the k-th of a block of 4-bit codes, the low halves of the bytes first.
INLINE void four_columns_of_codes(const uint8_t* t, int k, __m256i& top, __m256i& bottom) {
  const uint8_t* at = t + 64 * (k % 4);
  top = codes_at(at), bottom = codes_at(at + 32);
  if (k >= 4) top = _mm256_srli_epi16(top, 4), bottom = _mm256_srli_epi16(bottom, 4);
  const __m256i low = _mm256_set1_epi8(15);
  top = _mm256_and_si256(top, low), bottom = _mm256_and_si256(bottom, low);
}

// A block of 4-bit codes as bytes, once for all panels.
INLINE void widen_nibbles(const uint8_t* t, uint8_t* bytes) {
#pragma GCC unroll 8
  for (int k = 0; k < 8; k++) {
    __m256i top, bottom;
    four_columns_of_codes(t, k, top, bottom);
    store(bytes + 64 * k, top), store(bytes + 64 * k + 32, bottom);
  }
}

// 4 bits: sum[half][r] += the products of 32 columns of 16 rows of weights at t with row r of a panel x [8][R][4 columns].
// WIDE: the codes are bytes.
template <bool WIDE, int R>
INLINE void add_nibbles(__m256i (&sum)[2][R], const uint8_t* t, const int8_t* x) {
  __m256i pairs[2][R];
#pragma GCC unroll 8
  for (int k = 0; k < 8; k++) {
    __m256i top, bottom;
    if (WIDE) top = codes_at(t + 64 * k), bottom = codes_at(t + 64 * k + 32);
    else four_columns_of_codes(t, k, top, bottom);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const __m256i four = four_columns(x + (k * R + r) * 4);
      const __m256i a = _mm256_maddubs_epi16(top, four), b = _mm256_maddubs_epi16(bottom, four);
      pairs[0][r] = k == 0 ? a : _mm256_add_epi16(pairs[0][r], a);
      pairs[1][r] = k == 0 ? b : _mm256_add_epi16(pairs[1][r], b);
      asm("" : "+x"(pairs[0][r]), "+x"(pairs[1][r]));  // in this order: else many products come first, and go to the stack
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    sum[0][r] = _mm256_add_epi32(sum[0][r], _mm256_madd_epi16(pairs[0][r], ones));
    sum[1][r] = _mm256_add_epi32(sum[1][r], _mm256_madd_epi16(pairs[1][r], ones));
  }
}

// 8 bits: the same.
template <int R>
INLINE void add_bytes(__m256i (&sum)[2][R], const uint8_t* t, const int8_t* x) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
      const __m256i centred = _mm256_xor_si256(codes_at(t + 64 * k + 32 * half), _mm256_set1_epi8(-128));
      const __m256i magnitude = _mm256_abs_epi8(centred);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
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

// `panels` of R rows each from row `first` on.
template <int BITS, bool OFFSETS, int SPAN, int R, bool MANY>
INLINE void product_panels(const ProductJob& j, const uint8_t* t, int64_t first, int panels, float* out) {
  const BlockMatrix& w = j.call->matrix;
  const int8_t* x = j.q.codes + first * w.columns;
  const float* ratio = j.q.ratio + first * (j.spans + 1);
  const int32_t* base = j.q.base + first * j.groups;
  const int group = SPAN == 2 ? kBlock : w.group;
  constexpr bool WIDE = MANY && BITS == 4 && SPAN == 2;
  alignas(32) uint8_t bytes[WIDE ? kBlock * kTile : 1];
  vf total[MANY ? kPanelsAtOnce : 1][2][R];
  for (int n = 0; n < panels; n++)
    for (int r = 0; r < R; r++) total[n][0][r] = total[n][1][r] = splat(0.0f);
  for (int p = 0; p < j.spans; p++, ratio += R) {
    const uint8_t* marks = t + SPAN * group * kTile * BITS / 8;
#pragma GCC unroll 20
    for (int line = 0; line < SPAN * (kBlock * kTile * BITS / 8 + 2 * kTile * (OFFSETS ? 2 : 1)); line += 64)
      __builtin_prefetch(t + kAheadBytes + line);
#pragma GCC unroll 2
    for (int h = 0; h < SPAN; h++, base += R, x += group * R, t += group * kTile * BITS / 8) {
      const vf d[2] = {f16_vf(load<vh>(marks + 2 * kTile * h)), f16_vf(load<vh>(marks + 2 * kTile * h + 2 * W))};
      vf zero[2];
      if (OFFSETS) zero_points<BITS, SPAN>(zero, d, marks + 2 * kTile * SPAN, h);
      if (WIDE) widen_nibbles(t, bytes);
#pragma GCC unroll 1
      for (int n = 0; n < (MANY ? panels : 1); n++) {
        const int8_t* columns = x + n * R * int64_t(w.columns);
        __m256i sum[2][R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) sum[0][r] = sum[1][r] = _mm256_setzero_si256();
        for (int b = 0; b < group; b += kBlock) {
          const uint8_t* block = WIDE ? bytes : t + b * kTile * BITS / 8;
          if (BITS == 8) add_bytes<R>(sum, block, columns + b * R);
          else add_nibbles<WIDE, R>(sum, block, columns + b * R);
        }
        const int32_t* whole_codes = base + n * R * j.groups;
        const float* before = ratio + n * R * (j.spans + 1);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const __m256i of_codes = _mm256_set1_epi32(whole_codes[r]);
#pragma GCC unroll 2
          for (int v = 0; v < 2; v++) {
            const __m256i exact = OFFSETS || BITS == 8 ? sum[v][r] : _mm256_add_epi32(sum[v][r], of_codes);
            const vf whole = (vf)_mm256_cvtepi32_ps(exact);
            vf& all = total[n][v][r];
            all = h == 0 ? fma(all, splat(before[r]), whole * d[v]) : fma(whole, d[v], all);
            if (OFFSETS) all = fma(zero[v], (vf)of_codes, all);
          }
        }
      }
    }
    t = marks + 2 * kTile * SPAN * (OFFSETS ? 2 : 1);
  }
  for (int n = 0; n < panels; n++, ratio += R * (j.spans + 1))
    for (int r = 0; r < R; r++)
      for (int v = 0; v < 2; v++) store(out + (n * R + r) * kTile + v * W, total[n][v][r] * ratio[r]);
}

template <int BITS, bool OFFSETS, int SPAN, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, int panels, float* out) {
  if (R == kPanel && panels > 1) product_panels<BITS, OFFSETS, SPAN, R, R == kPanel>(j, t, first, panels, out);
  else product_panels<BITS, OFFSETS, SPAN, R, false>(j, t, first, 1, out);
}

}  // namespace
