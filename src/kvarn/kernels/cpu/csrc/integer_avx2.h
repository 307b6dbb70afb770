// Integer products of pairs of 16 bits (VPMADDWD), for int8 keys and values and for 4-bit values. On processors without VNNI
// they make as many products as multiply-adds of floats do, without turning codes into floats first.
// Queries: 16 bits with a power of two as their step, which hold a bfloat16 above 1/128 of its row's largest exactly, but for
// the very largest, and others to 2^-16 of it. Weights: 15 bits. 4-bit keys would need more bits, since the scales
// of their channels are folded into the query; they are multiplied as floats.
#pragma once
#include "integer_parts.h"

namespace {

constexpr int kMixLines = 2;
constexpr int kLongestBlock = 256;  // 2^15 of a weight times 15 * 16 times so many tokens fit 31 bits
INLINE bool k_has_integers(int codec) { return codec == kInt8; }
INLINE bool v_has_integers(int codec) { return codec == kInt8 || codec == kAffine4; }

// sum_a += a * pair, sum_b += b * pair: products of two neighbours of 16 bits, `pair` being two such numbers in memory. In
// assembly, in this order: GCC would put products first and some of the sums on the stack. 7.1 of 8 products a cycle on Zen 1.
INLINE void add_pairs(__m256i& sum_a, __m256i& sum_b, __m256i a, __m256i b, const uint8_t* pair) {
  __m256i x, y;
  asm("vpbroadcastd %4, %2\n\tvpmaddwd %2, %5, %3\n\tvpaddd %3, %0, %0\n\tvpmaddwd %2, %6, %2\n\tvpaddd %2, %1, %1"
      : "+x"(sum_a), "+x"(sum_b), "=&x"(x), "=&x"(y)
      : "m"(*reinterpret_cast<const int32_t*>(pair)), "x"(a), "x"(b));
}

// Rounded to 16 bits each, in order.
INLINE __m256i sixteen_codes(vf a, vf b) {
  const __m256i codes = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)a), _mm256_cvtps_epi32((__m256)b));
  return _mm256_permute4x64_epi64(codes, 0xd8);
}

// sum [R][4] += two integers (at pair, `apart` bytes from one row of results to the next) times two rows of 32 codes. Sums 0 and
// 1 hold the columns 0, 2, 4, 6 and 1, 3, 5, 7 of each lane's 16, sums 2 and 3 those from 8 on; 4-bit codes in the upper lane
// count 16 times.
template <int C, int R>
INLINE void add_two_rows(__m256i (*sum)[4], const uint8_t* m, int64_t row, const uint8_t* pair, int64_t apart) {
  auto load_row = [](const uint8_t* p) {
    if constexpr (C == kInt8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    else return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  };
  const uint8_t* next = m + row;
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m256i a = load_row(m), b = load_row(next);
    const __m256i both = half ? _mm256_unpackhi_epi16(a, b) : _mm256_unpacklo_epi16(a, b);
    __m256i even, odd;
    if constexpr (C == kInt8) {
      even = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8), odd = _mm256_srai_epi16(both, 8);
    } else {
      const __m256i nibbles = _mm256_set_m128i(_mm_set1_epi16(0xf0), _mm_set1_epi16(0x0f));
      even = _mm256_and_si256(both, nibbles), odd = _mm256_and_si256(_mm256_srli_epi16(both, 8), nibbles);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) add_pairs(sum[r][2 * half], sum[r][2 * half + 1], even, odd, pair + r * apart);
    asm("" : "+r"(m), "+r"(next));  // read again rather than kept in registers
  }
}

// Such sums as vectors of columns, in order. Lanes are exchanged by insertions: VPERM2I128 is slow on Zen 1.
template <int C>
INLINE void in_order(const __m256i* sum, vf* out) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m256i a = _mm256_unpacklo_epi32(sum[2 * i], sum[2 * i + 1]), b = _mm256_unpackhi_epi32(sum[2 * i], sum[2 * i + 1]);
    out[i] = (vf)_mm256_cvtepi32_ps(_mm256_inserti128_si256(a, _mm256_castsi256_si128(b), 1));
    out[2 + i] = (vf)_mm256_cvtepi32_ps(_mm256_inserti128_si256(b, _mm256_extracti128_si256(a, 1), 0));
    if constexpr (C == kAffine4) out[2 + i] *= 0.0625f;
  }
}

// x [n] in 16 bits, out int16 [n]. top: a bound of the magnitudes. Returns the step, a NaN where x holds something that is not
// finite.
INLINE float int8_query(const float* x, int n, float top, int8_t* out, int32_t* shift) {
  const int biased = imax(int(float_bits(top) >> 23), 15);
  const vf inverse = splat(bits_float(uint32_t(254 - (biased - 14)) << 23)), most = splat(32767.0f);
  for (int i = 0; i < n; i += 2 * W, out += 4 * W)
    store(out, sixteen_codes(vmin(load<vf>(x + i) * inverse, most), vmin(load<vf>(x + i + W) * inverse, most)));
  *shift = 0;
  return biased == 255 ? __builtin_nanf("") : bits_float(uint32_t(biased - 14) << 23);
}
INLINE float packed_query(const float*, const float*, int, float, int8_t*) { return 0.0f; }  // never called

