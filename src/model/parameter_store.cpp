#include "model/parameter_store.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/rng.h"

namespace cram {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// This rank's slice of the tensor of initial values, as fp64 on the CPU: value i of the whole tensor is the i-th of the
// parameter's stream, so only the slice's runs are drawn.
at::Tensor initial_values(const ParamSpec& spec, std::uint64_t seed) {
  const auto dim = static_cast<std::size_t>(spec.slice_dim);
  std::vector<std::int64_t> shape = spec.global_shape;
  const std::int64_t length = spec.slice_end - spec.slice_begin;
  shape[dim] = spec.slice_groups * length;
  const at::Tensor slice = at::zeros(shape, at::kDouble);
  std::int64_t outer = 1, inner = 1;
  for (std::size_t d = 0; d < dim; ++d) outer *= shape[d];
  for (std::size_t d = dim + 1; d < shape.size(); ++d) inner *= shape[d];
  const std::int64_t extent = spec.global_shape[dim] / spec.slice_groups;
  const std::int64_t count = (std::min(spec.slice_end, extent) - std::min(spec.slice_begin, extent)) * inner;
  const std::uint64_t key = stream_key(seed, spec.name);
  auto* values = slice.data_ptr<double>();
  // Piece p: group p % groups of outer index p / groups, contiguous here and in the whole tensor.
  const std::int64_t pieces = outer * spec.slice_groups;
  at::parallel_for(0, pieces, std::max<std::int64_t>(1, (1 << 16) / std::max<std::int64_t>(1, count)),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t p = begin; p < end; ++p) {
                       double* to = values + p * length * inner;
                       if (spec.init == InitRule::kConstant) {
                         std::fill_n(to, count, spec.init_value);
                         continue;
                       }
                       const std::int64_t first = (p * extent + spec.slice_begin) * inner;
                       if (count > 0) {
                         fill_normal(key, static_cast<std::uint64_t>(first), 0, spec.init_value, to,
                                     static_cast<std::uint64_t>(count));
                       }
                     }
                   });
  return slice;
}

}  // namespace

