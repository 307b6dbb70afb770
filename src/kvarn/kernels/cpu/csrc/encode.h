// Encoding one side of one block from floats, format by format. x is [n_rows][n] as the side is laid out (K: channels x
// tokens, V: tokens x channels); held[token] < 0 marks slots that hold nothing: they count for no scale and get code 0.
// A NaN makes the scale that it counts for a NaN, and with it all that is read by that scale.
#pragma once
#include "codecs.h"

namespace {

constexpr float kHalfMax = 65504.0f, kFP8Max = 448.0f;
constexpr uint16_t kHalfNaN = 0x7e00;

INLINE float clampf(float x, float low, float high) { return x < low ? low : x > high ? high : x; }
INLINE int clampi(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

INLINE uint8_t float_fp8(float x) {  // e4m3, round to nearest even, saturating
  uint8_t sign = uint8_t((float_bits(x) >> 24) & 0x80);
  if (x != x) return uint8_t(sign | 0x7f);
  float magnitude = fmin2(bits_float(float_bits(x) & 0x7fffffff), kFP8Max);
  if (magnitude < 0x1p-6f) return uint8_t(sign | (float_bits(magnitude + 16384.0f) - float_bits(16384.0f)));
  uint32_t u = float_bits(magnitude);
  u += 0x7ffff + ((u >> 20) & 1);
  return uint8_t(sign | ((u >> 20) - (120u << 3)));
}

// A whole number, yet a float: a capped scale makes it larger than any integer.
INLINE float code_of(float x, float scale) { return scale > 0.0f ? __builtin_rintf(x / scale) : 0.0f; }

struct Block {  // one side of one block, as floats
  const float* x;
  int n_rows, n;       // rows and their length
  bool tokens_in_row;  // K: a row is a channel
  const int32_t* held;
  int tokens() const { return tokens_in_row ? n : n_rows; }
  int channels() const { return tokens_in_row ? n_rows : n; }
  float get(int token, int channel) const {
    return tokens_in_row ? x[int64_t(channel) * n + token] : x[int64_t(token) * n + channel];
  }
};

inline void encode_float(int codec, const Block& b, uint8_t* out) {
  const int64_t count = int64_t(b.n_rows) * b.n;
  for (int64_t i = 0; i < count; i++) {
    float x = b.held[b.tokens_in_row ? i % b.n : i / b.n] < 0 ? 0.0f : b.x[i];
    if (codec == kFP8) out[i] = float_fp8(x);
    else store_float(out, i, codec, x);
  }
}

inline void put_code(const Block& b, int codec, uint8_t* codes, int token, int channel, int code) {
  int row = b.tokens_in_row ? channel : token, i = b.tokens_in_row ? token : channel;
  uint8_t* p = codes + row * row_bytes(codec, b.n);
  if (codec == kInt8) p[i] = uint8_t(int8_t(code));
  else packed_or(p, i, code_bits(codec), stripe_of(b.n), code);
}

inline void encode_int8(const Block& b, uint8_t* codes, uint16_t* scale) {
  for (int t = 0; t < b.tokens(); t++) {
    scale[t] = 0;
    if (b.held[t] < 0) continue;
    uint32_t top = 0;  // a magnitude's bits: these of a NaN are the largest
    for (int c = 0; c < b.channels(); c++) {
      const uint32_t bits = float_bits(b.get(t, c)) & 0x7fffffff;
      top = bits > top ? bits : top;
    }
    scale[t] = float_f16(clampf(bits_float(top) / 127.0f, 0.0f, kHalfMax));
    float step = f16_float(scale[t]);
    for (int c = 0; c < b.channels(); c++)
      put_code(b, kInt8, codes, t, c, clampi(int(clampf(code_of(b.get(t, c), step), -127, 127)), -127, 127));
  }
}

// Asymmetric codes of tokens [t0, t1) x channels [c0, c1), which share one scale and zero point (KIVI, Liu et al. 2024).
inline void encode_affine_part(const Block& b, int codec, uint8_t* codes, int t0, int t1, int c0, int c1, uint16_t* scale,
                               uint16_t* zero) {
  const int top = (1 << code_bits(codec)) - 1;
  float low = __builtin_inff(), high = -__builtin_inff();
  for (int t = t0; t < t1; t++)
    for (int c = c0; c < c1 && b.held[t] >= 0; c++) {
      const float x = b.get(t, c);
      low = x < low || x != x ? x : low;  // no number is below a NaN
      high = fmax2(x, high);
    }
  *scale = *zero = low != low ? kHalfNaN : 0;
  if (!(low <= high)) return;
  *scale = low < high ? float_f16(fmin2((high - low) / float(top), kHalfMax)) : 0;  // two infinities have no distance
  *zero = float_f16(clampf(low, -kHalfMax, kHalfMax));
  float step = f16_float(*scale), base = f16_float(*zero);
  for (int t = t0; t < t1; t++)
    for (int c = c0; c < c1 && b.held[t] >= 0; c++)
      put_code(b, codec, codes, t, c, int(clampf(code_of(b.get(t, c) - base, step), 0, float(top))));
}

inline void encode_affine(const Block& b, int codec, int group, uint8_t* codes, uint16_t* scale, uint16_t* zero) {
  if (b.tokens_in_row) {  // keys: a channel over the block's tokens
    for (int c = 0; c < b.channels(); c++)
      encode_affine_part(b, codec, codes, 0, b.tokens(), c, c + 1, scale + c, zero + c);
    return;
  }
  const int groups = b.channels() / group;
  for (int t = 0; t < b.tokens(); t++)
    for (int g = 0; g < groups; g++)
      encode_affine_part(b, codec, codes, t, t + 1, g * group, (g + 1) * group, scale + t * groups + g,
                         zero + t * groups + g);
}

// Rotate, take the nearest centroid of each rotated channel over the token's rms, fit the scale by least squares.
// After QuaRot (Ashkboos et al. 2024) and TurboQuant (Zandieh et al. 2025).
inline void encode_turbo(const Block& b, int codec, uint8_t* codes, uint16_t* scale, float* y) {
  const float* table = codebook(codec);
  const int levels = 1 << code_bits(codec), n = b.channels();
  for (int t = 0; t < b.tokens(); t++) {
    scale[t] = 0;
    if (b.held[t] < 0) continue;
    float squares = 0.0f, dot = 0.0f, norm = 0.0f;
    for (int c = 0; c < n; c++) y[c] = b.get(t, c);
    turbo_rotate(y, n);
    for (int c = 0; c < n; c++) squares += y[c] * y[c];
    float rms = __builtin_sqrtf(squares / float(n));
    if (rms == 0.0f) continue;
    if (!(rms < __builtin_inff())) {  // a NaN, an infinity, or squares beyond one
      scale[t] = kHalfNaN;
      continue;
    }
    for (int c = 0; c < n; c++) {
      int code = 0;
      while (code + 1 < levels && y[c] > 0.5f * (table[code] + table[code + 1]) * rms) code++;
      put_code(b, codec, codes, t, c, code);
      dot += y[c] * table[code];
      norm += table[code] * table[code];
    }
    scale[t] = float_f16(clampf(dot / norm, 0.0f, kHalfMax));
  }
}

// y: scratch of as many floats as there are channels.
inline void encode_side(const Side& side, const Block& b, uint8_t* codes, uint8_t* scale, uint8_t* zero, float* y) {
  auto *s = reinterpret_cast<uint16_t*>(scale), *z = reinterpret_cast<uint16_t*>(zero);
  if (side.codec <= kFP8) return encode_float(side.codec, b, codes);
  __builtin_memset(codes, 0, b.n_rows * row_bytes(side.codec, b.n));
  if (side.codec == kInt8) encode_int8(b, codes, s);
  else if (is_affine(side.codec)) encode_affine(b, side.codec, side.group, codes, s, z);
  else encode_turbo(b, side.codec, codes, s, y);
}

}  // namespace
