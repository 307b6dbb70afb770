// Products with matrices of 4- or 8-bit codes: activations become int8 as they come in, the sums of a block are integers.
// A matrix stands in tiles of 16 rows. A tile holds, for each group of columns that shares scales, its blocks of 32 columns
// and then 16 half-precision scales (and 16 offsets where codes have no common zero):
//   8 bits: [8][16 rows][4 columns] bytes; 4 bits: [4][16 rows][4 columns] bytes, low half columns 0..15, high half 16..31.
// So four columns of 16 rows are one VPDPBUSD operand. weight = scale * code + offset, or scale * (code - zero).
// A row of the result is summed in one order whatever rows stand beside it: the integers are exact, and groups follow
// each other.
#pragma once
#include "scratch.h"
#include "simd.h"
#include "small.h"
#include "types.h"

namespace {

using namespace kvarn;

constexpr int kTile = 16, kBlock = 32;
constexpr int kPanel = 12;

inline int64_t tile_bytes(const BlockMatrix& w) {
  int64_t codes = int64_t(w.columns) * kTile * w.bits / 8;
  return codes + int64_t(w.columns / w.group) * kTile * 2 * (w.zero < 0 ? 2 : 1);
}

// Rows that one tile is multiplied with together. The last panel of a call has fewer; rows that fill it up are zeros.
inline int panel_rows(int64_t left) {
  if (left >= kPanel) return kPanel;
  return left <= 2 ? int(left) : left <= 4 ? 4 : left <= 6 ? 6 : left <= 8 ? 8 : kPanel;
}

struct Quantized {  // activations of a call, a panel of R rows after the other, so that one pointer walks over all its rows
  int8_t* codes;    // [columns / 4][R][4]
  float* scale;     // [groups][R]
  float* shift;     // [groups][R]: scale * sum of the codes (matrices with offsets)
  int32_t* base;    // [groups][R]: -zero * sum of the codes (others)
};

struct ProductJob {
  const ProductCall* call;
  Quantized q;
  int tiles_per_item, n_tiles, groups;
};

// -- activations come in -----------------------------------------------------------------------------------------
template <int D>
INLINE void plain_row(const ProductCall& c, int64_t row, float* out) {
  const int64_t at = row * c.x_row, whole = c.width / W * W;
  for (int64_t i = 0; i < whole; i += W) store(out + i, load_vf(c.x, at + i, D));
  for (int64_t i = whole; i < c.width; i++) out[i] = load_as_float(c.x, at + i, D);
}

template <int D>
INLINE void normed_row(const ProductCall& c, int64_t row, float* out) {
  plain_row<D>(c, row, out);
  const int64_t whole = c.width / W * W;
  vf lanes{};
  float tail = 0.0f;
  for (int64_t i = 0; i < whole; i += W) lanes = fma(load<vf>(out + i), load<vf>(out + i), lanes);
  for (int64_t i = whole; i < c.width; i++) tail += out[i] * out[i];
  const float factor = 1.0f / __builtin_sqrtf((hsum(lanes) + tail) / float(c.width) + c.eps);
  for (int64_t i = 0; i < whole; i += W) store(out + i, load<vf>(out + i) * factor * load<vf>(c.norm + i));
  for (int64_t i = whole; i < c.width; i++) out[i] *= factor * c.norm[i];
}

template <int D>
INLINE void gated_row(const ProductCall& c, int64_t row, float* out) {  // x is [gate | up]
  const int64_t gate = row * c.x_row, up = gate + c.width, whole = c.width / W * W;
  for (int64_t i = 0; i < whole; i += W)
    store(out + i, activate(load_vf(c.x, gate + i, D), c.activation) * load_vf(c.x, up + i, D));
  for (int64_t i = whole; i < c.width; i++)
    out[i] = activate(splat(load_as_float(c.x, gate + i, D)), c.activation)[0] * load_as_float(c.x, up + i, D);
}

template <int D>
INLINE void float_row(const ProductCall& c, int64_t row, float* out) {
  if (c.before == kNormed) normed_row<D>(c, row, out);
  else if (c.before == kGated) gated_row<D>(c, row, out);
  else plain_row<D>(c, row, out);
  for (int64_t i = c.width; i < c.matrix.columns; i++) out[i] = 0.0f;
}

INLINE int quantize_lane_sum(vi v) {
  int sum = 0;
  for (int i = 0; i < W; i++) sum += v[i];
  return sum;
}

// x [n] -> int8 codes with one scale, the largest magnitude becoming 127; returns the scale and the codes' sum.
INLINE float quantize_group(const float* x, int n, int8_t* codes, int* sum) {
  vf most{};
  for (int i = 0; i < n; i += W) {
    vf v = load<vf>(x + i);
    most = vmax(most, vmax(v, -v));
  }
  const float top = hmax(most), scale = top / 127.0f, inverse = top > 0.0f ? 127.0f / top : 0.0f;
  vi total{};
  for (int i = 0; i < n; i += W) {
    vf rounded = (load<vf>(x + i) * inverse + 12582912.0f);  // to the nearest even integer, by the magic 1.5 * 2^23
    vi code = (vi)rounded - 0x4b400000;
    total += code;
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8((__m512i)code));
#else
    for (int j = 0; j < W; j++) codes[i + j] = int8_t(code[j]);
#endif
  }
#if defined(__AVX512F__)
  *sum = _mm512_reduce_add_epi32((__m512i)total);
#else
  *sum = quantize_lane_sum(total);
#endif
  return scale;
}