std::int64_t element_count(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

bool ParamSpec::is_sharded() const {
  const std::int64_t extent = global_shape[static_cast<std::size_t>(slice_dim)];
  return slice_begin != 0 || slice_groups * slice_end != extent;
}

namespace {

// The range of `full` that exists (without padding), viewed as [..., groups, rows of a group, ...].
at::Tensor existing_range(const at::Tensor& full, const ParamSpec& spec) {
  const std::int64_t extent = full.size(spec.slice_dim) / spec.slice_groups;
  const std::int64_t end = std::min(spec.slice_end, extent);
  const std::int64_t begin = std::min(spec.slice_begin, end);
  return full.unflatten(spec.slice_dim, {spec.slice_groups, extent}).narrow(spec.slice_dim + 1, begin, end - begin);
}

}  // namespace

at::Tensor take_slice(const at::Tensor& full, const ParamSpec& spec) {
  const at::Tensor range = existing_range(full, spec);
  const std::int64_t missing = spec.slice_end - spec.slice_begin - range.size(spec.slice_dim + 1);
  if (missing == 0) return range.flatten(spec.slice_dim, spec.slice_dim + 1);
  std::vector<std::int64_t> padding = range.sizes().vec();
  padding[static_cast<std::size_t>(spec.slice_dim + 1)] = missing;
  return at::cat({range, at::zeros(padding, range.options())}, spec.slice_dim + 1)
      .flatten(spec.slice_dim, spec.slice_dim + 1);
}

void put_slice(const at::Tensor& full, const ParamSpec& spec, const at::Tensor& part) {
  const at::Tensor range = existing_range(full, spec);
  const at::Tensor rows = part.unflatten(spec.slice_dim, {spec.slice_groups, spec.slice_end - spec.slice_begin});
  range.copy_(rows.narrow(spec.slice_dim + 1, 0, range.size(spec.slice_dim + 1)));
}

Precision parse_precision(const std::string& name) {
  if (name == "bf16") return Precision::kBf16;
  if (name == "fp32") return Precision::kFp32;
  if (name == "fp64") return Precision::kFp64;
  fail(ExitCode::kUsage, "train.precision=", name, " is not one of bf16, fp32, fp64");
}

const char* precision_name(Precision precision) {
  switch (precision) {
    case Precision::kBf16: return "bf16";
    case Precision::kFp32: return "fp32";
    case Precision::kFp64: return "fp64";
  }
  return "?";
}

at::ScalarType working_type(Precision precision) {
  return precision == Precision::kBf16 ? at::kBFloat16 : master_type(precision);
}

at::ScalarType master_type(Precision precision) { return precision == Precision::kFp64 ? at::kDouble : at::kFloat; }

ParamId ParameterStore::add(ParamSpec spec) {
  CRAM_DCHECK(buffers_.empty());
  CRAM_DCHECK(!has(spec.name));
  if (spec.slice_end < 0)
    spec.slice_end = spec.global_shape[static_cast<std::size_t>(spec.slice_dim)] / spec.slice_groups;
  Entry entry;
  entry.spec = std::move(spec);
  entries_.push_back(std::move(entry));
  return entries_.size() - 1;
}

std::vector<std::int64_t> ParameterStore::local_shape(ParamId id) const {
  const ParamSpec& s = entries_[id].spec;
  std::vector<std::int64_t> shape = s.global_shape;
  shape[static_cast<std::size_t>(s.slice_dim)] = s.slice_groups * (s.slice_end - s.slice_begin);
  return shape;
}

std::int64_t ParameterStore::local_numel(ParamId id) const { return element_count(local_shape(id)); }

ParamId ParameterStore::find(const std::string& name) const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.spec.name == name; });
  CRAM_CHECK(found != entries_.end(), ExitCode::kUsage, "the model has no parameter named ", name);
  return static_cast<ParamId>(found - entries_.begin());
}

bool ParameterStore::has(const std::string& name) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.spec.name == name; });
}

std::int64_t FlatBuffers::state_bytes() const {
  std::int64_t bytes = 0;
  for (const NamedTensor& state : states) bytes += static_cast<std::int64_t>(state.tensor.nbytes());
  return bytes;
}

void ParameterStore::allocate(Precision precision, at::Device device, const StateLayout& layout,
                              const Partition& partition) {
  allocate(precision, device, &layout, partition);
}

void ParameterStore::allocate(Precision precision, at::Device device) { allocate(precision, device, nullptr, {}); }

// Deals the parameters out to the flat buffers of their classes, in order.
void ParameterStore::place_parameters(const StateLayout* layout) {
  for (std::size_t id = 0; id < entries_.size(); ++id) {
    Entry& entry = entries_[id];
    ParamClass traits = entry.spec.traits;
    traits.sharded = entry.spec.is_sharded();
    if (layout != nullptr && layout->classify) layout->classify(entry.spec, traits);
    auto buffer =
        std::find_if(buffers_.begin(), buffers_.end(), [&](const FlatBuffers& b) { return b.traits == traits; });
    if (buffer == buffers_.end()) {
      buffer = buffers_.insert(buffers_.end(), FlatBuffers());
      buffer->traits = traits;
    }
    entry.buffer = static_cast<std::size_t>(buffer - buffers_.begin());
    entry.offset = buffer->numel;
    buffer->numel += round_up(local_numel(id), kParamAlignment);
  }
}

