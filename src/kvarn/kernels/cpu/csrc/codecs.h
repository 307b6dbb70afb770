// Reading the rows of a stored block: two vectors of floats at a time for the matrix loops, and whole blocks into a float
// scratch where a shape has no fast path. A "row" is one channel of K (its tokens) or one token of V (its channels).
//
// Packed codes stand in stripes of s elements (32, or 16 or 8 where the row does not divide): 4 bits: element i in byte
// i % (s/2), shifted by 4 * (i / (s/2)); 2 bits: byte i % (s/4), shift 2 * (i / (s/4)); 3 bits: the two low bits as for
// 2 bits, then s/8 bytes of high bits: byte i % (s/8), bit i / (s/8).
#pragma once
#include "simd.h"
#include "types.h"

namespace {

using namespace kvarn;

// Centroids of the Lloyd-Max quantizer of N(0, 1) with 16, 8 and 4 levels (Max 1960, table I), ascending.
constexpr float kGauss16[16] = {-2.7326f, -2.0690f, -1.6181f, -1.2562f, -0.9424f, -0.6568f, -0.3881f, -0.1284f,
                                0.1284f,  0.3881f,  0.6568f,  0.9424f,  1.2562f,  1.6181f,  2.0690f,  2.7326f};
constexpr float kGauss8[16] = {-2.1520f, -1.3439f, -0.7560f, -0.2451f, 0.2451f, 0.7560f, 1.3439f, 2.1520f};
constexpr float kGauss4[16] = {-1.5104f, -0.4528f, 0.4528f, 1.5104f};

INLINE bool is_affine(int codec) { return codec >= kAffine4 && codec <= kAffine2; }
INLINE bool is_turbo(int codec) { return codec >= kTurbo4; }
INLINE bool has_token_scale(int codec) { return codec == kInt8 || is_turbo(codec); }
INLINE int code_bits(int codec) { return codec >= kAffine4 ? 4 - (codec - kAffine4) % 3 : codec >= kFP8 ? 8 : codec ? 16 : 32; }
INLINE const float* codebook(int codec) { return codec == kTurbo4 ? kGauss16 : codec == kTurbo3 ? kGauss8 : kGauss4; }
INLINE int64_t row_bytes(int codec, int n) { return int64_t(n) * code_bits(codec) / 8; }
INLINE int stripe_of(int n) { return n % 32 == 0 ? 32 : n % 16 == 0 ? 16 : 8; }

INLINE int packed_get(const uint8_t* row, int i, int bits, int stripe) {
  const uint8_t* p = row + i / stripe * stripe * bits / 8;
  int j = i % stripe;
  if (bits == 4) return (p[j % (stripe / 2)] >> (4 * (j / (stripe / 2)))) & 15;
  int low = (p[j % (stripe / 4)] >> (2 * (j / (stripe / 4)))) & 3;
  if (bits == 2) return low;
  return low | (((p[stripe / 4 + j % (stripe / 8)] >> (j / (stripe / 8))) & 1) << 2);
}
INLINE void packed_or(uint8_t* row, int i, int bits, int stripe, int code) {  // the row starts as zeros
  uint8_t* p = row + i / stripe * stripe * bits / 8;
  int j = i % stripe;
  if (bits == 4) {
    p[j % (stripe / 2)] |= uint8_t(code << (4 * (j / (stripe / 2))));
    return;
  }
  p[j % (stripe / 4)] |= uint8_t((code & 3) << (2 * (j / (stripe / 4))));
  if (bits == 3) p[stripe / 4 + j % (stripe / 8)] |= uint8_t((code >> 2) << (j / (stripe / 8)));
}

// W lanes of a bit field of `bits` bits whose stripe of 32 repeats every `Period` bytes, from element c of the stripe.
template <int Period, int Bits>
INLINE vi field(const uint8_t* p, int c) {
  if constexpr (Period >= W) {
    vi bytes = widen(load<vb>(p + c % Period));
    return (bytes >> (Bits * (c / Period))) & ((1 << Bits) - 1);
  } else {
    uint8_t repeated[W];
    for (int i = 0; i < W; i += Period) __builtin_memcpy(repeated + i, p, Period);
    vi bytes = widen(load<vb>(repeated)), shift{};
    for (int i = 0; i < W; i++) shift[i] = Bits * (i / Period);
    return (bytes >> (shift + Bits * (c / Period))) & ((1 << Bits) - 1);
  }
}
template <int Bits>
INLINE vi packed_vi(const uint8_t* row, int c) {  // rows of whole stripes of 32; c a multiple of W
  const uint8_t* p = row + c / 32 * (4 * Bits);
  c %= 32;
  if constexpr (Bits == 4) return field<16, 4>(p, c);
  vi low = field<8, 2>(p, c);
  if constexpr (Bits == 2) return low;
  return low | (field<4, 1>(p + 8, c) << 2);
}
INLINE vf lookup(const float* table, vi index) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)index);
  return index > 7 ? (vf)high : (vf)low;
