// Sealing blocks into a format, decoding them, and the attention mass of their slots.
#pragma once
#include "encode.h"
#include "run.h"

namespace {

inline void run_seal_item(int item, void* context) {
  const SealCall& c = *static_cast<SealCall*>(context);
  const int head = item % c.heads, layer = item / c.heads % c.layers, i = item / c.heads / c.layers;
  const int block = c.source->block_size, dim = imax(c.k_dim, c.v_dim);
  const int64_t from = c.source_blocks[i], to = c.target_blocks[i];
  const int32_t* held = c.source->positions + from * block;
  thread_scratch.reset(Scratch::bytes<float>(int64_t(dim) * block) + Scratch::bytes<float>(dim));
  float *x = thread_scratch.take<float>(int64_t(dim) * block), *y = thread_scratch.take<float>(dim);
  auto seal_side = [&](const Side& source, const Side& target, int n_rows, int n, bool tokens_in_row) {
    stage_rows(source.codec, at(source.part[0], from, layer, head), n_rows, n, nullptr, x, n);
    encode_side(target, Block{x, n_rows, n, tokens_in_row, held}, at_mut(target.part[0], to, layer, head),
                at_mut(target.part[1], to, layer, head), at_mut(target.part[2], to, layer, head), y);
  };
  seal_side(c.source->k, c.target->k, c.k_dim, block, true);
  seal_side(c.source->v, c.target->v, block, c.v_dim, false);
}

inline void run_seal(const SealCall& c) {
  SealCall call = c;
  parallel_for(c.n_blocks * c.layers * c.heads, c.n_threads, run_seal_item, &call);
}

// x [n_rows][n]: codes times their scales, plus zero points; a rotated side is turned back.
inline void decode_side(const Side& side, int64_t block, int layer, int head, int n_rows, int n, bool tokens_in_row,
                        float* x, float* y) {
  stage_rows(side.codec, at(side.part[0], block, layer, head), n_rows, n, nullptr, x, n);
  if (side.codec < kInt8) return;
  const auto* scale = reinterpret_cast<const uint16_t*>(at(side.part[1], block, layer, head));
  const auto* zero = reinterpret_cast<const uint16_t*>(at(side.part[2], block, layer, head));
  const bool affine = is_affine(side.codec);
  const int group = affine && !tokens_in_row ? side.group : 0, groups = group ? n / group : 1;
  for (int i = 0; i < n_rows; i++)
    for (int j = 0; j < n; j++) {
      int index = affine ? (group ? i * groups + j / group : i) : tokens_in_row ? j : i;
      float value = x[int64_t(i) * n + j] * f16_float(scale[index]);
      x[int64_t(i) * n + j] = affine ? value + f16_float(zero[index]) : value;
    }
  if (!is_turbo(side.codec)) return;
  const int tokens = tokens_in_row ? n : n_rows, channels = tokens_in_row ? n_rows : n;
  const int64_t step = tokens_in_row ? n : 1;
  for (int t = 0; t < tokens; t++) {
    float* first = x + (tokens_in_row ? t : int64_t(t) * n);
    for (int c = 0; c < channels; c++) y[c] = first[c * step];
    turbo_unrotate(y, channels);
    for (int c = 0; c < channels; c++) first[c * step] = y[c];
  }
}

inline void run_decode_item(int item, void* context) {
  const DecodeCall& c = *static_cast<DecodeCall*>(context);
  const int head = item % c.heads, layer = item / c.heads % c.layers, i = item / c.heads / c.layers;
  const int block = c.pool->block_size, dim = imax(c.k_dim, c.v_dim);
  thread_scratch.reset(Scratch::bytes<float>(dim));
  float* y = thread_scratch.take<float>(dim);
  decode_side(c.pool->k, c.blocks[i], layer, head, c.k_dim, block, true, c.k + int64_t(item) * c.k_dim * block, y);
  decode_side(c.pool->v, c.blocks[i], layer, head, block, c.v_dim, false, c.v + int64_t(item) * c.v_dim * block, y);
}

inline void run_decode(const DecodeCall& c) {
  DecodeCall call = c;
  parallel_for(c.n_blocks * c.layers * c.heads, c.n_threads, run_decode_item, &call);
}

struct MassJob {
  const Step* step;
  const MassCall* call;
  Shape shape;
  int max_splits;
};

// One split of one sequence and head, over all its query tiles in order.
inline void run_mass_item(int item, void* context) {
  const MassJob& j = *static_cast<MassJob*>(context);
  const Step& s = *j.step;
  const AttendCall& c = j.call->attend;
  const Shape& h = j.shape;
  const int split = item % j.max_splits, head = item / j.max_splits % s.kv_heads, seq = item / j.max_splits / s.kv_heads;
  const int64_t width = int64_t(h.columns) * h.padded_block;
  thread_scratch.reset(work_bytes(s, h) + Scratch::bytes<float>(h.rows));
  Work w = take_work(thread_scratch, s, h);
  float* peak = thread_scratch.take<float>(h.rows);
  float* mass = j.call->mass + (int64_t(seq) * s.kv_heads + head) * s.table.columns * h.block;
  for (int token = s.query_start[seq]; token < s.query_start[seq + 1]; token += h.tile_tokens) {
    Tile t = make_tile(s, c, h, seq, head, 1, token, s.query_start[seq + 1]);
    const int begin = split * h.columns, end = imin(begin + h.columns, s.table.length[t.row]);
    if (begin >= end) return;
    stage_queries(s, c, h, t, w);
    int n = score_split(s, c, h, t, w, begin, end, 0, peak);
    for (int i = 0; i < n; i++) {
      float* to = mass + int64_t(w.columns[i].index) * h.block;
      for (int r = 0; r < t.n_rows; r++) {
        float lse = c.lse[int64_t(token + r / h.group) * c.query_heads + head * h.group + r % h.group];
        if (lse == -__builtin_inff()) continue;
        const float* x = w.scores + r * width + i * h.padded_block;
        for (int k = 0; k < h.block; k++) to[k] += exp1(x[k] - lse);
      }
    }
  }
}

inline void run_mass(const Step& s, const MassCall& c) {
  find_spans(s, c.attend.layer);
  MassJob j{&s, &c, shape_of(s, c.attend), 0};
  j.max_splits = (s.table.columns + j.shape.columns - 1) / j.shape.columns;
  parallel_for(s.n_seqs * s.kv_heads * j.max_splits, s.n_threads, run_mass_item, &j);
}

}  // namespace
