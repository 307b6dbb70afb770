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
#elif defined(__AVX2__)
  const __m128i split = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  for (; groups == 2 && j + W <= block; j += W) {
    const __m128i a = _mm_shuffle_epi8(load<__m128i>(x + 2 * j), split), b = _mm_shuffle_epi8(load<__m128i>(x + 2 * j + W), split);
    store(out + j, _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b)));
    store(out + block + j, _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b)));
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

// The weights of one row's stripes times the scales of group g (`first`: where those of a block begin) into w.products, whose peak
// is returned; the weights' sum with the zero points is added to the group's n channels. Scales and zero points of slots that hold
// nothing are 0.
INLINE Peak scale_stripes(const float* p, const Work& w, int n_stripes, int first, float* mix, int n) {
  vf zeros{}, most{}, all{};
  for (int t = 0; t < n_stripes; t++) {
    const float *scale = w.v_scale + w.stripe_scale[t] + first, *zero = w.v_zero + w.stripe_scale[t] + first;
    for (int j = 0; j < kStripe; j += W) {
      const vf weight = load<vf>(p + w.stripe_offset[t] + j), product = weight * load<vf>(scale + j);
      zeros = fma(weight, load<vf>(zero + j), zeros);
      most = vmax(product, most), all += product;
      store(w.products + w.stripe_offset[t] + j, product);
    }
  }
  const vf sum = splat(hsum(zeros));
  for (int i = 0; i < n; i += W) store(mix + i, load<vf>(mix + i) + sum);
  return {hmax(most), hsum(all)};
}

INLINE int scale_groups(const Step& s, const Side& v) { return is_affine(v.codec) ? s.v_dim / v.group : 1; }

// Scales (and zero points) of one head's values in every visited block that is mixed by integers.
inline void stage_v_scales(const Step& s, const AttendCall& c, const Shape& h, const Work& w, int n, int head) {
  const int64_t room = int64_t(h.padded_block) * (s.v_dim / 32);
  for (int i = 0; i < n; i++) {
    const Column& col = w.columns[i];
    const Side& v = col.pool->v;
    if (col.v_way != kInteger) continue;
    const int groups = scale_groups(s, v);
    group_scales(halves_at(v.part[1], col.block, c.layer, head), col, h.block, groups, w.v_scale + i * room);
    if (is_affine(v.codec)) group_scales(halves_at(v.part[2], col.block, c.layer, head), col, h.block, groups, w.v_zero + i * room);
  }
}

INLINE void mix_codec(int codec, const Stripes& v, int channel, int rows, float* mix, int64_t ld, bool asking) {
  switch (codec) {
    case kInt8: return mix_stripes<kInt8>(v, channel, rows, mix, ld, asking);
    case kAffine4: return mix_stripes<kAffine4>(v, channel, rows, mix, ld, asking);
    case kAffine3: return mix_stripes<kAffine3>(v, channel, rows, mix, ld, asking);
    case kAffine2: return mix_stripes<kAffine2>(v, channel, rows, mix, ld, asking);
    default: return;
  }
}

// mix of one head += the weights of a split's blocks in one pool times their values, asking for what w.ahead says.
inline void mix_pool(const Step& s, const AttendCall& c, const Shape& h, const Work& w, int n, int pool, const HeadRows& rows,
                     int64_t width, float* mix) {
  const Side& side = s.pools[pool].v;
  const bool affine = is_affine(side.codec);
  const int groups = scale_groups(s, side), group = s.v_dim / groups, span = affine ? 32 : 64;
  const int64_t room = int64_t(h.padded_block) * (s.v_dim / 32);
  const float* p = w.scores + rows.first * width;
  Stripes v{w.stripe, w.stripe_ahead, 0, row_bytes(side.codec, s.v_dim), w.weights, w.factor};
  for (int i = 0; i < n; i++) {
    const Column& col = w.columns[i];
    if (col.at != pool) continue;
    Ahead next = w.ahead[i];
    for (int j = 0; j < h.block; j += kStripe, v.n++, next.at += kStripe / 4 * kMixLines * next.step) {
      w.stripe[v.n] = at(side.part[0], col.block, c.layer, rows.head) + j * v.row;
      w.stripe_offset[v.n] = i * h.padded_block + j;
      w.stripe_scale[v.n] = i * room + j;
      w.stripe_ahead[v.n] = next;
    }
  }
  for (int g = 0; g < groups; g++) {
    for (int r = 0; r < rows.n; r++) {
      const float* x = p + r * width;
      uint8_t* out = w.weights + int64_t(r) * v.n * 2 * kStripe;
      Peak peak;
      if (affine) {
        peak = scale_stripes(x, w, v.n, g * h.block, mix + int64_t(r) * h.padded_v + g * group, group);
        x = w.products;
      } else {
        peak = peak_of(x, w.stripe_offset, v.n);
      }
      code_weights(x, w.stripe_offset, v.n, peak.top, out);
      w.factor[r] = peak.top * (1.0f / kTopWeight) + 0.0f * peak.sum;
    }
    for (int i = g * group; i < (g + 1) * group; i += span) mix_codec(side.codec, v, i, rows.n, mix, h.padded_v, i == 0);
  }
}