inline void quantize_row(const ProductJob& j, int64_t first, int in_panel, int r) {
  const ProductCall& c = *j.call;
  const BlockMatrix& w = c.matrix;
  float* x = thread_scratch.take<float>(w.columns);
  int8_t* row_codes = thread_scratch.take<int8_t>(w.columns);
  if (c.dtype == 0) float_row<0>(c, first + r, x);
  else if (c.dtype == 1) float_row<1>(c, first + r, x);
  else float_row<2>(c, first + r, x);
  for (int g = 0; g < j.groups; g++) {
    int sum;
    const int64_t at = first * j.groups + g * in_panel + r;
    j.q.scale[at] = quantize_group(x + int64_t(g) * w.group, w.group, row_codes + int64_t(g) * w.group, &sum);
    if (w.zero < 0) j.q.shift[at] = j.q.scale[at] * float(sum);
    else j.q.base[at] = -w.zero * sum;
  }
  int8_t* out = j.q.codes + first * w.columns + 4 * r;
  for (int k = 0; k < w.columns; k += 4) __builtin_memcpy(out + k * in_panel, row_codes + k, 4);
}

inline void quantize_panel(int panel, void* context) {
  const ProductJob& j = *static_cast<ProductJob*>(context);
  const int64_t first = int64_t(panel) * kPanel, left = j.call->rows - first, columns = j.call->matrix.columns;
  const int in_panel = panel_rows(left);
  if (left < in_panel) {
    __builtin_memset(j.q.codes + first * columns, 0, in_panel * columns);
    __builtin_memset(j.q.scale + first * j.groups, 0, in_panel * j.groups * sizeof(float));
    __builtin_memset(j.q.shift + first * j.groups, 0, in_panel * j.groups * sizeof(float));
  }
  for (int r = 0; r < in_panel && r < left; r++) {
    thread_scratch.reset(Scratch::bytes<float>(columns) + Scratch::bytes<int8_t>(columns));
    quantize_row(j, first, in_panel, r);
  }
}

// -- one tile for R rows -----------------------------------------------------------------------------------------
#if defined(__AVX512VNNI__)
INLINE __m512i four_columns(const int8_t* x) {
  int32_t bytes;
  __builtin_memcpy(&bytes, x, 4);
  return _mm512_set1_epi32(bytes);
}
INLINE void add_bytes(__m512i& sum, __m512i codes, __m512i x) {  // in assembly: GCC copies sums around the intrinsic
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
}

