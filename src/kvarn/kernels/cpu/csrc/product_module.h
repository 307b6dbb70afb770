#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "types.h"

namespace kvarn {

const Ops* ops_named(const std::string& name);
void add_products(nanobind::module_& m);

}  // namespace kvarn
