// The small row-wise steps around attention: residual add with RMSNorm, and the gated activation.
#pragma once
#include "scratch.h"
#include "simd.h"
#include "types.h"

namespace {

using namespace kvarn;

template <int D>
void norm_row(const RowsCall& c, int64_t row) {
  const int64_t x0 = row * c.x_row, y0 = row * c.y_row, n = c.width, whole = n / W * W;
  vf lanes{};
  float tail = 0.0f;
  auto sum_at = [&](int64_t i) {  // x + residual, rounded to the activations' precision as an unfused add would
    vf v = load_vf(c.x, x0 + i, D);
    if (c.y == nullptr) return v;
    v += load_vf(c.y, y0 + i, D);
    store_vf(c.sum, row * c.sum_row + i, D, v);
    return load_vf(c.sum, row * c.sum_row + i, D);
  };
  for (int64_t i = 0; i < whole; i += W) {
    vf v = sum_at(i);
    lanes = fma(v, v, lanes);
  }
  for (int64_t i = whole; i < n; i++) {
    float v = load_as_float(c.x, x0 + i, D);
    if (c.y != nullptr) {
      store_float(c.sum, row * c.sum_row + i, D, v + load_as_float(c.y, y0 + i, D));
      v = load_as_float(c.sum, row * c.sum_row + i, D);
    }
    tail += v * v;
  }
  const void* in = c.y == nullptr ? c.x : c.sum;
  const int64_t in0 = c.y == nullptr ? x0 : row * c.sum_row;
  float factor = 1.0f / __builtin_sqrtf((hsum(lanes) + tail) / float(n) + c.eps);
  for (int64_t i = 0; i < whole; i += W)
    store_vf(c.out, row * c.out_row + i, D, load_vf(in, in0 + i, D) * factor * load_vf(c.weight, i, c.weight_dtype));
  for (int64_t i = whole; i < n; i++)
    store_float(c.out, row * c.out_row + i, D,
                load_as_float(in, in0 + i, D) * factor * load_as_float(c.weight, i, c.weight_dtype));
}

INLINE vf silu(vf x) { return x / (1.0f + vexp(-x)); }
INLINE vf gelu_tanh(vf x) {  // 0.5 x (1 + tanh(u)) = x / (1 + exp(-2u))
  vf u = 0.7978845608028654f * fma(x * x * x, splat(0.044715f), x);
  return x / (1.0f + vexp(-2.0f * u));
}
INLINE vf activate(vf x, int activation) { return activation == 0 ? silu(x) : gelu_tanh(x); }

template <int D>
void gate_row(const RowsCall& c, int64_t row) {
  const int64_t x0 = row * c.x_row, y0 = row * c.y_row, whole = c.width / W * W;
  auto gated = [&](vf x, vf up) {  // the activation is rounded before the product, as two unfused steps would
    vf a = activate(x, c.activation);
    if (D == 1) a = bf16_vf(vf_bf16(a));
    return a * up;
  };
  for (int64_t i = 0; i < whole; i += W)
    store_vf(c.out, row * c.out_row + i, D, gated(load_vf(c.x, x0 + i, D), load_vf(c.y, y0 + i, D)));
  for (int64_t i = whole; i < c.width; i++)
    store_float(c.out, row * c.out_row + i, D,
                gated(splat(load_as_float(c.x, x0 + i, D)), splat(load_as_float(c.y, y0 + i, D)))[0]);
}

struct RowsJob {
  const RowsCall* call;
  int64_t rows;  // of one item
  bool norm;
};

inline void run_rows_item(int item, void* context) {
  const RowsJob& j = *static_cast<RowsJob*>(context);
  const RowsCall& c = *j.call;
  int64_t end = (item + 1) * j.rows < c.rows ? (item + 1) * j.rows : c.rows;
  for (int64_t row = item * j.rows; row < end; row++) {
    if (j.norm) c.dtype == 0 ? norm_row<0>(c, row) : c.dtype == 1 ? norm_row<1>(c, row) : norm_row<2>(c, row);
    else c.dtype == 0 ? gate_row<0>(c, row) : c.dtype == 1 ? gate_row<1>(c, row) : gate_row<2>(c, row);
  }
}

inline void run_rows(const RowsCall& c, bool norm) {
  int64_t rows = 32768 / (c.width + 1) + 1;  // an item is worth waking a thread for
  RowsJob j{&c, rows, norm};
  parallel_for(int((c.rows + rows - 1) / rows), c.n_threads, run_rows_item, &j);
}
inline void run_norm(const RowsCall& c) { run_rows(c, true); }
inline void run_gated(const RowsCall& c) { run_rows(c, false); }

}  // namespace
