// Finds ranks that hold different values of what should be equal everywhere.
#pragma once

#include <cstdint>

#include "model/parameter_store.h"
#include "parallel/mesh.h"

namespace cram {

/// Compares digests of the working weights of every rank that holds the same parameter or slice of it: data replicas,
/// parameters replicated over tensor ranks, the two copies of the tied embedding. Masters and moments are compared as
/// well where they are not shared out. Throws Error(kReplicasDiffer) on every rank, naming tensors and ranks; with more
/// than two holders those outside the majority. Collective over the world; reads every weight once.
void check_replicas(const ParameterStore& store, const Mesh& mesh, std::int64_t step);

}  // namespace cram
