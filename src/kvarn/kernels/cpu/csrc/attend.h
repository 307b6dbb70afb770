// Attention of one query tile over its sequence's bag of blocks.
//
// A tile's table row is walked in splits of a fixed number of columns; each split gives (peak, sum, mix) by an exact softmax
// inside it, and splits merge in order by their log-sum-exp (Milakov & Gimelshein 2018; Dao et al. 2022). What a row computes
// depends on its own query and its table row alone: neither tile height, batch, chunking nor threads change the order of any
// sum of floats.
#pragma once
#include "mix.h"

namespace {

// Softmax numerators of one row over the split's visited columns; pairs for the columns whose V is mixed by dot products,
// products with the tokens' scales for int8. The first rows of a head ask for the next keys where integers mix.
inline void exponentiate(const Step& s, const Shape& h, const Work& w, int n, int r, bool asking, float* x, float peak, float* sum) {
  vf lanes{};
  [[maybe_unused]] auto* pairs = reinterpret_cast<uint16_t*>(w.p_dot) + int64_t(r) * h.columns * h.padded_block;
  const int64_t room = int64_t(h.padded_block) * (s.v_dim / 32);
  const float safe = peak == -__builtin_inff() ? 0.0f : peak;
  for (int i = 0; i < n; i++, x += h.padded_block, pairs += h.padded_block) {
    const Column& col = w.columns[i];
    if (col.v_way == kDot) {
      for (int j = 0; j < h.padded_block; j += W) {
        vf e = vexp_below(load<vf>(x + j) - safe);
        lanes += e;
#if defined(__AVX512BF16__)
        store(pairs + j, _mm512_cvtneps_pbh((__m512)e));
#endif
      }
      continue;
    }
    const float* scale = col.v_way == kInteger && !is_affine(col.pool->v.codec) ? w.v_scale + i * room : nullptr;
    Ahead ahead = w.ahead[i];
    for (int j = 0; j < h.padded_block; j += W) {
      if (asking && col.v_way == kInteger) ask<kExpLines>(ahead);
      vf e = vexp_below(load<vf>(x + j) - safe);
      lanes += e;
      store(x + j, scale ? e * load<vf>(scale + j) : e);
    }
    w.ahead[i] = ahead;
  }
  *sum = hsum(lanes);
}

inline void zero(float* x, int64_t n) { __builtin_memset(x, 0, n * sizeof(float)); }

// Goes over the keys of a split in the order in which they lie in memory, block by block and head by head.
struct NextKeys {
  const Tile* tile;  // null: there are none
  int column, end, head;
};
INLINE NextKeys keys_of(const Step& s, const Shape& h, const Walk& walk) {
  if (walk.tile == nullptr) return {nullptr, 0, 0, 0};
  return {walk.tile, walk.begin, imin(walk.begin + h.columns, s.table.length[walk.tile->row]), 0};
}
// Ask for the keys that come next: their scales at once, their codes in the lines that are returned, beside a block that is mixed
// in this way. here: something at hand.
INLINE Ahead ask_next(const Step& s, const AttendCall& c, const Shape& h, NextKeys& next, const uint8_t* here, Way way) {
  if (next.tile == nullptr || next.column >= next.end) return {here, 0};
  const int64_t entry = int64_t(next.tile->row) * s.table.columns + next.column, block = s.table.block[entry];
  const int index = s.table.pool[entry], head = next.tile->head + next.head;
  const Pool& pool = s.pools[index];
  if (++next.head == next.tile->n_heads) next.head = 0, next.column++;
  prefetch_k(s, pool, block, c.layer, head, h.ask_k[index].from[way]);
  return {at(pool.k.part[0], block, c.layer, head), h.ask_k[index].step[way]};
}

inline void attend_split(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, int begin,
                         int end, Walk& walk, const Partial& out) {
  int n = score_split(s, c, h, t, w, begin, end, walk.asked_columns, out.peak);
  const int64_t width = int64_t(h.columns) * h.padded_block;
  zero(out.mix, int64_t(t.n_rows) * h.padded_v);
  bool turbo = false;
  for (int i = 0; i < n; i++) turbo |= is_turbo(w.columns[i].pool->v.codec);
  if (turbo) zero(w.mix_turbo, int64_t(t.n_rows) * h.padded_v);
  NextKeys next = keys_of(s, h, walk);
  for (int k = 0; k < t.n_heads; k++) {
    const HeadRows rows{t.head + k, k * t.head_rows, t.head_rows};
    if (h.any_v_integer) stage_v_scales(s, c, h, w, n, rows.head);
    for (int i = 0; i < n; i++)
      w.ahead[i] = ask_next(s, c, h, next, reinterpret_cast<const uint8_t*>(w.scores), w.columns[i].v_way);
    for (int r = 0; r < rows.n; r++)
      exponentiate(s, h, w, n, rows.first + r, r < imin(h.group, kExpRows), w.scores + (rows.first + r) * width,
                   out.peak[rows.first + r], out.sum + rows.first + r);
    float* mix = out.mix + int64_t(rows.first) * h.padded_v;
    if (h.any_v_integer) mix_by_integers(s, c, h, w, n, rows, width, mix);
    mix_others(s, c, h, w, n, rows, width, mix);
  }
  walk.asked_columns = next.column - walk.begin;
  if (!turbo) return;
  for (int r = 0; r < t.n_rows; r++) {
    float *turned = w.mix_turbo + int64_t(r) * h.padded_v, *mix = out.mix + int64_t(r) * h.padded_v;
    turbo_unrotate(turned, s.v_dim);
    for (int i = 0; i < s.v_dim; i++) mix[i] += turned[i];
  }
}

inline void merge(const Shape& h, int rows, const Partial& total, const Partial& part) {
  for (int r = 0; r < rows; r++) {
    if (part.sum[r] == 0.0f) continue;  // nothing seen; a NaN goes on, whatever the peak is beside it
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
    float inverse = sum == 0.0f ? 0.0f : keep / sum;  // a NaN stays one
    const float* mix = p.mix + int64_t(r) * h.padded_v;
    int i = 0;
    for (; i + W <= s.v_dim; i += W) store_vf(c.out, head * s.v_dim + i, c.dtype, load<vf>(mix + i) * inverse);
    for (; i < s.v_dim; i++) store_float(c.out, head * s.v_dim + i, c.dtype, mix[i] * inverse);
    if (c.lse != nullptr) c.lse[head] = sum == 0.0f ? -__builtin_inff() : peak + __builtin_logf(sum);
  }
}

}  // namespace
