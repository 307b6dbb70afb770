// Attention over blocks of codes by integer products (VPDPBUSD): no code is turned into a float.
//
// Scores: a query is rounded to N signed bytes, digits in base 256, with a power of two as its step, so that q . k is a sum
// of N integer products. Two bytes (int8 keys) hold a bfloat16 above 1/128 of its row's largest exactly, but for the very
// largest, and others to 2^-16 of it; three bytes (per-channel scales folded into the query) err by 2^-23.
// Mixing: a softmax weight times its token's scale is rounded to 16 bits of the largest scale of its 32 tokens, so a weight
// is off by 2^-17 of the split's peak at most.
// Integer sums are exact, so no result depends on how many rows or tokens go together. Everything works on stripes of 32
// tokens; how packed codes stand in a stripe is said in codecs.h.
#pragma once
#include "codecs.h"

namespace {

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
constexpr bool kHasIntegers = true;
#else
constexpr bool kHasIntegers = false;
#endif

constexpr int kStripe = 32;      // tokens that one product takes
constexpr int kPartBytes = 256;  // room of one part of a query: the widest head that these products take
constexpr int kMaxParts = 3;

constexpr int parts_of(int codec) { return codec == kInt8 ? 2 : 3; }

INLINE bool k_by_integers(int codec, int dim, int block, int dtype) {
  return kHasIntegers && dtype == kBFloat16 && (codec == kInt8 || is_affine(codec)) && dim % 16 == 0 &&
         dim <= kPartBytes && block % kStripe == 0;
}
INLINE bool v_by_integers(int codec, int dim, int block, int dtype) {
  return kHasIntegers && dtype == kBFloat16 && (codec == kInt8 || is_affine(codec)) && dim % 64 == 0 && block % kStripe == 0;
}

// The largest magnitude of x [n], n a multiple of W. A NaN counts as the largest.
INLINE float top_magnitude(const float* x, int n) {
  vi most{};
  for (int i = 0; i < n; i += W) {
    vi bits = load<vi>(x + i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return bits_float(uint32_t(hmax_i(most)));
}

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

// x [n] (times scale [n], if any) in N digits of base 256, most significant first, kPartBytes apart. top: a bound of the
// magnitudes. Returns the step, a NaN where x holds something that is not finite.
template <int N>
INLINE float split_query(const float* x, const float* scale, int n, float top, int8_t* out) {
  constexpr int bits = N == 2 ? 15 : 22;
  int biased = imax(int(float_bits(top) >> 23), bits);
  const float step = bits_float(uint32_t(biased + 1 - bits) << 23);
  const vf inverse = splat(bits_float(uint32_t(254 - (biased + 1 - bits)) << 23));
  const vf most = splat(N == 2 ? 127 * 257.0f : 1 << bits);  // the largest that two signed digits can say
  const __m512i half = _mm512_set1_epi32(128);
  for (int i = 0; i < n; i += W) {
    vf v = scale == nullptr ? load<vf>(x + i) : load<vf>(x + i) * load<vf>(scale + i);
    __m512i code = _mm512_cvtps_epi32((__m512)vmin(v * inverse, most));
    for (int p = N - 1; p > 0; p--) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + p * kPartBytes + i), _mm512_cvtepi32_epi8(code));
      code = _mm512_srai_epi32(_mm512_add_epi32(code, half), 8);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(code));
  }
  return biased == 255 ? __builtin_nanf("") : step;
}

INLINE int32_t sum_bytes(const int8_t* x, int n) {  // n a multiple of 16
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 16)
    total = _mm512_add_epi32(total, _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  return _mm512_reduce_add_epi32(total);
}

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

constexpr Bytes64 kPairRows = bytes64([](int t, int c) { return c / 2 * 64 + c % 2 * 32 + t; });
constexpr Bytes64 kLaneRows = bytes64([](int t, int c) { return c * 16 + t; });
constexpr Bytes64 kLaneRows8 = bytes64([](int t, int c) { return c * 16 + t % 8; });
constexpr Bytes64 kLaneHigh = bytes64([](int t, int c) { return c * 16 + 8 + t % 4; });
constexpr Bytes64 kShift2 = bytes64([](int t, int c) { return c % 2 ? 0 : 2 * (t / 8); });  // of 16-bit elements
constexpr Bytes64 kShift1 = bytes64([](int t, int c) { return c % 2 ? 0 : t / 4; });

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

