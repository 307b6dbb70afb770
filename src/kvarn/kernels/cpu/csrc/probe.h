// What the machine can do, for `kvarn doctor` and the statistics: bytes read and float32 operations a second.
#pragma once
#include "simd.h"
#include "types.h"

namespace {

// Read n_bytes once; returns a value that depends on all of them.
inline double read_sum(const uint8_t* data, int64_t n_bytes) {
  vi lanes[8] = {};
  const int64_t stride = 8 * int64_t(sizeof(vi));
  for (int64_t i = 0; i + stride <= n_bytes; i += stride)
    for (int j = 0; j < 8; j++) lanes[j] ^= load<vi>(data + i + j * sizeof(vi));
  double sum = 0;
  for (auto& lane : lanes)
    for (int i = 0; i < W; i++) sum += lane[i];
  return sum;
}

// 12 independent chains of fused multiply-adds; 2 * 12 * W operations a repeat.
inline double fma_rate(int64_t repeats) {
  vf x[12];
  for (int i = 0; i < 12; i++) x[i] = splat(1.0f + 0.001f * i);
  const vf a = splat(0.9999f), b = splat(1e-4f);
  for (int64_t k = 0; k < repeats; k++)
    for (int i = 0; i < 12; i++) x[i] = fma(x[i], a, b);
  double sum = 0;
  for (auto& v : x) sum += v[0];
  return sum * W;
}

}  // namespace
