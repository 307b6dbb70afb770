// Vectors of floats as wide as the instruction set has them, on the compiler's vector extensions, so one source serves
// SSE2, AVX2, AVX-512 and NEON. Intrinsics only where the extensions cannot say it.
// Everything is in an unnamed namespace: each instruction set has its own copy and the linker merges none of them.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

#define INLINE inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vs8 __attribute__((vector_size(W)));

template <class V>
INLINE V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
INLINE void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}
// Not vf{} + x: an addition, since it makes 0 of -0.
#if defined(__AVX512F__)
INLINE vf splat(float x) { return (vf)_mm512_set1_ps(x); }
#elif defined(__AVX2__)
INLINE vf splat(float x) { return (vf)_mm256_set1_ps(x); }
#elif defined(__x86_64__)
INLINE vf splat(float x) { return (vf)_mm_set1_ps(x); }
#elif defined(__aarch64__)
INLINE vf splat(float x) { return (vf)vdupq_n_f32(x); }
#else
INLINE vf splat(float x) { return vf{} + x; }
#endif
INLINE vi splat_i(int x) { return vi{} + x; }

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
// a > b ? a : b and a < b ? a : b, NaNs and all, for which GCC would compare and blend.
#if defined(__AVX512F__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE vf vmax(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf vmin(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
#endif
INLINE float fmax2(float a, float b) { return a > b ? a : b; }
INLINE float fmin2(float a, float b) { return a < b ? a : b; }
INLINE int imin(int a, int b) { return a < b ? a : b; }
INLINE int imax(int a, int b) { return a > b ? a : b; }

