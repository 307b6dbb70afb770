// The kernels without Python: seal random blocks into every format, attend over a table that mixes them with open blocks,
// and compare with attention over the decoded numbers in double precision. For machines whose kernels are cross-compiled:
// test_aarch64.py builds and runs it. Prints one line a format; exit status 1 where an error is beyond its budget.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "types.h"

namespace kvarn {
extern const Ops ops_baseline;
}

namespace {

using namespace kvarn;
constexpr int kHeads = 2, kGroup = 3, kDim = 64, kBlock = 32, kBlocks = 12, kColumns = 2 * kBlocks, kTokens = 3;
constexpr int kLength = kBlock * kColumns - 7;  // the last block has holes
const char* kNames[] = {"float32", "bfloat16", "float16", "fp8_e4m3", "int8",  "int4",
                        "int3",    "int2",     "turbo4",  "turbo3",   "turbo2"};

uint32_t seed = 1;
float random_float() {  // sum of uniforms: about normal
  float x = 0;
  for (int i = 0; i < 12; i++) seed = seed * 1664525u + 1013904223u, x += float(seed >> 8) / float(1 << 24);
  return x - 6.0f;
}

struct Storage {
  std::vector<uint8_t> part[6];
  std::vector<int32_t> positions;
  Pool pool{};

  explicit Storage(int codec) : positions(kColumns * kBlock, -1) {
    const int64_t codes = kDim * kBlock * 4, scales = kDim * kBlock * 2;  // room for any codec
    for (int i = 0; i < 6; i++) {
      const int64_t head = i % 3 == 0 ? codes : scales;
      part[i].assign(head * kHeads * kColumns, 0x7f);  // poison
      (i < 3 ? pool.k : pool.v).part[i % 3] = {part[i].data(), head * kHeads, 0, head};
    }
    pool.k.codec = pool.v.codec = codec;
    pool.v.group = codec >= kAffine4 && codec <= kAffine2 ? 32 : 0;
    pool.positions = positions.data(), pool.block_size = kBlock;
  }
};

void fill(Storage& open) {
  for (int block = 0; block < kColumns; block++)
    for (int j = 0; j < kBlock; j++) {
      const int position = block * kBlock + j;
      if (position >= kLength) continue;
      open.positions[position] = position;
      for (int h = 0; h < kHeads; h++)
        for (int d = 0; d < kDim; d++) {
          const float k = random_float() * (d == 5 ? 8.0f : 1.0f), v = random_float();
          const TensorRef &keys = open.pool.k.part[0], &values = open.pool.v.part[0];
          std::memcpy(keys.data + block * keys.block + h * keys.head + 4 * (d * kBlock + j), &k, 4);
          std::memcpy(values.data + block * values.block + h * values.head + 4 * (j * kDim + d), &v, 4);
        }
    }
}

struct Decoded {
  std::vector<float> k, v;  // [column][head][...]
};
Decoded decode(const Pool& pool) {
  std::vector<float> zeros(kColumns * kHeads * kDim * kBlock);
  Decoded d{zeros, zeros};
  std::vector<int64_t> blocks(kColumns);
  for (int i = 0; i < kColumns; i++) blocks[i] = i;
  ops_baseline.decode({&pool, blocks.data(), d.k.data(), d.v.data(), kColumns, 1, kHeads, kDim, kDim, 1});
  return d;
}

// Attention in double precision; blocks at odd columns are sealed ones.
void exact(const std::vector<float>& q, const Decoded& open, const Decoded& sealed, int token, int head, double* out) {
  std::vector<double> score(kLength, -std::numeric_limits<double>::infinity());
  const int position = kLength - kTokens + token, kv = head / kGroup;
  double peak = -1e300, sum = 0;
  for (int p = 0; p <= position; p++) {
    const auto& k = (p / kBlock % 2 ? sealed : open).k;
    double x = 0;
    for (int d = 0; d < kDim; d++)
      x += double(q[(token * kHeads * kGroup + head) * kDim + d]) *
           k[((p / kBlock * kHeads + kv) * kDim + d) * kBlock + p % kBlock];
    score[p] = x / 8, peak = std::fmax(peak, score[p]);
  }
  for (int d = 0; d < kDim; d++) out[d] = 0;
  for (int p = 0; p <= position; p++) {
    const auto& v = (p / kBlock % 2 ? sealed : open).v;
    const double w = std::exp(score[p] - peak);
    sum += w;
    for (int d = 0; d < kDim; d++) out[d] += w * v[((p / kBlock * kHeads + kv) * kBlock + p % kBlock) * kDim + d];
  }
  for (int d = 0; d < kDim; d++) out[d] /= sum;
}

double error_of(const Storage& open, int codec) {
  Storage sealed(codec);
  sealed.positions = open.positions, sealed.pool.positions = sealed.positions.data();
  std::vector<int64_t> blocks(kColumns);
  for (int i = 0; i < kColumns; i++) blocks[i] = i;
  ops_baseline.seal({&open.pool, &sealed.pool, blocks.data(), blocks.data(), kColumns, 1, kHeads, kDim, kDim, 1});

  uint8_t pool[kColumns];
  int32_t block[kColumns], length[1] = {kColumns}, first_row[1] = {0};
  int32_t query_start[2] = {0, kTokens}, positions[kTokens];
  for (int i = 0; i < kColumns; i++) pool[i] = uint8_t(i % 2), block[i] = i;
  for (int i = 0; i < kTokens; i++) positions[i] = kLength - kTokens + i;
  Span spans[kColumns];
  uint8_t known[1] = {0};
  std::vector<float> q(kTokens * kHeads * kGroup * kDim), out(q.size());
  for (float& x : q) x = random_float();
  Step s{};
  s.pools[0] = open.pool, s.pools[1] = sealed.pool, s.n_pools = 2;
  s.table = {pool, block, length, first_row, kColumns, 0, 0};
  s.query_start = query_start, s.positions = positions, s.spans = spans, s.known_rows = known;
  s.n_seqs = 1, s.n_tokens = kTokens, s.kv_heads = kHeads, s.k_dim = s.v_dim = kDim, s.n_threads = 2;
  AttendCall c{};
  c.q = q.data(), c.q_token = kHeads * kGroup * kDim, c.dtype = kFloat32, c.query_heads = kHeads * kGroup;
  c.out = out.data(), c.scale = 0.125f;
  ops_baseline.attend(s, c);

  const Decoded plain = decode(open.pool), coded = decode(sealed.pool);
  double worst = 0, want[kDim];
  for (int t = 0; t < kTokens; t++)
    for (int h = 0; h < kHeads * kGroup; h++) {
      exact(q, plain, coded, t, h, want);
      for (int d = 0; d < kDim; d++) {
        const double off = std::fabs(out[(t * kHeads * kGroup + h) * kDim + d] - want[d]);
        worst = off <= worst ? worst : off;  // a NaN is worst
      }
    }
  return worst;
}

}  // namespace

int main() {
  Storage open(kF32);
  fill(open);
  int failed = 0;
  for (int codec = kF32; codec <= kTurbo2; codec++) {
    const double error = error_of(open, codec);
    const bool good = error < 2e-5;
    std::printf("%-9s %.2e%s\n", kNames[codec], error, good ? "" : "  too large");
    failed |= !good;
  }
  return failed;
}
