// What all ways of attention by integer products share.
#pragma once
#include "codecs.h"

namespace {

constexpr int kStripe = 32;   // tokens that one product takes
constexpr int kWidest = 256;  // channels of a head

// Lines asked for beside four channels of keys, and beside a vector of softmax weights, of the first kExpRows rows of a head; with
// kMixLines beside four tokens of values about what int8 blocks of 64 channels need, evenly over the time that they take.
constexpr int kScoreLines = 2, kExpLines = 2, kExpRows = 3;

struct Queries {         // rows of one head, as integers
  const int8_t* digits;  // 4 bytes a channel; how they are used is each instruction set's own matter
  const int32_t* shift;  // [rows]: what is taken off a row's sums of int8 keys
  const float* step;     // [rows]
  const float* bias;     // [rows]: q . zero point; null: none
};

struct Stripes {  // V of one head in a split's blocks of one pool, and the weights of their tokens
  const uint8_t** at;  // [n]: a stripe's first token
  Ahead* ahead;        // [n]
  int n;
  int64_t row;             // bytes of a token
  const uint8_t* weights;  // [rows][n], 2 * kStripe bytes each
  const float* factor;     // [rows]
};

// The largest magnitude of x [n], n a multiple of W. A NaN counts as the largest.
INLINE float top_magnitude(const float* x, int n) {
  vi most{};
  for (int i = 0; i < n; i += W) {
    vi bits = load<vi>(x + i) & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return bits_float(uint32_t(hmax_i(most)));
}

// Of a row's weights in the stripes of a split: the largest, and their sum, in which a NaN or an infinity stays: a maximum does not
// show a NaN.
struct Peak {
  float top, sum;
};
INLINE Peak peak_of(const float* x, const int* offset, int n) {
  vf most{}, more{}, sum{};
  for (int t = 0; t < n; t++)
    for (int j = 0; j < kStripe; j += 2 * W) {
      const vf a = load<vf>(x + offset[t] + j), b = load<vf>(x + offset[t] + j + W);
      most = vmax(a, most), more = vmax(b, more);
      sum += a + b;
    }
  return {hmax(vmax(most, more)), hsum(sum)};
}

}  // namespace
