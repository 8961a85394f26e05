// The one owner of parameters: logical names, slices, initial values and flat buffers for working weights, masters,
// gradients and moments. Everything that walks over parameters (optimizer, checkpoint, export) walks over this.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace cram {

enum class InitRule { kNormal, kConstant };

/// One logical parameter. The name is the public one ("encoder.layers.3.attn.dense.weight") in every layout.
struct ParamSpec {
  std::string name;
  std::vector<std::int64_t> global_shape;
  InitRule init = InitRule::kNormal;
  double init_value = 0;        ///< standard deviation, or the constant
  bool decay = true;            ///< weight decay applies
  bool full_precision = false;  ///< computed with the fp32 master itself (norms, scalars), never with a bf16 copy
  std::int64_t fan_in = 0;
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

/// A contiguous run of parameters of one class: same decay rule, working format and sharding, so that the optimizer
/// needs one call for it and the gradient norm counts replicated tensors once. All tensors are 1-d and equally long;
/// `working` is `master` where the class is full precision.
struct FlatBuffers {
  bool decay = false;
  bool full_precision = false;
  bool sharded = false;    ///< every tensor rank holds another part; otherwise all hold the same
  std::int64_t numel = 0;  ///< with padding; every parameter starts at a multiple of kParamAlignment
  at::Tensor working, master, grad, exp_avg, exp_avg_sq;
};
inline constexpr std::int64_t kParamAlignment = 64;

class ParameterStore {
 public:
  ParameterStore() = default;
  ParameterStore(const ParameterStore&) = delete;
  ParameterStore& operator=(const ParameterStore&) = delete;

  /// Registers a parameter; its tensors exist after `allocate`.
  ParamId add(ParamSpec spec);

  /// Allocates the flat buffers. `with_optimizer` false leaves out gradients and moments (export, evaluation).
  void allocate(Precision precision, at::Device device, bool with_optimizer = true);

  /// Initial values: a pure function of (seed, name), made for the full tensor and then sliced; gradients and moments
  /// 0.
  void initialize(std::uint64_t seed);

  /// Copies masters to working weights (after a load; the optimizer does it as it goes).
  void refresh_working();

  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  [[nodiscard]] const ParamSpec& spec(ParamId id) const { return entries_[id].spec; }
  [[nodiscard]] std::vector<std::int64_t> local_shape(ParamId id) const;
  [[nodiscard]] std::int64_t local_numel(ParamId id) const;
  /// Throws Error(kUsage) when there is no such name.
  [[nodiscard]] ParamId find(const std::string& name) const;
  [[nodiscard]] bool has(const std::string& name) const;

  // Views of the flat buffers in the parameter's local shape.
  [[nodiscard]] const at::Tensor& weight(ParamId id) const { return entries_[id].working; }
  [[nodiscard]] const at::Tensor& master(ParamId id) const { return entries_[id].master; }
  [[nodiscard]] const at::Tensor& grad(ParamId id) const { return entries_[id].grad; }
  [[nodiscard]] const at::Tensor& exp_avg(ParamId id) const { return entries_[id].exp_avg; }
  [[nodiscard]] const at::Tensor& exp_avg_sq(ParamId id) const { return entries_[id].exp_avg_sq; }

  [[nodiscard]] std::vector<FlatBuffers>& buffers() { return buffers_; }
  [[nodiscard]] Precision precision() const { return precision_; }
  [[nodiscard]] at::Device device() const { return device_; }

  void zero_grad();

 private:
  struct Entry {
    ParamSpec spec;
    std::size_t buffer = 0;
    std::int64_t offset = 0;
    at::Tensor working, master, grad, exp_avg, exp_avg_sq;
  };
  std::vector<Entry> entries_;
  std::vector<FlatBuffers> buffers_;
  Precision precision_ = Precision::kFp32;
  at::Device device_ = at::Device(at::kCPU);
};

}  // namespace cram
