// cram_data: text to tokenizer, text and tokenizer to shards, and two ways to look at the results.
#include <algorithm>
#include <cstdio>
#include <cxxopts.hpp>
#include <functional>
#include <iostream>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/options.h"
#include "base/version.h"
#include "data/block_order.h"
#include "data/inspect.h"
#include "data/pack.h"
#include "data/tokenizer_folder.h"

namespace {

using cram::ExitCode;

constexpr const char* kHelp =
    R"(Prepares text for training.

  cram_data tokenizer --input PATH... --output DIR --vocab-size N   learn a vocabulary
  cram_data pack --input PATH... --tokenizer DIR --output DIR       make shards of token rows
  cram_data verify DIR                                              check every byte of an output
  cram_data inspect DIR --samples K [--masked]                      look at rows

Inputs are .txt (blank line between documents) and .jsonl (one object with a string "text" a line), plain, .gz or .zst,
folders of them, or - for standard input.
`cram_data COMMAND --help` lists the options of a command. Exit codes: 0 done, 2 usage, 22 data.
)";

/// Long option names of a command, for "did you mean".
std::vector<std::string> option_names(const cxxopts::Options& options) {
  std::vector<std::string> names;
  for (const auto& group : options.groups()) {
    for (const auto& option : options.group_help(group).options) {
      names.insert(names.end(), option.l.begin(), option.l.end());
    }
  }
  return names;
}

/// cxxopts reports an unknown option without its neighbours, so look first.
void check_names(const cxxopts::Options& options, const std::vector<std::string>& arguments) {
  const std::vector<std::string> known = option_names(options);
  for (const std::string& argument : arguments) {
    if (argument == "--") return;
    if (!argument.starts_with("--")) continue;
    const std::string name = argument.substr(2, argument.find('=') - 2);
    CRAM_CHECK(std::find(known.begin(), known.end(), name) != known.end(), ExitCode::kUsage, "unknown option --", name,
               ", nearest: --", cram::nearest_name(name, known), " (see --help)");
  }
}

/// One command's command line: texts only, numbers are parsed strictly by us.
class CommandLine {
 public:
  CommandLine(const std::string& command, const std::string& description, const std::string& positional)
      : options_("cram_data " + command, description), positional_(positional) {
    options_.add_options()("help", "Show this help")("version", "Show the version");
    options_.positional_help("").show_positional_help();
  }

  void add(const std::string& name, const std::string& help, const std::string& value_name = "VALUE") {
    options_.add_options()(name, help, cxxopts::value<std::vector<std::string>>(), value_name);
  }
  void add_flag(const std::string& name, const std::string& help) { options_.add_options()(name, help); }

  /// False when --help or --version was asked for and answered.
  bool parse(const std::vector<std::string>& arguments) {
    check_names(options_, arguments);
    std::vector<const char*> raw{"cram_data"};
    for (const std::string& argument : arguments) raw.push_back(argument.c_str());
    options_.parse_positional(positional_);
    try {
      result_ = options_.parse(static_cast<int>(raw.size()), raw.data());
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      cram::fail(ExitCode::kUsage, error.what(), " (see --help)");
    }
    if (result_.count("help") > 0) std::cout << options_.help();
    if (result_.count("version") > 0) std::cout << cram::version_line("cram_data") << "\n";
    return result_.count("help") + result_.count("version") == 0;
  }

  [[nodiscard]] bool has(const std::string& name) const { return result_.count(name) > 0; }
  [[nodiscard]] std::vector<std::string> texts(const std::string& name) const {
    CRAM_CHECK(has(name), ExitCode::kUsage, "--", name, " is missing (see --help)");
    return result_[name].as<std::vector<std::string>>();
  }
  /// The last one given wins.
  [[nodiscard]] std::string text(const std::string& name) const {
    const std::vector<std::string> all = texts(name);
    CRAM_CHECK(!all.empty() && !all.back().empty(), ExitCode::kUsage, "--", name, " is empty");
    return all.back();
  }
  [[nodiscard]] std::string text(const std::string& name, const std::string& otherwise) const {
    return has(name) ? text(name) : otherwise;
  }
  [[nodiscard]] std::int64_t integer(const std::string& name, std::int64_t otherwise) const {
    return has(name) ? cram::parse_integer(text(name), "--" + name) : otherwise;
  }
  [[nodiscard]] double number(const std::string& name, double otherwise) const {
    return has(name) ? cram::parse_double(text(name), "--" + name) : otherwise;
  }
  [[nodiscard]] int threads() const {
    const std::int64_t machine = std::max(1U, std::thread::hardware_concurrency());
    const std::int64_t count = integer("threads", machine);
    CRAM_CHECK(count >= 1 && count <= 1024, ExitCode::kUsage, "--threads must be in [1, 1024], got ", count);
    return static_cast<int>(count);
  }
  [[nodiscard]] std::uint64_t seed() const {
    const std::int64_t seed = integer("seed", 0);
    CRAM_CHECK(seed >= 0, ExitCode::kUsage, "--seed must not be negative, got ", seed);
    return static_cast<std::uint64_t>(seed);
  }
  [[nodiscard]] std::string folder() const {
    CRAM_CHECK(has("dir") && texts("dir").size() == 1, ExitCode::kUsage, "expected one folder, got ",
               has("dir") ? texts("dir").size() : 0, " (see --help)");
    return text("dir");
  }

 private:
  cxxopts::Options options_;
  std::string positional_;
  cxxopts::ParseResult result_;
};