// The same for all pools, in their order.
inline void mix_by_integers(const Step& s, const AttendCall& c, const Shape& h, const Work& w, int n, const HeadRows& rows,
                            int64_t width, float* mix) {
  for (int at = 0; at < s.n_pools; at++) {
    bool any = false;
    for (int i = 0; i < n; i++) any |= w.columns[i].at == at;
    if (any && h.v_ways[at] == kInteger) mix_pool(s, c, h, w, n, at, rows, width, mix);
  }
}

// One head's values in a block. Slots that hold nothing may hold anything: rows of zeros stand in for them, in place `index` of
// the scratch.
INLINE const uint8_t* v_rows(const Step& s, const Shape& h, const Work& w, const Column& col, const uint8_t* codes, int index) {
  if (!col.holes) return codes;
  int64_t bytes = row_bytes(col.pool->v.codec, s.v_dim);
  auto* out = reinterpret_cast<uint8_t*>(w.stage) + index * h.block * bytes;
  for (int j = 0; j < h.block; j++)
    if (col.positions[j] < 0) __builtin_memset(out + j * bytes, 0, bytes);
    else __builtin_memcpy(out + j * bytes, codes + j * bytes, bytes);
  return out;
}

// mix += weights [rows][block] times the rows of V, channels [first, first + n) of it.
inline void mix_plain(const Step& s, const Shape& h, const Work& w, const Column& col, int n_rows, const uint8_t* codes,
                      const float* weights, int64_t width, int first, int n, float* mix, const Ahead& ahead) {
  int codec = col.pool->v.codec;
  if (fast_row(codec, s.v_dim) && n % (2 * W) == 0 && (codec < kAffine4 || first % 32 == 0)) {
    const uint8_t* rows = v_rows(s, h, w, col, codes, 0);
    matmul(codec, rows + row_bytes(codec, first), row_bytes(codec, s.v_dim), n, weights, width, n_rows, h.block,
           mix + first, h.padded_v, true, Ahead{ahead.at + first / 32 * h.block * ahead.step, ahead.step});
    return;
  }
  stage_rows(codec, codes, h.block, s.v_dim, col.holes ? col.positions : nullptr, w.stage, h.padded_v);
  if (first == 0 && n == s.v_dim) {
    matmul(kF32, reinterpret_cast<uint8_t*>(w.stage), 4 * h.padded_v, h.padded_v, weights, width, n_rows, h.block, mix,
           h.padded_v, true, ahead);
    return;
  }
  for (int r = 0; r < n_rows; r++)
    for (int j = 0; j < h.block; j++)
      for (int i = first; i < first + n; i++)
        mix[int64_t(r) * h.padded_v + i] += weights[r * width + j] * w.stage[int64_t(j) * h.padded_v + i];
}

