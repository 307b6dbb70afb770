// The activations of a product: read as they stand, normed or gated, then rounded to int8, a scale for each span.
#pragma once
#include "product_data.h"

namespace {

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

// x [n] times `inverse` -> int8 codes; returns their sum. n is a multiple of 32.
#if defined(__AVX2__) && !defined(__AVX512F__)
INLINE int round_group(const float* x, int n, float inverse, int8_t* codes) {
  const __m256i lanes_in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i total = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 4 * W) {
    __m256i code[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
      const vf rounded = fma(load<vf>(x + i + v * W), splat(inverse), splat(kToInteger));
      code[v] = _mm256_sub_epi32((__m256i)rounded, _mm256_set1_epi32(0x4b400000));
    }
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
    store(codes + i, _mm256_permutevar8x32_epi32(bytes, lanes_in_order));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1)));
  }
  return hsum_i((vi)total);
}
#else
INLINE int round_group(const float* x, int n, float inverse, int8_t* codes) {
  vi total{};
  for (int i = 0; i < n; i += W) {
    vf rounded = fma(load<vf>(x + i), splat(inverse), splat(kToInteger));
    vi code = (vi)rounded - 0x4b400000;
    total += (vi)((vu)code << 24) >> 24;  // the byte that is kept: a NaN's integer would overflow the sum
    narrow_bytes(code, codes + i);
  }
  return hsum_i(total);
}
#endif

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

// Row r of the panel: its numbers, and its codes [columns] to `row_codes`.
inline void quantize_row(const ProductJob& j, int64_t first, int in_panel, int r, float* x, int8_t* row_codes) {
  const BlockMatrix& w = j.call->matrix;
  const int in_span = j.groups / j.spans, span = in_span * w.group, zero = zero_code(w);
  float_row_of(*j.call, first + r, x);
  RowScale row;
  float* ratio = j.q.ratio + first * (j.spans + 1) + r;
  for (int p = 0, g = 0; p < j.spans; p++) {
    float inverse;
    ratio[p * in_panel] = next_scale(&row, magnitude(x + p * span, span), &inverse);
    uint32_t sums = 0;
    for (int h = 0; h < in_span; h++, g++) {
      const int sum = round_group(x + g * w.group, w.group, inverse, row_codes + g * w.group);
      const bool whole = kWholeSums && w.offsets;
      j.q.base[first * j.groups + g * in_panel + r] = whole ? int32_t(float_bits(float(sum))) : -zero * sum;
      if (!kWholeSums) sums = sums >> 16 | uint32_t(float_bf16(float(sum))) << 16;
    }
    if (!kWholeSums) j.q.sums[first * j.spans + p * in_panel + r] = sums;
  }
  ratio[j.spans * in_panel] = row.before;
}

// codes: n rows, `columns` bytes after each other -> the panel's rows from `from` on.
INLINE void put_codes(const ProductJob& j, int64_t first, int in_panel, int from, int n, const int8_t* codes) {
  const int64_t columns = j.call->matrix.columns;
  int8_t* out = j.q.codes + first * columns + 4 * from;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (n == 4 && in_panel == 4) {  // 16 columns of each row as four times four
    for (int64_t k = 0; k < columns; k += 16, out += 64) {
      __m128i row[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) row[r] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + r * columns + k));
      const __m128i a = _mm_unpacklo_epi32(row[0], row[1]), b = _mm_unpacklo_epi32(row[2], row[3]);
      const __m128i c = _mm_unpackhi_epi32(row[0], row[1]), d = _mm_unpackhi_epi32(row[2], row[3]);
      store(out, _mm_unpacklo_epi64(a, b)), store(out + 16, _mm_unpackhi_epi64(a, b));
      store(out + 32, _mm_unpacklo_epi64(c, d)), store(out + 48, _mm_unpackhi_epi64(c, d));
    }
    return;
  }
#endif
  for (int64_t k = 0; k < columns; k += 4, out += 4 * in_panel) {
    if (n == 4) {
#pragma GCC unroll 4
      for (int r = 0; r < 4; r++) __builtin_memcpy(out + 4 * r, codes + r * columns + k, 4);
    } else {
      for (int r = 0; r < n; r++) __builtin_memcpy(out + 4 * r, codes + r * columns + k, 4);
    }
  }
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
  thread_scratch.reset(Scratch::bytes<float>(columns) + Scratch::bytes<int8_t>(kRowsAtOnce * columns));
  float* x = thread_scratch.take<float>(columns);
  int8_t* codes = thread_scratch.take<int8_t>(kRowsAtOnce * columns);
  const int n = int(rows - begin < kRowsAtOnce ? rows - begin : kRowsAtOnce);
  for (int r = 0; r < n; r++) quantize_row(j, first, in_panel, from + r, x, codes + r * columns);
  put_codes(j, first, in_panel, from, n, codes);
  if (begin + kRowsAtOnce < rows) return;
  for (int r = int(rows - first); r < in_panel; r++) no_row(j, first, in_panel, r);
}

}  // namespace