// Whole matrices: data rank r owns the parameters that begin in the r-th equal part of the buffer. The largest share is
// then at most the mean and the largest parameter; small ranks may own nothing.
void ParameterStore::share_out(FlatBuffers& b, std::size_t index, const Partition& partition) const {
  b.shared_out = partition.size > 1;
  if (!b.traits.whole_matrices || !b.shared_out) {
    b.numel = round_up(b.numel, partition.alignment());
    b.buckets = cut_buckets(b.numel, partition);
    if (!b.shared_out) {
      b.parts = {{0, b.numel, 0}};
      return;
    }
    for (const Bucket& bucket : b.buckets) b.parts.push_back({bucket.own_begin, bucket.own_end, bucket.at});
    return;
  }
  Partition everything = partition;
  everything.rank = 0;
  everything.size = 1;
  b.buckets = cut_buckets(b.numel, everything);
  b.part_of_rank.resize(static_cast<std::size_t>(partition.size));
  std::int64_t end = 0;
  std::size_t owner = 0;
  for (ParamId id = 0; id < entries_.size(); ++id) {
    if (entries_[id].buffer != index) continue;
    const std::int64_t begin = entries_[id].offset;
    for (const auto next = static_cast<std::size_t>(begin * partition.size / b.numel); owner < next;) {
      b.part_of_rank[owner++].end = end;
      b.part_of_rank[owner].begin = end;
    }
    end = begin + round_up(local_numel(id), kParamAlignment);
  }
  for (b.part_of_rank[owner].end = end; ++owner < b.part_of_rank.size();) {
    b.part_of_rank[owner] = {end, end, 0};
  }
  b.parts.push_back(b.part_of_rank[static_cast<std::size_t>(partition.rank)]);
}

void ParameterStore::make_tensors(FlatBuffers& b, const StateLayout* layout) const {
  const at::TensorOptions master_options = at::TensorOptions().dtype(master_type(precision_)).device(device_);
  std::int64_t owned = 0;
  for (const OwnedPart& part : b.parts) owned += part.numel();
  b.master = at::zeros({owned}, master_options);
  const bool one_format = b.traits.full_precision || working_type(precision_) == master_type(precision_);
  b.working =
      one_format && !b.shared_out
          ? b.master
          : at::zeros({b.numel}, master_options.dtype(one_format ? master_type(precision_) : working_type(precision_)));
  if (layout == nullptr) return;
  b.grad = at::zeros({b.numel}, master_options);
  b.owned_grad = !b.shared_out             ? b.grad
                 : b.traits.whole_matrices ? b.grad.narrow(0, b.parts[0].begin, owned)
                                           : at::zeros({owned}, master_options);
  if (!layout->states) return;
  for (const std::string& name : layout->states(b.traits))
    b.states.push_back({name, at::zeros({owned}, master_options)});
}

void ParameterStore::allocate(Precision precision, at::Device device, const StateLayout* layout,
                              const Partition& partition) {
  precision_ = precision;
  device_ = device;
  buffers_.clear();
  place_parameters(layout);
  for (std::size_t index = 0; index < buffers_.size(); ++index) {
    share_out(buffers_[index], index, partition);
    make_tensors(buffers_[index], layout);
  }
  for (std::size_t id = 0; id < entries_.size(); ++id) {
    Entry& entry = entries_[id];
    const FlatBuffers& b = buffers_[entry.buffer];
    const std::vector<std::int64_t> shape = local_shape(id);
    const auto view = [&](const at::Tensor& flat) {
      return flat.defined() ? flat.narrow(0, entry.offset, element_count(shape)).view(shape) : at::Tensor();
    };
    entry.working = view(b.working);
    entry.grad = view(b.grad);
    entry.master = b.shared_out ? at::Tensor() : view(b.master);
  }
}

std::vector<ParameterStore::OwnedRange> ParameterStore::owned(ParamId id) const {
  const Location where = location(id);
  const FlatBuffers& b = buffers_[where.buffer];
  std::vector<OwnedRange> ranges;
  for (const OwnedPart& part : b.parts) {
    const std::int64_t begin = std::max(where.begin, part.begin);
    const std::int64_t end = std::min(where.end, part.end);
    if (begin >= end) continue;
    const auto view = [&](const at::Tensor& flat) {
      return flat.defined() ? flat.narrow(0, part.at + begin - part.begin, end - begin) : at::Tensor();
    };
    OwnedRange range{begin - where.begin, end - where.begin, view(b.master), view(b.owned_grad), {}};
    for (const NamedTensor& state : b.states) range.states.push_back({state.name, view(state.tensor)});
    ranges.push_back(std::move(range));
  }
  return ranges;
}

