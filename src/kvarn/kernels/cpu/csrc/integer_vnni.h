// Integer products of one byte (VPDPBUSD). Scores: a query is rounded to N signed bytes, digits in base 256, so that q . k is
// a sum of N integer products. Two bytes (int8 keys) hold a bfloat16 above 1/128 of its row's largest exactly, but for the very
// largest, and others to 2^-16 of it; three bytes (per-channel scales folded into the query) err by 2^-23.
#pragma once
#include "integer_parts.h"

namespace {

constexpr int kMixLines = 3;
constexpr int kLongestBlock = 1 << 15;  // weights' digits of 255 times 127 times so many tokens fit 31 bits
INLINE bool k_has_integers(int codec) { return codec == kInt8 || is_affine(codec); }
INLINE bool v_has_integers(int codec) { return codec == kInt8 || is_affine(codec); }

// sum += products of unsigned and signed bytes, four a lane. In assembly: GCC copies sums around the intrinsic, and spills.
INLINE void add_products(__m512i& sum, __m512i unsigned_bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
}

struct alignas(64) Bytes64 {
  uint8_t at[64];
};
template <class F>
constexpr Bytes64 bytes64(F f) {  // of 16 lanes of 4 bytes: f(lane, byte)
  Bytes64 b{};
  for (int i = 0; i < 64; i++) b.at[i] = uint8_t(f(i / 4, i % 4));
  return b;
}
INLINE __m512i vector_of(const Bytes64& b) { return _mm512_load_si512(b.at); }
INLINE __m512i four_bytes(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
INLINE __m256i half_load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE __m512i two_halves(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

constexpr Bytes64 kLaneRows = bytes64([](int t, int c) { return c * 16 + t; });
constexpr Bytes64 kLaneRows8 = bytes64([](int t, int c) { return c * 16 + t % 8; });
constexpr Bytes64 kLaneHigh = bytes64([](int t, int c) { return c * 16 + 8 + t % 4; });
constexpr Bytes64 kShift2 = bytes64([](int t, int c) { return c % 2 ? 0 : 2 * (t / 8); });  // of 16-bit elements
constexpr Bytes64 kShift1 = bytes64([](int t, int c) { return c % 2 ? 0 : t / 4; });

// The digits of 16 numbers, as bytes of a lane each, in the order of `split_query`: N of them, N = 2 for int8 keys.
template <int N>
constexpr Bytes64 kDigits = bytes64([](int t, int c) {
  const int part = t / 4, i = t % 4 * 4 + c, channel = N == 2 ? i / 8 * 8 + i % 4 * 2 + i % 8 / 4 : i;
  return 4 * channel + (part < N ? N - 1 - part : 3);
});

// x [n] (times scale [n], if any) in N digits of base 256, out [n / 16][4][16]: the most significant ones of 16 channels first.
// For int8 keys (N = 2) each 8 channels stand as 0, 2, 4, 6, 1, 3, 5, 7. top: a bound of the magnitudes. Returns the step, a NaN
// where x holds something that is not finite.
template <int N>
INLINE float split_query(const float* x, const float* scale, int n, float top, int8_t* out) {
  constexpr int bits = N == 2 ? 15 : 22;
  int biased = imax(int(float_bits(top) >> 23), bits);
  const float step = bits_float(uint32_t(biased + 1 - bits) << 23);
  const vf inverse = splat(bits_float(uint32_t(254 - (biased + 1 - bits)) << 23));
  const vf most = splat(N == 2 ? 127 * 257.0f : 1 << bits);  // the largest that two signed digits can say
  const __m512i half = _mm512_set1_epi32(N == 2 ? 0x8080 : 0x808080), pick = vector_of(kDigits<N>);
  for (int i = 0; i < n; i += W, out += 4 * W) {
    vf v = scale == nullptr ? load<vf>(x + i) : load<vf>(x + i) * load<vf>(scale + i);
    __m512i code = _mm512_cvtps_epi32((__m512)vmin(v * inverse, most));
    code = _mm512_xor_si512(_mm512_add_epi32(code, half), half);  // each byte less 128 is a signed digit
    _mm512_storeu_si512(out, _mm512_permutexvar_epi8(pick, code));
  }
  return biased == 255 ? __builtin_nanf("") : step;
}

// The sum of x as its two digits say it, in steps.
INLINE int32_t sum_of_digits(const int8_t* digits, int n) {
  alignas(64) int32_t lanes[16];
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < n; i += W) add_products(sum, _mm512_set1_epi8(1), _mm512_loadu_si512(digits + 4 * i));
  _mm512_store_si512(lanes, sum);
  int32_t total = 0;
  for (int i = 0; i < 4; i++) total += 256 * lanes[i] + lanes[4 + i];
  return total;
}

// The query for int8 keys, whose codes are shifted by 128: *shift is 128 times the sum of its steps. Returns the step.
INLINE float int8_query(const float* x, int n, float top, int8_t* out, int32_t* shift) {
  const float step = split_query<2>(x, nullptr, n, top, out);
  *shift = 128 * sum_of_digits(out, n);
  return step;
}
// The query times the scales of its channels for packed keys. Returns the step.
INLINE float packed_query(const float* x, const float* scale, int n, float top, int8_t* out) {
  return split_query<3>(x, scale, n, top, out);
}

// Four pieces of N <= 16 bytes, `apart` bytes from each other, one a 16-byte lane.
template <int N>
INLINE __m512i four_lanes(const uint8_t* p, int64_t apart) {
  auto lane = [&](int i) {
    const uint8_t* at = p + i * apart;
    if constexpr (N == 16) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
    else return _mm_maskz_loadu_epi8((1 << N) - 1, at);
  };
  if (N == 16 && apart == 16) return _mm512_loadu_si512(p);
  __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(lane(0)), lane(1), 1);
  __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(lane(2)), lane(3), 1);
  return two_halves(low, high);
}

