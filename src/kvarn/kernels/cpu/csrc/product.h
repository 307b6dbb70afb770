// Products with matrices of codes: which rows and tiles go together, on threads. product_data.h says how they are laid out.
#pragma once
#include "activations.h"
#if defined(__AVX512VNNI__)
#include "product_vnni.h"
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "product_avx2.h"
#else
#include "product_plain.h"
#endif

namespace {

// -- results go out ----------------------------------------------------------------------------------------------
template <int D>
INLINE void put_row(const ProductCall& c, int64_t row, int first, const float* in) {
  const int n = imin(kTile, c.matrix.rows - first);
  const int64_t at = row * c.out_row + first, beside = row * c.residual_row + first;
  if (n == kTile) {
    for (int i = 0; i < kTile; i += W) {
      vf v = load<vf>(in + i);
      if (c.bias != nullptr) v += load<vf>(c.bias + first + i);
      if (c.residual != nullptr) v += load_vf(c.residual, beside + i, D);
      store_vf(c.out, at + i, D, v);
    }
    return;
  }
  for (int i = 0; i < n; i++) {
    float v = in[i];
    if (c.bias != nullptr) v += c.bias[first + i];
    if (c.residual != nullptr) v += load_as_float(c.residual, beside + i, D);
    store_float(c.out, at + i, D, v);
  }
}

template <int BITS, bool OFFSETS, int SPAN, int R>
void panels_with_tiles(const ProductJob& j, int begin, int end, int64_t first, int panels) {
  const ProductCall& c = *j.call;
  const int64_t left = c.rows - first, n = left < panels * R ? left : panels * R, bytes = tile_bytes(c.matrix);
  alignas(64) float out[(R == kPanel ? kPanelsAtOnce : 1) * R * kTile];
  for (int t = begin; t < end; t++) {
    product_tile<BITS, OFFSETS, SPAN, R>(j, c.matrix.data + t * bytes, first, panels, out);
    for (int64_t r = 0; r < n; r++) {
      if (c.out_dtype == 0) put_row<0>(c, first + r, t * kTile, out + r * kTile);
      else if (c.out_dtype == 1) put_row<1>(c, first + r, t * kTile, out + r * kTile);
      else put_row<2>(c, first + r, t * kTile, out + r * kTile);
    }
  }
}

template <int BITS, bool OFFSETS, int SPAN>
void product_item(int item, void* context) {
  const ProductJob& j = *static_cast<ProductJob*>(context);
  const int begin = int(int64_t(j.n_tiles) * item / j.n_items), end = int(int64_t(j.n_tiles) * (item + 1) / j.n_items);
  for (int64_t first = 0; first < j.call->rows;) {
    const int64_t left = j.call->rows - first;
    const int rows = panel_rows(left), panels = imax(1, imin(kPanelsAtOnce, full_panels(left)));
    switch (rows) {
#define KVARN_PANEL(R) \
  case R: if constexpr (R <= kPanel) panels_with_tiles<BITS, OFFSETS, SPAN, R>(j, begin, end, first, panels); break;
      KVARN_PANEL(1)
      KVARN_PANEL(2)
      KVARN_PANEL(4)
      KVARN_PANEL(6)
      KVARN_PANEL(8)
      KVARN_PANEL(12)
#undef KVARN_PANEL
      default: break;
    }
    first += int64_t(panels) * rows;
  }
}

template <int BITS>
INLINE auto item_of(const BlockMatrix& w) {
  if (span_groups(w) == 2) return w.offsets ? product_item<BITS, true, 2> : product_item<BITS, false, 2>;
  return w.offsets ? product_item<BITS, true, 1> : product_item<BITS, false, 1>;
}

inline void run_product(const ProductCall& c) {
  if (c.rows <= 0) return;
  const BlockMatrix& w = c.matrix;
  ProductJob j{};
  j.call = &c, j.groups = w.columns / w.group, j.n_tiles = (w.rows + kTile - 1) / kTile;
  j.spans = j.groups / span_groups(w);
  const int panels = int((c.rows + kPanel - 1) / kPanel);
  const int64_t rows = int64_t(panels - 1) * kPanel + panel_rows(c.rows - int64_t(panels - 1) * kPanel);
  call_scratch.reset(Scratch::bytes<int8_t>(rows * w.columns) + Scratch::bytes<float>(rows * (j.spans + 1)) +
                     Scratch::bytes<int32_t>(rows * j.groups) + Scratch::bytes<uint32_t>(rows * j.spans));
  j.q.codes = call_scratch.take<int8_t>(rows * w.columns);
  j.q.ratio = call_scratch.take<float>(rows * (j.spans + 1));
  j.q.base = call_scratch.take<int32_t>(rows * j.groups);
  j.q.sums = call_scratch.take<uint32_t>(rows * j.spans);
  parallel_for(int((c.rows + kRowsAtOnce - 1) / kRowsAtOnce), c.n_threads, quantize_rows, &j);
  // A few equal shares a thread. With many rows a share is at most what stays in the second-level cache beside them.
  const bool few = c.rows <= kFewRows;
  const int cached = imax(1, int(131072 / tile_bytes(w))), wanted = few ? 0 : (j.n_tiles + cached - 1) / cached;
  int shares = imax(4, (wanted + c.n_threads - 1) / c.n_threads);
  const int most = few ? shares : 2 * shares;
  for (int s = shares + 1; s <= most; s++)  // so that no share has a tile more than others, and a thread such ones only
    if (j.n_tiles % (s * c.n_threads) < j.n_tiles % (shares * c.n_threads)) shares = s;
  j.n_items = imin(j.n_tiles, shares * c.n_threads);
  parallel_for(j.n_items, c.n_threads, w.bits == 8 ? item_of<8>(w) : item_of<4>(w), &j);
}

// -- rows of an embedding ----------------------------------------------------------------------------------------
INLINE uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  return half;
}