// Codes of four channels for the first and the last 16 tokens of a stripe, as unsigned bytes [token][channel]; int8 plus 128.
template <int C>
INLINE void four_channels(const uint8_t* k, int64_t row, __m512i* first, __m512i* last) {
  const __m512i nibble = _mm512_set1_epi8(15);
  if constexpr (C == kInt8) {
    __m512i a, b;
    if (row == 32) a = _mm512_loadu_si512(k), b = _mm512_loadu_si512(k + 64);
    else a = two_halves(half_load(k), half_load(k + row)), b = two_halves(half_load(k + 2 * row), half_load(k + 3 * row));
    const __m512i sign = _mm512_set1_epi8(-128), pick = vector_of(kPairRows);
    a = _mm512_xor_si512(a, sign), b = _mm512_xor_si512(b, sign);
    *first = _mm512_permutex2var_epi8(a, pick, b);
    *last = _mm512_permutex2var_epi8(a, _mm512_add_epi8(pick, _mm512_set1_epi8(16)), b);
  } else if constexpr (C == kAffine4) {
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

struct Queries {         // rows of one head, in parts
  const int8_t* codes;   // [rows][N][kPartBytes]
  const int32_t* sums;   // [rows][N]: of int8 keys, whose codes are shifted by 128
  const float* step;     // [rows]
  const float* bias;     // [rows]: q . zero point; null: none
};

template <int C, int R>
INLINE void score_rows(const uint8_t* k, int64_t row, int dim, const Queries& q, int r0, const float* scale, float* out,
                       int64_t width) {
  constexpr int N = parts_of(C);
  const int8_t* codes = q.codes + int64_t(r0) * N * kPartBytes;
  __m512i sum[R][N][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < N; p++)
      sum[r][p][0] = sum[r][p][1] = C == kInt8 ? _mm512_set1_epi32(-128 * q.sums[(r0 + r) * N + p]) : _mm512_setzero_si512();
  for (int c = 0; c < dim; c += 4, k += 4 * row) {
    __m512i first, last;
    four_channels<C>(k, row, &first, &last);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < N; p++) {
        __m512i x = four_bytes(codes + (r * N + p) * kPartBytes + c);
        add_products(sum[r][p][0], first, x);
        add_products(sum[r][p][1], last, x);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      __m512i low = _mm512_add_epi32(_mm512_slli_epi32(sum[r][N - 2][i], 8), sum[r][N - 1][i]);
      vf v = (vf)_mm512_cvtepi32_ps(low);
      if (N == 3) v = fma((vf)_mm512_cvtepi32_ps(sum[r][0][i]), splat(65536.0f), v);
      v *= q.step[r0 + r];
      if (C == kInt8) v *= load<vf>(scale + i * W);
      else v += q.bias[r0 + r];
      store(out + (r0 + r) * width + i * W, v);
    }
}

// q . k of one stripe for `rows` rows: out [rows][width]. k: the stripe's first byte; row: bytes of a channel; scale
// [32]: of int8 tokens.
template <int C>
void score_stripe(const uint8_t* k, int64_t row, int dim, const Queries& q, int rows, const float* scale, float* out,
                  int64_t width) {
  for (int r = 0; r < rows;) {
    const int left = rows - r;
    if (C == kInt8 && left >= 6) score_rows<C, C == kInt8 ? 6 : 1>(k, row, dim, q, r, scale, out, width), r += 6;
    else if (left >= 4) score_rows<C, 4>(k, row, dim, q, r, scale, out, width), r += 4;
    else if (left == 3) score_rows<C, 3>(k, row, dim, q, r, scale, out, width), r += 3;
    else if (left == 2) score_rows<C, 2>(k, row, dim, q, r, scale, out, width), r += 2;
    else score_rows<C, 1>(k, row, dim, q, r, scale, out, width), r += 1;
  }
}

// Codes of four tokens for V vectors of 16 channels, as bytes [channel][token]: all 64 channels at v (V = 4) or the half of
// them (V = 2). The channels of int8 come in the order 16 * lane + 4 * vector + element.
template <int C, int V>
INLINE void four_tokens(const uint8_t* v, int64_t row, int half, __m512i* x) {
  const __m512i nibble = _mm512_set1_epi8(15);
  if constexpr (C == kInt8) {
    static_assert(V == 4);
    __m512i a = _mm512_loadu_si512(v), b = _mm512_loadu_si512(v + row), c = _mm512_loadu_si512(v + 2 * row),
            d = _mm512_loadu_si512(v + 3 * row);
    __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
    x[0] = _mm512_unpacklo_epi16(ab, cd), x[1] = _mm512_unpackhi_epi16(ab, cd);
    ab = _mm512_unpackhi_epi8(a, b), cd = _mm512_unpackhi_epi8(c, d);
    x[2] = _mm512_unpacklo_epi16(ab, cd), x[3] = _mm512_unpackhi_epi16(ab, cd);
  } else if constexpr (C == kAffine4) {
    __m512i y = _mm512_permutexvar_epi8(vector_of(kLaneRows), four_lanes<16>(v + half * 16, row));
    x[0] = _mm512_and_si512(y, nibble);
    x[1] = _mm512_and_si512(_mm512_srli_epi16(y, 4), nibble);
  } else {
    constexpr int bytes = C == kAffine2 ? 8 : 12;
    __m512i y = four_lanes<bytes>(v + half * bytes, row), low = _mm512_permutexvar_epi8(vector_of(kLaneRows8), y);
    x[0] = low_bits(low, 0), x[1] = low_bits(low, 1);
    if constexpr (C == kAffine3) {
      __m512i high = _mm512_permutexvar_epi8(vector_of(kLaneHigh), y);
      x[0] = _mm512_or_si512(x[0], third_bit(high, 0));
      x[1] = _mm512_or_si512(x[1], third_bit(high, 1));
    }
  }
}

// Lanes of 4 floats from [vector][lane] to [lane][vector].
INLINE void transpose_lanes(vf* f) {
  __m512 a = _mm512_shuffle_f32x4((__m512)f[0], (__m512)f[1], 0x44), b = _mm512_shuffle_f32x4((__m512)f[2], (__m512)f[3], 0x44);
  __m512 c = _mm512_shuffle_f32x4((__m512)f[0], (__m512)f[1], 0xee), d = _mm512_shuffle_f32x4((__m512)f[2], (__m512)f[3], 0xee);
  f[0] = (vf)_mm512_shuffle_f32x4(a, b, 0x88), f[1] = (vf)_mm512_shuffle_f32x4(a, b, 0xdd);
  f[2] = (vf)_mm512_shuffle_f32x4(c, d, 0x88), f[3] = (vf)_mm512_shuffle_f32x4(c, d, 0xdd);
}

template <int C, int R>
INLINE void mix_rows(const uint8_t* v, int64_t row, int half, const uint8_t* weights, float factor, float* mix, int64_t ld) {
  constexpr int V = C == kInt8 ? 4 : 2;
  __m512i sum[R][2][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) sum[r][0][i] = sum[r][1][i] = _mm512_setzero_si512();
  for (int j = 0; j < kStripe; j += 4, v += 4 * row) {
    __m512i x[V];
    four_tokens<C, V>(v, row, half, x);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int p = 0; p < 2; p++) {
        __m512i w = four_bytes(weights + (r * 2 + p) * kStripe + j);
#pragma GCC unroll 8
        for (int i = 0; i < V; i++) add_products(sum[r][p][i], w, x[i]);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    vf f[V];
#pragma GCC unroll 8
    for (int i = 0; i < V; i++)
      f[i] = fma((vf)_mm512_cvtepi32_ps(sum[r][0][i]), splat(256.0f), (vf)_mm512_cvtepi32_ps(sum[r][1][i]));
    if constexpr (C == kInt8) transpose_lanes(f);
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) store(mix + r * ld + i * W, fma(f[i], splat(factor), load<vf>(mix + r * ld + i * W)));
  }
}

// mix [rows][ld] += factor * weights times one stripe of V: 64 channels of int8, 32 (the half of 64) of packed codes.
template <int C>
void mix_stripe(const uint8_t* v, int64_t row, int half, const uint8_t* weights, int rows, float factor, float* mix,
                int64_t ld) {
  for (int r = 0; r < rows;) {
    const int left = rows - r;
    const uint8_t* w = weights + r * 2 * kStripe;
    float* to = mix + r * ld;
    if (C != kInt8 && left >= 6) mix_rows<C, C == kInt8 ? 1 : 6>(v, row, half, w, factor, to, ld), r += 6;
    else if (C != kInt8 && left >= 4) mix_rows<C, C == kInt8 ? 1 : 4>(v, row, half, w, factor, to, ld), r += 4;
    else if (left == 3 || left > 4) mix_rows<C, 3>(v, row, half, w, factor, to, ld), r += 3;
    else if (left >= 2) mix_rows<C, 2>(v, row, half, w, factor, to, ld), r += 2;
    else mix_rows<C, 1>(v, row, half, w, factor, to, ld), r += 1;
  }
}

// Softmax weights p [32] times ratio [32] (at most 65535 together) as two bytes each, the high ones first: out [2][32].
INLINE void split_weights(const float* p, const float* ratio, uint8_t* out) {
  for (int j = 0; j < kStripe; j += W) {
    __m512i w = _mm512_cvtps_epi32((__m512)(load<vf>(p + j) * load<vf>(ratio + j)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm512_cvtepi32_epi8(_mm512_srli_epi32(w, 8)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kStripe + j), _mm512_cvtepi32_epi8(w));
  }
}

#else  // never called: k_by_integers and v_by_integers say no

struct Queries {
  const int8_t* codes;
  const int32_t* sums;
  const float *step, *bias;
};
template <int N>
INLINE float split_query(const float*, const float*, int, float, int8_t*) { return 0.0f; }
INLINE int32_t sum_bytes(const int8_t*, int) { return 0; }
template <int C>
void score_stripe(const uint8_t*, int64_t, int, const Queries&, int, const float*, float*, int64_t) {}
template <int C>
void mix_stripe(const uint8_t*, int64_t, int, const uint8_t*, int, float, float*, int64_t) {}
INLINE void split_weights(const float*, const float*, uint8_t*) {}

#endif

}  // namespace
