// The pieces that attention works on: what a call asks of every tile, tiles, their scratch, and which blocks they may see.
#pragma once
#include "integer.h"
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
INLINE const uint16_t* halves_at(const TensorRef& t, int64_t block, int layer, int head) {
  return reinterpret_cast<const uint16_t*>(at(t, block, layer, head));
}

// How one side of a pool is multiplied: floats of any codec, bfloat16 pairs, or integers. It depends on formats, shapes
// and the activations' type alone, so a row is computed in one way wherever it stands.
enum Way : uint8_t { kPlain, kDot, kInteger };

INLINE bool dot_codec(int codec) { return codec == kBF16 || codec == kFP8; }
INLINE Way k_way(const Step& s, const Pool& p, int dtype) {
  if (kHasDot && dtype == kBFloat16 && dot_codec(p.k.codec) && s.k_dim % 2 == 0 && p.block_size % 32 == 0) return kDot;
  return k_by_integers(p.k.codec, s.k_dim, p.block_size, dtype) ? kInteger : kPlain;
}
INLINE Way v_way(const Step& s, const Pool& p, int dtype) {
  if (kHasDot && dtype == kBFloat16 && dot_codec(p.v.codec) && s.v_dim % 32 == 0 && p.block_size % 2 == 0) return kDot;
  return v_by_integers(p.v.codec, s.v_dim, p.block_size, dtype) ? kInteger : kPlain;
}

INLINE int64_t k_bytes(const Step& s, const Pool& p) { return s.k_dim * row_bytes(p.k.codec, p.block_size); }
INLINE int64_t v_bytes(const Step& s, const Pool& p) { return p.block_size * row_bytes(p.v.codec, s.v_dim); }

// How the codes of one side of a block are asked for beside products that ask for n lines, way by way: so many bytes apart, and
// those from `from` on at once.
struct Lines {
  int64_t step[3], from[3];
  void set(int way, int64_t bytes, int64_t n) {
    step[way] = n > 0 ? imin(64, int(bytes / n)) : 0;
    from[way] = step[way] * n;
  }
};

struct Shape {  // what is the same for every tile of a call
  int group;        // G
  int tile_tokens;  // query tokens of a full tile of one head
  int rows;         // rows of a full tile
  int columns;      // table columns of a split
  int block, padded_block, padded_v;
  Way k_ways[kMaxPools], v_ways[kMaxPools];
  bool need_dot, need_int8, need_top, need_turbo;  // forms of the queries
  bool any_v_integer;
  Lines ask_k[kMaxPools], ask_v[kMaxPools];  // of the next blocks' codes, by the way in which this block is multiplied
};

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
    const int codec = s.pools[i].k.codec;
    const Way way = h.k_ways[i] = k_way(s, s.pools[i], c.dtype);
    h.v_ways[i] = v_way(s, s.pools[i], c.dtype);
    h.any_v_integer |= h.v_ways[i] == kInteger;
    const int64_t stripes = h.block / kStripe, vectors = stripes * (kStripe / W) * imin(h.group, kExpRows);
    const int64_t of_k[] = {s.v_dim / 32 * h.block * kPlainLines, s.v_dim / 32 * (h.block / 2) * kDotLines,
                            stripes * (kStripe / 4) * kMixLines + vectors * kExpLines};
    const int64_t of_v[] = {h.block / 32 * s.k_dim * kPlainLines, stripes * (s.k_dim / 2) * kDotLines,
                            stripes * (s.k_dim / 4) * kScoreLines};
    for (int way = kPlain; way <= kInteger; way++) {
      h.ask_k[i].set(way, k_bytes(s, s.pools[i]), of_k[way]);
      h.ask_v[i].set(way, v_bytes(s, s.pools[i]), of_v[way]);
    }
    h.need_dot |= way == kDot;
    h.need_int8 |= way == kInteger && codec == kInt8;
    h.need_top |= way == kInteger && codec != kInt8;
    h.need_turbo |= is_turbo(codec);
  }
  return h;
}

struct Partial {  // peak, sum [rows], mix [rows][padded_v]: a softmax-weighted sum before its division
  float *peak, *sum, *mix;
};

struct Column {  // one visited block
  const Pool* pool;
  int64_t block;
  int index, at;  // in the table row; of the pool
  const int32_t* positions;
  Way k_way, v_way;
  bool all_seen;  // every query of the tile sees every slot
  bool holes;     // some slot holds nothing
};

// The query heads of some KV heads, side by side, for consecutive tokens of one sequence: rows [head][token][group].
// Several heads go together where they share a table row and there are few tokens (decoding): a block is then looked up,
// and its page touched, once.
struct Tile {
  int seq, row, head, n_heads, token, n_tokens;
  int head_rows, n_rows;
  int first_position, last_position;
};

// What a thread probably works at next, so that it asks for its keys, and how far it has asked.
struct Walk {
  const Tile* tile;  // null: nothing
  int begin;         // first column of its split
  int asked_columns;  // all heads of the tile
};

