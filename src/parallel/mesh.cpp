#include "parallel/mesh.h"

#include "base/check.h"

namespace cram {

std::string Layout::text() const {
  std::string text;
  const auto append = [&](const char* axis, int size) {
    if (size > 1) text += concat(text.empty() ? "" : "·", axis, size);
  };
  append("dp", data);
  append("tp", tensor);
  append("pp", pipeline);
  return text.empty() ? "1" : text;
}

MeshCoordinates coordinates_of(const Layout& layout, int rank) {
  return {rank % layout.tensor, rank / layout.tensor % layout.data, rank / (layout.tensor * layout.data)};
}

int rank_of(const Layout& layout, const MeshCoordinates& place) {
  return place.tp_rank + layout.tensor * (place.dp_rank + layout.data * place.pp_rank);
}

std::vector<int> group_ranks(const Layout& layout, Axis axis, int rank) {
  MeshCoordinates place = coordinates_of(layout, rank);
  int& along = axis == Axis::kTensor ? place.tp_rank : axis == Axis::kData ? place.dp_rank : place.pp_rank;
  const int size = axis == Axis::kTensor ? layout.tensor : axis == Axis::kData ? layout.data : layout.pipeline;
  std::vector<int> ranks;
  for (along = 0; along < size; ++along) ranks.push_back(rank_of(layout, place));
  return ranks;
}

Layout layout_for(int world_size, int tensor, int pipeline) {
  CRAM_CHECK(tensor >= 1 && pipeline >= 1 && world_size % (tensor * pipeline) == 0, ExitCode::kUsage, world_size,
             " ranks cannot be parallel.tensor=", tensor, " x parallel.pipeline=", pipeline,
             " x data: the product must divide the number of ranks; start ", tensor * pipeline,
             " of them or a multiple, or choose ", "sizes whose product divides ", world_size);
  return {tensor, pipeline, world_size / (tensor * pipeline)};
}

Mesh::Mesh(Communicator& world, const Layout& layout, Communicator& device_world)
    : layout_(layout), place_(coordinates_of(layout, world.rank())), world_(world) {
  CRAM_CHECK(world.size() == layout.world_size(), ExitCode::kUsage, "layout ", layout.text(), " needs ",
             layout.world_size(), " ranks, this job has ", world.size());
  // A group's colour is the world rank of its first member; its order is the axis' own.
  const auto along = [&](Axis axis, int key, const char* name) {
    return device_world.split(group_ranks(layout, axis, world.rank()).front(), key, name);
  };
  tensor_ = along(Axis::kTensor, place_.tp_rank, "tensor");
  data_ = along(Axis::kData, place_.dp_rank, "data");
  pipeline_ = along(Axis::kPipeline, place_.pp_rank, "pipeline");
  const bool holds_embedding = is_first_stage() || is_last_stage();
  const int first = group_ranks(layout, Axis::kPipeline, world.rank()).front();
  tied_ = device_world.split(holds_embedding ? first : layout.world_size() + world.rank(), place_.pp_rank, "tied");
  if (&device_world != &world) {
    tensor_host_ = world.split(group_ranks(layout, Axis::kTensor, world.rank()).front(), place_.tp_rank, "tensor-host");
  }
}

}  // namespace cram
