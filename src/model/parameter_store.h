// The one owner of parameters: logical names, slices, initial values and flat buffers for working weights, masters,
// gradients and whatever an optimizer keeps. Everything that walks over parameters (optimizer, checkpoint, replica
// check, export) walks over this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "parallel/buckets.h"
#include "parallel/communicator.h"

namespace cram {

/// The product of the extents; 1 of no dimension.
[[nodiscard]] std::int64_t element_count(const std::vector<std::int64_t>& shape);

enum class InitRule { kNormal, kConstant };

/// What reductions and the optimizer need to know of a parameter. Parameters of one class share flat buffers.
struct ParamClass {
  bool decay = true;            ///< weight decay applies
  bool full_precision = false;  ///< computed with the fp32 master itself (norms, scalars), never with a bf16 copy
  bool sharded = false;         ///< every tensor rank holds another part; otherwise all hold the same
  bool tied = false;            ///< another pipeline stage holds it as well: gradients are summed over both
  bool counts = true;           ///< false on the second of two tied copies: not in norms, files and counts
  bool partial = false;         ///< sequence parallel: every tensor rank has the gradient of its own rows
  double lr_factor = 1;         ///< times the schedule's learning rate
  bool whole_matrices = false;  ///< the optimizer needs a parameter in one piece: never cut over data ranks

  bool operator==(const ParamClass&) const = default;
};

/// One logical parameter. The name is the public one ("encoder.layers.3.attn.dense.weight") in every layout.
struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> global_shape;
  InitRule init = InitRule::kNormal;
  double init_value = 0;   ///< standard deviation, or the constant
  ParamClass traits = {};  ///< `sharded` follows from the slice
  // The slice this rank owns: rows [slice_begin, slice_end) of dimension slice_dim; the whole tensor by default. With
  // slice_groups g > 1 the dimension is cut into g equal parts and the range is taken from each (the halves of a gated
  // FFN). slice_end may lie beyond the dimension: rows of zeros follow that no file knows (a padded vocabulary).
  std::int64_t slice_dim = 0;
  std::int64_t slice_begin = 0;
  std::int64_t slice_end = -1;  ///< -1 = the whole dimension
  std::int64_t slice_groups = 1;

  /// True when this rank holds less than the whole tensor (or a padded form of it).
  [[nodiscard]] bool is_sharded() const;
};

/// The spec's slice of a full tensor, as a new tensor or view; padded with zeros where the slice is.
[[nodiscard]] at::Tensor take_slice(const at::Tensor& full, const ParamSpec& spec);
/// Writes `part`, which take_slice would have returned, to its place in `full`; padding is dropped.
void put_slice(const at::Tensor& full, const ParamSpec& spec, const at::Tensor& part);

using ParamId = std::size_t;

/// Number formats of a run. bf16: working bf16, the rest fp32; fp32 and fp64: one format, the working weights are the
/// masters.
enum class Precision { kBf16, kFp32, kFp64 };
[[nodiscard]] Precision parse_precision(const std::string& name);
[[nodiscard]] const char* precision_name(Precision precision);
[[nodiscard]] at::ScalarType working_type(Precision precision);
[[nodiscard]] at::ScalarType master_type(Precision precision);

/// A tensor and what its optimizer calls it ("exp_avg").
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// What an optimizer keeps of every parameter beside the master, in the master's format and of its size, and what it
/// wants of them. The default keeps nothing: evaluation and export.
struct StateLayout {
  /// Names of the states of a class of parameters, in the order in which the optimizer gets them.
  std::function<std::vector<std::string>(const ParamClass&)> states = {};
  /// May set lr_factor and whole_matrices of a parameter's class; empty: nothing is changed.
  std::function<void(const ParamSpec&, ParamClass&)> classify = {};
};

/// Elements [begin, end) of a flat buffer that this rank owns; they lie at `at` of its buffers of owned elements.
struct OwnedPart {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t at = 0;

  [[nodiscard]] std::int64_t numel() const { return end - begin; }
};

/// A contiguous run of parameters of one class, so that the optimizer needs one call for it, the gradient norm counts
/// every value once, and reductions know what they reduce. `working` and `grad` hold all of it. Master and states hold
/// what this rank owns, part after part: everything in a partition of one, otherwise its part of every bucket, or, of
/// whole matrices, a run of parameters (possibly none). `owned_grad` is `grad` where this rank owns everything, a view
/// of it for whole matrices; `working` is `master` where it owns everything and the formats are the same.
struct FlatBuffers {
  ParamClass traits;
  std::int64_t numel = 0;  ///< with padding; every parameter starts at a multiple of kParamAlignment
  std::vector<Bucket> buckets;
  std::vector<OwnedPart> parts;         ///< this rank's
  std::vector<OwnedPart> part_of_rank;  ///< of whole matrices that are shared out: every data rank's
  at::Tensor working, grad;
  at::Tensor master, owned_grad;
  std::vector<NamedTensor> states;
  bool shared_out = false;  ///< other data ranks own parts of it

