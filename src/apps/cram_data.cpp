// cram_data: text to tokenizer, text and tokenizer to shards, and two ways to look at the results.
#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "apps/program.h"
#include "base/check.h"
#include "base/options.h"
#include "data/block_order.h"
#include "data/inspect.h"
#include "data/pack.h"
#include "data/tokenizer_folder.h"

namespace {

using cram::CommandLine;
using cram::ExitCode;
using cram::Flag;

constexpr const char* kHelp =
    R"(Prepares text for training:
  cram_data tokenizer --input PATH... --output DIR --vocab-size N   learn a vocabulary
  cram_data pack --input PATH... --tokenizer DIR --output DIR       make shards of token rows
  cram_data verify DIR                                              check every byte of an output
  cram_data inspect DIR --samples K [--masked]                      look at rows

`cram_data COMMAND --help` lists the options of a command. Exit codes: 0 done, 2 usage, 22 data.
)";

constexpr const char* kInputHelp =
    R"(Inputs are .txt (blank line between documents) and .jsonl (one object with a string "text" a line), plain, .gz or .zst,
folders of them, or - for standard input.
)";

std::vector<Flag> with_common(std::vector<Flag> flags) {
  const std::vector<Flag> common = {
      {"input", "file, folder or -; several may follow, and plain words count as inputs", true},
      {"output", "folder to make", true},
      {"threads", "threads for reading; the result does not depend on them (default: all)", true},
      {"force", "replace an output that was made from something else"}};
  flags.insert(flags.begin(), common.begin(), common.end());
  return flags;
}

std::vector<std::string> inputs_of(const CommandLine& line) {
  std::vector<std::string> inputs = line.values("input");
  inputs.insert(inputs.end(), line.arguments().begin(), line.arguments().end());
  CRAM_CHECK(!inputs.empty(), ExitCode::kUsage, "--input is missing (--help lists all)");
  return inputs;
}

int threads_of(const CommandLine& line) {
  const std::int64_t count = line.integer("threads", std::max(1U, std::thread::hardware_concurrency()));
  CRAM_CHECK(count >= 1 && count <= 1024, ExitCode::kUsage, "--threads must be in [1, 1024], got ", count);
  return static_cast<int>(count);
}

std::uint64_t seed_of(const CommandLine& line) {
  const std::int64_t seed = line.integer("seed", 0);
  CRAM_CHECK(seed >= 0, ExitCode::kUsage, "--seed must not be negative, got ", seed);
  return static_cast<std::uint64_t>(seed);
}

std::string folder_of(const CommandLine& line) {
  CRAM_CHECK(line.arguments().size() == 1, ExitCode::kUsage, "expected one folder, got ", line.arguments().size(),
             " (--help lists all)");
  return line.arguments()[0];
}

std::string joined_orders() {
  std::string all;
  for (const std::string& name : cram::block_order_names()) all += (all.empty() ? "" : " | ") + name;
  return all;
}

int run_tokenizer(int argc, char** argv) {
  const CommandLine line(
      "cram_data tokenizer",
      with_common({{"vocab-size", "entries, with the five special ones (default 32768)", true},
                   {"type", "bpe | unigram (default bpe)", true},
                   {"soft-vocab", "take the largest vocabulary that the text supports, if smaller"}}),
      argc, argv);
  if (line.answered("cram_data tokenizer --input PATH... --output DIR --vocab-size N", kInputHelp)) return 0;
  cram::TokenizerFolderSettings settings;
  settings.inputs = inputs_of(line);
  settings.output = line.required("output");
  settings.tokenizer.vocab_size = line.integer("vocab-size", settings.tokenizer.vocab_size);
  settings.tokenizer.type = line.value("type", settings.tokenizer.type);
  settings.tokenizer.soft_vocab = line.has("soft-vocab");
  settings.threads = threads_of(line);
  settings.force = line.has("force");
  cram::make_tokenizer_folder(settings);
  return 0;
}

int run_pack(int argc, char** argv) {
  const CommandLine line(
      "cram_data pack",
      with_common({{"tokenizer", "folder of `cram_data tokenizer`", true},
                   {"seq-length", "tokens a row (default 128)", true},
                   {"filter", "drop documents unless tokens < X * characters (recipe: 0.25; default: keep all)", true},
                   {"order", "of training rows: " + joined_orders() + " (default randomized)", true},
                   {"validation", "share of documents held out (default 0.01)", true},
                   {"seed", "of document and row order (default 0)", true},
                   {"rows-per-shard", "rows of a shard file (default 262144)", true}}),
      argc, argv);
  if (line.answered("cram_data pack --input PATH... --tokenizer DIR --output DIR", kInputHelp)) return 0;
  cram::PackSettings settings;
  settings.inputs = inputs_of(line);
  settings.output = line.required("output");
  settings.tokenizer = line.required("tokenizer");
  settings.seq_length = line.integer("seq-length", settings.seq_length);
  if (line.has("filter")) settings.filter = line.number("filter", 0);
  settings.order = line.value("order", settings.order);
  settings.validation = line.number("validation", settings.validation);
  settings.seed = seed_of(line);
  settings.rows_per_shard = line.integer("rows-per-shard", settings.rows_per_shard);
  settings.threads = threads_of(line);
  settings.force = line.has("force");
  cram::pack(settings);
  return 0;
}

int run_verify(int argc, char** argv) {
  const CommandLine line("cram_data verify", {}, argc, argv);
  if (line.answered("cram_data verify DIR", "Checks every file of an output of `tokenizer` or `pack`.\n")) return 0;
  cram::verify_folder(folder_of(line));
  return 0;
}

int run_inspect(int argc, char** argv) {
  const CommandLine line("cram_data inspect",
                         {{"samples", "rows to show (default 5)", true},
                          {"split", "train | validation (default train)", true},
                          {"masked", "show each row as the model would see it, too"},
                          {"mask-rate", "with --masked (default 0.25)", true},
                          {"seed", "of the choice of rows and of masks (default 0)", true}},
                         argc, argv);
  if (line.answered("cram_data inspect DIR", "Shows what an output of `tokenizer` or `pack` holds.\n")) return 0;
  cram::InspectSettings settings;
  settings.folder = folder_of(line);
  settings.samples = line.integer("samples", settings.samples);
  settings.split = line.value("split", settings.split);
  settings.masked = line.has("masked");
  settings.mask_rate = line.number("mask-rate", settings.mask_rate);
  settings.seed = seed_of(line);
  cram::inspect_folder(settings);
  return 0;
}

struct Command {
  const char* name;
  int (*run)(int argc, char** argv);
};
constexpr Command kCommands[] = {
    {"tokenizer", run_tokenizer}, {"pack", run_pack}, {"verify", run_verify}, {"inspect", run_inspect}};

// The first word is the command; what follows is its command line.
int run(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  std::vector<std::string> names;
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run(argc - 1, argv + 1);
    names.emplace_back(command.name);
  }
  if (name.empty() || name[0] == '-') {
    const CommandLine line("cram_data", {}, argc, argv);
    if (line.answered("cram_data COMMAND ...", kHelp)) return 0;
    cram::fail(ExitCode::kUsage, "a command is missing: tokenizer, pack, verify or inspect (--help says more)");
  }
  cram::fail(ExitCode::kUsage, "unknown command '", name, "'; the nearest is ", cram::nearest_name(name, names),
             " (--help lists all)");
}

}  // namespace

int main(int argc, char** argv) {
  return cram::guarded_main("cram_data", [&] { return run(argc, argv); });
}