struct Row {  // what a row of a tile stands for
  int64_t token;
  int query_head;
};
INLINE Row row_of(const Shape& h, const Tile& t, int r) {
  const int head = r / t.head_rows, in_head = r % t.head_rows;
  return {t.token + in_head / h.group, (t.head + head) * h.group + in_head % h.group};
}

struct Work {  // scratch of one tile; what belongs to queries is [rows][...]
  float *q, *q_turbo, *q_scaled, *scores, *stage, *mix_turbo, *bias, *column_bias;  // the last: [columns][rows]
  float *scale, *zero;  // of one block, as floats, [groups][tokens] for values
  uint32_t *q_dot, *p_dot;
  int8_t *q_int8, *q_block;  // digits of the queries for int8 keys; for one block of packed codes
  int32_t* q_shift;
  float *q_step, *q_top, *block_step;
  float *v_scale, *v_zero;  // of a split's blocks whose values are mixed by integers: [column][group][tokens]
  float *products, *factor;  // of one row: weights times scales; [rows]: what an integer weight of 1 stands for
  uint8_t* weights;          // [rows][stripes of a split][2][kStripe]
  const uint8_t** stripe;    // of one head's values
  int *stripe_offset, *stripe_scale;  // where its tokens' scores stand in a row, and their scales in v_scale
  Ahead *stripe_ahead, *ahead;  // what to ask for beside a stripe; beside a visited block of one head
  DotPart* parts;
  RowPart* row_parts;
  Column* columns;
};

INLINE int64_t scale_floats(const Step& s, const Shape& h) {  // the most scales that one side of a block has
  return imax(round_up(s.k_dim, W), h.padded_block * (s.v_dim / 8 + 1));
}

// Calls take(n) of each part's type and length, in one order: once to add them up, once to cut.
template <class Take>
INLINE Work lay_out(Take take, const Step& s, const Shape& h) {
  Work w;
  const int64_t rows = h.rows, width = int64_t(h.columns) * h.padded_block;
  const int64_t digits = h.need_int8 || h.need_top ? rows * 4 * s.k_dim : 0;
  w.q = take(float{}, rows * s.k_dim);
  w.q_turbo = take(float{}, rows * s.k_dim);
  w.q_dot = take(uint32_t{}, rows * s.k_dim);
  w.q_scaled = take(float{}, rows * imax(h.padded_block, s.k_dim));
  w.scores = take(float{}, rows * width);
  w.p_dot = take(uint32_t{}, rows * width);
  w.stage = take(float{}, imax(imax(s.k_dim, h.block) * imax(h.padded_block, h.padded_v), h.columns * h.block * s.v_dim / 2));
  w.mix_turbo = take(float{}, rows * h.padded_v);
  w.bias = take(float{}, rows);
  w.column_bias = take(float{}, rows * h.columns);
  w.scale = take(float{}, scale_floats(s, h));
  w.zero = take(float{}, scale_floats(s, h));
  w.q_int8 = take(int8_t{}, digits);
  w.q_block = take(int8_t{}, digits);
  w.q_shift = take(int32_t{}, rows);
  w.q_step = take(float{}, rows);
  w.q_top = take(float{}, rows);
  w.block_step = take(float{}, rows);
  const int64_t v_scales = h.any_v_integer ? width * (s.v_dim / 32) : 0, stripes = h.any_v_integer ? width / kStripe : 0;
  w.v_scale = take(float{}, v_scales);
  w.v_zero = take(float{}, v_scales);
  w.products = take(float{}, width);
  w.factor = take(float{}, rows);
  w.weights = take(uint8_t{}, rows * stripes * 2 * kStripe);
  w.stripe = take(static_cast<const uint8_t*>(nullptr), stripes);
  w.stripe_offset = take(int{}, stripes);
  w.stripe_scale = take(int{}, stripes);
  w.stripe_ahead = take(Ahead{}, stripes);
  w.ahead = take(Ahead{}, h.columns);
  w.parts = take(DotPart{}, h.columns);
  w.row_parts = take(RowPart{}, h.columns);
  w.columns = take(Column{}, h.columns);
  return w;
}

inline Partial take_partial(Scratch& m, const Shape& h) {
  return {m.take<float>(h.rows), m.take<float>(h.rows), m.take<float>(int64_t(h.rows) * h.padded_v)};
}

inline int64_t work_bytes(const Step& s, const Shape& h) {  // with two partial results
  int64_t total = 2 * (2 * Scratch::bytes<float>(h.rows) + Scratch::bytes<float>(int64_t(h.rows) * h.padded_v));
  lay_out([&](auto type, int64_t n) -> decltype(type)* {
    total += Scratch::bytes<decltype(type)>(n);
    return nullptr;
  }, s, h);
  return total;
}

