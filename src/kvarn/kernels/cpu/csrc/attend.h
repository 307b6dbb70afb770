// Attention of one query tile over its sequence's bag of blocks.
//
// A tile's table row is walked in splits of a fixed number of columns; each split gives (peak, sum, mix) by an exact softmax
// inside it, and splits merge in order by their log-sum-exp (Milakov & Gimelshein 2018; Dao et al. 2022). What a row computes
// depends on its own query and its table row alone: neither tile height, batch, chunking nor threads change the order of any
// sum of floats.
#pragma once
#include "mix.h"

namespace {

// Softmax numerators of one row over the split's visited columns; pairs for the columns whose V is mixed by dot products.
inline void exponentiate(const Shape& h, const Work& w, int n, int r, float* x, float peak, float* sum) {
  vf lanes{};
  [[maybe_unused]] auto* pairs = reinterpret_cast<uint16_t*>(w.p_dot) + int64_t(r) * h.columns * h.padded_block;
  float safe = peak == -__builtin_inff() ? 0.0f : peak;
  for (int i = 0; i < n; i++) {
    const bool dot = w.columns[i].v_way == kDot;
    for (int j = i * h.padded_block; j < (i + 1) * h.padded_block; j += W) {
      vf e = vexp(load<vf>(x + j) - safe);
      lanes += e;
      if (dot) {
#if defined(__AVX512BF16__)
        store(pairs + j, _mm512_cvtneps_pbh((__m512)e));
#endif
      } else {
        store(x + j, e);
      }
    }
  }
  *sum = hsum(lanes);
}

inline void zero(float* x, int64_t n) { __builtin_memset(x, 0, n * sizeof(float)); }

// Ask for the keys of the column that stands as far into the next split as `index` does into this one.
INLINE void prefetch_next(const Step& s, const AttendCall& c, const Tile& t, int column) {
  if (!t.walked || column >= s.table.length[t.row]) return;
  const int64_t at = int64_t(t.row) * s.table.columns + column;
  for (int k = 0; k < t.n_heads; k++) prefetch_k(s, s.pools[s.table.pool[at]], s.table.block[at], c.layer, t.head + k);
}

inline void attend_split(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, int begin,
                         int end, const Partial& out) {
  int n = score_split(s, c, h, t, w, begin, end, out.peak);
  const int64_t width = int64_t(h.columns) * h.padded_block;
  zero(out.mix, int64_t(t.n_rows) * h.padded_v);
  bool turbo = false;
  for (int i = 0; i < n; i++) turbo |= is_turbo(w.columns[i].pool->v.codec);
  if (turbo) zero(w.mix_turbo, int64_t(t.n_rows) * h.padded_v);
  for (int r = 0; r < t.n_rows; r++) exponentiate(h, w, n, r, w.scores + r * width, out.peak[r], out.sum + r);
  for (int i = 0; i < n; i++) {
    prefetch_next(s, c, t, end + i);
    for (int k = 0; k < t.n_heads; k++) {
      const HeadRows rows{t.head + k, k * t.head_rows, t.head_rows};
      mix_block(s, c, h, w, w.columns[i], rows, i, width, out.mix + int64_t(rows.first) * h.padded_v);
    }
  }
  if (!turbo) return;
  for (int r = 0; r < t.n_rows; r++) {
    float *turned = w.mix_turbo + int64_t(r) * h.padded_v, *mix = out.mix + int64_t(r) * h.padded_v;
    turbo_unrotate(turned, s.v_dim);
    for (int i = 0; i < s.v_dim; i++) mix[i] += turned[i];
  }
}

inline void merge(const Shape& h, int rows, const Partial& total, const Partial& part) {
  for (int r = 0; r < rows; r++) {
    if (part.peak[r] == -__builtin_inff()) continue;
    float peak = fmax2(total.peak[r], part.peak[r]);
    float keep = exp1(total.peak[r] - peak), take = exp1(part.peak[r] - peak);
    total.peak[r] = peak;
    total.sum[r] = total.sum[r] * keep + part.sum[r] * take;
    float *to = total.mix + int64_t(r) * h.padded_v, *from = part.mix + int64_t(r) * h.padded_v;
    vf a = splat(keep), b = splat(take);
    for (int i = 0; i < h.padded_v; i += W) store(to + i, fma(load<vf>(from + i), b, load<vf>(to + i) * a));
  }
}

inline void clear(const Shape& h, int rows, const Partial& p) {
  for (int r = 0; r < rows; r++) p.peak[r] = -__builtin_inff(), p.sum[r] = 0.0f;
  zero(p.mix, int64_t(rows) * h.padded_v);
}

// Divide, let the head's sink join the denominator (gpt-oss), write rows of the output and their log-sum-exp.
inline void finish(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Partial& p) {
  for (int r = 0; r < t.n_rows; r++) {
    const Row row = row_of(h, t, r);
    const int64_t head = row.token * c.query_heads + row.query_head;
    float peak = p.peak[r], sum = p.sum[r], keep = 1.0f;
    if (c.sinks != nullptr) {
      float sink = c.sinks[row.query_head], top = fmax2(peak, sink);
      keep = exp1(peak - top);
      sum = sum * keep + exp1(sink - top);
      peak = top;
    }
    float inverse = sum > 0.0f ? keep / sum : 0.0f;
    const float* mix = p.mix + int64_t(r) * h.padded_v;
    int i = 0;
    for (; i + W <= s.v_dim; i += W) store_vf(c.out, head * s.v_dim + i, c.dtype, load<vf>(mix + i) * inverse);
    for (; i < s.v_dim; i++) store_float(c.out, head * s.v_dim + i, c.dtype, mix[i] * inverse);
    if (c.lse != nullptr) c.lse[head] = sum > 0.0f ? peak + __builtin_logf(sum) : -__builtin_inff();
  }
}

}  // namespace
