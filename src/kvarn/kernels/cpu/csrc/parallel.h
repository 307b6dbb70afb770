#pragma once

namespace kvarn {

// Run on the team behind this GOMP_parallel (null: on our own threads).
void use_team(void* gomp_parallel);
bool uses_shared_team();

}  // namespace kvarn
