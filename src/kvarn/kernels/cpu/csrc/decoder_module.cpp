// A decoder's layers and its last norm over one step in one call: the same operations in the same order as layer by layer, without the way
// through Python between them, and on one team of threads that stays together.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "product_module.h"
#include "scratch.h"

namespace nb = nanobind;

namespace kvarn {
namespace {

using RopeParts = std::tuple<Address, Address, int>;  // cos, sin, half
using Place = std::tuple<int, int, int>;              // of a layer: cache group, index within it, rotation

struct Layer {
  const PyMatrix *qkv, *out, *gate_up, *down;
  const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // after_*: null where there is none
  const float *q_norm, *k_norm;                                              // null: heads are not normed
  float eps, head_eps;
  int query_heads, kv_heads, activation;  // kv_heads 0: another layer's cache is read
  AttendCall attention;                   // scale, caps, window, chunk, sinks
};

struct Run {  // one step
  const struct PyDecoder* decoder;
  const void* x;
  void* out;
  int64_t rows;
  int dtype, n_threads;
  const std::vector<Address>* steps;     // of each cache group
  const std::vector<RopeParts>* ropes;   // different ones
  const int64_t* read;                   // ascending rows whose results are wanted
  int64_t n_read;                        // -1: all
};

struct HeadNorm {  // RMS norm of some heads of each row, packed into `out`
  const Ops* ops;
  const uint8_t* x;
  uint8_t* out;
  const float* weight;
  int64_t rows, row_bytes, out_bytes;  // of one token
  int heads, dim, dtype;
  float eps;
};

constexpr int kHeadNormRows = 16;

void norm_heads(int item, void* context) {
  const auto& h = *static_cast<HeadNorm*>(context);
  for (int64_t t = int64_t(item) * kHeadNormRows; t < std::min<int64_t>(h.rows, int64_t(item + 1) * kHeadNormRows); t++) {
    RowsCall c{};
    c.x = h.x + t * h.row_bytes, c.out = h.out + t * h.out_bytes, c.weight = h.weight;
    c.x_row = c.out_row = c.width = h.dim, c.rows = h.heads;
    c.dtype = h.dtype, c.eps = h.eps, c.n_threads = 1;
    h.ops->rms_norm(c);
  }
}

struct PyDecoder {
  const Ops* ops;
  std::vector<Layer> layers;
  std::vector<Place> places;
  const void* norm;
  int norm_dtype;
  float eps;

  PyDecoder(const std::string& isa, Address norm, int norm_dtype, float eps)
      : ops(ops_named(isa)), norm(pointer<void>(norm)), norm_dtype(norm_dtype), eps(eps) {}

  void add(const PyMatrix& qkv, const PyMatrix& out, const PyMatrix& gate_up, const PyMatrix& down,
           const std::vector<Address>& norms, float eps, float head_eps, int query_heads, int kv_heads, int activation,
           float scale, int window, int chunk, float soft_cap, Address sinks) {
    if (norms.size() != 6) throw std::invalid_argument("a layer has six norms, absent ones being 0");
    Layer l{};
    l.qkv = &qkv, l.out = &out, l.gate_up = &gate_up, l.down = &down;
    l.before_attention = pointer<float>(norms[0]), l.after_attention = pointer<float>(norms[1]);
    l.before_mlp = pointer<float>(norms[2]), l.after_mlp = pointer<float>(norms[3]);
    l.q_norm = pointer<float>(norms[4]), l.k_norm = pointer<float>(norms[5]);
    l.eps = eps, l.head_eps = head_eps, l.query_heads = query_heads, l.kv_heads = kv_heads, l.activation = activation;
    l.attention.scale = scale, l.attention.window = window, l.attention.chunk = chunk;
    l.attention.soft_cap = soft_cap, l.attention.sinks = pointer<float>(sinks), l.attention.query_heads = query_heads;
    if (out.matrix.rows != qkv.width || down.matrix.rows != qkv.width || gate_up.width != qkv.width ||
        gate_up.matrix.rows != 2 * down.width || qkv.matrix.rows % (query_heads + 2 * kv_heads) != 0)
      throw std::invalid_argument("the matrices of a layer do not fit each other");
    layers.push_back(l);
  }

  void lay(const std::vector<Place>& places) {
    if (places.size() != layers.size()) throw std::invalid_argument("a place is needed for each layer");
    this->places = places;
  }

