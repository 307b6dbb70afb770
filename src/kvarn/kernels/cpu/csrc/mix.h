// Mixing: softmax weights times the values of a block, in whichever way its format is multiplied.
#pragma once
#include "score.h"

namespace {

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

// Scales [block][groups] as floats [groups][block]; of slots that hold nothing, which may be anything: 0.
inline void group_scales(const uint16_t* x, const Column& col, int block, int groups, float* out) {
  int j = 0;
#if defined(__AVX512F__)
  alignas(64) static const int32_t even[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  const __m512i pick = _mm512_load_si512(even), next = _mm512_add_epi32(pick, _mm512_set1_epi32(1));
  for (; groups == 2 && j + W <= block; j += W) {
    vf a = f16_vf(load<vh>(x + 2 * j)), b = f16_vf(load<vh>(x + 2 * j + W));
    store(out + j, (vf)_mm512_permutex2var_ps((__m512)a, pick, (__m512)b));
    store(out + block + j, (vf)_mm512_permutex2var_ps((__m512)a, next, (__m512)b));
  }
#endif
  for (; j + W <= block && groups == 1; j += W) store(out + j, f16_vf(load<vh>(x + j)));
  for (; j < block; j++)
    for (int g = 0; g < groups; g++) out[g * block + j] = f16_float(x[j * groups + g]);
  if (!col.holes) return;
  for (j = 0; j < block; j++)
    for (int g = 0; g < groups && col.positions[j] < 0; g++) out[g * block + j] = 0.0f;
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

// The largest of 32 scales, and in ratio what makes it 65535.
INLINE float ratio_of(const float* scale, float* ratio) {
  const float top = top_magnitude(scale, kStripe), factor = top > 0.0f ? 65535.0f / top : 0.0f;
  for (int j = 0; j < kStripe; j += W) store(ratio + j, load<vf>(scale + j) * factor);
  return top * (1.0f / 65535.0f);
}

// One stripe of V's channels [first, first + 64) of int8 or [first, first + 32) of packed codes.
INLINE void mix_integers(int codec, const uint8_t* v, int64_t row, int first, const uint8_t* weights, int rows, float factor,
                         float* mix, int64_t ld) {
  v += row_bytes(codec, first / 64 * 64);
  mix += first;
  const int half = first / 32 % 2;
  switch (codec) {
    case kInt8: return mix_stripe<kInt8>(v, row, 0, weights, rows, factor, mix, ld);
    case kAffine4: return mix_stripe<kAffine4>(v, row, half, weights, rows, factor, mix, ld);
    case kAffine3: return mix_stripe<kAffine3>(v, row, half, weights, rows, factor, mix, ld);
    case kAffine2: return mix_stripe<kAffine2>(v, row, half, weights, rows, factor, mix, ld);
    default: return;
  }
}

inline void mix_by_integers(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                            const HeadRows& rows, const float* p, int64_t width, float* mix) {
  const Side& v = col.pool->v;
  const uint8_t* codes = at(v.part[0], col.block, c.layer, rows.head);
  const int64_t row = row_bytes(v.codec, s.v_dim);
  const bool affine = is_affine(v.codec);
  const int group = affine ? v.group : s.v_dim, groups = s.v_dim / group, span = affine ? 32 : 64;
  group_scales(halves_at(v.part[1], col.block, c.layer, rows.head), col, h.block, groups, w.scale);
  if (affine) group_scales(halves_at(v.part[2], col.block, c.layer, rows.head), col, h.block, groups, w.zero);
  alignas(64) float ratio[kStripe];
  for (int g = 0; g < groups; g++) {
    if (affine) mix_zero(p, width, rows.n, h.block, w.zero + g * h.block, mix + g * group, h.padded_v, group);
    for (int j = 0; j < h.block; j += kStripe) {
      const float factor = ratio_of(w.scale + g * h.block + j, ratio);
      for (int r = 0; r < rows.n; r++) split_weights(p + r * width + j, ratio, w.weights + r * 2 * kStripe);
      for (int i = g * group; i < (g + 1) * group; i += span)
        mix_integers(v.codec, codes + j * row, row, i, w.weights, rows.n, factor, mix, h.padded_v);
    }
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
inline void mix_plain(const Step& s, const Shape& h, const Work& w, const Column& col, int n_rows, const uint8_t* codes,
                      const float* weights, int64_t width, int first, int n, float* mix) {
  int codec = col.pool->v.codec;
  if (fast_row(codec, s.v_dim) && n % (2 * W) == 0 && (codec < kAffine4 || first % 32 == 0)) {
    const uint8_t* rows = v_rows(s, h, w, col, codes);
    matmul(codec, rows + row_bytes(codec, first), row_bytes(codec, s.v_dim), n, weights, width, n_rows, h.block,
           mix + first, h.padded_v, true);
    return;
  }
  stage_rows(codec, codes, h.block, s.v_dim, col.holes ? col.positions : nullptr, w.stage, h.padded_v);
  if (first == 0 && n == s.v_dim) {
    matmul(kF32, reinterpret_cast<uint8_t*>(w.stage), 4 * h.padded_v, h.padded_v, weights, width, n_rows, h.block, mix,
           h.padded_v, true);
    return;
  }
  for (int r = 0; r < n_rows; r++)
    for (int j = 0; j < h.block; j++)
      for (int i = first; i < first + n; i++)
        mix[int64_t(r) * h.padded_v + i] += weights[r * width + j] * w.stage[int64_t(j) * h.padded_v + i];
}

inline void mix_affine(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                       const HeadRows& rows, const uint8_t* codes, const float* p, int64_t width, float* mix) {
  const Side& v = col.pool->v;
  const int groups = s.v_dim / v.group;
  group_scales(halves_at(v.part[1], col.block, c.layer, rows.head), col, h.block, groups, w.scale);
  group_scales(halves_at(v.part[2], col.block, c.layer, rows.head), col, h.block, groups, w.zero);
  for (int g = 0; g < groups; g++) {
    mix_zero(p, width, rows.n, h.block, w.zero + g * h.block, mix + g * v.group, h.padded_v, v.group);
    scale_weights(p, width, rows.n, h.block, w.scale + g * h.block, w.q_scaled);
    mix_plain(s, h, w, col, rows.n, codes, w.q_scaled, h.block, g * v.group, v.group, mix);
  }
}

inline void mix_by_floats(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                          const HeadRows& rows, const float* p, int64_t width, float* mix) {
  const Side& v = col.pool->v;
  const uint8_t* codes = at(v.part[0], col.block, c.layer, rows.head);
  if (is_affine(v.codec)) return mix_affine(s, c, h, w, col, rows, codes, p, width, mix);
  if (has_token_scale(v.codec)) {
    halves(halves_at(v.part[1], col.block, c.layer, rows.head), h.block, w.scale);
    scale_weights(p, width, rows.n, h.block, w.scale, w.q_scaled);
    float* to = is_turbo(v.codec) ? w.mix_turbo + int64_t(rows.first) * h.padded_v : mix;
    mix_plain(s, h, w, col, rows.n, codes, w.q_scaled, h.block, 0, s.v_dim, to);
    return;
  }
  mix_plain(s, h, w, col, rows.n, codes, p, width, 0, s.v_dim, mix);
}

// mix [n][padded_v] of one head += the weights of visited block `index` times its values.
inline void mix_block(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                      const HeadRows& rows, int index, int64_t width, float* mix) {
  const float* p = w.scores + rows.first * width + int64_t(index) * h.padded_block;
  if (col.v_way == kInteger) return mix_by_integers(s, c, h, w, col, rows, p, width, mix);
  if (col.v_way == kPlain) return mix_by_floats(s, c, h, w, col, rows, p, width, mix);
  const uint8_t* v = v_rows(s, h, w, col, at(col.pool->v.part[0], col.block, c.layer, rows.head));
  const uint32_t* pairs = w.p_dot + (rows.first * width + int64_t(index) * h.padded_block) / 2;
  auto product = col.pool->v.codec == kBF16 ? matmul_dot<kBF16> : matmul_dot<kFP8>;
  product(v, s.v_dim, pairs, width / 2, rows.n, h.block / 2, mix, h.padded_v, true);
}

}  // namespace