#else
  vf out{};
  for (int i = 0; i < W; i++) out[i] = table[index[i]];
  return out;
#endif
}

// Elements c .. c + W of a stored row as floats, before any scale.
template <int C>
INLINE vf row_vf(const uint8_t* row, int c) {
  if constexpr (C == kF32) return load<vf>(row + 4 * c);
  if constexpr (C == kBF16) return bf16_vf(load<vh>(row + 2 * c));
  if constexpr (C == kF16) return f16_vf(load<vh>(row + 2 * c));
  if constexpr (C == kFP8) return fp8_vf(load<vb>(row + c));
  if constexpr (C == kInt8) return i8_vf(load<vs8>(row + c));
  if constexpr (C == kAffine4) return __builtin_convertvector(packed_vi<4>(row, c), vf);
  if constexpr (C == kAffine3) return __builtin_convertvector(packed_vi<3>(row, c), vf);
  if constexpr (C == kAffine2) return __builtin_convertvector(packed_vi<2>(row, c), vf);
  if constexpr (C == kTurbo4) return lookup(kGauss16, packed_vi<4>(row, c));
  if constexpr (C == kTurbo3) return lookup(kGauss8, packed_vi<3>(row, c));
  if constexpr (C == kTurbo2) return lookup(kGauss4, packed_vi<2>(row, c));
}

// One element of a stored row, before any scale: the slow way, for any shape.
INLINE float row_float(int codec, const uint8_t* row, int i, int n) {
  if (codec == kF32) return load<float>(row + 4 * i);
  if (codec == kBF16) return bf16_float(load<uint16_t>(row + 2 * i));
  if (codec == kF16) return f16_float(load<uint16_t>(row + 2 * i));
  if (codec == kFP8) return fp8_float(row[i]);
  if (codec == kInt8) return float(int8_t(row[i]));
  int code = packed_get(row, i, code_bits(codec), stripe_of(n));
  return is_turbo(codec) ? codebook(codec)[code] : float(code);
}

// Can the vector loaders read rows of n elements? (Stored rows are read two vectors at a time.)
INLINE bool fast_row(int codec, int n) { return codec >= kAffine4 ? n % 32 == 0 : n % (2 * W) == 0; }

// Copy a block's rows into floats [n_rows][width], width >= n; the rest of a row and rows with keep[i] < 0 become zero.
inline void stage_rows(int codec, const uint8_t* data, int n_rows, int n, const int32_t* keep, float* out, int width) {
  for (int i = 0; i < n_rows; i++, out += width) {
    for (int j = 0; j < width; j++) out[j] = 0.0f;
    if (keep != nullptr && keep[i] < 0) continue;
    const uint8_t* row = data + i * row_bytes(codec, n);
    for (int j = 0; j < n; j++) out[j] = row_float(codec, row, j, n);
  }
}

// Sign of element i before the Hadamard transform: a fixed pseudo-random pattern (Knuth's multiplicative hash).
INLINE float turbo_sign(int i) { return ((uint32_t(i) * 0x9E3779B1u + 0x7F4A7C15u) >> 16) & 1 ? -1.0f : 1.0f; }
INLINE int turbo_span(int n) { return n & -n; }  // the transform runs over spans of the largest power of two in n

inline void hadamard(float* x, int n) {
  int span = turbo_span(n);
  float norm = 1.0f / __builtin_sqrtf(float(span));
  for (int at = 0; at < n; at += span)
    for (int half = 1; half < span; half *= 2)
      for (int i = at; i < at + span; i += 2 * half)
        for (int j = i; j < i + half; j++) {
          float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
  for (int i = 0; i < n; i++) x[i] *= norm;
}
inline void turbo_rotate(float* x, int n) {
  for (int i = 0; i < n; i++) x[i] *= turbo_sign(i);
  hadamard(x, n);
}
inline void turbo_unrotate(float* x, int n) {
  hadamard(x, n);
  for (int i = 0; i < n; i++) x[i] *= turbo_sign(i);
}

}  // namespace