// Codes of 2 or 3 bits out of gathered bytes: element 16 * half + lane of a stripe. high: the bytes of third bits.
INLINE __m512i low_bits(__m512i gathered, int half) {
  __m512i shift = _mm512_add_epi16(vector_of(kShift2), _mm512_set1_epi16(short(4 * half)));
  return _mm512_and_si512(_mm512_srlv_epi16(gathered, shift), _mm512_set1_epi8(3));
}
INLINE __m512i third_bit(__m512i gathered, int half) {
  __m512i shift = _mm512_add_epi16(vector_of(kShift1), _mm512_set1_epi16(short(4 * half)));
  return _mm512_slli_epi16(_mm512_and_si512(_mm512_srlv_epi16(gathered, shift), _mm512_set1_epi8(1)), 2);
}

// Rows 2i and 2i + 1 (of 32 tokens) of int8 keys as unsigned bytes, plus 128.
INLINE __m512i two_channels(const uint8_t* k, int64_t row) {
  const __m512i x = row == 32 ? _mm512_loadu_si512(k) : two_halves(half_load(k), half_load(k + row));
  return _mm512_xor_si512(x, _mm512_set1_epi8(-128));
}
// The digits of channels 0, 2, 4, 6 for the lower half of a register, of channels 1, 3, 5, 7 for the upper one.
INLINE __m512i even_and_odd(const int8_t* digits) {
  int32_t even, odd;
  __builtin_memcpy(&even, digits, 4);
  __builtin_memcpy(&odd, digits + 4, 4);
  return _mm512_mask_set1_epi32(_mm512_set1_epi32(even), 0xff00, odd);
}

// Eight channels of 32 int8 tokens a round, interleaved by VPUNPCK, which is three times as fast as VPERMT2B: the lower half
// of a sum belongs to the even channels, the upper one to the odd ones.
template <int R>
INLINE void score_int8(const uint8_t* k, int64_t row, int dim, const Queries& q, int r0, const uint16_t* scale, float* out,
                       int64_t width, Ahead ahead) {
  const int8_t* digits = q.digits + int64_t(r0) * 4 * dim;
  __m512i sum[R][2][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) sum[r][0][i] = sum[r][1][i] = _mm512_setzero_si512();
  for (int c = 0; c < dim; c += 8, k += 8 * row) {
    ask<2 * kScoreLines>(ahead);
    __m512i x[4];
    {
      const __m512i a = two_channels(k, row), b = two_channels(k + 2 * row, row), d = two_channels(k + 4 * row, row),
                    e = two_channels(k + 6 * row, row);
      const __m512i ab = _mm512_unpacklo_epi8(a, b), de = _mm512_unpacklo_epi8(d, e);
      const __m512i ab2 = _mm512_unpackhi_epi8(a, b), de2 = _mm512_unpackhi_epi8(d, e);
      x[0] = _mm512_unpacklo_epi16(ab, de), x[1] = _mm512_unpackhi_epi16(ab, de);
      x[2] = _mm512_unpacklo_epi16(ab2, de2), x[3] = _mm512_unpackhi_epi16(ab2, de2);
    }
    const int8_t* at = digits + c / 16 * 64 + c % 16;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int p = 0; p < 2; p++) {
        const __m512i y = even_and_odd(at + r * 4 * dim + p * 16);
#pragma GCC unroll 8
        for (int i = 0; i < 4; i++) add_products(sum[r][p][i], x[i], y);
      }
  }
  const vf first = f16_vf(load<vh>(scale)), last = f16_vf(load<vh>(scale + W));
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    __m512i x[4];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++) x[i] = _mm512_add_epi32(_mm512_slli_epi32(sum[r][0][i], 8), sum[r][1][i]);
    // Lanes of 4 tokens: x[i] holds the tokens from 4i and from 16 + 4i on, of the even and then of the odd channels.
    const __m512i low = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x44), _mm512_shuffle_i32x4(x[0], x[1], 0xee));
    const __m512i high = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2], x[3], 0x44), _mm512_shuffle_i32x4(x[2], x[3], 0xee));
    const __m512i shift = _mm512_set1_epi32(q.shift[r0 + r]);
    const vf a = (vf)_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_shuffle_i32x4(low, high, 0x88), shift));
    const vf b = (vf)_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_shuffle_i32x4(low, high, 0xdd), shift));
    float* to = out + (r0 + r) * width;
    store(to, a * q.step[r0 + r] * first);
    store(to + W, b * q.step[r0 + r] * last);
  }
}

