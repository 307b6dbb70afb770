// Scores: queries times the keys of a block, in whichever way its format is multiplied, then scale, cap and mask.
#pragma once
#include "tile.h"

namespace {

inline void halves(const uint16_t* x, int n, float* out) {
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, f16_vf(load<vh>(x + i)));
  for (; i < n; i++) out[i] = f16_float(x[i]);
}

inline void scale_columns(float* scores, int64_t width, int rows, const float* scale, int n) {
  for (int r = 0; r < rows; r++) {
    float* x = scores + r * width;
    int j = 0;
    for (; j + W <= n; j += W) store(x + j, load<vf>(x + j) * load<vf>(scale + j));
    for (; j < n; j++) x[j] *= scale[j];
  }
}

INLINE vf floats_at(const float* p) { return load<vf>(p); }
INLINE vf floats_at(const uint16_t* p) { return f16_vf(load<vh>(p)); }
INLINE float float_of(float x) { return x; }
INLINE float float_of(uint16_t x) { return f16_float(x); }

// q' = q * scale of each channel; bias = q . zero point, of R rows [dim]. Scales and zero points are floats or half-precision.
template <int R, class T>
INLINE void scale_queries(const float* q, int dim, const T* scale, const T* zero, float* out, float* bias) {
  vf lanes[R] = {};
  float tail[R] = {};
  int i = 0;
  for (; i + W <= dim; i += W) {
    const vf by = floats_at(scale + i), with = floats_at(zero + i);
    for (int r = 0; r < R; r++) {
      const vf x = load<vf>(q + int64_t(r) * dim + i);
      store(out + int64_t(r) * dim + i, x * by);
      lanes[r] = fma(x, with, lanes[r]);
    }
  }
  for (; i < dim; i++)
    for (int r = 0; r < R; r++) {
      out[int64_t(r) * dim + i] = q[int64_t(r) * dim + i] * float_of(scale[i]);
      tail[r] += q[int64_t(r) * dim + i] * float_of(zero[i]);
    }
  for (int r = 0; r < R; r++) bias[r] = hsum(lanes[r]) + tail[r];
}

struct HeadRows {  // the rows of one KV head in a tile
  int head, first, n;
};

INLINE void score_integers(int codec, const uint8_t* k, int64_t row, int dim, int block, const Queries& q, int rows,
                           const uint16_t* scale, float* out, int64_t width, Ahead v) {
  for (int j = 0; j < block; j += kStripe, scale += kStripe, out += kStripe, v.at += dim / 4 * kScoreLines * v.step) {
    const uint8_t* stripe = k + row_bytes(codec, j);
    switch (codec) {
      case kInt8: score_stripe<kInt8>(stripe, row, dim, q, rows, scale, out, width, v); break;
      case kAffine4: score_stripe<kAffine4>(stripe, row, dim, q, rows, scale, out, width, v); break;
      case kAffine3: score_stripe<kAffine3>(stripe, row, dim, q, rows, scale, out, width, v); break;
      case kAffine2: score_stripe<kAffine2>(stripe, row, dim, q, rows, scale, out, width, v); break;
      default: break;
    }
  }
}

// Scale times q . zero point of each row, from w.zero.
inline void bias_of_rows(const float* q, int rows, int dim, const float* zero, float scale, float* bias) {
  for (int r = 0; r < rows; r++, q += dim) {
    vf lanes{};
    for (int i = 0; i < dim; i += W) lanes = fma(load<vf>(q + i), load<vf>(zero + i), lanes);
    bias[r] = hsum(lanes) * scale;
  }
}

