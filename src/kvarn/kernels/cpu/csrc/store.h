// Writing a step's keys and values into open blocks, with their rotation, and rotation alone.
#pragma once
#include "attend.h"

namespace {

inline void store_row(int codec, uint8_t* base, int64_t first, int64_t step, const float* x, int n) {
  if (codec == kF32) {
    auto* out = reinterpret_cast<float*>(base);
    for (int i = 0; i < n; i++) out[first + i * step] = x[i];
  } else if (codec == kBF16) {
    auto* out = reinterpret_cast<uint16_t*>(base);
    for (int i = 0; i < n; i++) out[first + i * step] = float_bf16(x[i]);
  } else {
    auto* out = reinterpret_cast<uint16_t*>(base);
    for (int i = 0; i < n; i++) out[first + i * step] = float_f16(x[i]);
  }
}

struct StoreJob {
  const Step* step;
  const AttendCall* call;
  int tokens;  // of one item
};

inline void write_token(const Step& s, const AttendCall& c, int token, float* x) {
  const Pool& pool = s.pools[s.open_pool];
  const int block_size = pool.block_size;
  for (int h = 0; h < s.kv_heads; h++) {
    int64_t slot = s.slots[token * s.slot_token + c.layer * s.slot_layer + h * s.slot_head];
    if (slot < 0) continue;
    int64_t block = slot / block_size, column = slot % block_size;
    load_rotated(c.k, token * c.k_token + int64_t(h) * s.k_dim, s.k_dim, c.dtype, c.rope, token, x);
    store_row(pool.k.codec, at_mut(pool.k.part[0], block, c.layer, h), column, block_size, x, s.k_dim);
    load_rotated(c.v, token * c.v_token + int64_t(h) * s.v_dim, s.v_dim, c.dtype, Rotation{}, token, x);
    store_row(pool.v.codec, at_mut(pool.v.part[0], block, c.layer, h), column * s.v_dim, 1, x, s.v_dim);
  }
}

inline void run_write_item(int item, void* context) {
  const StoreJob& j = *static_cast<StoreJob*>(context);
  thread_scratch.reset(Scratch::bytes<float>(imax(j.step->k_dim, j.step->v_dim)));
  float* x = thread_scratch.take<float>(imax(j.step->k_dim, j.step->v_dim));
  int end = imin((item + 1) * j.tokens, j.step->n_tokens);
  for (int t = item * j.tokens; t < end; t++) write_token(*j.step, *j.call, t, x);
}

inline void run_write(const Step& s, const AttendCall& c) {
  StoreJob j{&s, &c, 64};
  parallel_for((s.n_tokens + j.tokens - 1) / j.tokens, s.n_threads, run_write_item, &j);
}

inline void run_rope_item(int item, void* context) {
  const StoreJob& j = *static_cast<StoreJob*>(context);
  const Step& s = *j.step;
  const AttendCall& c = *j.call;
  thread_scratch.reset(Scratch::bytes<float>(s.k_dim));
  float* x = thread_scratch.take<float>(s.k_dim);
  int end = imin((item + 1) * j.tokens, s.n_tokens);
  for (int t = item * j.tokens; t < end; t++)
    for (int h = 0; h < c.query_heads; h++) {
      load_rotated(c.q, t * c.q_token + int64_t(h) * s.k_dim, s.k_dim, c.dtype, c.rope, t, x);
      int64_t first = (int64_t(t) * c.query_heads + h) * s.k_dim;
      for (int i = 0; i < s.k_dim; i++) store_float(c.out, first + i, c.dtype, x[i]);
    }
}

inline void run_rope(const Step& s, const AttendCall& c) {
  StoreJob j{&s, &c, 64};
  parallel_for((s.n_tokens + j.tokens - 1) / j.tokens, s.n_threads, run_rope_item, &j);
}

}  // namespace
