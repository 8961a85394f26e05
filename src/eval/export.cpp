#include "eval/export.h"

#include <torch/types.h>

#include "base/file_io.h"
#include "base/safetensors.h"
#include "model/weights_io.h"
#include "train/forward_pass.h"

namespace cram {

void export_cramming(const LoadedModel& model, const std::string& output) {
  make_folders(output);
  export_weights(output + "/model.safetensors", model.config, *model.store);
}

void export_sample(LoadedModel& model, ShardSet& validation, std::int64_t rows, const std::string& output) {
  CRAM_CHECK(rows >= 1 && rows <= validation.rows(), ExitCode::kUsage, "--sample ", rows, ": the validation split has ",
             validation.rows(), " rows");
  const std::int64_t seq = validation.seq_length();
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(rows * seq));
  validation.read_rows(0, rows, ids.data());
  const std::vector<std::int64_t> wide(ids.begin(), ids.end());
  const at::Tensor input = at::tensor(wide, at::kLong).view({rows, seq});
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  ForwardPass pass(*model.model, *model.store, *alone);
  const at::Tensor logits =
      pass.outputs(input, at::arange(rows * seq, at::kLong)).to(at::kFloat).cpu().contiguous();  // [N*S,V]
  make_folders(output);
  write_safetensors(output + "/sample.safetensors",
                    {{"input_ids", "I64", {rows, seq}, input.const_data_ptr()},
                     {"logits", "F32", {rows, seq, logits.size(1)}, logits.const_data_ptr()}},
                    {{"format", "pt"}});
}

}  // namespace cram
