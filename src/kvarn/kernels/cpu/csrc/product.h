// Products with matrices of 4- or 8-bit codes: activations become int8 as they come in, the sums of a group are integers.
// A matrix stands in tiles of 16 rows; weight = scale * (code - zero) + offset, zero being the code in the middle. A span of
// columns shares the scale of the activations: a group, or two where groups have 32 columns and their number is even. A tile
// holds for each span the codes of its groups, in blocks of 32 columns:
//   8 bits: [8][16 rows][4 columns] bytes; 4 bits: [4][16 rows][4 columns] bytes, low half columns 0..15, high half 16..31,
// so that four columns of 16 rows are one VPDPBUSD operand; then [groups of the span][16 rows] half-precision scales; then,
// where there are offsets, [16 rows][groups of the span] of them in bfloat16, so that two groups are one VDPBF16PS operand.
// A row of the result is summed in one order whatever rows stand beside it: the integers are exact, and spans follow
// each other. The sum is kept in units of the span's activation scale, which costs one multiplication a span:
//   total = total * (scale before / scale) + sum of (weight scale * integers) + sum of (offset * activation codes).
#pragma once
#include "scratch.h"
#include "simd.h"
#include "small.h"
#include "types.h"

namespace {

using namespace kvarn;

constexpr int kTile = 16, kBlock = 32;
constexpr int kPanel = 12, kRowsAtOnce = 4;  // the second divides the first

inline int64_t tile_bytes(const BlockMatrix& w) {
  int64_t codes = int64_t(w.columns) * kTile * w.bits / 8;
  return codes + int64_t(w.columns / w.group) * kTile * 2 * (w.offsets ? 2 : 1);
}

inline int span_groups(const BlockMatrix& w) { return w.group == kBlock && w.columns / kBlock % 2 == 0 ? 2 : 1; }
inline int zero_code(const BlockMatrix& w) { return 1 << (w.bits - 1); }

// Rows that one tile is multiplied with together. The last panel of a call has fewer; rows that fill it up are zeros.
inline int panel_rows(int64_t left) {
  if (left >= kPanel) return kPanel;
  return left <= 2 ? int(left) : left <= 4 ? 4 : left <= 6 ? 6 : left <= 8 ? 8 : kPanel;
}

struct Quantized {  // activations of a call, a panel of R rows after the other, so that one pointer walks over all its rows
  int8_t* codes;    // [columns / 4][R][4]
  float* ratio;     // [spans + 1][R]: the scale of the span before over this one's; at the end the last span's scale
  int32_t* base;    // [groups][R]: -zero * sum of the codes
  uint32_t* sums;   // [spans][R]: the codes' sums in bfloat16, one group in the high half or two (matrices with offsets)
};

struct ProductJob {
  const ProductCall* call;
  Quantized q;
  int n_items, n_tiles, groups, spans;
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

constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: added, it rounds to the nearest even integer

// The largest magnitude, a NaN above all: as integers, floats without their signs have the same order.
INLINE float magnitude(const float* x, int n) {
  vi most{};
  for (int i = 0; i < n; i += W) {
    const vi bits = (vi)load<vf>(x + i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return bits_float(uint32_t(hmax_i(most)));
}

// x [n] times `inverse` -> int8 codes; returns their sum.
INLINE int round_group(const float* x, int n, float inverse, int8_t* codes) {
  vi total{};
  for (int i = 0; i < n; i += W) {
    vf rounded = fma(load<vf>(x + i), splat(inverse), splat(kToInteger));
    vi code = (vi)rounded - 0x4b400000;
    total += (vi)((vu)code << 24) >> 24;  // the byte that is kept: a NaN's integer would overflow the sum
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + i), _mm512_cvtepi32_epi8((__m512i)code));
#else
    for (int j = 0; j < W; j++) codes[i + j] = int8_t(code[j]);
#endif
  }
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)total);
#else
  return quantize_lane_sum(total);
#endif
}

struct RowScale {  // of the span before, and the largest so far
  float before = 0.0f, most = 0.0f;
};

// The span's scale, its largest magnitude becoming 127, and what total has to be multiplied with. A scale far below the
// largest (2^-60) would make the ratio infinite; what it holds is lost beside the rest anyway.
INLINE float next_scale(RowScale* row, float top, float* inverse) {
  float scale = top / 127.0f;
  *inverse = top > 0.0f ? 127.0f / top : 0.0f;
  const float least = row->most * 0x1p-60f;
  if (top == 0.0f) scale = row->before;
  else if (scale < least) scale = least, *inverse = 1.0f / least;
  const float ratio = row->before == 0.0f ? 0.0f : row->before / scale;  // a NaN goes on
  row->before = scale, row->most = scale > row->most ? scale : row->most;
  return ratio;
}