// Scores that already have the call's scale in them; the block's values are asked for meanwhile.
inline void score_by_integers(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                              const HeadRows& rows, float* out, int64_t width, const Ahead& v) {
  const Side& k = col.pool->k;
  const uint8_t* codes = at(k.part[0], col.block, c.layer, rows.head);
  const int64_t row = row_bytes(k.codec, h.block);
  if (k.codec == kInt8) {
    const uint16_t* scale = halves_at(k.part[1], col.block, c.layer, rows.head);
    const Queries q{w.q_int8 + int64_t(rows.first) * 4 * s.k_dim, w.q_shift + rows.first, w.q_step + rows.first, nullptr};
    score_integers(kInt8, codes, row, s.k_dim, h.block, q, rows.n, scale, out, width, v);
    return;
  }
  const float* q = w.q + int64_t(rows.first) * s.k_dim;
  halves(halves_at(k.part[1], col.block, c.layer, rows.head), s.k_dim, w.scale);
  halves(halves_at(k.part[2], col.block, c.layer, rows.head), s.k_dim, w.zero);
  const float top = top_magnitude(w.scale, s.k_dim);
  for (int r = 0; r < rows.n; r++)
    w.block_step[r] = c.scale * packed_query(q + int64_t(r) * s.k_dim, w.scale, s.k_dim, w.q_top[rows.first + r] * top,
                                             w.q_block + int64_t(r) * 4 * s.k_dim);
  bias_of_rows(q, rows.n, s.k_dim, w.zero, c.scale, w.bias);
  score_integers(k.codec, codes, row, s.k_dim, h.block, {w.q_block, nullptr, w.block_step, w.bias}, rows.n, nullptr, out, width, v);
}

inline void score_by_floats(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                            const HeadRows& rows, float* out, int64_t width, float* bias, const Ahead& v) {
  const Side& k = col.pool->k;
  const uint8_t* codes = at(k.part[0], col.block, c.layer, rows.head);
  const float* q = (is_turbo(k.codec) ? w.q_turbo : w.q) + int64_t(rows.first) * s.k_dim;
  if (has_token_scale(k.codec)) halves(halves_at(k.part[1], col.block, c.layer, rows.head), h.block, w.scale);
  if (is_affine(k.codec)) {
    const uint16_t *scale = halves_at(k.part[1], col.block, c.layer, rows.head),
                   *zero = halves_at(k.part[2], col.block, c.layer, rows.head);
    auto scale_all = [&](const auto* by, const auto* with) {
#define KVARN_SOME(R) \
  scale_queries<R>(q + int64_t(r0) * s.k_dim, s.k_dim, by, with, w.q_scaled + int64_t(r0) * s.k_dim, bias + r0)
      KVARN_ROWS(rows.n, KVARN_SOME)
#undef KVARN_SOME
    };
    if (rows.n <= kMaxRows) {
      scale_all(scale, zero);
    } else {
      halves(scale, s.k_dim, w.scale);
      halves(zero, s.k_dim, w.zero);
      scale_all(w.scale, w.zero);
    }
    q = w.q_scaled;
  }
  if (fast_row(k.codec, h.block)) {
    matmul(k.codec, codes, row_bytes(k.codec, h.block), h.block, q, s.k_dim, rows.n, s.k_dim, out, width, false, v);
  } else {
    stage_rows(k.codec, codes, s.k_dim, h.block, nullptr, w.stage, h.padded_block);
    matmul(kF32, reinterpret_cast<uint8_t*>(w.stage), 4 * h.padded_block, h.padded_block, q, s.k_dim, rows.n, s.k_dim,
           out, width, false, v);
  }
  if (has_token_scale(k.codec)) scale_columns(out, width, rows.n, w.scale, h.block);
}

// Do scores lack each row's product with the zero points?
INLINE bool lacks_bias(const Column& col) { return col.k_way == kPlain && is_affine(col.pool->k.codec); }

// Scores q . k of one block and head into out [rows][width] (padded_block columns of it), what they lack into bias [rows]. Products
// ask for the block's values meanwhile.
inline void score_block(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                        const HeadRows& rows, float* out, int64_t width, float* bias) {
  const Ahead v{at(col.pool->v.part[0], col.block, c.layer, rows.head), h.ask_v[col.at].step[col.k_way]};
  if (col.k_way == kInteger) return score_by_integers(s, c, h, w, col, rows, out, width, v);
  if (col.k_way == kPlain) return score_by_floats(s, c, h, w, col, rows, out, width, bias, v);
  const uint8_t* k = at(col.pool->k.part[0], col.block, c.layer, rows.head);
  const uint32_t* q = w.q_dot + int64_t(rows.first) * (s.k_dim / 2);
  auto product = col.pool->k.codec == kBF16 ? matmul_dot<kBF16> : matmul_dot<kFP8>;
  const DotPart part{k, q, v};
  product(&part, 1, h.block, s.k_dim / 2, rows.n, s.k_dim / 2, out, width, false);
}

