// Attention over blocks of codes by integer products: no code is turned into a float. Queries and softmax weights are rounded to
// integers; an integer weight is a softmax weight times its token's scale, in steps of the row's largest such product in the
// split, so that one integer sum a channel goes through all of a split's blocks.
// Integer sums are exact, so no result depends on how many rows or tokens go together. Everything works on stripes of 32
// tokens; how packed codes stand in a stripe is said in codecs.h.
#pragma once
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#include "integer_mix_vnni.h"
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "integer_avx2.h"
#else
#include "integer_none.h"
#endif

namespace {

INLINE bool k_by_integers(int codec, int dim, int block, int dtype) {
  return k_has_integers(codec) && dtype == kBFloat16 && dim % 16 == 0 && dim <= kWidest && block % kStripe == 0;
}
INLINE bool v_by_integers(int codec, int dim, int block, int dtype) {
  return v_has_integers(codec) && dtype == kBFloat16 && dim % 64 == 0 && block % kStripe == 0 && block <= kLongestBlock;
}

}  // namespace