INLINE void float_row_of(const ProductCall& c, int64_t row, float* out) {
  if (c.dtype == 0) float_row<0>(c, row, out);
  else if (c.dtype == 1) float_row<1>(c, row, out);
  else float_row<2>(c, row, out);
}

inline void quantize_row(const ProductJob& j, int64_t first, int in_panel, int r) {
  const BlockMatrix& w = j.call->matrix;
  const int in_span = j.groups / j.spans, span = in_span * w.group, zero = zero_code(w);
  float* x = thread_scratch.take<float>(w.columns);
  int8_t* row_codes = thread_scratch.take<int8_t>(w.columns);
  float_row_of(*j.call, first + r, x);
  RowScale row;
  float* ratio = j.q.ratio + first * (j.spans + 1) + r;
  for (int p = 0, g = 0; p < j.spans; p++) {
    float inverse;
    ratio[p * in_panel] = next_scale(&row, magnitude(x + p * span, span), &inverse);
    uint32_t sums = 0;
    for (int h = 0; h < in_span; h++, g++) {
      const int sum = round_group(x + g * w.group, w.group, inverse, row_codes + g * w.group);
      j.q.base[first * j.groups + g * in_panel + r] = -zero * sum;
      sums = sums >> 16 | uint32_t(float_bf16(float(sum))) << 16;
    }
    j.q.sums[first * j.spans + p * in_panel + r] = sums;
  }
  ratio[j.spans * in_panel] = row.before;
  int8_t* out = j.q.codes + first * w.columns + 4 * r;
  for (int k = 0; k < w.columns; k += 4) __builtin_memcpy(out + k * in_panel, row_codes + k, 4);
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
// Four rows at once, a lane each, with the numbers of quantize_row.
INLINE __m128 largest_of_four(const float* const (&x)[4], int begin, int n) {
  __m512i most[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {
    most[r] = _mm512_setzero_si512();
    for (int i = begin; i < begin + n; i += 16)
      most[r] = _mm512_max_epi32(most[r], _mm512_and_si512(_mm512_loadu_si512(x[r] + i), _mm512_set1_epi32(0x7fffffff)));
  }
  const __m512i a = _mm512_max_epi32(_mm512_unpacklo_epi32(most[0], most[1]), _mm512_unpackhi_epi32(most[0], most[1]));
  const __m512i b = _mm512_max_epi32(_mm512_unpacklo_epi32(most[2], most[3]), _mm512_unpackhi_epi32(most[2], most[3]));
  const __m512i c = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));  // rows 0..3 of each lane
  const __m256i d = _mm256_max_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
  return _mm_castsi128_ps(_mm_max_epi32(_mm256_castsi256_si128(d), _mm256_extracti128_si256(d, 1)));
}

struct FourScales {
  __m128 before, most;
};

INLINE __m128 next_scales(FourScales* rows, __m128 top, __m128* inverse) {  // see next_scale
  const __m128 none = _mm_setzero_ps(), least = _mm_mul_ps(rows->most, _mm_set1_ps(0x1p-60f));
  const __mmask8 some = _mm_cmp_ps_mask(top, none, _CMP_GT_OQ);
  __m128 scale = _mm_div_ps(top, _mm_set1_ps(127.0f));
  *inverse = _mm_maskz_div_ps(some, _mm_set1_ps(127.0f), top);
  const __mmask8 small = _mm_mask_cmp_ps_mask(some, scale, least, _CMP_LT_OQ);
  if (__builtin_expect(small, 0)) {
    scale = _mm_mask_mov_ps(scale, small, least);
    *inverse = _mm_mask_div_ps(*inverse, small, _mm_set1_ps(1.0f), least);
  }
  scale = _mm_mask_mov_ps(scale, _mm_cmp_ps_mask(top, none, _CMP_EQ_OQ), rows->before);
  const __m128 ratio = _mm_maskz_div_ps(_mm_cmp_ps_mask(rows->before, none, _CMP_NEQ_UQ), rows->before, scale);
  rows->before = scale, rows->most = _mm_max_ps(scale, rows->most);
  return ratio;
}