// Codes of four channels for the first and the last 16 tokens of a stripe, as unsigned bytes [token][channel].
template <int C>
INLINE void four_channels(const uint8_t* k, int64_t row, __m512i* first, __m512i* last) {
  const __m512i nibble = _mm512_set1_epi8(15);
  if constexpr (C == kAffine4) {
    __m512i x = _mm512_permutexvar_epi8(vector_of(kLaneRows), four_lanes<16>(k, row));
    *first = _mm512_and_si512(x, nibble);
    *last = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
  } else {
    __m512i x = four_lanes<C == kAffine2 ? 8 : 12>(k, row), low = _mm512_permutexvar_epi8(vector_of(kLaneRows8), x);
    *first = low_bits(low, 0), *last = low_bits(low, 1);
    if constexpr (C == kAffine3) {
      __m512i high = _mm512_permutexvar_epi8(vector_of(kLaneHigh), x);
      *first = _mm512_or_si512(*first, third_bit(high, 0));
      *last = _mm512_or_si512(*last, third_bit(high, 1));
    }
  }
}

// Packed codes of 32 tokens, four channels a round.
template <int C, int R>
INLINE void score_packed(const uint8_t* k, int64_t row, int dim, const Queries& q, int r0, float* out, int64_t width, Ahead ahead) {
  const int8_t* digits = q.digits + int64_t(r0) * 4 * dim;
  __m512i sum[R][3][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < 3; p++) sum[r][p][0] = sum[r][p][1] = _mm512_setzero_si512();
  for (int c = 0; c < dim; c += 4, k += 4 * row) {
    __m512i first, last;
    ask<kScoreLines>(ahead);
    four_channels<C>(k, row, &first, &last);
    const int8_t* at = digits + c / 16 * 64 + c % 16;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < 3; p++) {
        __m512i x = four_bytes(at + r * 4 * dim + p * 16);
        add_products(sum[r][p][0], first, x);
        add_products(sum[r][p][1], last, x);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      __m512i low = _mm512_add_epi32(_mm512_slli_epi32(sum[r][1][i], 8), sum[r][2][i]);
      vf v = fma((vf)_mm512_cvtepi32_ps(sum[r][0][i]), splat(65536.0f), (vf)_mm512_cvtepi32_ps(low));
      store(out + (r0 + r) * width + i * W, v * q.step[r0 + r] + q.bias[r0 + r]);
    }
}

// q . k of one stripe for `rows` rows: out [rows][width]. k: the stripe's first byte; row: bytes of a channel; scale
// [32]: of int8 tokens, in half precision.
template <int C>
void score_stripe(const uint8_t* k, int64_t row, int dim, const Queries& q, int rows, const uint16_t* scale, float* out,
                  int64_t width, Ahead ahead) {
  for (int r = 0; r < rows; ahead = {k, 0}) {
    const int left = rows - r;
    if constexpr (C == kInt8) {
      if (left == 3 || left > 4) score_int8<3>(k, row, dim, q, r, scale, out, width, ahead), r += 3;
      else if (left >= 2) score_int8<2>(k, row, dim, q, r, scale, out, width, ahead), r += 2;
      else score_int8<1>(k, row, dim, q, r, scale, out, width, ahead), r += 1;
    } else {
      if (left >= 4) score_packed<C, 4>(k, row, dim, q, r, out, width, ahead), r += 4;
      else if (left == 3) score_packed<C, 3>(k, row, dim, q, r, out, width, ahead), r += 3;
      else if (left == 2) score_packed<C, 2>(k, row, dim, q, r, out, width, ahead), r += 2;
      else score_packed<C, 1>(k, row, dim, q, r, out, width, ahead), r += 1;
    }
  }
}

}  // namespace