  // x [rows, hidden] -> out [n_read, hidden]; n_read -1: all rows
  void run(Address x, Address out, int64_t rows, int dtype, const std::vector<Address>& steps,
           const std::vector<RopeParts>& ropes, Address read, int64_t n_read, int n_threads) const {
    if (places.size() != layers.size()) throw std::invalid_argument("the layers have no places yet");
    for (const auto& [group, index, rope] : places)
      if (group < 0 || group >= int(steps.size()) || rope < 0 || rope >= int(ropes.size()))
        throw std::invalid_argument("a layer's group has no step, or its rotation is missing");
    const auto* wanted = pointer<int64_t>(read);
    for (int64_t i = 0; i < n_read; i++)
      if (wanted[i] < 0 || wanted[i] >= rows || (i > 0 && wanted[i] <= wanted[i - 1]))
        throw std::invalid_argument("rows that are read ascend within the step's");
    Run r{this, pointer<void>(x), pointer<void>(out), rows, dtype, n_threads, &steps, &ropes, wanted, n_read};
    nb::gil_scoped_release free;
    together(n_threads, [](void* p) { static_cast<Run*>(p)->decoder->all(*static_cast<Run*>(p)); }, &r);
  }

 private:
  void all(const Run& r) const;
};

thread_local Scratch results;

ProductCall product_of(const PyMatrix& m, const Run& r, const void* x, int64_t x_row, void* out) {
  ProductCall c{};
  c.matrix = m.matrix, c.width = m.width, c.bias = m.bias;
  c.x = x, c.x_row = x_row, c.dtype = r.dtype, c.rows = r.rows;
  c.out = out, c.out_row = m.matrix.rows, c.out_dtype = r.dtype, c.n_threads = r.n_threads;
  return c;
}

void normed(const PyMatrix& m, const Run& r, const void* x, const float* norm, float eps, void* out) {
  ProductCall c = product_of(m, r, x, m.width, out);
  c.before = kNormed, c.norm = norm, c.eps = eps;
  m.ops->product(c);
}

class Pass {  // one run through all layers
 public:
  Pass(const PyDecoder& d, const Run& r) : d_(d), r_(r), size_(r.dtype == kFloat32 ? 4 : 2) {
    int64_t wide = 0, mixed = 0, ffn = 0;
    hidden_ = d.layers[0].qkv->width;
    for (const Layer& l : d.layers) {
      wide = std::max<int64_t>(wide, l.qkv->matrix.rows), mixed = std::max<int64_t>(mixed, l.out->width);
      ffn = std::max<int64_t>(ffn, l.gate_up->matrix.rows);
    }
    const int64_t row = r.rows * size_;
    results.reset(4 * Scratch::bytes<uint8_t>(row * hidden_) + 2 * Scratch::bytes<uint8_t>(row * wide) +
                  Scratch::bytes<uint8_t>(row * mixed) + Scratch::bytes<uint8_t>(row * ffn));
    between_ = results.take<uint8_t>(row * hidden_), next_ = results.take<uint8_t>(row * hidden_);
    aside_ = results.take<uint8_t>(row * hidden_), unused_ = results.take<uint8_t>(row * hidden_);
    heads_ = results.take<uint8_t>(row * wide), normed_heads_ = results.take<uint8_t>(row * wide);
    mixed_ = results.take<uint8_t>(row * mixed), ffn_ = results.take<uint8_t>(row * ffn);
  }

  void all() {
    const void* x = r_.x;
    for (size_t i = 0; i < d_.layers.size(); i++) {
      attend(d_.layers[i], i, x);
      if (i + 1 == d_.layers.size()) x = only_read(x, d_.layers[i]);
      if (r_.rows == 0) return;
      rest(d_.layers[i], x, next_);
      x = next_;
    }
    RowsCall n{};
    n.x = x, n.weight = d_.norm, n.out = r_.out, n.rows = r_.rows, n.dtype = r_.dtype, n.weight_dtype = d_.norm_dtype;
    n.x_row = n.out_row = n.width = hidden_, n.eps = d_.eps, n.n_threads = r_.n_threads;
    d_.ops->rms_norm(n);
  }

 private:
  // After the last attention only the rows that are read go on: they move to the front.
  const void* only_read(const void* x, const Layer& l) {
    if (r_.n_read < 0) return x;
    const auto* from = static_cast<const uint8_t*>(x);
    const int64_t row = hidden_ * size_, mixed = l.out->width * size_;
    for (int64_t i = 0; i < r_.n_read; i++) {
      std::memmove(next_ + i * row, from + r_.read[i] * row, row);
      std::memmove(mixed_ + i * mixed, mixed_ + r_.read[i] * mixed, mixed);
    }
    r_.rows = r_.n_read;
    return next_;
  }