// 32 columns of four rows -> [8][4 rows][4 columns] codes, `stride` bytes between the eights; adds to each row's sum.
INLINE __m128i round_block(const float* const (&x)[4], int begin, const __m512 (&inverse)[4], int8_t* out, int64_t stride,
                           __m128i sums) {
  __m256i row[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {
    __m128i half[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m512 v = _mm512_fmadd_ps(_mm512_loadu_ps(x[r] + begin + 16 * i), inverse[r], _mm512_set1_ps(kToInteger));
      half[i] = _mm512_cvtepi32_epi8(_mm512_castps_si512(v));  // the low byte is the integer's
    }
    row[r] = _mm256_set_m128i(half[1], half[0]);
  }
  const __m256i a = _mm256_unpacklo_epi32(row[0], row[1]), b = _mm256_unpackhi_epi32(row[0], row[1]);
  const __m256i c = _mm256_unpacklo_epi32(row[2], row[3]), d = _mm256_unpackhi_epi32(row[2], row[3]);
  const __m256i four[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c), _mm256_unpacklo_epi64(b, d),
                           _mm256_unpackhi_epi64(b, d)};
  __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * stride), _mm256_castsi256_si128(four[i]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (4 + i) * stride), _mm256_extracti128_si256(four[i], 1));
    sum = _mm256_dpbusd_epi32(sum, _mm256_set1_epi8(1), four[i]);
  }
  return _mm_add_epi32(sums, _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1)));
}

inline void quantize_four(const ProductJob& j, int64_t first, int in_panel, int from) {
  const BlockMatrix& w = j.call->matrix;
  const int in_span = j.groups / j.spans, span = in_span * w.group;
  const int64_t stride = 4 * in_panel;
  const float* x[4];
  for (int r = 0; r < 4; r++) {
    float* row = thread_scratch.take<float>(w.columns);
    if (first + from + r < j.call->rows) float_row_of(*j.call, first + from + r, row);
    else __builtin_memset(row, 0, w.columns * sizeof(float));
    x[r] = row;
  }
  FourScales rows{_mm_setzero_ps(), _mm_setzero_ps()};
  float* ratio = j.q.ratio + first * (j.spans + 1) + from;
  int8_t* out = j.q.codes + first * w.columns + 4 * from;
  for (int p = 0, g = 0; p < j.spans; p++) {
    __m128 inverse;
    _mm_storeu_ps(ratio + p * in_panel, next_scales(&rows, largest_of_four(x, p * span, span), &inverse));
    float lanes[4];
    _mm_storeu_ps(lanes, inverse);
    const __m512 factor[4] = {_mm512_set1_ps(lanes[0]), _mm512_set1_ps(lanes[1]), _mm512_set1_ps(lanes[2]),
                              _mm512_set1_ps(lanes[3])};
    __m128i sums = _mm_setzero_si128();
    for (int h = 0; h < in_span; h++, g++) {
      __m128i sum = _mm_setzero_si128();
      for (int b = g * w.group; b < (g + 1) * w.group; b += kBlock, out += kBlock * in_panel)
        sum = round_block(x, b, factor, out, stride, sum);
      const __m128i base = _mm_mullo_epi32(sum, _mm_set1_epi32(-zero_code(w)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(j.q.base + first * j.groups + g * in_panel + from), base);
      const __m128i bits = _mm_castps_si128(_mm_cvtepi32_ps(sum));  // to bfloat16, to nearest even
      const __m128i even = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
      const __m128i half = _mm_srli_epi32(_mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7fff)), even), 16);
      sums = _mm_or_si128(_mm_srli_epi32(sums, 16), _mm_slli_epi32(half, 16));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(j.q.sums + first * j.spans + p * in_panel + from), sums);
  }
  _mm_storeu_ps(ratio + j.spans * in_panel, rows.before);
}
#endif

inline void no_row(const ProductJob& j, int64_t first, int in_panel, int r) {
  const int columns = j.call->matrix.columns;
  for (int p = 0; p <= j.spans; p++) j.q.ratio[first * (j.spans + 1) + p * in_panel + r] = 0.0f;
  for (int g = 0; g < j.groups; g++) j.q.base[first * j.groups + g * in_panel + r] = 0;
  for (int p = 0; p < j.spans; p++) j.q.sums[first * j.spans + p * in_panel + r] = 0;
  for (int k = 0; k < columns; k += 4) __builtin_memset(j.q.codes + first * columns + 4 * r + k * in_panel, 0, 4);
}

