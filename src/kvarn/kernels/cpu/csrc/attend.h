// Attention of one query tile over its sequence's bag of blocks.
//
// A tile is the query heads of one KV head for a few consecutive tokens of one sequence. Its table row is walked in splits
// of a fixed number of columns; each split gives (peak, sum, mix) by an exact softmax inside it, and splits merge in order
// by their log-sum-exp (Milakov & Gimelshein 2018; Dao et al. 2022). What a row computes depends on its own query and its
// table row alone: neither tile height, batch, chunking nor threads change the order of any sum.
#pragma once
#include "matmul.h"
#include "scratch.h"

namespace {

constexpr int kSplitTokens = 256;  // keys of one split
constexpr int kTileRows = 48;      // query rows of a tile, about

INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

INLINE const uint8_t* at(const TensorRef& t, int64_t block, int layer, int head) {
  return t.data + block * t.block + layer * t.layer + head * t.head;
}
INLINE uint8_t* at_mut(const TensorRef& t, int64_t block, int layer, int head) {
  return t.data + block * t.block + layer * t.layer + head * t.head;
}

struct Shape {  // what is the same for every tile of a call
  int group;        // G
  int tile_tokens;  // query tokens of a full tile
  int rows;         // rows of a full tile
  int columns;      // table columns of a split
  int block, padded_block, padded_v;
  bool need_plain, need_dot, need_turbo;
};

INLINE bool k_by_dot(const Step& s, const Pool& p, int dtype) {
  return kHasDot && dtype == kBFloat16 && p.k.codec == kBF16 && s.k_dim % 2 == 0 && p.block_size % 32 == 0;
}
INLINE bool v_by_dot(const Step& s, const Pool& p, int dtype) {
  return kHasDot && dtype == kBFloat16 && p.v.codec == kBF16 && s.v_dim % 32 == 0 && p.block_size % 2 == 0;
}

inline Shape shape_of(const Step& s, const AttendCall& c) {
  Shape h{};
  h.group = c.query_heads / s.kv_heads;
  h.tile_tokens = imax(1, kTileRows / h.group);
  h.rows = h.tile_tokens * h.group;
  h.block = s.pools[0].block_size;
  h.columns = imax(1, kSplitTokens / h.block);
  h.padded_block = round_up(h.block, 32);
  h.padded_v = round_up(s.v_dim, 32);
  for (int i = 0; i < s.n_pools; i++) {
    bool dot = k_by_dot(s, s.pools[i], c.dtype), turbo = is_turbo(s.pools[i].k.codec);
    h.need_dot |= dot;
    h.need_turbo |= turbo;
    h.need_plain |= !dot && !turbo;
  }
  return h;
}

struct Partial {  // peak, sum [rows], mix [rows][padded_v]: a softmax-weighted sum before its division
  float *peak, *sum, *mix;
};

struct Column {  // one visited block
  const Pool* pool;
  int64_t block;
  int index;  // in the table row
  const int32_t* positions;
  bool all_seen;  // every query of the tile sees every slot
  bool holes;     // some slot holds nothing
};

struct Tile {
  int seq, head, row, token, n_tokens, n_rows;
  int first_position, last_position;
};

struct Work {  // scratch of one tile
  float *q, *q_turbo, *q_scaled, *scores, *stage, *mix_turbo, *bias;
  float *scale, *zero;  // of one block, as floats, [groups][tokens] for values
  uint32_t *q_dot, *p_dot;
  Column* columns;
};

INLINE int64_t scale_floats(const Step& s, const Shape& h) {  // the most scales that one side of a block has
  return imax(round_up(s.k_dim, W), h.padded_block * (s.v_dim / 8 + 1));
}

inline int64_t work_bytes(const Step& s, const Shape& h) {
  auto f = [](int64_t n) { return Scratch::bytes<float>(n); };
  int64_t width = int64_t(h.columns) * h.padded_block;
  int64_t stage = int64_t(imax(s.k_dim, h.block)) * imax(h.padded_block, h.padded_v);
  return f(int64_t(h.rows) * s.k_dim) * 4 + f(h.rows * width) * 2 + f(stage) + f(int64_t(h.rows) * h.padded_v) +
         f(int64_t(h.rows) * imax(h.padded_block, s.k_dim)) + f(h.rows) + 2 * f(scale_floats(s, h)) +
         Scratch::bytes<Column>(h.columns) + 2 * (2 * f(h.rows) + f(int64_t(h.rows) * h.padded_v));
}

inline Work take_work(Scratch& m, const Step& s, const Shape& h) {
  Work w;
  int64_t width = int64_t(h.columns) * h.padded_block;
  w.q = m.take<float>(int64_t(h.rows) * s.k_dim);
  w.q_turbo = m.take<float>(int64_t(h.rows) * s.k_dim);
  w.q_dot = m.take<uint32_t>(int64_t(h.rows) * s.k_dim);
  w.q_scaled = m.take<float>(int64_t(h.rows) * imax(h.padded_block, s.k_dim));
  w.scores = m.take<float>(h.rows * width);
  w.p_dot = m.take<uint32_t>(h.rows * width);
  w.stage = m.take<float>(int64_t(imax(s.k_dim, h.block)) * imax(h.padded_block, h.padded_v));
  w.mix_turbo = m.take<float>(int64_t(h.rows) * h.padded_v);
  w.bias = m.take<float>(h.rows);
  w.scale = m.take<float>(scale_floats(s, h));
  w.zero = m.take<float>(scale_floats(s, h));
  w.columns = m.take<Column>(h.columns);
  return w;
}

inline Partial take_partial(Scratch& m, const Shape& h) {
  return {m.take<float>(h.rows), m.take<float>(h.rows), m.take<float>(int64_t(h.rows) * h.padded_v)};
}

// One head's rotated vector as floats; in the activations' precision, as an unfused rotation would leave it.
inline void load_rotated(const void* x, int64_t first, int dim, int dtype, const Rotation& rope, int64_t token, float* out) {
  int i = 0;
  for (; i + W <= dim; i += W) store(out + i, load_vf(x, first + i, dtype));
  for (; i < dim; i++) out[i] = load_as_float(x, first + i, dtype);
  if (rope.cos == nullptr) return;
  const int half = rope.half;
  const float *cos = rope.cos + token * half, *sin = rope.sin + token * half;
  for (i = 0; i + W <= half; i += W) {
    vf a = load<vf>(out + i), b = load<vf>(out + i + half), c = load<vf>(cos + i), s = load<vf>(sin + i);
    vf first_half = a * c - b * s, second_half = b * c + a * s;
    if (dtype == kBFloat16) first_half = bf16_vf(vf_bf16(first_half)), second_half = bf16_vf(vf_bf16(second_half));
    store(out + i, first_half);
    store(out + i + half, second_half);
  }
  for (; i < half; i++) {
    float a = out[i], b = out[i + half], turned[2] = {a * cos[i] - b * sin[i], b * cos[i] + a * sin[i]};
    for (int j = 0; j < 2; j++) {
      if (dtype == kBFloat16) turned[j] = bf16_float(float_bf16(turned[j]));
      out[i + j * half] = turned[j];
    }
  }
  if (dtype == kFloat16)
    for (i = 0; i < 2 * half; i++) out[i] = f16_float(float_f16(out[i]));
}

inline void stage_queries(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w) {
  for (int r = 0; r < t.n_rows; r++) {
    int64_t token = t.token + r / h.group;
    float* q = w.q + int64_t(r) * s.k_dim;
    int64_t first = token * c.q_token + int64_t(t.head * h.group + r % h.group) * s.k_dim;
    load_rotated(c.q, first, s.k_dim, c.dtype, c.rope, token, q);
    if (h.need_dot) {
      auto* pairs = reinterpret_cast<uint16_t*>(w.q_dot + int64_t(r) * (s.k_dim / 2));
      int i = 0;
      for (; i + W <= s.k_dim; i += W) store(pairs + i, vf_bf16(load<vf>(q + i)));
      for (; i < s.k_dim; i++) pairs[i] = float_bf16(q[i]);
    }
    if (h.need_turbo) {
      float* turned = w.q_turbo + int64_t(r) * s.k_dim;
      for (int i = 0; i < s.k_dim; i++) turned[i] = q[i];
      turbo_rotate(turned, s.k_dim);
    }
  }
}

// The oldest and newest position that a block's slots hold (high -1: none). Returns whether some slot holds nothing.
INLINE bool span_of(const int32_t* p, int n, int* low, int* high) {
  // As unsigned numbers the positions of empty slots, -1, are above all others.
  vi most{}, all = splat_i(-1);
  vu least = (vu)all;
  most += -1;
  int i = 0;
  for (; i + W <= n; i += W) {
    vi x = load<vi>(p + i);
    most = x > most ? x : most;
    least = (vu)x < least ? (vu)x : least;
    all = all & ~(x >> 31);
  }
  uint32_t bottom = hmin_u(least);
  int top = hmax_i(most);
  bool holes = hmin_u((vu)all) != 0xffffffffu;
  for (; i < n; i++) {
    holes |= p[i] < 0;
    bottom = uint32_t(p[i]) < bottom ? uint32_t(p[i]) : bottom;
    top = imax(top, p[i]);
  }
  *low = top < 0 ? INT32_MAX : int(bottom);
  *high = top;
  return holes;
}

// The blocks of columns [begin, end) that some query of the tile may see.
inline int visible_columns(const Step& s, const AttendCall& c, const Tile& t, int begin, int end, Column* out) {
  int n = 0;
  const int64_t row = int64_t(t.row) * s.table.columns;
  for (int i = begin; i < end; i++) {
    const Pool& pool = s.pools[s.table.pool[row + i]];
    int64_t block = s.table.block[row + i];
    const int32_t* p = pool.positions + block * pool.block_size;
    int low, high;
    const bool holes = span_of(p, pool.block_size, &low, &high);
    if (high < 0 || low > t.last_position) continue;
    if (c.window > 0 && high <= t.first_position - c.window) continue;
    if (c.chunk > 0 && high / c.chunk < t.first_position / c.chunk) continue;
    bool all = !holes && high <= t.first_position && c.chunk == 0 && (c.window == 0 || low > t.last_position - c.window);
    out[n++] = {&pool, block, i, p, all, holes};
  }
  return n;
}

// Blocks lie anywhere in memory, each about a page, where the hardware's prefetcher stops: ask for the next one in time.
INLINE void prefetch(const Side& side, int64_t block, int layer, int head, int64_t bytes) {
  const uint8_t* p = at(side.part[0], block, layer, head);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

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

// q' = q * scale of each channel; bias = q . zero point.
inline void scale_queries(const float* q, int rows, int dim, const float* scale, const float* zero, float* out, float* bias) {
  for (int r = 0; r < rows; r++, q += dim, out += dim) {
    vf lanes{};
    float tail = 0.0f;
    int i = 0;
    for (; i + W <= dim; i += W) {
      vf x = load<vf>(q + i);
      store(out + i, x * load<vf>(scale + i));
      lanes = fma(x, load<vf>(zero + i), lanes);
    }
    for (; i < dim; i++) {
      out[i] = q[i] * scale[i];
      tail += q[i] * zero[i];
    }
    bias[r] = hsum(lanes) + tail;
  }
}

// Raw scores q . k of one block into out [rows][width] (padded_block columns of it).
inline void score_block(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, const Column& col,
                        float* out, int64_t width) {
  const Side& k = col.pool->k;
  const uint8_t* codes = at(k.part[0], col.block, c.layer, t.head);
  if (k_by_dot(s, *col.pool, c.dtype)) {
    matmul_dot(reinterpret_cast<const uint16_t*>(codes), h.block, w.q_dot, s.k_dim / 2, t.n_rows, s.k_dim / 2, out, width,
               false);
    return;
  }
  const float* q = is_turbo(k.codec) ? w.q_turbo : w.q;
  if (k.codec >= kInt8) {
    const auto* scale = reinterpret_cast<const uint16_t*>(at(k.part[1], col.block, c.layer, t.head));
    halves(scale, is_affine(k.codec) ? s.k_dim : h.block, w.scale);
  }
  if (is_affine(k.codec)) {
    halves(reinterpret_cast<const uint16_t*>(at(k.part[2], col.block, c.layer, t.head)), s.k_dim, w.zero);
    scale_queries(q, t.n_rows, s.k_dim, w.scale, w.zero, w.q_scaled, w.bias);
    q = w.q_scaled;
  }
  if (fast_row(k.codec, h.block)) {
    matmul(k.codec, codes, row_bytes(k.codec, h.block), h.block, q, s.k_dim, t.n_rows, s.k_dim, out, width, false);
  } else {
    stage_rows(k.codec, codes, s.k_dim, h.block, nullptr, w.stage, h.padded_block);
    matmul(kF32, reinterpret_cast<uint8_t*>(w.stage), 4 * h.padded_block, h.padded_block, q, s.k_dim, t.n_rows, s.k_dim,
           out, width, false);
  }
  if (has_token_scale(k.codec)) scale_columns(out, width, t.n_rows, w.scale, h.block);
  if (is_affine(k.codec))
    for (int r = 0; r < t.n_rows; r++)
      for (int j = 0; j < h.padded_block; j += W)
        store(out + r * width + j, load<vf>(out + r * width + j) + w.bias[r]);
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

// Scale, cap and mask one row of one block; what may not be seen becomes -inf. Returns the row's lanes of maxima.
INLINE vf finish_scores(const AttendCall& c, const Column& col, int block, int padded, int position, float* x, vf peak) {
  const vf none = splat(-__builtin_inff());
  int oldest = c.window > 0 ? position - c.window : -1;
  if (c.chunk > 0) oldest = imax(oldest, position / c.chunk * c.chunk - 1);
  oldest = imax(oldest, -1);
  for (int j = 0; j < padded; j += W) {
    vf v = load<vf>(x + j) * c.scale;
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

// Softmax numerators of one row over the split's visited columns; pairs for the columns whose V is mixed by dot products.
inline void exponentiate(const Step& s, const AttendCall& c, const Shape& h, const Work& w, int n, int r, float* x,
                         float peak, float* sum) {
  vf lanes{};
  [[maybe_unused]] auto* pairs = reinterpret_cast<uint16_t*>(w.p_dot) + int64_t(r) * h.columns * h.padded_block;
  float safe = peak == -__builtin_inff() ? 0.0f : peak;
  for (int i = 0; i < n; i++) {
    bool dot = v_by_dot(s, *w.columns[i].pool, c.dtype);
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

// Weights of one block times the scale of each token: out [rows][block]. A weight of 0 wins over any scale: slots that
// hold nothing may have a scale of NaN.
inline void scale_weights(const float* p, int64_t width, int rows, int block, const float* scale, float* out) {
  for (int r = 0; r < rows; r++, p += width, out += block) {
    int j = 0;
    for (; j + W <= block; j += W) {
      vf weight = load<vf>(p + j);
      store(out + j, weight == 0.0f ? vf{} : weight * load<vf>(scale + j));
    }
    for (; j < block; j++) out[j] = p[j] == 0.0f ? 0.0f : p[j] * scale[j];
  }
}

// Scales [block][groups] as floats [groups][block].
inline void group_scales(const uint16_t* x, int block, int groups, float* out) {
  for (int g = 0; g < groups; g++)
    for (int j = 0; j < block; j++) out[g * block + j] = f16_float(x[j * groups + g]);
}

// Sum of weights times zero points, added to the channels [first, first + n) of each row.
inline void mix_zero(const float* p, int64_t width, int rows, int block, const float* zero, float* mix, int64_t ld, int n) {
  for (int r = 0; r < rows; r++, p += width, mix += ld) {
    vf lanes{};
    float sum = 0.0f;
    int j = 0;
    for (; j + W <= block; j += W) {
      vf weight = load<vf>(p + j);
      lanes += weight == 0.0f ? vf{} : weight * load<vf>(zero + j);
    }
    for (; j < block; j++) sum += p[j] == 0.0f ? 0.0f : p[j] * zero[j];
    sum += hsum(lanes);
    for (int i = 0; i < n; i++) mix[i] += sum;
  }
}

INLINE const uint8_t* v_rows(const Step& s, const Shape& h, const Work& w, const Column& col, const uint8_t* codes) {
  if (!col.holes) return codes;  // slots that hold nothing may hold anything: rows of zeros stand in for them
  int64_t bytes = row_bytes(col.pool->v.codec, s.v_dim);
  auto* out = reinterpret_cast<uint8_t*>(w.stage);
  for (int j = 0; j < h.block; j++)
    if (col.positions[j] < 0) __builtin_memset(out + j * bytes, 0, bytes);
    else __builtin_memcpy(out + j * bytes, codes + j * bytes, bytes);
  return out;
}

// mix += weights [rows][block] times the rows of V, channels [first, first + n) of it.
inline void mix_plain(const Step& s, const Shape& h, const Tile& t, const Work& w, const Column& col, const uint8_t* codes,
                      const float* weights, int64_t width, int first, int n, float* mix) {
  int codec = col.pool->v.codec;
  if (fast_row(codec, s.v_dim) && n % (2 * W) == 0 && (codec < kAffine4 || first % 32 == 0)) {
    const uint8_t* rows = v_rows(s, h, w, col, codes);
    matmul(codec, rows + row_bytes(codec, first), row_bytes(codec, s.v_dim), n, weights, width, t.n_rows, h.block,
           mix + first, h.padded_v, true);
    return;
  }
  stage_rows(codec, codes, h.block, s.v_dim, col.holes ? col.positions : nullptr, w.stage, h.padded_v);
  if (first == 0 && n == s.v_dim) {
    matmul(kF32, reinterpret_cast<uint8_t*>(w.stage), 4 * h.padded_v, h.padded_v, weights, width, t.n_rows, h.block, mix,
           h.padded_v, true);
    return;
  }
  for (int r = 0; r < t.n_rows; r++)
    for (int j = 0; j < h.block; j++)
      for (int i = first; i < first + n; i++)
        mix[int64_t(r) * h.padded_v + i] += weights[r * width + j] * w.stage[int64_t(j) * h.padded_v + i];
}

inline void mix_affine(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, const Column& col,
                       const uint8_t* codes, const float* p, int64_t width, float* mix) {
  const Side& v = col.pool->v;
  const int groups = s.v_dim / v.group;
  group_scales(reinterpret_cast<const uint16_t*>(at(v.part[1], col.block, c.layer, t.head)), h.block, groups, w.scale);
  group_scales(reinterpret_cast<const uint16_t*>(at(v.part[2], col.block, c.layer, t.head)), h.block, groups, w.zero);
  for (int g = 0; g < groups; g++) {
    mix_zero(p, width, t.n_rows, h.block, w.zero + g * h.block, mix + g * v.group, h.padded_v, v.group);
    scale_weights(p, width, t.n_rows, h.block, w.scale + g * h.block, w.q_scaled);
    mix_plain(s, h, t, w, col, codes, w.q_scaled, h.block, g * v.group, v.group, mix);
  }
}

inline void mix_block(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, const Column& col,
                      int index, int64_t width, float* mix) {
  const Side& v = col.pool->v;
  const uint8_t* codes = at(v.part[0], col.block, c.layer, t.head);
  if (v_by_dot(s, *col.pool, c.dtype)) {
    const uint8_t* rows = v_rows(s, h, w, col, codes);
    matmul_dot(reinterpret_cast<const uint16_t*>(rows), s.v_dim, w.p_dot + int64_t(index) * h.padded_block / 2, width / 2,
               t.n_rows, h.block / 2, mix, h.padded_v, true);
    return;
  }
  const float* p = w.scores + int64_t(index) * h.padded_block;
  if (is_affine(v.codec)) return mix_affine(s, c, h, t, w, col, codes, p, width, mix);
  if (has_token_scale(v.codec)) {
    halves(reinterpret_cast<const uint16_t*>(at(v.part[1], col.block, c.layer, t.head)), h.block, w.scale);
    scale_weights(p, width, t.n_rows, h.block, w.scale, w.q_scaled);
    mix_plain(s, h, t, w, col, codes, w.q_scaled, h.block, 0, s.v_dim, is_turbo(v.codec) ? w.mix_turbo : mix);
    return;
  }
  mix_plain(s, h, t, w, col, codes, p, width, 0, s.v_dim, mix);
}

inline void zero(float* x, int64_t n) { __builtin_memset(x, 0, n * sizeof(float)); }

// Scores of one split into w.scores [rows][n * padded_block], scaled and masked. Returns n, the columns visited.
inline int score_split(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, int begin, int end,
                       float* peak) {
  int n = visible_columns(s, c, t, begin, end, w.columns);
  const int64_t width = int64_t(h.columns) * h.padded_block;
  for (int i = 0; i < n; i++) {
    if (i + 1 < n) {
      const Column& next = w.columns[i + 1];
      prefetch(next.pool->k, next.block, c.layer, t.head, s.k_dim * row_bytes(next.pool->k.codec, h.block));
    }
    const Column& col = w.columns[i];
    prefetch(col.pool->v, col.block, c.layer, t.head, h.block * row_bytes(col.pool->v.codec, s.v_dim));
    score_block(s, c, h, t, w, col, w.scores + i * h.padded_block, width);
  }
  for (int r = 0; r < t.n_rows; r++) {
    int position = s.positions[t.token + r / h.group];
    vf lanes = splat(-__builtin_inff());
    for (int i = 0; i < n; i++)
      lanes = finish_scores(c, w.columns[i], h.block, h.padded_block, position, w.scores + r * width + i * h.padded_block,
                            lanes);
    peak[r] = n ? hmax(lanes) : -__builtin_inff();
  }
  return n;
}

inline void attend_split(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w, int begin,
                         int end, const Partial& out) {
  int n = score_split(s, c, h, t, w, begin, end, out.peak);
  const int64_t width = int64_t(h.columns) * h.padded_block;
  zero(out.mix, int64_t(t.n_rows) * h.padded_v);
  bool turbo = false;
  for (int i = 0; i < n; i++) turbo |= is_turbo(w.columns[i].pool->v.codec);
  if (turbo) zero(w.mix_turbo, int64_t(t.n_rows) * h.padded_v);
  for (int r = 0; r < t.n_rows; r++) exponentiate(s, c, h, w, n, r, w.scores + r * width, out.peak[r], out.sum + r);
  for (int i = 0; i < n; i++) mix_block(s, c, h, t, w, w.columns[i], i, width, out.mix);
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
    int64_t head = int64_t(t.token + r / h.group) * c.query_heads + t.head * h.group + r % h.group;
    float peak = p.peak[r], sum = p.sum[r], keep = 1.0f;
    if (c.sinks != nullptr) {
      float sink = c.sinks[t.head * h.group + r % h.group], top = fmax2(peak, sink);
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
