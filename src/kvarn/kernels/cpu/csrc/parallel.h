#pragma once

namespace kvarn {

// Run on the team behind this GOMP_parallel (null: on our own threads).
void use_team(void* gomp_parallel);
bool uses_shared_team();

// body(context) on this thread while the team stays together: each parallel_for within costs no start and no barrier of
// OpenMP's. A thread that has no processor just now is not waited for; its share is done by the others.
void together(int n_threads, void (*body)(void*), void* context);

}  // namespace kvarn