template <int BITS, bool ZERO, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, float* out) {
  const BlockMatrix& w = j.call->matrix;
  const int8_t* x = j.q.codes + first * w.columns;
  const float *scale = j.q.scale + first * j.groups, *shift = j.q.shift + first * j.groups;
  const int32_t* base = j.q.base + first * j.groups;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 total[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  for (int g = 0; g < j.groups; g++) {
    __m512i sum[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) sum[r] = ZERO ? _mm512_set1_epi32(base[g * R + r]) : _mm512_setzero_si512();
    for (int b = 0; b < w.group; b += kBlock, x += kBlock * R) {
#pragma GCC unroll 8
      for (int i = 0; i < BITS; i++, t += 64) {
        __m512i codes = _mm512_loadu_si512(t);
        if (BITS == 8) {
#pragma GCC unroll 12
          for (int r = 0; r < R; r++) add_bytes(sum[r], codes, four_columns(x + (i * R + r) * 4));
        } else {
          __m512i even = _mm512_and_si512(codes, low), odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
#pragma GCC unroll 12
          for (int r = 0; r < R; r++) add_bytes(sum[r], even, four_columns(x + (i * R + r) * 4));
#pragma GCC unroll 12
          for (int r = 0; r < R; r++)
            add_bytes(sum[r], odd, four_columns(x + ((4 + i) * R + r) * 4));
        }
      }
    }
    __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(t)));
    t += 2 * kTile;
    __m512 m = _mm512_setzero_ps();
    if (!ZERO) m = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(t))), t += 2 * kTile;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_mul_ps(d, _mm512_set1_ps(scale[g * R + r])), total[r]);
      if (!ZERO) total[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(shift[g * R + r]), total[r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * kTile, total[r]);
}
#else
template <int BITS, bool ZERO, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, float* out) {
  const BlockMatrix& w = j.call->matrix;
  constexpr int V = kTile / W;
  const int8_t* x = j.q.codes + first * w.columns;
  const float *scale = j.q.scale + first * j.groups, *shift = j.q.shift + first * j.groups;
  const int32_t* base = j.q.base + first * j.groups;
  vf total[R][V] = {};
  for (int g = 0; g < j.groups; g++) {
    vi sum[R][V];
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) sum[r][v] = splat_i(ZERO ? base[g * R + r] : 0);
    for (int b = 0; b < w.group; b += kBlock, x += kBlock * R)
      for (int i = 0; i < BITS; i++, t += 64)
        for (int v = 0; v < V; v++) {
          vu codes = load<vu>(t + v * W * 4);
          for (int k = 0; k < 4; k++) {
            vi first = (vi)((codes >> (8 * k)) & (BITS == 8 ? 255u : 15u)), second = (vi)((codes >> (8 * k + 4)) & 15u);
            for (int r = 0; r < R; r++) {
              const int8_t* a = x + (i * R + r) * 4 + k;
              sum[r][v] += first * int32_t(a[0]);
              if (BITS == 4) sum[r][v] += second * int32_t(a[16 * R]);
            }
          }
        }
    for (int v = 0; v < V; v++) {
      vf d = f16_vf(load<vh>(t + v * W * 2)), m = ZERO ? vf{} : f16_vf(load<vh>(t + 2 * kTile + v * W * 2));
      for (int r = 0; r < R; r++) {
        total[r][v] = fma(__builtin_convertvector(sum[r][v], vf), d * scale[g * R + r], total[r][v]);
        if (!ZERO) total[r][v] = fma(m, splat(shift[g * R + r]), total[r][v]);
      }
    }
    t += 2 * kTile * (ZERO ? 1 : 2);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out + r * kTile + v * W, total[r][v]);
}
#endif

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

template <int BITS, bool ZERO, int R>
void panel_with_tiles(const ProductJob& j, int begin, int end, int64_t first) {
  const ProductCall& c = *j.call;
  const int64_t n = c.rows - first < R ? c.rows - first : R, bytes = tile_bytes(c.matrix);
  alignas(64) float out[R * kTile];
  for (int t = begin; t < end; t++) {
    product_tile<BITS, ZERO, R>(j, c.matrix.data + t * bytes, first, out);
    for (int64_t r = 0; r < n; r++) {
      if (c.out_dtype == 0) put_row<0>(c, first + r, t * kTile, out + r * kTile);
      else if (c.out_dtype == 1) put_row<1>(c, first + r, t * kTile, out + r * kTile);
      else put_row<2>(c, first + r, t * kTile, out + r * kTile);
    }
  }
}

