#include "model/parameter_store.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/rng.h"

namespace cram {
namespace {

std::int64_t product(const std::vector<std::int64_t>& shape) {
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The parameter's slice of the full tensor of initial values, as fp64 on the CPU.
at::Tensor initial_values(const ParamSpec& spec, std::uint64_t seed) {
  const at::Tensor full = at::empty(spec.global_shape, at::kDouble);
  if (spec.init == InitRule::kConstant) {
    full.fill_(spec.init_value);
  } else {
    const std::uint64_t key = stream_key(seed, spec.name);
    auto* data = full.data_ptr<double>();
    at::parallel_for(0, full.numel(), 1 << 16, [&](std::int64_t begin, std::int64_t end) {
      fill_normal(key, static_cast<std::uint64_t>(begin), 0, spec.init_value, data + begin,
                  static_cast<std::uint64_t>(end - begin));
    });
  }
  return take_slice(full, spec);
}

}  // namespace

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

std::int64_t ParameterStore::local_numel(ParamId id) const { return product(local_shape(id)); }

ParamId ParameterStore::find(const std::string& name) const {
  const auto found =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.spec.name == name; });
  CRAM_CHECK(found != entries_.end(), ExitCode::kUsage, "the model has no parameter named ", name);
  return static_cast<ParamId>(found - entries_.begin());
}

bool ParameterStore::has(const std::string& name) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.spec.name == name; });
}

void ParameterStore::allocate(Precision precision, at::Device device, bool with_optimizer, const Partition& partition) {
  precision_ = precision;
  device_ = device;
  buffers_.clear();
  for (std::size_t id = 0; id < entries_.size(); ++id) {
    Entry& entry = entries_[id];
    const auto same_class = [&](const FlatBuffers& b) {
      return b.decay == entry.spec.decay && b.full_precision == entry.spec.full_precision &&
             b.sharded == entry.spec.is_sharded() && b.tied == entry.spec.tied && b.counts == entry.spec.counts &&
             b.partial == entry.spec.partial;
    };
    auto buffer = std::find_if(buffers_.begin(), buffers_.end(), same_class);
    if (buffer == buffers_.end()) {
      FlatBuffers made;
      made.decay = entry.spec.decay;
      made.full_precision = entry.spec.full_precision;
      made.sharded = entry.spec.is_sharded();
      made.tied = entry.spec.tied;
      made.counts = entry.spec.counts;
      made.partial = entry.spec.partial;
      buffer = buffers_.insert(buffers_.end(), std::move(made));
    }
    entry.buffer = static_cast<std::size_t>(buffer - buffers_.begin());
    entry.offset = buffer->numel;
    buffer->numel += round_up(local_numel(id), kParamAlignment);
  }
  const at::TensorOptions master_options = at::TensorOptions().dtype(master_type(precision)).device(device);
  const bool shared_out = partition.size > 1;
  for (FlatBuffers& b : buffers_) {
    b.numel = round_up(b.numel, partition.alignment());
    b.buckets = cut_buckets(b.numel, partition);
    const std::int64_t owned = b.numel / partition.size;
    b.master = at::zeros({owned}, master_options);
    const bool one_format = b.full_precision || working_type(precision) == master_type(precision);
    b.working =
        one_format && !shared_out
            ? b.master
            : at::zeros({b.numel}, master_options.dtype(one_format ? master_type(precision) : working_type(precision)));
    if (with_optimizer) {
      b.grad = at::zeros({b.numel}, master_options);
      b.owned_grad = shared_out ? at::zeros({owned}, master_options) : b.grad;
      b.exp_avg = at::zeros({owned}, master_options);
      b.exp_avg_sq = at::zeros({owned}, master_options);
    }
  }
  for (std::size_t id = 0; id < entries_.size(); ++id) {
    Entry& entry = entries_[id];
    const FlatBuffers& b = buffers_[entry.buffer];
    const std::vector<std::int64_t> shape = local_shape(id);
    const auto view = [&](const at::Tensor& flat) {
      return flat.defined() ? flat.narrow(0, entry.offset, product(shape)).view(shape) : at::Tensor();
    };
    entry.working = view(b.working);
    entry.grad = view(b.grad);
    if (shared_out) continue;
    entry.master = view(b.master);
    entry.exp_avg = view(b.exp_avg);
    entry.exp_avg_sq = view(b.exp_avg_sq);
  }
}

std::vector<ParameterStore::OwnedRange> ParameterStore::owned(ParamId id) const {
  const Location where = location(id);
  const FlatBuffers& b = buffers_[where.buffer];
  std::vector<OwnedRange> ranges;
  for (const Bucket& bucket : b.buckets) {
    const std::int64_t begin = std::max(where.begin, bucket.own_begin);
    const std::int64_t end = std::min(where.end, bucket.own_end);
    if (begin >= end) continue;
    const auto view = [&](const at::Tensor& flat) {
      return flat.defined() ? flat.narrow(0, bucket.at + begin - bucket.own_begin, end - begin) : at::Tensor();
    };
    ranges.push_back({begin - where.begin, end - where.begin, view(b.master), view(b.owned_grad), view(b.exp_avg),
                      view(b.exp_avg_sq)});
  }
  return ranges;
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
    for (const at::Tensor* state : {&b.grad, &b.owned_grad, &b.exp_avg, &b.exp_avg_sq}) {
      if (state->defined()) state->zero_();
    }
  }
}

void ParameterStore::refresh_working() {
  for (const FlatBuffers& b : buffers_) {
    if (b.working.is_same(b.master)) continue;
    for (const Bucket& bucket : b.buckets) {
      b.working.narrow(0, bucket.own_begin, bucket.owned()).copy_(b.master.narrow(0, bucket.at, bucket.owned()));
    }
  }
}

void ParameterStore::zero_grad() {
  for (const FlatBuffers& b : buffers_) b.grad.zero_();
}

void ParameterStore::weights_written() {
  for (const FlatBuffers& b : buffers_) b.working.unsafeGetTensorImpl()->bump_version();
}

}  // namespace cram
