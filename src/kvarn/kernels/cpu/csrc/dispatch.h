#pragma once
#include "types.h"

namespace kvarn {

// Instruction sets that were compiled in and that this machine runs, best first; ends with null.
const Ops* const* available_ops();

}  // namespace kvarn