template <int BITS, bool ZERO>
void product_item(int item, void* context) {
  const ProductJob& j = *static_cast<ProductJob*>(context);
  const int begin = item * j.tiles_per_item, end = imin(begin + j.tiles_per_item, j.n_tiles);
  for (int64_t first = 0; first < j.call->rows; first += kPanel) {
    switch (panel_rows(j.call->rows - first)) {
#define KVARN_PANEL(R) \
  case R: panel_with_tiles<BITS, ZERO, R>(j, begin, end, first); break;
      KVARN_PANEL(1)
      KVARN_PANEL(2)
      KVARN_PANEL(4)
      KVARN_PANEL(6)
      KVARN_PANEL(8)
      KVARN_PANEL(12)
#undef KVARN_PANEL
      default: break;
    }
  }
}

inline void run_product(const ProductCall& c) {
  if (c.rows <= 0) return;
  const BlockMatrix& w = c.matrix;
  ProductJob j{};
  j.call = &c, j.groups = w.columns / w.group, j.n_tiles = (w.rows + kTile - 1) / kTile;
  const int panels = int((c.rows + kPanel - 1) / kPanel);
  const int64_t rows = int64_t(panels - 1) * kPanel + panel_rows(c.rows - int64_t(panels - 1) * kPanel);
  call_scratch.reset(Scratch::bytes<int8_t>(rows * w.columns) + 2 * Scratch::bytes<float>(rows * j.groups));
  j.q.codes = call_scratch.take<int8_t>(rows * w.columns);
  j.q.scale = call_scratch.take<float>(rows * j.groups);
  j.q.shift = call_scratch.take<float>(rows * j.groups);
  j.q.base = reinterpret_cast<int32_t*>(j.q.shift);  // a matrix needs one of the two
  parallel_for(panels, c.n_threads, quantize_panel, &j);
  // Few rows: a few equal shares a thread. Many: as many tiles as stay in the second-level cache beside the rows.
  const int share = (j.n_tiles + 4 * c.n_threads - 1) / (4 * c.n_threads);
  const int cached = imax(1, int(131072 / tile_bytes(w)));
  j.tiles_per_item = panels == 1 ? share : imin(share, cached);
  const int items = (j.n_tiles + j.tiles_per_item - 1) / j.tiles_per_item;
  auto item = w.bits == 8 ? (w.zero < 0 ? product_item<8, false> : product_item<8, true>)
                          : (w.zero < 0 ? product_item<4, false> : product_item<4, true>);
  parallel_for(items, c.n_threads, item, &j);
}

// -- rows of an embedding ----------------------------------------------------------------------------------------
inline void gather_item(int item, void* context) {
  const GatherCall& c = *static_cast<GatherCall*>(context);
  const BlockMatrix& w = c.matrix;
  const int64_t id = c.ids[item], lane = id % kTile, scales = 2 * kTile * (w.zero < 0 ? 2 : 1);
  const uint8_t* t = w.data + id / kTile * tile_bytes(w);
  for (int column = 0; column < c.width;) {
    const uint8_t* at = t + int64_t(w.group) * kTile * w.bits / 8;
    uint16_t half;
    __builtin_memcpy(&half, at + 2 * lane, 2);
    const float d = f16_float(half);
    __builtin_memcpy(&half, at + 2 * kTile * (w.zero < 0) + 2 * lane, 2);
    const float m = w.zero < 0 ? f16_float(half) : -float(w.zero) * d;
    for (int k = 0; k < w.group && column < c.width; k++, column++) {
      const int block = k / kBlock, in = k % kBlock, half_in = in % 16;
      const uint8_t* codes = t + int64_t(block) * kBlock * kTile * w.bits / 8;
      const int code = w.bits == 8 ? codes[in / 4 * 64 + lane * 4 + in % 4]
                                   : codes[half_in / 4 * 64 + lane * 4 + half_in % 4] >> (in < 16 ? 0 : 4) & 15;
      store_float(c.out, int64_t(item) * c.width + column, c.dtype, d * float(code) + m);
    }
    t = at + scales;
  }
}

inline void run_gather(const GatherCall& c) {
  parallel_for(c.rows, c.rows > 16 ? c.n_threads : 1, gather_item, const_cast<GatherCall*>(&c));
}

}  // namespace
