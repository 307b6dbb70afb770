// C[r][0 .. 2W) (+)= sum over k of A[r][k] * M[k][0 .. 2W), for R rows at once: the one inner loop of attention.
// Scores: A = queries, M = K (channels x tokens). Mixing: A = softmax weights, M = V (tokens x channels).
// Each row has its own chain of sums in the order of k, so a row's result does not depend on how many rows go together.
#pragma once
#include "codecs.h"

namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 6;
#endif

template <int C, int R>
INLINE void tile(const uint8_t* m, int64_t row_stride, int column, const float* a, int64_t lda, int n, float* c,
                 int64_t ldc, bool add) {
  vf x[R], y[R];
  for (int r = 0; r < R; r++) {
    x[r] = add ? load<vf>(c + r * ldc) : vf{};
    y[r] = add ? load<vf>(c + r * ldc + W) : vf{};
  }
  for (int k = 0; k < n; k++) {
    vf p = row_vf<C>(m + k * row_stride, column), q = row_vf<C>(m + k * row_stride, column + W);
    for (int r = 0; r < R; r++) {
      vf w = splat(a[r * lda + k]);
      x[r] = fma(w, p, x[r]);
      y[r] = fma(w, q, y[r]);
    }
  }
  for (int r = 0; r < R; r++) {
    store(c + r * ldc, x[r]);
    store(c + r * ldc + W, y[r]);
  }
}

// Call body(first row, constant R) for pieces of at most kMaxRows rows.
#define KVARN_ROWS(rows, CALL)                            \
  for (int r0 = 0; r0 < (rows);) {                        \
    int left = (rows) - r0;                               \
    if (kMaxRows >= 12 && left >= 12) { CALL(12); r0 += 12; } \
    else if (left >= 6) { CALL(6); r0 += 6; }             \
    else if (left >= 4) { CALL(4); r0 += 4; }             \
    else if (left == 3) { CALL(3); r0 += 3; }             \
    else if (left == 2) { CALL(2); r0 += 2; }             \
    else { CALL(1); r0 += 1; }                            \
  }

template <int C>
void matmul_codec(const uint8_t* m, int64_t row_stride, int columns, const float* a, int64_t lda, int rows, int n,
                  float* c, int64_t ldc, bool add) {
  for (int col = 0; col < columns; col += 2 * W) {
#define KVARN_TILE(R) tile<C, R>(m, row_stride, col, a + r0 * lda, lda, n, c + r0 * ldc + col, ldc, add)
    KVARN_ROWS(rows, KVARN_TILE)
#undef KVARN_TILE
  }
}

// M [n][columns] as `codec` stores it (columns must satisfy fast_row), A [rows][n], C [rows][columns].
inline void matmul(int codec, const uint8_t* m, int64_t row_stride, int columns, const float* a, int64_t lda, int rows,
                   int n, float* c, int64_t ldc, bool add) {
  switch (codec) {
#define KVARN_CASE(C) \
  case C: return matmul_codec<C>(m, row_stride, columns, a, lda, rows, n, c, ldc, add);
    KVARN_CASE(kF32)
    KVARN_CASE(kBF16)
    KVARN_CASE(kF16)
    KVARN_CASE(kFP8)
    KVARN_CASE(kInt8)
    KVARN_CASE(kAffine4)
    KVARN_CASE(kAffine3)
    KVARN_CASE(kAffine2)
    KVARN_CASE(kTurbo4)
    KVARN_CASE(kTurbo3)
    KVARN_CASE(kTurbo2)
#undef KVARN_CASE
    default: break;
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// The same for bfloat16 on both sides: pairs of rows of M are interleaved and multiplied two at a time (VDPBF16PS, float32
// sums). A holds pairs of bfloat16 [rows][pairs]; M [2 * pairs][columns], columns a multiple of 32.
template <int R>
INLINE void dot_tile(const uint16_t* m, int64_t columns, const uint32_t* a, int64_t lda, int pairs, float* c, int64_t ldc,
                     bool add) {
  alignas(64) static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                               8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i pick_low = _mm512_load_si512(low), pick_high = _mm512_add_epi16(pick_low, _mm512_set1_epi16(16));
  __m512 x[R], y[R];
  for (int r = 0; r < R; r++) {
    x[r] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
    y[r] = add ? _mm512_loadu_ps(c + r * ldc + 16) : _mm512_setzero_ps();
  }
  for (int k = 0; k < pairs; k++) {
    __m512i even = _mm512_loadu_si512(m + 2 * k * columns), odd = _mm512_loadu_si512(m + (2 * k + 1) * columns);
    __m512bh p = (__m512bh)_mm512_permutex2var_epi16(even, pick_low, odd);
    __m512bh q = (__m512bh)_mm512_permutex2var_epi16(even, pick_high, odd);
    for (int r = 0; r < R; r++) {
      __m512bh w = (__m512bh)_mm512_set1_epi32(int(a[r * lda + k]));
      x[r] = _mm512_dpbf16_ps(x[r], w, p);
      y[r] = _mm512_dpbf16_ps(y[r], w, q);
    }
  }
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(c + r * ldc, x[r]);
    _mm512_storeu_ps(c + r * ldc + 16, y[r]);
  }
}
#endif

inline void matmul_dot(const uint16_t* m, int columns, const uint32_t* a, int64_t lda, int rows, int pairs, float* c,
                       int64_t ldc, bool add) {
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
  for (int col = 0; col < columns; col += 32) {
#define KVARN_TILE(R) dot_tile<R>(m + col, columns, a + r0 * lda, lda, pairs, c + r0 * ldc + col, ldc, add)
    KVARN_ROWS(rows, KVARN_TILE)
#undef KVARN_TILE
  }
#else
  (void)m, (void)columns, (void)a, (void)lda, (void)rows, (void)pairs, (void)c, (void)ldc, (void)add;
#endif
}

}  // namespace
