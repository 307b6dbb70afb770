// C[r][0 .. 2W) (+)= sum over k of A[r][k] * M[k][0 .. 2W), for R rows at once: the inner loops of attention by floats.
// Scores: A = queries, M = K (channels x tokens). Mixing: A = softmax weights, M = V (tokens x channels).
// Each row has its own chain of sums in the order of k, so a row's result does not depend on how many rows go together.
#pragma once
#include <cstddef>

#include "stage_stripe.h"

namespace {

#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 6;
#endif

// V: vectors of columns at once. ahead: a line a row of M.
template <int C, int R, int V>
INLINE void tile(const uint8_t* m, int64_t row_stride, int column, const float* a, int64_t lda, int n, float* c,
                 int64_t ldc, bool add, Ahead ahead) {
  vf sum[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = add ? load<vf>(c + r * ldc + v * W) : vf{};
  for (int k = 0; k < n; k++, m += row_stride) {
    vf x[V];
    ask<kPlainLines>(ahead);
    for (int v = 0; v < V; v++) x[v] = row_vf<C>(m, column + v * W);
    for (int r = 0; r < R; r++) {
      vf w = splat(a[r * lda + k]);
      for (int v = 0; v < V; v++) sum[r][v] = fma(w, x[v], sum[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(c + r * ldc + v * W, sum[r][v]);
}

// A product of float weights with rows of M, and memory to ask for meanwhile.
struct RowPart {
  const uint8_t* m;
  const float* a;
  Ahead ahead;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Lanes of two vectors side by side. VPERM2F128 would be one instruction, and eight operations on Zen 1.
INLINE __m256 low_lanes(__m256 a, __m256 b) { return _mm256_insertf128_ps(a, _mm256_castps256_ps128(b), 1); }
INLINE __m256 high_lanes(__m256 a, __m256 b) { return _mm256_insertf128_ps(b, _mm256_extractf128_ps(a, 1), 0); }

// Three rows of weights, `apart` bytes from one to the next, times n rows of 32 bfloat16, asking for a line beside each.
struct ThreeRows {
  const uint8_t* m;
  const float* w;
  const uint8_t* at;
  int64_t step, stride, apart, n;
  alignas(32) uint32_t high[W];  // the high halves
};
// In assembly, since 12 sums leave four registers, and GCC would put some of them and its pointers on the stack: 13 cycles a row
// instead of 16 on Zen 1, of which the multiply-adds need 12.
INLINE void add_three_rows(vf (&even)[3][2], vf (&odd)[3][2], const ThreeRows& rows) {
#define KVARN_HALF(AT) "vmovdqu " AT "(%%rax), %%ymm13\n\tvpslld $16, %%ymm13, %%ymm12\n\tvpand 64(%[rows]), %%ymm13, %%ymm13\n\t"
#define KVARN_WEIGHT(AT, TO) "vbroadcastss " AT ", %%ymm" TO "\n\t"
#define KVARN_ADD(ROW, HALF, WEIGHT) \
  "vfmadd231ps %%ymm12, %%ymm" WEIGHT ", %[e" ROW HALF "]\n\tvfmadd231ps %%ymm13, %%ymm" WEIGHT ", %[o" ROW HALF "]\n\t"
  static_assert(offsetof(ThreeRows, high) == 64);
  asm("mov 0(%[rows]), %%rax\n\tmov 8(%[rows]), %%rcx\n\tmov 16(%[rows]), %%rdx\n\tmov 24(%[rows]), %%r8\n\t"
      "mov 32(%[rows]), %%r9\n\tmov 40(%[rows]), %%r10\n\tmov 48(%[rows]), %%r11\n"
      "1:\n\tprefetcht1 (%%rdx)\n\t"                                           //
      KVARN_HALF("0")                                                            //
      KVARN_WEIGHT("(%%rcx)", "14") KVARN_ADD("0", "0", "14")                    //
      KVARN_WEIGHT("(%%rcx,%%r10)", "15") KVARN_ADD("1", "0", "15")              //
      KVARN_WEIGHT("(%%rcx,%%r10,2)", "14") KVARN_ADD("2", "0", "14")            //
      KVARN_HALF("32") KVARN_ADD("2", "1", "14") KVARN_ADD("1", "1", "15")       //
      KVARN_WEIGHT("(%%rcx)", "14") KVARN_ADD("0", "1", "14")                    //
      "add %%r8, %%rdx\n\tadd %%r9, %%rax\n\tadd $4, %%rcx\n\tdec %%r11\n\tjnz 1b"
      : [e00] "+x"(even[0][0]), [e01] "+x"(even[0][1]), [e10] "+x"(even[1][0]), [e11] "+x"(even[1][1]), [e20] "+x"(even[2][0]),
        [e21] "+x"(even[2][1]), [o00] "+x"(odd[0][0]), [o01] "+x"(odd[0][1]), [o10] "+x"(odd[1][0]), [o11] "+x"(odd[1][1]),
        [o20] "+x"(odd[2][0]), [o21] "+x"(odd[2][1])
      : [rows] "r"(&rows)
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
#undef KVARN_HALF
#undef KVARN_WEIGHT
#undef KVARN_ADD
}

// bfloat16 without widening by shuffles: of two neighbours in 32 bits the even column is the low half moved up, the odd one
// the high half. Sums of even and odd columns stay apart until the end of all parts. V: vectors of 16 columns, so that one row, or
// few, use a whole line of memory at once. kSplit: M's columns stand in the order 0 to 7, 16 to 23, 8 to 15, 24 to 31.
template <int R, int V, bool kSplit = false>
INLINE void tile_bf16(const RowPart* parts, int n_parts, int64_t row_stride, int column, int64_t first_row, int64_t lda, int n, float* c,
                      int64_t ldc, bool add, bool asking) {
  const vu high = (vu)_mm256_set1_epi32(int(0xffff0000u));
  constexpr int next = kSplit ? 8 : 16, apart = kSplit ? 16 : 8;  // in C: from a vector of 16 columns to the next; of its halves
  vf even[R][V], odd[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      even[r][v] = odd[r][v] = vf{};
      if (!add) continue;
      const __m256 x = _mm256_loadu_ps(c + r * ldc + next * v), y = _mm256_loadu_ps(c + r * ldc + next * v + apart);
      const __m256 low = low_lanes(x, y), top = high_lanes(x, y);
      even[r][v] = (vf)_mm256_shuffle_ps(low, top, 0x88), odd[r][v] = (vf)_mm256_shuffle_ps(low, top, 0xdd);
    }
  for (int i = 0; i < n_parts; i++) {
    const uint8_t* m = parts[i].m + 2 * column;
    const float* a = parts[i].a + first_row * lda;
    Ahead ahead = asking ? parts[i].ahead : Ahead{m, 0};
    ahead.at += column / 32 * n * ahead.step;
    if constexpr (R == 3 && V == 2) {
      constexpr uint32_t high_half = 0xffff0000u;
      const ThreeRows rows{m, a, ahead.at, ahead.step, row_stride, lda * int64_t(sizeof(float)), n,
                           {high_half, high_half, high_half, high_half, high_half, high_half, high_half, high_half}};
      if (n > 0) add_three_rows(even, odd, rows);
      continue;
    }
    for (int k = 0; k < n; k++, m += row_stride) {
      vf p[V], q[V];
      ask<kPlainLines>(ahead);
      for (int v = 0; v < V; v++) {
        const vu both = load<vu>(m + 32 * v);
        p[v] = (vf)(both << 16), q[v] = (vf)(both & high);
      }
      for (int r = 0; r < R; r++) {
        const vf w = splat(a[r * lda + k]);
        for (int v = 0; v < V; v++) even[r][v] = fma(w, p[v], even[r][v]), odd[r][v] = fma(w, q[v], odd[r][v]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) {
      const __m256 low = _mm256_unpacklo_ps((__m256)even[r][v], (__m256)odd[r][v]);
      const __m256 top = _mm256_unpackhi_ps((__m256)even[r][v], (__m256)odd[r][v]);
      _mm256_storeu_ps(c + r * ldc + next * v, low_lanes(low, top));
      _mm256_storeu_ps(c + r * ldc + next * v + apart, high_lanes(low, top));
    }
}
#endif

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

#if defined(__AVX2__) && !defined(__AVX512F__)
// C (+)= the sum over parts of A * M in bfloat16, rows of `columns` numbers, a multiple of 16. Up to three rows take lines at once.
inline void matmul_bf16(const RowPart* parts, int n_parts, int64_t row_stride, int columns, int64_t lda, int rows, int n, float* c, int64_t ldc,
                        bool add) {
  int col = 0;
#define KVARN_TILE(R) \
  tile_bf16<R, (R <= 3 ? V : 1)>(parts, n_parts, row_stride, col, r0, lda, n, c + r0 * ldc + col, ldc, add, r0 == 0 && col % 32 == 0)
  if (rows <= 3) {
    constexpr int V = 2;
    for (; col + 4 * W <= columns; col += 4 * W) { KVARN_ROWS(rows, KVARN_TILE) }
  }
  constexpr int V = 1;
  for (; col < columns; col += 2 * W) { KVARN_ROWS(rows, KVARN_TILE) }
#undef KVARN_TILE
}

template <int C>
void matmul_codec(const uint8_t* m, int64_t row_stride, int columns, const float* a, int64_t lda, int rows, int n, float* c, int64_t ldc,
                  bool add, Ahead ahead);

// Columns in stripes of 32 that become floats or bfloat16 once for all rows.
template <int C>
void matmul_staged(const uint8_t* m, int64_t row_stride, int columns, const float* a, int64_t lda, int rows, int n, float* c,
                   int64_t ldc, bool add, Ahead ahead) {
  constexpr int kSome = 64, S = staged(C);  // rows of M: 8 KiB
  alignas(32) uint8_t stripe[kSome * 128];
  for (int col = 0; col < columns; col += 32, m += row_bytes(C, 32), c += 32)
    for (int k = 0; k < n; k += kSome) {
      const int some = imin(kSome, n - k);
      stage_stripe<C>(m + k * row_stride, row_stride, some, stripe, ahead);
      const RowPart part{stripe, a + k, Ahead{stripe, 0}};
      if constexpr (S == kF32) {
        matmul_codec<kF32>(stripe, 128, 32, a + k, lda, rows, some, c, ldc, add || k > 0, part.ahead);
      } else if (rows <= 3) {
#define KVARN_TILE(R) \
  tile_bf16<R, (R <= 3 ? 2 : 1), true>(&part, 1, 64, 0, r0, lda, some, c + r0 * ldc, ldc, add || k > 0, true)
        KVARN_ROWS(rows, KVARN_TILE)
#undef KVARN_TILE
      } else {
#define KVARN_TILE(R) \
  tile_bf16<R, 1, true>(&part, 1, 64, 16 * v, r0, lda, some, c + r0 * ldc + 8 * v, ldc, add || k > 0, true)
        for (int v = 0; v < 2; v++) { KVARN_ROWS(rows, KVARN_TILE) }
#undef KVARN_TILE
      }
    }
}
INLINE bool takes_parts(int codec, int columns, int rows) { return codec == kBF16 && columns % (2 * W) == 0 && rows <= 3; }
#else
INLINE bool takes_parts(int, int, int) { return false; }
inline void matmul_bf16(const RowPart*, int, int64_t, int, int64_t, int, int, float*, int64_t, bool) {}
#endif

template <int C>
void matmul_codec(const uint8_t* m, int64_t row_stride, int columns, const float* a, int64_t lda, int rows, int n,
                  float* c, int64_t ldc, bool add, Ahead ahead) {
  int col = 0;
  // The first rows ask, for whole stripes of columns.
  auto asked = [&](int r0) { return r0 == 0 && col % 32 == 0 ? Ahead{ahead.at + col / 32 * n * ahead.step, ahead.step} : Ahead{m, 0}; };
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (C != kF32)
    if (columns % 32 == 0 && (C >= kAffine4 || rows > 3))
      return matmul_staged<C>(m, row_stride, columns, a, lda, rows, n, c, ldc, add, ahead);
  if constexpr (C == kBF16) {
    const RowPart part{m, a, ahead};
    return matmul_bf16(&part, 1, row_stride, columns, lda, rows, n, c, ldc, add);
  }
  // Up to three rows take four vectors at once.
#define KVARN_TILE(R) \
  tile<C, R, (R <= 3 ? 4 : 2)>(m, row_stride, col, a + r0 * lda, lda, n, c + r0 * ldc + col, ldc, add, asked(r0))
  if (rows <= 3)
    for (; col + 4 * W <= columns; col += 4 * W) { KVARN_ROWS(rows, KVARN_TILE) }
#undef KVARN_TILE
#endif
  for (; col < columns; col += 2 * W) {
#define KVARN_TILE(R) tile<C, R, 2>(m, row_stride, col, a + r0 * lda, lda, n, c + r0 * ldc + col, ldc, add, asked(r0))
    KVARN_ROWS(rows, KVARN_TILE)
#undef KVARN_TILE
  }
}

// M [n][columns] as `codec` stores it (columns must satisfy fast_row), A [rows][n], C [rows][columns]. ahead: memory to ask for
// meanwhile, a line for each row of M and 32 columns.
inline void matmul(int codec, const uint8_t* m, int64_t row_stride, int columns, const float* a, int64_t lda, int rows,
                   int n, float* c, int64_t ldc, bool add, Ahead ahead) {
  switch (codec) {
#define KVARN_CASE(C) \
  case C: return matmul_codec<C>(m, row_stride, columns, a, lda, rows, n, c, ldc, add, ahead);
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

// One product of pairs of bfloat16 [rows][pairs] with M [2 * pairs][columns], columns a multiple of 32, and memory to ask for
// meanwhile: kDotLines lines a pair of rows and 32 columns.
constexpr int kDotLines = 2;
struct DotPart {
  const uint8_t* m;
  const uint32_t* a;
  Ahead ahead;
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
// The same for bfloat16 on both sides: pairs of rows of M are interleaved and multiplied two at a time (VDPBF16PS, float32
// sums). A holds pairs of bfloat16 [rows][pairs]; M [2 * pairs][columns], columns a multiple of 32. fp8 numbers become
// bfloat16, which holds them all, by a table of their 128 magnitudes.
struct alignas(64) Interleave {
  uint16_t words[32];
  uint8_t low[64], high[64];  // low and high bytes of the bfloat16 of each e4m3 magnitude
  uint8_t low_more[64], high_more[64];
  uint8_t bytes[64];
};
constexpr uint32_t e4m3_as_bf16(int code) {
  if (code == 0x7f) return 0x7fc0;
  if (code >= 8) return uint32_t((code << 4) + (120 << 7));
  if (code == 0) return 0;
  int exponent = code >= 4 ? 2 : code >= 2 ? 1 : 0;  // code * 2^-9
  return uint32_t(((exponent - 9 + 127) << 7) | ((code << (7 - exponent)) & 127));
}
constexpr Interleave make_interleave() {
  Interleave t{};
  for (int i = 0; i < 32; i++) t.words[i] = uint16_t(i / 2 + i % 2 * 32);
  for (int i = 0; i < 64; i++) {
    t.low[i] = uint8_t(e4m3_as_bf16(i)), t.high[i] = uint8_t(e4m3_as_bf16(i) >> 8);
    t.low_more[i] = uint8_t(e4m3_as_bf16(i + 64)), t.high_more[i] = uint8_t(e4m3_as_bf16(i + 64) >> 8);
    t.bytes[i] = uint8_t(i / 4 + i % 4 / 2 * 32 + i % 2 * 64);  // [16 columns][2 rows][low, high]
  }
  return t;
}
constexpr Interleave kInterleave = make_interleave();

// Columns 0 .. 16 and 16 .. 32 of two rows of M, each as [column][row] in bfloat16.
template <int C>
INLINE void two_rows(const uint8_t* m, int64_t row, __m512bh* p, __m512bh* q) {
  if constexpr (C == kBF16) {
    const __m512i pick = _mm512_load_si512(kInterleave.words);
    __m512i even = _mm512_loadu_si512(m), odd = _mm512_loadu_si512(m + row);
    *p = (__m512bh)_mm512_permutex2var_epi16(even, pick, odd);
    *q = (__m512bh)_mm512_permutex2var_epi16(even, _mm512_add_epi16(pick, _mm512_set1_epi16(16)), odd);
  } else {
    const __m512i pick = _mm512_load_si512(kInterleave.bytes);
    __m512i x = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(m))),
                                   _mm256_loadu_si256(reinterpret_cast<const __m256i*>(m + row)), 1);
    __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kInterleave.low), x, _mm512_load_si512(kInterleave.low_more));
    __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(kInterleave.high), x, _mm512_load_si512(kInterleave.high_more));
    high = _mm512_or_si512(high, _mm512_and_si512(x, _mm512_set1_epi8(-128)));
    *p = (__m512bh)_mm512_permutex2var_epi8(low, pick, high);
    *q = (__m512bh)_mm512_permutex2var_epi8(low, _mm512_add_epi8(pick, _mm512_set1_epi8(16)), high);
  }
}

INLINE void add_pairs(__m512& sum, __m512bh a, __m512bh b) {  // in assembly: GCC copies sums around the intrinsic
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}

template <int C, int R>
INLINE void dot_tile(const DotPart* parts, int n_parts, int column, int64_t row, int64_t lda, int64_t first_row, int pairs, float* c,
                     int64_t ldc, bool add, bool asking) {
  __m512 x[R], y[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    x[r] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
    y[r] = add ? _mm512_loadu_ps(c + r * ldc + 16) : _mm512_setzero_ps();
  }
  for (int i = 0; i < n_parts; i++) {
    const uint8_t* m = parts[i].m + row_bytes(C, column);
    const uint32_t* a = parts[i].a + first_row * lda;
    Ahead ahead = asking ? parts[i].ahead : Ahead{m, 0};
    ahead.at += int64_t(column / 32) * pairs * kDotLines * ahead.step;
    for (int k = 0; k < pairs; k++, m += 2 * row) {
      __m512bh p, q;
      ask<kDotLines>(ahead);
      two_rows<C>(m, row, &p, &q);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        __m512bh w = (__m512bh)_mm512_set1_epi32(int(a[r * lda + k]));
        add_pairs(x[r], w, p);
        add_pairs(y[r], w, q);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    _mm512_storeu_ps(c + r * ldc, x[r]);
    _mm512_storeu_ps(c + r * ldc + 16, y[r]);
  }
}
#endif

// C (+)= the sum over parts of A * M, M as bfloat16 or fp8 stores it, rows of `columns` numbers.
template <int C>
void matmul_dot(const DotPart* parts, int n_parts, int columns, int64_t lda, int rows, int pairs, float* c, int64_t ldc, bool add) {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  for (int col = 0; col < columns; col += 32) {
#define KVARN_TILE(R) \
  dot_tile<C, R>(parts, n_parts, col, row_bytes(C, columns), lda, r0, pairs, c + r0 * ldc + col, ldc, add, r0 == 0)
    KVARN_ROWS(rows, KVARN_TILE)
#undef KVARN_TILE
  }
#else
  (void)parts, (void)n_parts, (void)columns, (void)lda, (void)rows, (void)pairs, (void)c, (void)ldc, (void)add;
#endif
}

}  // namespace
