// The Python module: descriptors are built once a step, so that a layer's call carries few numbers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "dispatch.h"
#include "parallel.h"
#include "product_module.h"
#include "types.h"

namespace nb = nanobind;

namespace kvarn {

const Ops* ops_named(const std::string& name) {
  for (auto p = available_ops(); *p != nullptr; p++)
    if (name == (*p)->name) return *p;
  throw std::invalid_argument("instruction set " + name + " is not built in, or this machine lacks it");
}

namespace {

using Part = std::tuple<Address, int64_t, int64_t, int64_t>;  // data, byte strides of block, layer, head

Side make_side(int codec, int group, const std::vector<Part>& parts) {
  if (parts.empty() || parts.size() > 3) throw std::invalid_argument("a side has 1 to 3 tensors");
  Side side{};
  side.codec = codec, side.group = group;
  for (size_t i = 0; i < parts.size(); i++)
    side.part[i] = {pointer<uint8_t>(std::get<0>(parts[i])), std::get<1>(parts[i]), std::get<2>(parts[i]),
                    std::get<3>(parts[i])};
  return side;
}

struct PyPool {
  Pool pool{};
  PyPool(int k_codec, int k_group, const std::vector<Part>& k, int v_codec, int v_group, const std::vector<Part>& v,
         Address positions, int block_size) {
    pool.k = make_side(k_codec, k_group, k), pool.v = make_side(v_codec, v_group, v);
    pool.positions = pointer<int32_t>(positions), pool.block_size = block_size;
  }
};

struct PyStep {  // one step's rows over one cache group
  Step s{};
  const Ops* ops;
  std::unique_ptr<Span[]> spans;
  std::vector<uint8_t> known_rows;

  PyStep(const std::string& isa, const std::vector<const PyPool*>& pools, int kv_heads, int k_dim, int v_dim, int n_threads)
      : ops(ops_named(isa)) {
    if (pools.size() > kMaxPools) throw std::invalid_argument("too many pools in one group");
    for (const PyPool* p : pools) s.pools[s.n_pools++] = p->pool;
    s.kv_heads = kv_heads, s.k_dim = k_dim, s.v_dim = v_dim, s.n_threads = n_threads;
  }
  Address address() const { return reinterpret_cast<Address>(&s); }
  void set_table(Address pool, Address block, Address length, Address first_row, int rows, int columns,
                 int layer_stride, int head_stride) {
    s.table = {pointer<uint8_t>(pool), pointer<int32_t>(block), pointer<int32_t>(length), pointer<int32_t>(first_row),
               columns, layer_stride, head_stride};
    spans.reset(new Span[size_t(rows) * size_t(columns)]);
    known_rows.assign(rows, 0);
    s.spans = spans.get(), s.known_rows = known_rows.data();
  }
  void set_rows(Address query_start, Address positions, int n_seqs, int n_tokens) {
    s.query_start = pointer<int32_t>(query_start), s.positions = pointer<int32_t>(positions);
    s.n_seqs = n_seqs, s.n_tokens = n_tokens;
  }
  void set_slots(Address slots, int64_t token, int64_t layer, int64_t head, int open_pool) {
    s.slots = pointer<int64_t>(slots), s.slot_token = token, s.slot_layer = layer, s.slot_head = head;
    s.open_pool = open_pool;
  }
  // Every call carries its own parameters, so a step may be used by any layer, in any order.
  void append_and_attend(int layer, Address q, int64_t q_token, Address k, int64_t k_token, Address v, int64_t v_token,
                         Address out, Address lse, int dtype, int query_heads, Address cos, Address sin, int half,
                         float scale, int window, int chunk, float soft_cap, Address sinks) const {
    AttendCall c = with(layer, q, q_token, k, k_token, v, v_token, out, dtype, query_heads);
    c.rope = {pointer<float>(cos), pointer<float>(sin), half};
    c.lse = pointer<float>(lse), c.scale = scale, c.window = window, c.chunk = chunk, c.soft_cap = soft_cap;
    c.sinks = pointer<float>(sinks);
    nb::gil_scoped_release free;
    if (c.k != nullptr) ops->write(s, c);
    ops->attend(s, c);
  }
  void write(int layer, Address k, int64_t k_token, Address v, int64_t v_token, int dtype) const {
    AttendCall c = with(layer, 0, 0, k, k_token, v, v_token, 0, dtype, s.kv_heads);
    nb::gil_scoped_release free;
    ops->write(s, c);
  }
  void rope(Address x, int64_t token, Address out, int dtype, int heads, Address cos, Address sin, int half) const {
    AttendCall c = with(0, x, token, 0, 0, 0, 0, out, dtype, heads);
    c.rope = {pointer<float>(cos), pointer<float>(sin), half};
    nb::gil_scoped_release free;
    ops->rope(s, c);
  }
  void mass(int layer, Address q, int64_t q_token, Address lse, Address mass, int dtype, int query_heads, float scale,
            int window, int chunk, float soft_cap) const {
    MassCall m{with(layer, q, q_token, 0, 0, 0, 0, 0, dtype, query_heads), pointer<float>(mass)};
    AttendCall& c = m.attend;
    c.lse = pointer<float>(lse), c.scale = scale, c.window = window, c.chunk = chunk, c.soft_cap = soft_cap;
    nb::gil_scoped_release free;
    ops->mass(s, m);
  }