inline void mix_affine(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                       const HeadRows& rows, const uint8_t* codes, const float* p, int64_t width, float* mix, const Ahead& ahead) {
  const Side& v = col.pool->v;
  const int groups = s.v_dim / v.group;
  group_scales(halves_at(v.part[1], col.block, c.layer, rows.head), col, h.block, groups, w.scale);
  group_scales(halves_at(v.part[2], col.block, c.layer, rows.head), col, h.block, groups, w.zero);
  for (int g = 0; g < groups; g++) {
    mix_zero(p, width, rows.n, h.block, w.zero + g * h.block, mix + g * v.group, h.padded_v, v.group);
    scale_weights(p, width, rows.n, h.block, w.scale + g * h.block, w.q_scaled);
    mix_plain(s, h, w, col, rows.n, codes, w.q_scaled, h.block, g * v.group, v.group, mix, ahead);
  }
}

inline void mix_by_floats(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const Column& col,
                          const HeadRows& rows, const float* p, int64_t width, float* mix, const Ahead& ahead) {
  const Side& v = col.pool->v;
  const uint8_t* codes = at(v.part[0], col.block, c.layer, rows.head);
  if (is_affine(v.codec)) return mix_affine(s, c, h, w, col, rows, codes, p, width, mix, ahead);
  if (has_token_scale(v.codec)) {
    halves(halves_at(v.part[1], col.block, c.layer, rows.head), h.block, w.scale);
    scale_weights(p, width, rows.n, h.block, w.scale, w.q_scaled);
    float* to = is_turbo(v.codec) ? w.mix_turbo + int64_t(rows.first) * h.padded_v : mix;
    mix_plain(s, h, w, col, rows.n, codes, w.q_scaled, h.block, 0, s.v_dim, to, ahead);
    return;
  }
  mix_plain(s, h, w, col, rows.n, codes, p, width, 0, s.v_dim, mix, ahead);
}

// mix [n][padded_v] of one head += the weights of the visited blocks [begin, end), all mixed by dot products and of one codec,
// times their values.
inline void mix_dots(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const HeadRows& rows, int begin, int end,
                     int64_t width, float* mix) {
  const int codec = w.columns[begin].pool->v.codec;
  for (int i = begin; i < end; i++) {
    const Column& col = w.columns[i];
    const uint8_t* v = v_rows(s, h, w, col, at(col.pool->v.part[0], col.block, c.layer, rows.head), i - begin);
    w.parts[i - begin] = {v, w.p_dot + (rows.first * width + int64_t(i) * h.padded_block) / 2, w.ahead[i]};
  }
  auto product = codec == kBF16 ? matmul_dot<kBF16> : matmul_dot<kFP8>;
  product(w.parts, end - begin, s.v_dim, width / 2, rows.n, h.block / 2, mix, h.padded_v, true);
}

// The same for floats that a product over several parts takes.
inline void mix_parts(const Step& s, const AttendCall& c, const Shape& h, const Work& w, const HeadRows& rows, int begin, int end,
                      int64_t width, float* mix) {
  for (int i = begin; i < end; i++) {
    const Column& col = w.columns[i];
    const uint8_t* v = v_rows(s, h, w, col, at(col.pool->v.part[0], col.block, c.layer, rows.head), i - begin);
    w.row_parts[i - begin] = {v, w.scores + rows.first * width + int64_t(i) * h.padded_block, w.ahead[i]};
  }
  matmul_bf16(w.row_parts, end - begin, row_bytes(kBF16, s.v_dim), s.v_dim, width, rows.n, h.block, mix, h.padded_v, true);
}

// The same for all visited blocks whose values are not mixed by integers, in their order.
inline void mix_others(const Step& s, const AttendCall& c, const Shape& h, const Work& w, int n, const HeadRows& rows, int64_t width,
                       float* mix) {
  for (int i = 0, end; i < n; i = end) {
    const Column& col = w.columns[i];
    end = i + 1;
    const int codec = col.pool->v.codec;
    const bool parts = col.v_way == kPlain && takes_parts(codec, s.v_dim, rows.n);
    if (col.v_way == kPlain && !parts)
      mix_by_floats(s, c, h, w, col, rows, w.scores + rows.first * width + int64_t(i) * h.padded_block, width, mix, w.ahead[i]);
    if (col.v_way != kDot && !parts) continue;
    while (end < n && w.columns[end].v_way == col.v_way && w.columns[end].pool->v.codec == codec) end++;
    if (parts) mix_parts(s, c, h, w, rows, i, end, width, mix);
    else mix_dots(s, c, h, w, rows, i, end, width, mix);
  }
}

}  // namespace