INLINE vf cap_scores(vf x, float cap) {  // cap * tanh(x / cap); the polynomial near 0 is Cephes' (tanhf, S. Moshier)
  vf u = x * (1.0f / cap), z = u * u;
  vf p = fma(splat(-5.70498872745e-3f), z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  vf near = fma(p * z, u, u), far = 1.0f - 2.0f / (vexp(2.0f * u) + 1.0f);
  return cap * (z < 0.390625f ? near : far);
}

// Add the bias that is lacking; scale, cap and mask one row of one block; what may not be seen becomes -inf. Returns the row's
// lanes of maxima.
INLINE vf finish_scores(const AttendCall& c, const Column& col, int block, int padded, int position, float bias, float* x, vf peak) {
  if (col.all_seen && block == padded && !(c.soft_cap > 0.0f)) {
    if (col.k_way == kInteger) {
      for (int j = 0; j < padded; j += W) peak = vmax(peak, load<vf>(x + j));
      return peak;
    }
    for (int j = 0; j < padded; j += W) {
      vf v = (load<vf>(x + j) + bias) * c.scale;
      store(x + j, v);
      peak = vmax(peak, v);
    }
    return peak;
  }
  const vf none = splat(-__builtin_inff());
  int oldest = c.window > 0 ? position - c.window : -1;
  if (c.chunk > 0) oldest = imax(oldest, position / c.chunk * c.chunk - 1);
  oldest = imax(oldest, -1);
  const float scale = col.k_way == kInteger ? 1.0f : c.scale;
  for (int j = 0; j < padded; j += W) {
    vf v = (load<vf>(x + j) + bias) * scale;
    if (c.soft_cap > 0.0f) v = cap_scores(v, c.soft_cap);
    if (!col.all_seen || j + W > block) {
      vi p;
      if (j + W <= block) {
        p = load<vi>(col.positions + j);
      } else {
        for (int i = 0; i < W; i++) p[i] = j + i < block ? col.positions[j + i] : -1;
      }
      v = (p <= splat_i(position)) & (p > splat_i(oldest)) ? v : none;
    }
    store(x + j, v);
    peak = vmax(peak, v);
  }
  return peak;
}

// Scores of one split into w.scores [rows][n * padded_block], scaled and masked. asked_columns: those whose keys were asked for
// before. Returns n, the columns visited.
inline int score_split(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, int begin, int end,
                       int asked_columns, float* peak) {
  const int n = visible_columns(s, c, h, t, begin, end, w.columns);
  const int64_t width = int64_t(h.columns) * h.padded_block;
  for (int i = 0; i < n; i++) {
    const Column& col = w.columns[i];
    for (int k = 0; k < t.n_heads; k++) {
      const HeadRows rows{t.head + k, k * t.head_rows, t.head_rows};
      if (i + 1 < n && w.columns[i + 1].index - begin >= asked_columns)
        prefetch_k(s, *w.columns[i + 1].pool, w.columns[i + 1].block, c.layer, rows.head, 0);
      prefetch_v(s, *col.pool, col.block, c.layer, rows.head, h.ask_v[col.at].from[col.k_way]);
      score_block(s, c, h, w, col, rows, w.scores + rows.first * width + i * h.padded_block, width,
                  w.column_bias + i * h.rows + rows.first);
    }
  }
  for (int r = 0; r < t.n_rows; r++) {
    const int position = s.positions[row_of(h, t, r).token];
    vf lanes = splat(-__builtin_inff());
    for (int i = 0; i < n; i++)
      lanes = finish_scores(c, w.columns[i], h.block, h.padded_block, position,
                            lacks_bias(w.columns[i]) ? w.column_bias[i * h.rows + r] : 0.0f,
                            w.scores + r * width + i * h.padded_block, lanes);
    peak[r] = n ? hmax(lanes) : -__builtin_inff();
  }
  return n;
}

}  // namespace