  void rest(const Layer& l, const void* x, void* out) {  // of a layer, after its attention; out may be x
    add_back(*l.out, mixed_, false, l, l.after_attention, x, between_);
    normed(*l.gate_up, r_, between_, l.before_mlp, l.eps, ffn_);
    add_back(*l.down, ffn_, true, l, l.after_mlp, between_, out);
  }

  void attend(const Layer& l, size_t i, const void* x) {
    const auto& [group, index, rope] = d_.places[i];
    const Step& s = *pointer<Step>((*r_.steps)[group]);
    const auto& [cos, sin, half] = (*r_.ropes)[rope];
    normed(*l.qkv, r_, x, l.before_attention, l.eps, heads_);
    const int64_t row = l.qkv->matrix.rows, dim = row / (l.query_heads + 2 * l.kv_heads), q_width = l.query_heads * dim;
    AttendCall c = l.attention;
    c.layer = index, c.dtype = r_.dtype, c.out = mixed_;
    c.rope = {pointer<float>(cos), pointer<float>(sin), half};
    c.q = heads_, c.q_token = row;
    uint8_t* k = heads_ + q_width * size_;
    if (l.kv_heads > 0) {
      c.k = k, c.v = k + l.kv_heads * dim * size_, c.k_token = c.v_token = row;
    }
    uint8_t* packed = normed_heads_;
    if (l.q_norm != nullptr) {
      norm(l, heads_, l.query_heads, dim, row, l.q_norm, packed);
      c.q = packed, c.q_token = q_width;
      packed += r_.rows * q_width * size_;
    }
    if (l.k_norm != nullptr && l.kv_heads > 0) {
      norm(l, k, l.kv_heads, dim, row, l.k_norm, packed);
      c.k = packed, c.k_token = l.kv_heads * dim;
    }
    if (c.k != nullptr) d_.ops->write(s, c);
    d_.ops->attend(s, c);
  }

  void norm(const Layer& l, const uint8_t* x, int heads, int64_t dim, int64_t row, const float* weight, uint8_t* out) {
    HeadNorm h{d_.ops, x, out, weight, r_.rows, row * size_, heads * dim * size_, heads, int(dim), r_.dtype, l.head_eps};
    parallel_for(int((r_.rows + kHeadNormRows - 1) / kHeadNormRows), r_.n_threads, norm_heads, &h);
  }

  // out = residual + the product, or + its norm where the layer norms after the block too.
  void add_back(const PyMatrix& m, const void* x, bool gated, const Layer& l, const float* after, const void* residual,
                void* out) {
    ProductCall c = product_of(m, r_, x, gated ? 2 * m.width : m.width, after == nullptr ? out : aside_);
    if (gated) c.before = kGated, c.activation = l.activation;
    if (after == nullptr) c.residual = residual, c.residual_row = hidden_;
    m.ops->product(c);
    if (after == nullptr) return;
    RowsCall n{};
    n.x = aside_, n.weight = after, n.out = unused_, n.rows = r_.rows, n.dtype = r_.dtype, n.eps = l.eps;
    n.x_row = n.y_row = n.out_row = n.sum_row = n.width = hidden_, n.n_threads = r_.n_threads;
    d_.ops->rms_norm(n);
    // The sum alone is wanted; the norm that comes with it goes where the product was.
    n.x = unused_, n.y = residual, n.sum = out, n.out = aside_;
    d_.ops->rms_norm(n);
  }

  const PyDecoder& d_;
  Run r_;
  const int64_t size_;
  int64_t hidden_;
  uint8_t *between_, *next_, *aside_, *unused_, *heads_, *normed_heads_, *mixed_, *ffn_;
};

void PyDecoder::all(const Run& r) const {
  if (!layers.empty() && r.rows > 0) Pass(*this, r).all();
}

}  // namespace

void add_decoder(nb::module_& m) {
  nb::class_<PyDecoder>(m, "Decoder")
      .def(nb::init<const std::string&, Address, int, float>())
      .def("add", &PyDecoder::add)
      .def("lay", &PyDecoder::lay)
      .def("run", &PyDecoder::run);
}

}  // namespace kvarn
