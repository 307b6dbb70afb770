// Mixing values by integer products of one byte: weights in two bytes.
#pragma once
#include "integer_vnni.h"

namespace {

constexpr Bytes64 kHighLow = bytes64([](int t, int c) {  // of 32 numbers: their second bytes, then their first ones
  const int i = 4 * t + c;
  return i % 32 * 4 + (i < 32);
});

// Codes of four tokens for V vectors of 16 channels, as bytes [channel][token]: all 64 channels at v (V = 4) or the half of
// them (V = 2). The channels of int8 come in the order 16 * lane + 4 * vector + element.
template <int C, int V>
INLINE void four_tokens(const uint8_t* v, int64_t row, int half, __m512i* x) {
  const __m512i nibble = _mm512_set1_epi8(15);
  if constexpr (C == kInt8) {
    static_assert(V == 4);
    __m512i a = _mm512_loadu_si512(v), b = _mm512_loadu_si512(v + row), c = _mm512_loadu_si512(v + 2 * row),
            d = _mm512_loadu_si512(v + 3 * row);
    __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    x[0] = _mm512_unpacklo_epi16(ab, cd), x[1] = _mm512_unpackhi_epi16(ab, cd);
    ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
    x[2] = _mm512_unpacklo_epi16(ab, cd), x[3] = _mm512_unpackhi_epi16(ab, cd);
  } else if constexpr (C == kAffine4) {
    __m512i y = _mm512_permutexvar_epi8(vector_of(kLaneRows), four_lanes<16>(v + half * 16, row));
    x[0] = _mm512_and_si512(y, nibble);
    x[1] = _mm512_and_si512(_mm512_srli_epi16(y, 4), nibble);
  } else {
    constexpr int bytes = C == kAffine2 ? 8 : 12;
    __m512i y = four_lanes<bytes>(v + half * bytes, row), low = _mm512_permutexvar_epi8(vector_of(kLaneRows8), y);
    x[0] = low_bits(low, 0), x[1] = low_bits(low, 1);
    if constexpr (C == kAffine3) {
      __m512i high = _mm512_permutexvar_epi8(vector_of(kLaneHigh), y);
      x[0] = _mm512_or_si512(x[0], third_bit(high, 0));
      x[1] = _mm512_or_si512(x[1], third_bit(high, 1));
    }
  }
}

// Lanes of 4 floats from [vector][lane] to [lane][vector].
INLINE void transpose_lanes(vf* f) {
  __m512 a = _mm512_shuffle_f32x4((__m512)f[0], (__m512)f[1], 0x44), b = _mm512_shuffle_f32x4((__m512)f[2], (__m512)f[3], 0x44);
  __m512 c = _mm512_shuffle_f32x4((__m512)f[0], (__m512)f[1], 0xee), d = _mm512_shuffle_f32x4((__m512)f[2], (__m512)f[3], 0xee);
  f[0] = (vf)_mm512_shuffle_f32x4(a, b, 0x88), f[1] = (vf)_mm512_shuffle_f32x4(a, b, 0xdd);
  f[2] = (vf)_mm512_shuffle_f32x4(c, d, 0x88), f[3] = (vf)_mm512_shuffle_f32x4(c, d, 0xdd);
}

// R rows of mix [..][ld] += factor * weights times V's stripes.
template <int C, int R>
INLINE void mix_rows(const Stripes& v, int64_t first, int half, int r0, float* mix, int64_t ld, bool asking) {
  constexpr int V = C == kInt8 ? 4 : 2;
  __m512i sum[R][2][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) sum[r][0][i] = sum[r][1][i] = _mm512_setzero_si512();
  const int64_t weights_row = int64_t(v.n) * 2 * kStripe;
  for (int t = 0; t < v.n; t++) {
    const uint8_t *codes = v.at[t] + first, *weights = v.weights + r0 * weights_row + t * 2 * kStripe;
    Ahead ahead = asking ? v.ahead[t] : Ahead{codes, 0};
    for (int j = 0; j < kStripe; j += 4, codes += 4 * v.row) {
      __m512i x[V];
      ask<kMixLines>(ahead);
      four_tokens<C, V>(codes, v.row, half, x);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) {
          __m512i w = four_bytes(weights + r * weights_row + p * kStripe + j);
#pragma GCC unroll 8
          for (int i = 0; i < V; i++) add_products(sum[r][p][i], w, x[i]);
        }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    vf f[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; i++)
      f[i] = fma((vf)_mm512_cvtepi32_ps(sum[r][0][i]), splat(256.0f), (vf)_mm512_cvtepi32_ps(sum[r][1][i]));
    if constexpr (C == kInt8) transpose_lanes(f);
    float* to = mix + (r0 + r) * ld;
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) store(to + i * W, fma(f[i], splat(v.factor[r0 + r]), load<vf>(to + i * W)));
  }
}

// mix [rows][ld] += factor * weights times the channels [channel, channel + 64) of int8, or [channel, channel + 32) of packed
// codes, of V's stripes.
template <int C>
void mix_stripes(const Stripes& v, int channel, int rows, float* mix, int64_t ld, bool asking) {
  const int64_t first = row_bytes(C, channel / 64 * 64);
  const int half = channel / 32 % 2;
  mix += channel;
  for (int r = 0; r < rows; asking = false) {
    const int left = rows - r;
    if (C != kInt8 && left >= 6) mix_rows<C, C == kInt8 ? 1 : 6>(v, first, half, r, mix, ld, asking), r += 6;
    else if (C != kInt8 && left >= 4) mix_rows<C, C == kInt8 ? 1 : 4>(v, first, half, r, mix, ld, asking), r += 4;
    else if (left == 3 || left > 4) mix_rows<C, 3>(v, first, half, r, mix, ld, asking), r += 3;
    else if (left >= 2) mix_rows<C, 2>(v, first, half, r, mix, ld, asking), r += 2;
    else mix_rows<C, 1>(v, first, half, r, mix, ld, asking), r += 1;
  }
}

// Weights of a row's stripes, x [offset[t]], as two bytes each, kTopWeight for `top`, the largest of them; the high ones first: out
// [n][2][kStripe].
constexpr float kTopWeight = 65535.0f;
INLINE void code_weights(const float* x, const int* offset, int n, float top, uint8_t* out) {
  const float ratio = top > 0.0f ? kTopWeight / top : 0.0f;
  const __m512i pick = vector_of(kHighLow);
  for (int t = 0; t < n; t++, out += 2 * kStripe) {
    __m512i a = _mm512_cvtps_epi32((__m512)(load<vf>(x + offset[t]) * ratio));
    __m512i b = _mm512_cvtps_epi32((__m512)(load<vf>(x + offset[t] + W) * ratio));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi8(a, pick, b));
  }
}

}  // namespace
