// Two finished runs beside each other: losses and gradient norms of every step, final weights, bytes sent.
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "base/log.h"
#include "eval/loaded_model.h"

namespace cram {
namespace {

using nlohmann::json;

struct Run {
  std::map<std::int64_t, std::pair<double, double>> steps;  // step -> loss, gradient norm; the last attempt's
  json summary;
};

Run read_run(const std::string& folder) {
  const std::string path = folder + "/metrics.jsonl";
  std::ifstream file(path);
  CRAM_CHECK(file, ExitCode::kUsage, "cannot read ", path, "; name two run folders");
  Run run;
  std::string line;
  while (std::getline(file, line)) {
    const json entry = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_discarded() || !entry.contains("kind")) continue;
    if (entry.at("kind") == "summary") run.summary = entry;
    if (entry.at("kind") != "train" || entry.at("loss").is_null()) continue;
    run.steps[entry.at("step").get<std::int64_t>()] = {entry.at("loss").get<double>(),
                                                       entry.at("grad_norm").get<double>()};
  }
  return run;
}

double relative(double a, double b) { return std::abs(a - b) / std::max(std::abs(a), 1e-300); }

}  // namespace

BenchResult bench_compare(BenchContext& context) {
  const Run a = read_run(context.paths[0]), b = read_run(context.paths[1]);
  CRAM_CHECK(!a.steps.empty() && a.steps.size() == b.steps.size(), ExitCode::kUsage, "the runs have ", a.steps.size(),
             " and ", b.steps.size(), " steps; only equally long ones can be compared");
  double loss = 0, norm = 0;
  for (const auto& [step, figures] : a.steps) {
    const auto other = b.steps.find(step);
    CRAM_CHECK(other != b.steps.end(), ExitCode::kUsage, context.paths[1], " lacks step ", step);
    loss = std::max(loss, relative(figures.first, other->second.first));
    norm = std::max(norm, relative(figures.second, other->second.second));
  }
  const LoadedModel first = load_model(context.paths[0], Precision::kFp32, at::Device(at::kCPU));
  const LoadedModel second = load_model(context.paths[1], Precision::kFp32, at::Device(at::kCPU));
  double weights = 0, distance = 0, scale = 0;
  for (ParamId id = 0; id < first.store->size(); ++id) {
    const at::Tensor x = first.store->master(id).to(at::kDouble);
    const at::Tensor y = second.store->master(second.store->find(first.store->spec(id).name)).to(at::kDouble);
    weights = std::max(weights, (x - y).abs().max().item<double>());
    distance += (x - y).square().sum().item<double>();
    scale += x.square().sum().item<double>();
  }
  BenchResult result;
  result.add("step1_loss", b.steps.begin()->second.first);
  result.add("loss_err", loss);
  result.add("grad_norm_err", norm);
  result.add("weights_err", std::sqrt(distance / scale));
  result.add("weights_max_diff", weights);
  double sent = 0, planned = 0;
  bool bytes_ok = true;
  if (b.summary.contains("sent_bytes")) {
    for (const char* group : {"tensor", "pipeline", "data", "tied"}) {
      const double counted = b.summary.at("sent_bytes").at(group).get<double>();
      const double expected = b.summary.at("planned_bytes").at(group).get<double>();
      bytes_ok = bytes_ok && std::abs(counted - expected) <= 1e-9 * std::max(counted, expected);
      sent += counted;
      planned += expected;
    }
  }
  result.add("sent_bytes", sent);
  result.add("planned_bytes", planned);
  result.add("bytes_ok", bytes_ok ? 1 : 0);
  return result;
}

}  // namespace cram