INLINE int code_at(const BlockMatrix& w, const uint8_t* codes, int64_t lane, int k) {  // of column k of a group
  const int in = k % kBlock, half_in = in % 16;
  codes += int64_t(k / kBlock) * kBlock * kTile * w.bits / 8;
  return w.bits == 8 ? codes[in / 4 * 64 + lane * 4 + in % 4]
                     : codes[half_in / 4 * 64 + lane * 4 + half_in % 4] >> (in < 16 ? 0 : 4) & 15;
}

inline void gather_item(int item, void* context) {
  const GatherCall& c = *static_cast<GatherCall*>(context);
  const BlockMatrix& w = c.matrix;
  const int64_t id = c.ids[item], lane = id % kTile, group_bytes = int64_t(w.group) * kTile * w.bits / 8;
  const int in_span = span_groups(w);
  const uint8_t* t = w.data + id / kTile * tile_bytes(w);
  for (int column = 0; column < c.width;) {
    const uint8_t *scales = t + in_span * group_bytes, *offsets = scales + 2 * kTile * in_span;
    for (int h = 0; h < in_span; h++) {
      const float d = f16_float(half_at(scales + 2 * (kTile * h + lane)));
      const float m = w.offsets ? bf16_float(half_at(offsets + 2 * (in_span * lane + h))) : 0.0f;
      for (int k = 0; k < w.group && column < c.width; k++, column++) {
        const int code = code_at(w, t + h * group_bytes, lane, k) - zero_code(w);
        store_float(c.out, int64_t(item) * c.width + column, c.dtype, d * float(code) + m);
      }
    }
    t = offsets + (w.offsets ? 2 * kTile * in_span : 0);
  }
}

inline void run_gather(const GatherCall& c) {
  parallel_for(c.rows, c.rows > 16 ? c.n_threads : 1, gather_item, const_cast<GatherCall*>(&c));
}

}  // namespace
