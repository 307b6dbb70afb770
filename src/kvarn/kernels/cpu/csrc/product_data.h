// Products with matrices of 4- or 8-bit codes: activations become int8 as they come in, the sums of a group are integers.
// A matrix stands in tiles of 16 rows; weight = scale * (code - zero) + offset, zero being the code in the middle. A span of
// columns shares the scale of the activations: a group, or two where groups have 32 columns and their number is even. A tile
// holds for each span the codes of its groups, in blocks of 32 columns:
//   8 bits: [8][16 rows][4 columns] bytes; 4 bits: [4][16 rows][4 columns] bytes, low half columns 0..15, high half 16..31,
// so that four columns of 16 rows are one VPDPBUSD operand; then [groups of the span][16 rows] half-precision scales; then,
// where there are offsets, [16 rows][groups of the span] of them in bfloat16, so that two groups are one VDPBF16PS operand.
// A row of the result is summed in one order whatever rows stand beside it: the integers are exact, and spans follow
// each other. The sum is kept in units of the span's activation scale, which costs one multiplication a span:
//   total = total * (scale before / scale) + sum of (weight scale * integers) + sum of (offset * activation codes).
#pragma once
#include "scratch.h"
#include "simd.h"
#include "small.h"
#include "types.h"

namespace {

using namespace kvarn;

constexpr int kTile = 16, kBlock = 32;
// On AVX2 rows go in panels whose sums stay in registers, so many panels with a tile at once; offsets are multiplied with the
// whole sums of the codes, which stand in `base`.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kPanel = 4, kPanelsAtOnce = 8;
constexpr bool kWholeSums = true;
#else
constexpr int kPanel = 12, kPanelsAtOnce = 1;
constexpr bool kWholeSums = false;
#endif
constexpr int kRowsAtOnce = 4;  // divides a panel
constexpr int kFewRows = 12;  // as fast as memory gives weights, about

inline int64_t tile_bytes(const BlockMatrix& w) {
  int64_t codes = int64_t(w.columns) * kTile * w.bits / 8;
  return codes + int64_t(w.columns / w.group) * kTile * 2 * (w.offsets ? 2 : 1);
}

inline int span_groups(const BlockMatrix& w) { return w.group == kBlock && w.columns / kBlock % 2 == 0 ? 2 : 1; }
inline int zero_code(const BlockMatrix& w) { return 1 << (w.bits - 1); }

// Rows that one tile is multiplied with together. The last panel of a call has fewer; rows that fill it up are zeros.
inline int panel_rows(int64_t left) {
  if (left >= kPanel) return kPanel;
  return left <= 2 ? int(left) : left <= 4 ? 4 : left <= 6 ? 6 : left <= 8 ? 8 : kPanel;
}

// Panels of kPanel rows, one after the other, a last one that is filled up among them.
inline int full_panels(int64_t left) { return int(left / kPanel) + (left % kPanel != 0 && panel_rows(left % kPanel) == kPanel); }

struct Quantized {  // activations of a call, a panel of R rows after the other, so that one pointer walks over all its rows
  int8_t* codes;    // [columns / 4][R][4]
  float* ratio;     // [spans + 1][R]: the scale of the span before over this one's; at the end the last span's scale
  int32_t* base;    // [groups][R]: -zero * sum of the codes; with kWholeSums and offsets the sum, a float's bits
  uint32_t* sums;   // [spans][R]: the codes' sums in bfloat16, one group in the high half or two (matrices with offsets)
};

struct ProductJob {
  const ProductCall* call;
  Quantized q;
  int n_items, n_tiles, groups, spans;
};

}  // namespace
