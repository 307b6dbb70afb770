/* Requests to valgrind's callgrind from Python. Outside of valgrind they do nothing. */
#include <valgrind/callgrind.h>
#include <valgrind/valgrind.h>

int kvarn_in_valgrind(void) { return (int)RUNNING_ON_VALGRIND; }

void kvarn_begin(void) {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}

void kvarn_end(const char *name) {
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}
