// All operations, compiled once for every instruction set: KVARN_ISA names the table that this object defines.
#include "run.h"
#include "small.h"
#include "product.h"
#include "store.h"
#include "seal.h"
#include "probe.h"

#define KVARN_CONCAT2(a, b) a##b
#define KVARN_CONCAT(a, b) KVARN_CONCAT2(a, b)
#define KVARN_STRING2(x) #x
#define KVARN_STRING(x) KVARN_STRING2(x)

namespace kvarn {

extern const Ops KVARN_CONCAT(ops_, KVARN_ISA);
const Ops KVARN_CONCAT(ops_, KVARN_ISA) = {
    KVARN_STRING(KVARN_ISA), run_attend, run_mass, run_seal, run_decode, run_norm,
    run_gated,               run_rope,   run_write, run_product, run_gather,
    read_sum,               fma_rate,
};

}  // namespace kvarn