// kRowsAtOnce rows of a panel. The last rows of a call fill their panel up with zeros.
inline void quantize_rows(int item, void* context) {
  const ProductJob& j = *static_cast<ProductJob*>(context);
  const int64_t rows = j.call->rows, columns = j.call->matrix.columns, begin = int64_t(item) * kRowsAtOnce;
  const int64_t first = begin / kPanel * kPanel;
  const int in_panel = panel_rows(rows - first), from = int(begin - first);
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  if (in_panel % 4 == 0) {
    thread_scratch.reset(4 * Scratch::bytes<float>(columns));
    quantize_four(j, first, in_panel, from);
    if (begin + kRowsAtOnce < rows) return;
    for (int r = from + 4; r < in_panel; r++) no_row(j, first, in_panel, r);
    return;
  }
#endif
  for (int r = from; r < from + kRowsAtOnce && first + r < rows; r++) {
    thread_scratch.reset(Scratch::bytes<float>(columns) + Scratch::bytes<int8_t>(columns));
    quantize_row(j, first, in_panel, r);
  }
  if (begin + kRowsAtOnce < rows) return;
  for (int r = int(rows - first); r < in_panel; r++) no_row(j, first, in_panel, r);
}

// -- one tile for R rows -----------------------------------------------------------------------------------------
#if defined(__AVX512VNNI__)
// In assembly: GCC copies sums around the intrinsic, and loads the four columns of all 16 lanes before.
INLINE void add_bytes(__m512i& sum, __m512i codes, const int8_t* four) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<const int32_t*>(four)));
}

template <int BITS, int R>
INLINE void add_block(__m512i (&sum)[R], const uint8_t* t, const int8_t* x) {
#pragma GCC unroll 8
  for (int i = 0; i < BITS; i++) {
    const __m512i codes = _mm512_loadu_si512(t + 64 * i), low = _mm512_set1_epi8(15);
    const __m512i even = BITS == 8 ? codes : _mm512_and_si512(codes, low);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) add_bytes(sum[r], even, x + (i * R + r) * 4);
    if (BITS == 8) continue;
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) add_bytes(sum[r], odd, x + ((4 + i) * R + r) * 4);
  }
}

INLINE __m512 one_for_all(uint32_t bits) { return _mm512_castsi512_ps(_mm512_set1_epi32(int(bits))); }

// total += offsets [16][SPAN] times the sums of the span's codes.
template <int SPAN, int R>
INLINE void add_offsets(__m512 (&total)[R], const uint8_t* t, const uint32_t* sums) {
  if (SPAN == 1) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t));
    const __m512 m = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) total[r] = _mm512_fmadd_ps(m, one_for_all(sums[r]), total[r]);
    return;
  }
  const __m512i both = _mm512_loadu_si512(t);
#if defined(__AVX512BF16__)
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
    total[r] = _mm512_dpbf16_ps(total[r], (__m512bh)both, (__m512bh)_mm512_set1_epi32(int(sums[r])));
#else
  const uint32_t high = 0xffff0000u;
  const __m512 m0 = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  const __m512 m1 = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(high))));
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    total[r] = _mm512_fmadd_ps(m0, one_for_all(sums[r] << 16), total[r]);
    total[r] = _mm512_fmadd_ps(m1, one_for_all(sums[r] & high), total[r]);
  }
#endif
}

template <int BITS, bool OFFSETS, int SPAN, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, float* out) {
  const BlockMatrix& w = j.call->matrix;
  const int8_t* x = j.q.codes + first * w.columns;
  const float* ratio = j.q.ratio + first * (j.spans + 1);
  const int32_t* base = j.q.base + first * j.groups;
  const uint32_t* sums = j.q.sums + first * j.spans;
  const int group = SPAN == 2 ? kBlock : w.group;
  __m512 total[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  for (int p = 0; p < j.spans; p++, ratio += R, sums += R) {
    const uint8_t* marks = t + SPAN * group * kTile * BITS / 8;
#pragma GCC unroll 2
    for (int h = 0; h < SPAN; h++, base += R) {
      __m512i sum[R];
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) sum[r] = _mm512_set1_epi32(base[r]);
      for (int b = 0; b < group; b += kBlock, t += 64 * BITS, x += kBlock * R) add_block<BITS, R>(sum, t, x);
      const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(marks + 2 * kTile * h)));
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const __m512 whole = _mm512_cvtepi32_ps(sum[r]);
        total[r] = h == 0 ? _mm512_fmadd_ps(total[r], _mm512_set1_ps(ratio[r]), _mm512_mul_ps(whole, d))
                          : _mm512_fmadd_ps(whole, d, total[r]);
      }
    }
    t = marks + 2 * kTile * SPAN;
    if (OFFSETS) add_offsets<SPAN, R>(total, t, sums), t += 2 * kTile * SPAN;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * kTile, _mm512_mul_ps(total[r], _mm512_set1_ps(ratio[r])));
}
#else
template <int BITS, int R, int V>
INLINE void add_block(vi (&sum)[R][V], const uint8_t* t, const int8_t* x) {
  for (int i = 0; i < BITS; i++)
    for (int v = 0; v < V; v++) {
      vu codes = load<vu>(t + i * 64 + v * W * 4);
      for (int k = 0; k < 4; k++) {
        vi first = (vi)((codes >> (8 * k)) & (BITS == 8 ? 255u : 15u)), second = (vi)((codes >> (8 * k + 4)) & 15u);
        for (int r = 0; r < R; r++) {
          const int8_t* a = x + (i * R + r) * 4 + k;
          sum[r][v] += first * int32_t(a[0]);
          if (BITS == 4) sum[r][v] += second * int32_t(a[16 * R]);
        }
      }
    }
}

