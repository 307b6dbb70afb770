// The Python side of matrices of codes: the matrix is described once, a call carries the activations.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "product_module.h"

namespace nb = nanobind;

namespace kvarn {

PyMatrix::PyMatrix(const std::string& isa, Address data, int rows, int columns, int width, int group, int bits,
                   bool offsets, Address bias)
    : matrix{pointer<uint8_t>(data), rows, columns, group, bits, offsets},
      width(width),
      bias(pointer<float>(bias)),
      ops(ops_named(isa)) {
  bool fits = rows > 0 && columns > 0 && columns % 32 == 0 && width > 0 && width <= columns;
  if (!fits || (bits != 4 && bits != 8) || group % 32 != 0 || group <= 0 || columns % group != 0)
    throw std::invalid_argument("not a matrix of codes");
}

void PyMatrix::product(Address x, int64_t x_row, int dtype, int64_t rows, int before, Address norm, float eps, int activation,
                       Address residual, int64_t residual_row, Address out, int out_dtype, int n_threads) const {
  ProductCall c{};
  c.matrix = matrix, c.width = width, c.bias = bias;
  c.x = pointer<void>(x), c.x_row = x_row, c.dtype = dtype, c.rows = rows;
  c.before = before, c.norm = pointer<float>(norm), c.eps = eps, c.activation = activation;
  c.residual = pointer<void>(residual), c.residual_row = residual_row;
  c.out = pointer<void>(out), c.out_row = matrix.rows, c.out_dtype = out_dtype, c.n_threads = n_threads;
  nb::gil_scoped_release free;
  ops->product(c);
}

void PyMatrix::gather(Address ids, int rows, Address out, int dtype, int n_threads) const {
  GatherCall c{matrix, pointer<int64_t>(ids), pointer<void>(out), rows, width, dtype, n_threads};
  nb::gil_scoped_release free;
  ops->gather(c);
}

void add_products(nb::module_& m) {
  nb::class_<PyMatrix>(m, "Matrix")
      .def(nb::init<const std::string&, Address, int, int, int, int, int, bool, Address>())
      .def("product", &PyMatrix::product)
      .def("gather", &PyMatrix::gather);
}

}  // namespace kvarn
