#include "train/replicas.h"

#include <torch/types.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "parallel/agreement.h"

namespace cram {
namespace {

std::string digest_of(const at::Tensor& tensor) {
  const at::Tensor host = tensor.cpu().contiguous();
  return digest_bytes(host.const_data_ptr(), host.nbytes());
}

// One line a value: what it is, then its digest. Equal first parts on several ranks must have equal digests.
std::string describe(const ParameterStore& store, const Mesh& mesh) {
  std::string lines;
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    const auto add = [&](const char* kind, const at::Tensor& tensor) {
      lines += concat(kind, " of ", spec.name, spec.is_sharded() ? concat(", part ", mesh.place().tp_rank) : "", "\t",
                      digest_of(tensor), "\n");
    };
    add("weight", store.weight(id));
    if (!store.master(id).defined()) continue;  // shared out: nobody else has this part
    if (store.master(id).const_data_ptr() != store.weight(id).const_data_ptr()) add("master", store.master(id));
    for (const ParameterStore::OwnedRange& range : store.owned(id)) {
      for (const NamedTensor& state : range.states) add(state.name.c_str(), state.tensor);
    }
  }
  return lines;
}

std::string list_of(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += concat(text.empty() ? "" : ", ", rank);
  return text;
}

}  // namespace

void check_replicas(const ParameterStore& store, const Mesh& mesh, std::int64_t step) {
  if (mesh.world().size() == 1) return;
  const std::vector<std::string> all = gather_text(mesh.world(), describe(store, mesh));
  std::map<std::string, std::map<std::string, std::vector<int>>> holders;  // what -> digest -> ranks
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::istringstream lines(all[rank]);
    for (std::string line; std::getline(lines, line);) {
      const std::size_t tab = line.find('\t');
      holders[line.substr(0, tab)][line.substr(tab + 1)].push_back(static_cast<int>(rank));
    }
  }
  std::string findings;
  int found = 0;
  for (const auto& [what, by_digest] : holders) {
    if (by_digest.size() == 1) continue;
    if (++found > 10) continue;
    const auto larger = [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); };
    const auto majority = std::max_element(by_digest.begin(), by_digest.end(), larger);
    std::vector<int> others;
    std::size_t holders_in_all = 0;
    for (const auto& [digest, ranks] : by_digest) {
      holders_in_all += ranks.size();
      if (digest != majority->first) others.insert(others.end(), ranks.begin(), ranks.end());
    }
    std::sort(others.begin(), others.end());
    if (2 * majority->second.size() > holders_in_all) {
      findings += concat("\n  ", what, ": rank ", list_of(others), " differs from ranks ", list_of(majority->second));
      continue;
    }
    std::vector<std::vector<int>> camps;  // nobody can say who is right
    for (const auto& [digest, ranks] : by_digest) camps.push_back(ranks);
    std::sort(camps.begin(), camps.end());
    findings += concat("\n  ", what, ": ranks ");
    for (std::size_t i = 0; i < camps.size(); ++i) findings += concat(i == 0 ? "" : " and ", list_of(camps[i]));
    findings += " differ";
  }
  CRAM_CHECK(found == 0, ExitCode::kReplicasDiffer, "after step ", step,
             " ranks differ in what they should hold alike (", found, " tensors):", findings,
             "\nresume from the last checkpoint; a machine that does this twice has a fault");
}

}  // namespace cram