std::string joined_orders() {
  std::string all;
  for (const std::string& name : cram::block_order_names()) all += (all.empty() ? "" : " | ") + name;
  return all;
}

void add_common(CommandLine& line) {
  line.add("input", "Files, folders or - (several may follow; plain words count as inputs)", "PATH");
  line.add("output", "Folder to make", "DIR");
  line.add("threads", "Threads for reading; the result does not depend on them (default: all)", "N");
  line.add_flag("force", "Replace an output that was made from something else");
}

void run_tokenizer(const std::vector<std::string>& arguments) {
  CommandLine line("tokenizer", "Learns a SentencePiece vocabulary from text.", "input");
  add_common(line);
  line.add("vocab-size", "Entries, with the five special ones (default 32768)", "N");
  line.add("type", "bpe | unigram (default bpe)", "NAME");
  line.add_flag("soft-vocab", "Take the largest possible vocabulary when the text supports no more");
  if (!line.parse(arguments)) return;
  cram::TokenizerFolderSettings settings;
  settings.inputs = line.texts("input");
  settings.output = line.text("output");
  settings.tokenizer.vocab_size = line.integer("vocab-size", settings.tokenizer.vocab_size);
  settings.tokenizer.type = line.text("type", settings.tokenizer.type);
  settings.tokenizer.soft_vocab = line.has("soft-vocab");
  settings.threads = line.threads();
  settings.force = line.has("force");
  cram::make_tokenizer_folder(settings);
}

void run_pack(const std::vector<std::string>& arguments) {
  CommandLine line("pack", "Makes shards of token rows.", "input");
  add_common(line);
  line.add("tokenizer", "Folder of `cram_data tokenizer`", "DIR");
  line.add("seq-length", "Tokens a row (default 128)", "S");
  line.add("filter", "Drop documents unless tokens < X * characters (recipe: 0.25; default: keep all)", "X");
  line.add("order", "Of training rows: " + joined_orders() + " (default randomized)", "NAME");
  line.add("validation", "Share of documents held out (default 0.01)", "X");
  line.add("seed", "Of document and row order (default 0)", "N");
  line.add("rows-per-shard", "Rows of a shard file (default 262144)", "N");
  if (!line.parse(arguments)) return;
  cram::PackSettings settings;
  settings.inputs = line.texts("input");
  settings.output = line.text("output");
  settings.tokenizer = line.text("tokenizer");
  settings.seq_length = line.integer("seq-length", settings.seq_length);
  if (line.has("filter")) settings.filter = line.number("filter", 0);
  settings.order = line.text("order", settings.order);
  settings.validation = line.number("validation", settings.validation);
  settings.seed = line.seed();
  settings.rows_per_shard = line.integer("rows-per-shard", settings.rows_per_shard);
  settings.threads = line.threads();
  settings.force = line.has("force");
  cram::pack(settings);
}

void run_verify(const std::vector<std::string>& arguments) {
  CommandLine line("verify", "Checks every file of an output of `tokenizer` or `pack`; exit 22 when one is damaged.",
                   "dir");
  line.add("dir", "The folder (a plain word)", "DIR");
  if (line.parse(arguments)) cram::verify_folder(line.folder());
}

void run_inspect(const std::vector<std::string>& arguments) {
  CommandLine line("inspect", "Shows what an output of `tokenizer` or `pack` holds.", "dir");
  line.add("dir", "The folder (a plain word)", "DIR");
  line.add("samples", "Rows to show (default 5)", "K");
  line.add("split", "train | validation (default train)", "NAME");
  line.add_flag("masked", "Show each row as the model would see it, too");
  line.add("mask-rate", "With --masked (default 0.25)", "X");
  line.add("seed", "Of the choice of rows and of masks (default 0)", "N");
  if (!line.parse(arguments)) return;
  cram::InspectSettings settings;
  settings.folder = line.folder();
  settings.samples = line.integer("samples", settings.samples);
  settings.split = line.text("split", settings.split);
  settings.masked = line.has("masked");
  settings.mask_rate = line.number("mask-rate", settings.mask_rate);
  settings.seed = line.seed();
  cram::inspect_folder(settings);
}

struct Command {
  const char* name;
  void (*run)(const std::vector<std::string>& arguments);
};
constexpr Command kCommands[] = {
    {"tokenizer", run_tokenizer}, {"pack", run_pack}, {"verify", run_verify}, {"inspect", run_inspect}};

void run(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    std::cerr << kHelp;
    cram::fail(ExitCode::kUsage, "a command is missing: tokenizer, pack, verify or inspect");
  }
  const std::string& name = arguments.front();
  if (name == "--help" || name == "-h" || name == "help") {
    std::cout << kHelp;
    return;
  }
  if (name == "--version") {
    std::cout << cram::version_line("cram_data") << "\n";
    return;
  }
  std::vector<std::string> names;
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run({arguments.begin() + 1, arguments.end()});
    names.emplace_back(command.name);
  }
  cram::fail(ExitCode::kUsage, "unknown command '", name, "', nearest: ", cram::nearest_name(name, names),
             " (see --help)");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run({argv + 1, argv + argc});
    return static_cast<int>(ExitCode::kOk);
  } catch (const cram::Error& error) {
    std::fprintf(stderr, "cram_data: %s\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "cram_data: out of memory: use a machine with more memory or less text at once\n");
    return static_cast<int>(ExitCode::kOutOfMemory);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cram_data: %s\n", error.what());
    return static_cast<int>(ExitCode::kOther);
  }
}