 private:
  AttendCall with(int layer, Address q, int64_t q_token, Address k, int64_t k_token, Address v, int64_t v_token,
                  Address out, int dtype, int query_heads) const {
    AttendCall c{};
    c.layer = layer, c.q = pointer<void>(q), c.q_token = q_token, c.out = pointer<void>(out);
    c.k = pointer<void>(k), c.k_token = k_token, c.v = pointer<void>(v), c.v_token = v_token;
    c.dtype = dtype, c.query_heads = query_heads;
    return c;
  }
};

void seal(const std::string& isa, const PyPool& source, Address source_blocks, const PyPool& target, Address target_blocks,
          int n_blocks, int layers, int heads, int k_dim, int v_dim, int n_threads) {
  SealCall c{&source.pool, &target.pool, pointer<int64_t>(source_blocks), pointer<int64_t>(target_blocks), n_blocks,
             layers, heads, k_dim, v_dim, n_threads};
  const Ops* ops = ops_named(isa);
  nb::gil_scoped_release free;
  ops->seal(c);
}

void decode(const std::string& isa, const PyPool& pool, Address blocks, Address k, Address v, int n_blocks, int layers,
            int heads, int k_dim, int v_dim, int n_threads) {
  DecodeCall c{&pool.pool, pointer<int64_t>(blocks), pointer<float>(k), pointer<float>(v), n_blocks, layers, heads, k_dim,
               v_dim, n_threads};
  const Ops* ops = ops_named(isa);
  nb::gil_scoped_release free;
  ops->decode(c);
}

struct PySmall {  // the small row-wise operations on one instruction set
  const Ops* ops;
  explicit PySmall(const std::string& isa) : ops(ops_named(isa)) {}