  /// Bytes of the optimizer's states.
  [[nodiscard]] std::int64_t state_bytes() const;
};
inline constexpr std::int64_t kParamAlignment = 64;

class ParameterStore {
 public:
  ParameterStore() = default;
  ParameterStore(const ParameterStore&) = delete;
  ParameterStore& operator=(const ParameterStore&) = delete;

  /// Registers a parameter; its tensors exist after `allocate`.
  ParamId add(ParamSpec spec);

  /// Allocates the flat buffers for training; `partition` shares masters and states out to the data ranks (ZeRO-1).
  void allocate(Precision precision, at::Device device, const StateLayout& layout, const Partition& partition = {});
  /// Without gradients and states: export, evaluation.
  void allocate(Precision precision, at::Device device);

  /// Initial values: a pure function of (seed, name, element of the whole tensor), of which only this rank's slice is
  /// made; gradients and states 0.
  void initialize(std::uint64_t seed);

  /// Sets a parameter from its local tensor: the owned part of the master, and the whole working copy.
  void assign(ParamId id, const at::Tensor& local);

  /// Copies masters to working weights (after a load; the optimizer does it as it goes). Only the owned parts.
  void refresh_working();

  /// A part of a parameter whose master and states this rank owns; flat elements [begin, end) of its local tensor.
  struct OwnedRange {
    std::int64_t begin = 0;
    std::int64_t end = 0;
    at::Tensor master, grad;  // 1-d views; the gradient is undefined without an optimizer
    std::vector<NamedTensor> states;

    /// What a checkpoint stores of it: "master" and every state.
    [[nodiscard]] std::vector<NamedTensor> stored() const;
  };
  [[nodiscard]] std::vector<OwnedRange> owned(ParamId id) const;

  /// Where a parameter lies in the flat buffers.
  struct Location {
    std::size_t buffer = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  [[nodiscard]] Location location(ParamId id) const {
    return {entries_[id].buffer, entries_[id].offset, entries_[id].offset + local_numel(id)};
  }

  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  [[nodiscard]] const ParamSpec& spec(ParamId id) const { return entries_[id].spec; }
  [[nodiscard]] std::vector<std::int64_t> local_shape(ParamId id) const;
  [[nodiscard]] std::int64_t local_numel(ParamId id) const;
  /// Throws Error(kUsage) when there is no such name.
  [[nodiscard]] ParamId find(const std::string& name) const;
  [[nodiscard]] bool has(const std::string& name) const;

  // Views of the flat buffers in the parameter's local shape. Master and states are undefined where other ranks own a
  // part of them; `owned` works everywhere.
  [[nodiscard]] const at::Tensor& weight(ParamId id) const { return entries_[id].working; }
  [[nodiscard]] const at::Tensor& master(ParamId id) const { return entries_[id].master; }
  [[nodiscard]] const at::Tensor& grad(ParamId id) const { return entries_[id].grad; }
  /// The state of that name; undefined where there is none.
  [[nodiscard]] at::Tensor state(ParamId id, std::string_view name) const;
  /// The class with what the optimizer added to it, once allocated.
  [[nodiscard]] const ParamClass& traits(ParamId id) const { return buffers_[entries_[id].buffer].traits; }

  [[nodiscard]] std::vector<FlatBuffers>& buffers() { return buffers_; }
  [[nodiscard]] const std::vector<FlatBuffers>& buffers() const { return buffers_; }
  [[nodiscard]] Precision precision() const { return precision_; }
  [[nodiscard]] at::Device device() const { return device_; }

  /// Completes the working weights of every data rank from the parts that each has made of its masters. Collective over
  /// `data`, the ranks of the partition.
  void gather_working(Communicator& data);

  void zero_grad();
  /// Must be called by whoever has written working weights without ATen operators (an optimizer's kernel, a
  /// collective): moves the version counters by which layers know that what they made of a weight is out of date.
  void weights_written();

 private:
  struct Entry {
    ParamSpec spec;
    std::size_t buffer = 0;
    std::int64_t offset = 0;
    at::Tensor working, master, grad;
  };
  void allocate(Precision precision, at::Device device, const StateLayout* layout, const Partition& partition);
  void place_parameters(const StateLayout* layout);
  void share_out(FlatBuffers& buffer, std::size_t index, const Partition& partition) const;
  void make_tensors(FlatBuffers& buffer, const StateLayout* layout) const;
  std::vector<Entry> entries_;
  std::vector<FlatBuffers> buffers_;
  Precision precision_ = Precision::kFp32;
  at::Device device_ = at::Device(at::kCPU);
};

}  // namespace cram
