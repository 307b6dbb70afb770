// A tile of weights for R rows, on the compiler's vectors of 32-bit integers: for what has no products of bytes.
#pragma once
#include "product_data.h"

namespace {

template <int BITS, int R, int V>
INLINE void add_block(vi (&sum)[R][V], const uint8_t* t, const int8_t* x) {
  for (int i = 0; i < BITS; i++)
    for (int v = 0; v < V; v++) {
      vu codes = load<vu>(t + i * 64 + v * W * 4);
      for (int k = 0; k < 4; k++) {
        vi first = (vi)((codes >> (8 * k)) & (BITS == 8 ? 255u : 15u)), second = (vi)((codes >> (8 * k + 4)) & 15u);
        for (int r = 0; r < R; r++) {
          const int8_t* a = x + (i * R + r) * 4 + k;
          sum[r][v] += first * int32_t(a[0]);
          if (BITS == 4) sum[r][v] += second * int32_t(a[16 * R]);
        }
      }
    }
}

template <int SPAN, int R, int V>
INLINE void add_offsets(vf (&total)[R][V], const uint8_t* t, const uint32_t* sums) {
  for (int v = 0; v < V; v++) {
    if (SPAN == 1) {
      const vf m = bf16_vf(load<vh>(t + v * W * 2));
      for (int r = 0; r < R; r++) total[r][v] = fma(m, splat(bits_float(sums[r])), total[r][v]);
      continue;
    }
    const vu both = load<vu>(t + v * W * 4);
    const vf m0 = (vf)(both << 16), m1 = (vf)(both & 0xffff0000u);
    for (int r = 0; r < R; r++) {
      total[r][v] = fma(m0, splat(bits_float(sums[r] << 16)), total[r][v]);
      total[r][v] = fma(m1, splat(bits_float(sums[r] & 0xffff0000u)), total[r][v]);
    }
  }
}

template <int BITS, bool OFFSETS, int SPAN, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, int, float* out) {
  const BlockMatrix& w = j.call->matrix;
  constexpr int V = kTile / W;
  const int8_t* x = j.q.codes + first * w.columns;
  const float* ratio = j.q.ratio + first * (j.spans + 1);
  const int32_t* base = j.q.base + first * j.groups;
  const uint32_t* sums = j.q.sums + first * j.spans;
  vf total[R][V] = {};
  for (int p = 0; p < j.spans; p++, ratio += R, sums += R) {
    const uint8_t* marks = t + SPAN * w.group * kTile * BITS / 8;
    for (int h = 0; h < SPAN; h++, base += R) {
      vi sum[R][V];
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = splat_i(base[r]);
      for (int b = 0; b < w.group; b += kBlock, t += 64 * BITS, x += kBlock * R) add_block<BITS, R, V>(sum, t, x);
      for (int v = 0; v < V; v++) {
        const vf d = f16_vf(load<vh>(marks + 2 * kTile * h + v * W * 2));
        for (int r = 0; r < R; r++) {
          const vf whole = __builtin_convertvector(sum[r][v], vf);
          total[r][v] = h == 0 ? fma(total[r][v], splat(ratio[r]), whole * d) : fma(whole, d, total[r][v]);
        }
      }
    }
    t = marks + 2 * kTile * SPAN;
    if (OFFSETS) add_offsets<SPAN, R, V>(total, t, sums), t += 2 * kTile * SPAN;
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out + r * kTile + v * W, total[r][v] * ratio[r]);
}

}  // namespace
