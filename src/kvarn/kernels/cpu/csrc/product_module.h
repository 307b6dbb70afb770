#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "types.h"

namespace kvarn {

using Address = uintptr_t;

template <class T>
T* pointer(Address a) {
  return reinterpret_cast<T*>(a);
}

struct PyMatrix {  // a matrix of codes, described once
  BlockMatrix matrix{};
  int width;
  const float* bias;
  const Ops* ops;

  PyMatrix(const std::string& isa, Address data, int rows, int columns, int width, int group, int bits, bool offsets,
           Address bias);
  void product(Address x, int64_t x_row, int dtype, int64_t rows, int before, Address norm, float eps, int activation,
               Address residual, int64_t residual_row, Address out, int out_dtype, int n_threads) const;
  void gather(Address ids, int rows, Address out, int dtype, int n_threads) const;
};

const Ops* ops_named(const std::string& name);
void add_products(nanobind::module_& m);
void add_decoder(nanobind::module_& m);

}  // namespace kvarn