template <int R>
INLINE void score_rows(const uint8_t* k, int64_t row, int dim, const Queries& q, int r0, const uint16_t* scale, float* out,
                       int64_t width, Ahead ahead) {
  const uint8_t* pair = reinterpret_cast<const uint8_t*>(q.digits) + int64_t(r0) * 4 * dim;
  __m256i sum[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum[r][i] = _mm256_setzero_si256();
  for (int c = 0; c < dim; c += 2, k += 2 * row, pair += 4) {
    ask<kScoreLines / 2>(ahead);
    add_two_rows<kInt8, R>(sum, k, row, pair, 4 * dim);
  }
  vf scales[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) scales[i] = f16_vf(load<vh>(scale + i * W));
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const vf step = splat(q.step[r0 + r]);
    vf x[4];
    in_order<kInt8>(sum[r], x);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) store(out + (r0 + r) * width + i * W, x[i] * step * scales[i]);
  }
}

// q . k of one stripe for `rows` rows: out [rows][width]. k: the stripe's first byte; row: bytes of a channel; scale [32]: of
// the tokens, in half precision.
template <int C>
void score_stripe(const uint8_t* k, int64_t row, int dim, const Queries& q, int rows, const uint16_t* scale, float* out,
                  int64_t width, Ahead ahead) {
  if constexpr (C == kInt8) {
    for (int r = 0; r < rows; ahead = {k, 0}) {
      const int left = rows - r;
      if (left == 3 || left > 4) score_rows<3>(k, row, dim, q, r, scale, out, width, ahead), r += 3;
      else if (left >= 2) score_rows<2>(k, row, dim, q, r, scale, out, width, ahead), r += 2;
      else score_rows<1>(k, row, dim, q, r, scale, out, width, ahead), r += 1;
    }
  }
}

// R rows of mix [..][ld] += factor * weights times 32 channels of V's stripes.
template <int C, int R>
INLINE void mix_rows(const Stripes& v, int64_t first, int r0, float* mix, int64_t ld, bool asking) {
  __m256i sum[R][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sum[r][i] = _mm256_setzero_si256();
  const int64_t apart = int64_t(v.n) * 2 * kStripe;
  for (int t = 0; t < v.n; t++) {
    const uint8_t *codes = v.at[t] + first, *pair = v.weights + r0 * apart + t * 2 * kStripe;
    Ahead ahead = asking ? v.ahead[t] : Ahead{codes, 0};
    for (int j = 0; j < kStripe; j += 2, codes += 2 * v.row, pair += 4) {
      ask<kMixLines / 2>(ahead);
      add_two_rows<C, R>(sum, codes, v.row, pair, apart);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    vf x[4];
    in_order<C>(sum[r], x);
    float* to = mix + (r0 + r) * ld;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) store(to + i * W, fma(x[i], splat(v.factor[r0 + r]), load<vf>(to + i * W)));
  }
}

// mix [rows][ld] += factor * weights times the channels [channel, channel + 64) of int8, or [channel, channel + 32) of 4-bit
// codes, of V's stripes.
template <int C>
void mix_stripes(const Stripes& v, int channel, int rows, float* mix, int64_t ld, bool asking) {
  if constexpr (C == kInt8 || C == kAffine4) {
    for (int end = channel + (C == kInt8 ? 64 : 32); channel < end; channel += 32) {
      const int64_t first = row_bytes(C, channel);
      for (int r = 0; r < rows; asking = false) {
        const int left = rows - r;
        if (left == 3 || left > 4) mix_rows<C, 3>(v, first, r, mix + channel, ld, asking), r += 3;
        else if (left >= 2) mix_rows<C, 2>(v, first, r, mix + channel, ld, asking), r += 2;
        else mix_rows<C, 1>(v, first, r, mix + channel, ld, asking), r += 1;
      }
    }
  }
}

// Weights of a row's stripes, x [offset[t]], as 16 bits each, kTopWeight for `top`, the largest of them: out int16 [n][kStripe].
constexpr float kTopWeight = 32767.0f;
INLINE void code_weights(const float* x, const int* offset, int n, float top, uint8_t* out) {
  const float ratio = top > 0.0f ? kTopWeight / top : 0.0f;
  for (int t = 0; t < n; t++)
    for (int j = 0; j < kStripe; j += 2 * W, out += 4 * W)
      store(out, sixteen_codes(load<vf>(x + offset[t] + j) * ratio, load<vf>(x + offset[t] + j + W) * ratio));
}

}  // namespace