std::vector<NamedTensor> ParameterStore::OwnedRange::stored() const {
  std::vector<NamedTensor> all = {{"master", master}};
  all.insert(all.end(), states.begin(), states.end());
  return all;
}

at::Tensor ParameterStore::state(ParamId id, std::string_view name) const {
  const Location where = location(id);
  const FlatBuffers& b = buffers_[where.buffer];
  if (b.shared_out) return {};
  for (const NamedTensor& state : b.states) {
    if (state.name == name) return state.tensor.narrow(0, where.begin, where.end - where.begin).view(local_shape(id));
  }
  return {};
}

void ParameterStore::assign(ParamId id, const at::Tensor& local) {
  const at::Tensor flat = local.reshape({-1});
  for (const OwnedRange& range : owned(id)) range.master.copy_(flat.slice(0, range.begin, range.end));
  entries_[id].working.copy_(local);
}

void ParameterStore::initialize(std::uint64_t seed) {
  // Rounded as a master first: the working copy is that of the master, to the last bit.
  for (ParamId id = 0; id < entries_.size(); ++id) {
    assign(id, initial_values(entries_[id].spec, seed).to(master_type(precision_)));
  }
  for (const FlatBuffers& b : buffers_) {
    for (const at::Tensor* gradient : {&b.grad, &b.owned_grad}) {
      if (gradient->defined()) gradient->zero_();
    }
    for (const NamedTensor& state : b.states) state.tensor.zero_();
  }
}

void ParameterStore::refresh_working() {
  for (const FlatBuffers& b : buffers_) {
    if (b.working.is_same(b.master)) continue;
    for (const OwnedPart& part : b.parts) {
      b.working.narrow(0, part.begin, part.numel()).copy_(b.master.narrow(0, part.at, part.numel()));
    }
  }
}

namespace {

// Every rank's owned slices of a buffer, in place.
void gather_slices(const FlatBuffers& b, Communicator& data, std::vector<Work>& pending) {
  for (const Bucket& bucket : b.buckets) {
    pending.push_back(data.all_gather_async(b.working.narrow(0, bucket.begin, bucket.numel()),
                                            b.working.narrow(0, bucket.own_begin, bucket.owned())));
  }
}

// The same of whole matrices, whose parts are of unequal size: each rank sends its own to all others.
void gather_matrices(const FlatBuffers& b, Communicator& data) {
  std::vector<Message> sends, receives;
  const OwnedPart& own = b.parts[0];
  for (int peer = 0; peer < data.size(); ++peer) {
    if (peer == data.rank()) continue;
    const OwnedPart theirs = b.part_of_rank[static_cast<std::size_t>(peer)];
    if (own.numel() > 0) sends.push_back({peer, b.working.narrow(0, own.begin, own.numel()), 0});
    if (theirs.numel() > 0) receives.push_back({peer, b.working.narrow(0, theirs.begin, theirs.numel()), 0});
  }
  data.exchange_(sends, receives);
}

}  // namespace

void ParameterStore::gather_working(Communicator& data) {
  std::vector<Work> gathering;
  for (const FlatBuffers& b : buffers_) {
    if (!b.shared_out) continue;
    if (b.traits.whole_matrices) {
      gather_matrices(b, data);
    } else {
      gather_slices(b, data, gathering);
    }
  }
  for (Work& work : gathering) work.wait();
  weights_written();
}

void ParameterStore::zero_grad() {
  for (const FlatBuffers& b : buffers_) b.grad.zero_();
}

void ParameterStore::weights_written() {
  for (const FlatBuffers& b : buffers_) b.working.unsafeGetTensorImpl()->bump_version();
}

}  // namespace cram