  void rms_norm(Address x, int64_t x_row, Address residual, int64_t residual_row, Address weight, Address out, Address sum,
                int64_t rows, int64_t width, int dtype, int weight_dtype, float eps, int n_threads) const {
    RowsCall c{};
    c.x = pointer<void>(x), c.x_row = x_row, c.y = pointer<void>(residual), c.y_row = residual_row;
    c.weight = pointer<void>(weight), c.out = pointer<void>(out), c.out_row = width;
    c.sum = pointer<void>(sum), c.sum_row = width, c.rows = rows, c.width = width;
    c.dtype = dtype, c.weight_dtype = weight_dtype, c.eps = eps, c.n_threads = n_threads;
    nb::gil_scoped_release free;
    ops->rms_norm(c);
  }
  void gated(Address gate, int64_t gate_row, Address up, int64_t up_row, Address out, int64_t rows, int64_t width, int dtype,
             int activation, int n_threads) const {
    RowsCall c{};
    c.x = pointer<void>(gate), c.x_row = gate_row, c.y = pointer<void>(up), c.y_row = up_row;
    c.out = pointer<void>(out), c.out_row = width, c.rows = rows, c.width = width;
    c.dtype = dtype, c.activation = activation, c.n_threads = n_threads;
    nb::gil_scoped_release free;
    ops->gated(c);
  }
};

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (auto p = available_ops(); *p != nullptr; p++) names.emplace_back((*p)->name);
  return names;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct ReadJob {
  const Ops* ops;
  const uint8_t* data;
  int64_t n_bytes, part;
  double sink[64];
};

// Bytes a second that n_threads threads read from a buffer (choose it larger than the caches), best of `repeats`.
double read_bandwidth(const std::string& isa, Address data, int64_t n_bytes, int n_threads, int repeats) {
  ReadJob job{ops_named(isa), pointer<uint8_t>(data), n_bytes, n_bytes / 64 / 4096 * 4096, {}};
  nb::gil_scoped_release free;
  double best = 0;
  for (int i = 0; i < repeats; i++) {
    auto begin = std::chrono::steady_clock::now();
    parallel_for(
        64, n_threads,
        [](int k, void* p) {
          auto& j = *static_cast<ReadJob*>(p);
          j.sink[k] += j.ops->read_sum(j.data + k * j.part, j.part);
        },
        &job);
    best = std::max(best, double(64 * job.part) / seconds_since(begin));
  }
  return best;
}

// Float32 operations a second (a fused multiply-add counts two) of n_threads threads, best of `repeats`.
double float_rate(const std::string& isa, int n_threads, int repeats) {
  struct RateJob {
    const Ops* ops;
    double sink[64];
  } job{ops_named(isa), {}};
  constexpr int64_t kRounds = 1 << 18;
  const int width = isa.rfind("avx512", 0) == 0 ? 16 : isa == "avx2" ? 8 : 4;
  nb::gil_scoped_release free;
  double best = 0;
  for (int i = 0; i < repeats; i++) {
    auto begin = std::chrono::steady_clock::now();
    parallel_for(
        8, n_threads,
        [](int k, void* p) {
          auto& j = *static_cast<RateJob*>(p);
          j.sink[k] += j.ops->fma_rate(kRounds);
        },
        &job);
    best = std::max(best, 8.0 * kRounds * 12 * width * 2 / seconds_since(begin));
  }
  return best;
}

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // objects that live to the end of the process are no leak
  m.doc() = "Kvarn's kernels for CPUs; see kvarn.kernels.cpu.backend for the Python side.";
  nb::class_<PyPool>(m, "Pool").def(
      nb::init<int, int, const std::vector<Part>&, int, int, const std::vector<Part>&, Address, int>());
  nb::class_<PyStep>(m, "Step")
      .def(nb::init<const std::string&, const std::vector<const PyPool*>&, int, int, int, int>())
      .def("address", &PyStep::address)
      .def("set_table", &PyStep::set_table)
      .def("set_rows", &PyStep::set_rows)
      .def("set_slots", &PyStep::set_slots)
      .def("write", &PyStep::write)
      .def("append_and_attend", &PyStep::append_and_attend)
      .def("rope", &PyStep::rope)
      .def("mass", &PyStep::mass);
  nb::class_<PySmall>(m, "Small")
      .def(nb::init<const std::string&>())
      .def("rms_norm", &PySmall::rms_norm)
      .def("gated", &PySmall::gated);
  add_products(m);
  add_decoder(m);
  m.def("seal", &seal);
  m.def("decode", &decode);
  m.def("instruction_sets", &instruction_sets, "Instruction sets built in that this machine runs, best first.");
  m.def("use_team", [](Address gomp_parallel) { use_team(pointer<void>(gomp_parallel)); });
  m.def("uses_shared_team", &uses_shared_team);
  m.def("read_bandwidth", &read_bandwidth);
  m.def("float_rate", &float_rate);
}

}  // namespace kvarn