template <int SPAN, int R, int V>
INLINE void add_offsets(vf (&total)[R][V], const uint8_t* t, const uint32_t* sums) {
  for (int v = 0; v < V; v++) {
    if (SPAN == 1) {
      const vf m = bf16_vf(load<vh>(t + v * W * 2));
      for (int r = 0; r < R; r++) total[r][v] = fma(m, splat(bits_float(sums[r])), total[r][v]);
      continue;
    }
    const vu both = load<vu>(t + v * W * 4);
    const vf m0 = (vf)(both << 16), m1 = (vf)(both & 0xffff0000u);
    for (int r = 0; r < R; r++) {
      total[r][v] = fma(m0, splat(bits_float(sums[r] << 16)), total[r][v]);
      total[r][v] = fma(m1, splat(bits_float(sums[r] & 0xffff0000u)), total[r][v]);
    }
  }
}

template <int BITS, bool OFFSETS, int SPAN, int R>
INLINE void product_tile(const ProductJob& j, const uint8_t* t, int64_t first, float* out) {
  const BlockMatrix& w = j.call->matrix;
  constexpr int V = kTile / W;
  const int8_t* x = j.q.codes + first * w.columns;
  const float* ratio = j.q.ratio + first * (j.spans + 1);
  const int32_t* base = j.q.base + first * j.groups;
  const uint32_t* sums = j.q.sums + first * j.spans;
  vf total[R][V] = {};
  for (int p = 0; p < j.spans; p++, ratio += R, sums += R) {
    const uint8_t* marks = t + SPAN * w.group * kTile * BITS / 8;
    for (int h = 0; h < SPAN; h++, base += R) {
      vi sum[R][V];
      for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = splat_i(base[r]);
      for (int b = 0; b < w.group; b += kBlock, t += 64 * BITS, x += kBlock * R) add_block<BITS, R, V>(sum, t, x);
      for (int v = 0; v < V; v++) {
        const vf d = f16_vf(load<vh>(marks + 2 * kTile * h + v * W * 2));
        for (int r = 0; r < R; r++) {
          const vf whole = __builtin_convertvector(sum[r][v], vf);
          total[r][v] = h == 0 ? fma(total[r][v], splat(ratio[r]), whole * d) : fma(whole, d, total[r][v]);
        }
      }
    }
    t = marks + 2 * kTile * SPAN;
    if (OFFSETS) add_offsets<SPAN, R, V>(total, t, sums), t += 2 * kTile * SPAN;
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out + r * kTile + v * W, total[r][v] * ratio[r]);
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

template <int BITS, bool OFFSETS, int SPAN, int R>
void panel_with_tiles(const ProductJob& j, int begin, int end, int64_t first) {
  const ProductCall& c = *j.call;
  const int64_t n = c.rows - first < R ? c.rows - first : R, bytes = tile_bytes(c.matrix);
  alignas(64) float out[R * kTile];
  for (int t = begin; t < end; t++) {
    product_tile<BITS, OFFSETS, SPAN, R>(j, c.matrix.data + t * bytes, first, out);
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
  for (int64_t first = 0; first < j.call->rows; first += kPanel) {
    switch (panel_rows(j.call->rows - first)) {
#define KVARN_PANEL(R) \
  case R: panel_with_tiles<BITS, OFFSETS, SPAN, R>(j, begin, end, first); break;
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
  // A few equal shares a thread. With many rows a share is at most what stays in the second-level cache beside the rows.
  const int cached = imax(1, int(131072 / tile_bytes(w))), wanted = panels == 1 ? 0 : (j.n_tiles + cached - 1) / cached;
  const int shares = imax(4, (wanted + c.n_threads - 1) / c.n_threads);
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
