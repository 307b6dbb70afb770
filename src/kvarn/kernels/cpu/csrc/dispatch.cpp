// Which of the compiled instruction sets this machine can run.
#include "dispatch.h"

#include "isas.h"

namespace kvarn {

#define KVARN_DECLARE(isa) extern const Ops ops_##isa;
KVARN_ISA_LIST(KVARN_DECLARE)

namespace {

#if defined(__x86_64__)
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
bool runs_avx512_bf16() {
  return runs_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
#endif
bool runs_baseline() { return true; }

const Ops* found[8] = {};

}  // namespace

const Ops* const* available_ops() {
  if (found[0] != nullptr) return found;
  int n = 0;
#define KVARN_OFFER(isa) \
  if (runs_##isa()) found[n++] = &ops_##isa;
  KVARN_ISA_LIST(KVARN_OFFER)
  return found;
}

}  // namespace kvarn
