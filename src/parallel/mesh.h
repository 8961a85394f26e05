// Ranks as a grid of pipeline x data x tensor axes, and the groups along each axis.
//
// rank = tp + TP * (dp + DP * pp): tensor ranks, which talk most, are neighbours (Narayanan et al. 2021, section 3).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace cram {

/// Sizes of the axes.
struct Layout {
  int tensor = 1;
  int pipeline = 1;
  int data = 1;

  [[nodiscard]] int world_size() const { return tensor * pipeline * data; }
  /// "dp2·tp2·pp4", "1" for one rank.
  [[nodiscard]] std::string text() const;
};

/// A rank's place on each axis.
struct MeshCoordinates {
  int tp_rank = 0;
  int dp_rank = 0;
  int pp_rank = 0;
  bool operator==(const MeshCoordinates&) const = default;
};

[[nodiscard]] MeshCoordinates coordinates_of(const Layout& layout, int rank);
[[nodiscard]] int rank_of(const Layout& layout, const MeshCoordinates& place);

/// World ranks of the group of `rank` along one axis, in the axis' order: a pure function, equal on all ranks.
enum class Axis { kTensor, kData, kPipeline };
[[nodiscard]] std::vector<int> group_ranks(const Layout& layout, Axis axis, int rank);

/// The layout for a world: data is what is left. Throws Error(kUsage) naming the numbers when tensor x pipeline does
/// not divide the world.
[[nodiscard]] Layout layout_for(int world_size, int tensor, int pipeline);

class Mesh {
 public:
  /// Collective over `world`, which must outlive the mesh and have layout.world_size() ranks. It is the control plane
  /// and moves CPU tensors; the groups move tensors of the device and are split off `device_world` (of the same ranks),
  /// which is `world` itself on a CPU. Groups are made in the same order on every rank: tensor, data, pipeline, tied,
  /// tensor (host).
  Mesh(Communicator& world, const Layout& layout, Communicator& device_world);
  Mesh(Communicator& world, const Layout& layout) : Mesh(world, layout, world) {}
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const MeshCoordinates& place() const { return place_; }
  [[nodiscard]] Communicator& world() const { return world_; }
  [[nodiscard]] Communicator& tensor() const { return *tensor_; }
  [[nodiscard]] Communicator& data() const { return *data_; }
  [[nodiscard]] Communicator& pipeline() const { return *pipeline_; }
  /// The tensor group on the control plane: for what tensor ranks tell each other on the host.
  [[nodiscard]] Communicator& tensor_host() const { return tensor_host_ ? *tensor_host_ : *tensor_; }
  /// The first and the last stage of this rank's pipeline, which both hold the tied embedding: size 2 there, a group of
  /// one elsewhere and where there is only one stage.
  [[nodiscard]] Communicator& tied() const { return *tied_; }

  [[nodiscard]] bool is_first_stage() const { return place_.pp_rank == 0; }
  [[nodiscard]] bool is_last_stage() const { return place_.pp_rank == layout_.pipeline - 1; }

 private:
  Layout layout_;
  MeshCoordinates place_;
  Communicator& world_;
  std::unique_ptr<Communicator> tensor_, data_, pipeline_, tied_;
  std::unique_ptr<Communicator> tensor_host_;  ///< null where tensor_ moves CPU tensors itself
};

}  // namespace cram
