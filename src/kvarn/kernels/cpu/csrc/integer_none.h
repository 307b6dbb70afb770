// No integer products: nothing of this is called but the first two.
#pragma once
#include "integer_parts.h"

namespace {

constexpr int kMixLines = 0;
constexpr int kLongestBlock = 0;
INLINE bool k_has_integers(int) { return false; }
INLINE bool v_has_integers(int) { return false; }

INLINE float int8_query(const float*, int, float, int8_t*, int32_t*) { return 0.0f; }
INLINE float packed_query(const float*, const float*, int, float, int8_t*) { return 0.0f; }
constexpr float kTopWeight = 1.0f;
INLINE void code_weights(const float*, const int*, int, float, uint8_t*) {}
template <int C>
void score_stripe(const uint8_t*, int64_t, int, const Queries&, int, const uint16_t*, float*, int64_t, Ahead) {}
template <int C>
void mix_stripes(const Stripes&, int, int, float*, int64_t, bool) {}

}  // namespace