inline Work take_work(Scratch& m, const Step& s, const Shape& h) {
  return lay_out([&](auto type, int64_t n) { return m.take<decltype(type)>(n); }, s, h);
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

inline void stage_query(const Step& s, const AttendCall& c, const Shape& h, const Work& w, int r) {
  float* q = w.q + int64_t(r) * s.k_dim;
  if (h.need_dot) {
    auto* pairs = reinterpret_cast<uint16_t*>(w.q_dot + int64_t(r) * (s.k_dim / 2));
    int i = 0;
    for (; i + W <= s.k_dim; i += W) store(pairs + i, vf_bf16(load<vf>(q + i)));
    for (; i < s.k_dim; i++) pairs[i] = float_bf16(q[i]);
  }
  if (h.need_int8 || h.need_top) w.q_top[r] = top_magnitude(q, s.k_dim);
  if (h.need_int8) {
    int8_t* digits = w.q_int8 + int64_t(r) * 4 * s.k_dim;
    w.q_step[r] = c.scale * int8_query(q, s.k_dim, w.q_top[r], digits, w.q_shift + r);
  }
  if (h.need_turbo) {
    float* turned = w.q_turbo + int64_t(r) * s.k_dim;
    for (int i = 0; i < s.k_dim; i++) turned[i] = q[i];
    turbo_rotate(turned, s.k_dim);
  }
}

inline void stage_queries(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, const Work& w) {
  for (int r = 0; r < t.n_rows; r++) {
    const Row row = row_of(h, t, r);
    const int64_t first = row.token * c.q_token + int64_t(row.query_head) * s.k_dim;
    load_rotated(c.q, first, s.k_dim, c.dtype, c.rope, row.token, w.q + int64_t(r) * s.k_dim);
    stage_query(s, c, h, w, r);
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

inline void find_row_spans(int row, void* context) {
  const Step& s = *static_cast<const Step*>(context);
  if (s.known_rows[row]) return;
  const int64_t first = int64_t(row) * s.table.columns;
  for (int i = 0; i < s.table.length[row]; i++) {
    const Pool& pool = s.pools[s.table.pool[first + i]];
    Span& span = s.spans[first + i];
    span.holes = span_of(pool.positions + int64_t(s.table.block[first + i]) * pool.block_size, pool.block_size, &span.low, &span.high);
  }
  s.known_rows[row] = 1;
}

INLINE int table_row(const Step& s, int seq, int layer, int head) {
  return s.table.first_row[seq] + layer * s.table.layer_stride + head * s.table.head_stride;
}

// Positions do not change within a step, so each row's are looked through once, not once a layer and head.
inline void find_spans(const Step& s, int layer) {
  const int heads = s.table.head_stride ? s.kv_heads : 1;
  for (int seq = 0; seq < s.n_seqs; seq++)
    for (int head = 0; head < heads; head++)
      find_row_spans(table_row(s, seq, layer, head), const_cast<Step*>(&s));
}

// The blocks of columns [begin, end) that some query of the tile may see.
inline int visible_columns(const Step& s, const AttendCall& c, const Shape& h, const Tile& t, int begin, int end, Column* out) {
  int n = 0;
  const int64_t row = int64_t(t.row) * s.table.columns;
  for (int i = begin; i < end; i++) {
    const int at = s.table.pool[row + i];
    const Pool& pool = s.pools[at];
    const Span& span = s.spans[row + i];
    if (span.high < 0 || span.low > t.last_position) continue;
    if (c.window > 0 && span.high <= t.first_position - c.window) continue;
    if (c.chunk > 0 && span.high / c.chunk < t.first_position / c.chunk) continue;
    const int64_t block = s.table.block[row + i];
    const bool all = !span.holes && span.high <= t.first_position && c.chunk == 0 &&
                     (c.window == 0 || span.low > t.last_position - c.window);
    out[n++] = {&pool, block, i, at, pool.positions + block * pool.block_size, h.k_ways[at], h.v_ways[at], all, span.holes != 0};
  }
  return n;
}

INLINE void prefetch_bytes(const uint8_t* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Blocks lie anywhere in memory, each about a page, where the hardware's prefetcher stops: ask for them in time. The codes
// are asked for all at once, or (`from` > 0) line by line by the products that run before they are needed, and at once only
// from that byte on: a burst fills the core's outstanding misses, and everything waits.
INLINE void prefetch_side(const Side& side, int64_t block, int layer, int head, int64_t code_bytes, int64_t scales, int64_t from) {
  prefetch_bytes(at(side.part[0], block, layer, head) + from, code_bytes - from);
  if (side.codec < kInt8) return;
  prefetch_bytes(at(side.part[1], block, layer, head), 2 * scales);
  if (is_affine(side.codec)) prefetch_bytes(at(side.part[2], block, layer, head), 2 * scales);
}
INLINE void prefetch_k(const Step& s, const Pool& p, int64_t block, int layer, int head, int64_t from) {
  prefetch_side(p.k, block, layer, head, k_bytes(s, p), is_affine(p.k.codec) ? s.k_dim : p.block_size, from);
}
INLINE void prefetch_v(const Step& s, const Pool& p, int64_t block, int layer, int head, int64_t from) {
  const int groups = is_affine(p.v.codec) ? s.v_dim / p.v.group : 1;
  prefetch_side(p.v, block, layer, head, v_bytes(s, p), int64_t(p.block_size) * groups, from);
}

}  // namespace