// Horizontal reductions fold halves, so their order is fixed.
#if defined(__AVX512F__)
INLINE float hsum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float hmax(vf v) { return _mm512_reduce_max_ps((__m512)v); }
#elif defined(__AVX2__)
INLINE float hsum(vf v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
INLINE float hmax(vf v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
#else
INLINE float hsum(vf v) {
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
INLINE float hmax(vf v) {
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) v[i] = fmax2(v[i], v[i + n]);
  return v[0];
}
#endif
#if defined(__AVX512F__)
INLINE int hmax_i(vi v) { return _mm512_reduce_max_epi32((__m512i)v); }
INLINE int hsum_i(vi v) { return _mm512_reduce_add_epi32((__m512i)v); }
INLINE void narrow_bytes(vi v, int8_t* out) {  // the low byte of each lane
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8((__m512i)v));
}
#elif defined(__AVX2__)
INLINE int hmax_i(vi v) {
  __m128i x = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
INLINE int hsum_i(vi v) {
  __m128i x = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
}
#else
INLINE int hmax_i(vi v) {
  int x = v[0];
  for (int i = 1; i < W; i++) x = imax(x, v[i]);
  return x;
}
INLINE int hsum_i(vi v) {
  int x = 0;
  for (int i = 0; i < W; i++) x += v[i];
  return x;
}
INLINE void narrow_bytes(vi v, int8_t* out) {
  for (int i = 0; i < W; i++) out[i] = int8_t(v[i]);
}
#endif
INLINE uint32_t hmin_u(vu v) {
#if defined(__AVX512F__)
  return _mm512_reduce_min_epu32((__m512i)v);
#else
  uint32_t x = v[0];
  for (int i = 1; i < W; i++) x = v[i] < x ? v[i] : x;
  return x;
#endif
}

// Widening and narrowing of lanes. Compilers take __builtin_convertvector apart lane by lane, so it is the last resort.
#if defined(__AVX512F__)
INLINE vi widen(vs8 b) { return (vi)_mm512_cvtepi8_epi32((__m128i)b); }
INLINE vi widen(vb b) { return (vi)_mm512_cvtepu8_epi32((__m128i)b); }
INLINE vu widen(vh h) { return (vu)_mm512_cvtepu16_epi32((__m256i)h); }
INLINE vh widen_half(vb b) { return (vh)_mm256_cvtepu8_epi16((__m128i)b); }
INLINE vh narrow(vu u) { return (vh)_mm512_cvtepi32_epi16((__m512i)u); }
#elif defined(__AVX2__)
INLINE vi widen(vs8 b) { return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)b)); }
INLINE vi widen(vb b) { return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)b)); }
INLINE vu widen(vh h) { return (vu)_mm256_cvtepu16_epi32((__m128i)h); }
INLINE vh widen_half(vb b) { return (vh)_mm_cvtepu8_epi16(_mm_cvtsi64_si128((int64_t)b)); }
INLINE vh narrow(vu u) {
  __m256i low = _mm256_and_si256((__m256i)u, _mm256_set1_epi32(0xffff));
  return (vh)_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
#elif defined(__SSE2__)
INLINE vu widen(vh h) { return (vu)_mm_unpacklo_epi16(_mm_cvtsi64_si128((int64_t)h), _mm_setzero_si128()); }
INLINE __m128i quad(const void* p) {  // 4 bytes
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return _mm_cvtsi32_si128(x);
}
INLINE vi widen(vb b) {
  return (vi)_mm_unpacklo_epi16(_mm_unpacklo_epi8(quad(&b), _mm_setzero_si128()), _mm_setzero_si128());
}
INLINE vi widen(vs8 b) {
  __m128i high = _mm_unpacklo_epi16(_mm_setzero_si128(), _mm_unpacklo_epi8(_mm_setzero_si128(), quad(&b)));
  return (vi)_mm_srai_epi32(high, 24);
}
INLINE vh widen_half(vb b) { return __builtin_convertvector(b, vh); }
INLINE vh narrow(vu u) { return __builtin_convertvector(u, vh); }
#else
INLINE vi widen(vs8 b) { return __builtin_convertvector(b, vi); }
INLINE vi widen(vb b) { return __builtin_convertvector(b, vi); }
INLINE vu widen(vh h) { return __builtin_convertvector(h, vu); }
INLINE vh widen_half(vb b) { return __builtin_convertvector(b, vh); }
INLINE vh narrow(vu u) { return __builtin_convertvector(u, vh); }
#endif

INLINE float bits_float(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
INLINE uint32_t float_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}
INLINE float bf16_float(uint16_t h) { return bits_float(uint32_t(h) << 16); }
INLINE uint16_t float_bf16(float f) {  // round to nearest even; a NaN stays one
  uint32_t u = float_bits(f);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE vf bf16_vf(vh h) { return (vf)(widen(h) << 16); }
INLINE vh vf_bf16(vf f) {
  vu u = (vu)f;
  vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vu nan = (u >> 16) | 0x40;
  return narrow((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

INLINE vf f16_vf(vh h) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  vu u = widen(h);
  vf magnitude = (vf)((u & 0x7fff) << 13) * bits_float(0x77800000);  // 2^112 moves the exponent, subnormals too
  vu special = (u & 0x7c00) == 0x7c00 ? vu{} + 0x7f800000u : vu{};
  return (vf)((vu)magnitude | special | ((u & 0x8000) << 16));
#endif
}
INLINE float f16_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t u = h;
  float magnitude = bits_float((u & 0x7fff) << 13) * bits_float(0x77800000);
  uint32_t special = (u & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
  return bits_float(float_bits(magnitude) | special | ((u & 0x8000) << 16));
#endif
}
INLINE uint16_t float_f16(float f) {  // round to nearest even; overflow becomes infinity
#if defined(__F16C__)
  return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT);
#else
  uint32_t u = float_bits(f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u >= 0x47800000) return uint16_t(sign | (u > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (u < 0x38800000) {  // subnormal half: let the adder round
    float shifted = bits_float(u) + 0.5f;
    return uint16_t(sign | (float_bits(shifted) - 0x3f000000));
  }
  u += 0xc8000fff + ((u >> 13) & 1);
  return uint16_t(sign | (u >> 13));
#endif
}
INLINE vf fp8_vf(vb b) {  // e4m3 is a half with its exponent 8 lower; its one NaN, 0x7f, gets a NaN's exponent
  vh h = widen_half(b), magnitude = (h & 0x7f) << 7;
  return f16_vf(magnitude | ((magnitude + 0x80) & 0x4000) | ((h & 0x80) << 8)) * 256.0f;
}
INLINE float fp8_float(uint8_t b) {
  const int magnitude = (b & 0x7f) << 7;
  return f16_float(uint16_t(magnitude | ((magnitude + 0x80) & 0x4000) | ((b & 0x80) << 8))) * 256.0f;
}
INLINE vf i8_vf(vs8 b) { return __builtin_convertvector(widen(b), vf); }

INLINE float load_as_float(const void* p, int64_t i, int dtype) {
  if (dtype == 0) return static_cast<const float*>(p)[i];
  uint16_t h = static_cast<const uint16_t*>(p)[i];
  return dtype == 1 ? bf16_float(h) : f16_float(h);
}
INLINE void store_float(void* p, int64_t i, int dtype, float x) {
  if (dtype == 0) static_cast<float*>(p)[i] = x;
  else static_cast<uint16_t*>(p)[i] = dtype == 1 ? float_bf16(x) : float_f16(x);
}
// W consecutive elements of an activation; dtype is a compile-time constant where this matters.
INLINE vf load_vf(const void* p, int64_t i, int dtype) {
  if (dtype == 0) return load<vf>(static_cast<const float*>(p) + i);
  vh h = load<vh>(static_cast<const uint16_t*>(p) + i);
  return dtype == 1 ? bf16_vf(h) : f16_vf(h);
}
INLINE void store_vf(void* p, int64_t i, int dtype, vf x) {
  if (dtype == 0) {
    store(static_cast<float*>(p) + i, x);
  } else if (dtype == 1) {
    store(static_cast<uint16_t*>(p) + i, vf_bf16(x));
  } else {
    for (int j = 0; j < W; j++) static_cast<uint16_t*>(p)[i + j] = float_f16(x[j]);
  }
}

// exp with a relative error under 2 ulp: 2^n * p(r), |r| <= ln2 / 2, p by the Cephes coefficients (expf, S. Moshier).
// 0 below -87.
INLINE vf vexp(vf x) {
#if defined(__AVX512F__)
  x = vmin(splat(88.0f), x);  // in this order a NaN stays one
  vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vf in = x;
  x = vmax(splat(-88.0f), vmin(splat(88.0f), x));  // in this order a NaN stays one
  vf n = fma(x, splat(1.44269504088896341f), splat(12582912.0f)) - 12582912.0f;  // round by the magic 1.5 * 2^23
#endif
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
#if defined(__AVX512F__)
  __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLE_UQ);
  return (vf)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
#else
  vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return in <= -87.0f ? vf{} : p * (vf)power;
#endif
}
INLINE float exp1(float x) { return vexp(splat(x))[0]; }

// exp of what is at most 0 (or a NaN), within 2^-23 of exp(0): for weights, where an error counts beside the largest.
// exp(x) = 2^n * 2^r, |r| <= 1/2, by a polynomial with the least largest relative error, 9e-8, that is 1 at 0.
INLINE vf vexp_below(vf x) {
#if defined(__AVX512F__)
  x = vmax(splat(-160.0f), x * 1.44269504088896341f);  // in this order a NaN stays one
  vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = vmax(splat(-127.0f), x * 1.44269504088896341f);
  const vf magic = x + 12582912.0f;  // 1.5 * 2^23: the last bits are n
  const vf n = magic - 12582912.0f;
#endif
  vf r = x - n;
  vf p = fma(splat(1.326472731e-3f), r, splat(9.671512991e-3f));
  p = fma(p, r, splat(5.550733581e-2f));
  p = fma(p, r, splat(2.402224243e-1f));
  p = fma(p, r, splat(6.931470037e-1f));
  p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  return p * (vf)(((vi)magic << 23) + 0x3f800000);  // exactly 0 at -127
#endif
}

// Memory to ask for while a product runs: from `at`, some lines a round of its loop, each `step` bytes after the last. A burst
// would fill the core's outstanding misses, and everything would wait. Asked for into the second cache: on Zen 4 twice as fast as
// into the first.
struct Ahead {
  const uint8_t* at;  // never null: where there is nothing to ask for, something at hand, and step 0
  int64_t step;
};
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kPlainLines = 1;  // beside a product of floats: for each row of its matrix and 32 columns
#else
constexpr int kPlainLines = 0;
#endif
template <int kLines>
INLINE void ask(Ahead& a) {
#pragma GCC unroll 4
  for (int i = 0; i < kLines; i++, a.at += a.step) __builtin_prefetch(a.at, 0, 2);
}

}  // namespace
