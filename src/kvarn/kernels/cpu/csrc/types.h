// What crosses the border between Python and the kernels: plain structs of pointers, byte strides and counts.
// No torch, no standard containers: this header is compiled once for every instruction set.
#pragma once
#include <cstdint>

namespace kvarn {

// Element types of activations and of float formats. The values are part of the Python side (cpu/codes.py).
enum Dtype : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// How one side (K or V) of a block is stored. Float codecs share their values with Dtype.
enum Codec : int {
  kF32 = 0, kBF16 = 1, kF16 = 2, kFP8 = 3, kInt8 = 4,
  kAffine4 = 5, kAffine3 = 6, kAffine2 = 7,
  kTurbo4 = 8, kTurbo3 = 9, kTurbo2 = 10
};

struct TensorRef {  // one tensor of a format; strides in bytes, 0 where the grain has no such axis
  uint8_t* data;
  int64_t block, layer, head;
};

struct Side {
  int codec;
  int group;  // channels that share one scale (affine values)
  TensorRef part[3];
};

struct Pool {
  Side k, v;
  int32_t* positions;  // [N, B]
  int block_size;
};

constexpr int kMaxPools = 16;

struct Table {
  const uint8_t* pool;      // [R, C]
  const int32_t* block;     // [R, C]
  const int32_t* length;    // [R]
  const int32_t* first_row; // [S]
  int columns, layer_stride, head_stride;
};

struct Span {  // positions that a block's slots hold
  int32_t low, high;  // oldest and newest; high -1: none
  int32_t holes;      // 1: some slot holds nothing
};

struct Step {
  Pool pools[kMaxPools];
  int n_pools;
  Table table;
  const int32_t* query_start;  // [S + 1]
  const int32_t* positions;    // [T]
  Span* spans;                 // [R, C], of the rows that known_rows [R] marks: found at the first call that needs them
  uint8_t* known_rows;
  int n_seqs, n_tokens;
  int kv_heads, k_dim, v_dim;
  const int64_t* slots;  // [T, L', H'] or null
  int64_t slot_token, slot_layer, slot_head;  // strides in elements, 0 where the grain has no such axis
  int open_pool;
  int n_threads;
};

struct Rotation {  // cos, sin [T, half] float32; null: no rotation
  const float *cos, *sin;
  int half;
};

struct AttendCall {
  const void *q, *k, *v;  // k, v null: nothing is written
  int64_t q_token, k_token, v_token;  // stride of a token in elements; heads are contiguous
  int dtype, query_heads, layer;
  Rotation rope;
  void* out;     // [T, Hq, E] contiguous, dtype as q
  float* lse;    // [T, Hq] or null
  float scale, soft_cap;
  int window, chunk;  // 0: none
  const float* sinks; // [Hq] or null
};

struct MassCall {  // attention mass of every slot, from queries and their log-sum-exp
  AttendCall attend;   // out unused; lse read
  float* mass;         // [S, H, C, B], added to
};

struct SealCall {
  const Pool *source, *target;
  const int64_t *source_blocks, *target_blocks;
  int n_blocks, layers, heads, k_dim, v_dim, n_threads;
};

struct DecodeCall {
  const Pool* pool;
  const int64_t* blocks;
  float *k, *v;  // [n, L, H, D, B], [n, L, H, B, E]
  int n_blocks, layers, heads, k_dim, v_dim, n_threads;
};

struct RowsCall {  // row-wise small operations over [rows, width]
  const void *x, *y;  // y: residual, up projection, or null
  void *out, *sum;    // sum: x + residual where asked, or null
  const void* weight;
  int64_t rows, width, x_row, y_row, out_row, sum_row;
  int dtype, weight_dtype, n_threads;
  float eps;
  int activation;  // 0 silu, 1 gelu_tanh
};

struct BlockMatrix {  // codes and scales in tiles of 16 rows, see product_data.h
  const uint8_t* data;
  int rows, columns;  // columns: a multiple of 32, padded with code zero
  int group;          // columns that share a scale, a multiple of 32
  int bits;           // of a code: 4 or 8
  bool offsets;       // one a scale
};

enum Before : int { kAsIs = 0, kNormed = 1, kGated = 2 };  // what happens to activations before the product

struct ProductCall {  // out = before(x) @ matrix.T (+ bias) (+ residual)
  BlockMatrix matrix;
  const void* x;
  int64_t x_row;
  int width, dtype;  // columns of x that count; kGated: x is [gate | up], each of that width
  int before, activation;
  const float* norm;
  float eps;
  const float* bias;
  const void* residual;  // in out's dtype, or null
  void* out;
  int64_t residual_row, out_row;
  int out_dtype, n_threads;
  int64_t rows;
};

struct GatherCall {  // rows `ids` of a matrix as floats [rows, width]
  BlockMatrix matrix;
  const int64_t* ids;
  void* out;
  int rows, width, dtype, n_threads;
};

struct Ops {  // one table an instruction set
  const char* name;
  void (*attend)(const Step&, const AttendCall&);
  void (*mass)(const Step&, const MassCall&);
  void (*seal)(const SealCall&);
  void (*decode)(const DecodeCall&);
  void (*rms_norm)(const RowsCall&);
  void (*gated)(const RowsCall&);
  void (*rope)(const Step&, const AttendCall&);
  void (*write)(const Step&, const AttendCall&);
  void (*product)(const ProductCall&);
  void (*gather)(const GatherCall&);
  double (*read_sum)(const uint8_t*, int64_t n_bytes);
  double (*fma_rate)(int64_t repeats);
};

// Run task(i, context) for i in [0, n) on up to n_threads threads; order and placement carry no meaning.
void parallel_for(int n, int n_threads, void (*task)(int, void*), void* context);

}  // namespace kvarn
