#include "data/tokenizer_folder.h"

#include <filesystem>

#include "base/check.h"
#include "base/digest.h"
#include "base/file_io.h"
#include "base/log.h"
#include "data/documents.h"
#include "data/manifest.h"

namespace cram {

void make_tokenizer_folder(const TokenizerFolderSettings& settings) {
  const InputList inputs = find_inputs(settings.inputs);
  Manifest manifest;
  manifest.kind = "tokenizer";
  manifest.inputs_digest = inputs.digest;
  manifest.settings = {{"vocab_size", std::to_string(settings.tokenizer.vocab_size)},
                       {"type", settings.tokenizer.type},
                       {"soft_vocab", settings.tokenizer.soft_vocab ? "true" : "false"}};
  if (is_already_made(settings.output, manifest, settings.force)) {
    const Manifest present = read_manifest(settings.output);
    say("already made: ", settings.output, " has this tokenizer of ", present.tokenizer.vocab_size, " entries (digest ",
        present.tokenizer.digest, ") from the same inputs");
    return;
  }
  say("training a ", settings.tokenizer.type, " tokenizer of ", settings.tokenizer.vocab_size, " entries on ",
      inputs.files.size(), " files");
  if (inputs.skipped_files > 0) {
    say("skipped ", inputs.skipped_files, " files that are no .txt or .jsonl (", inputs.first_skipped, " ...)");
  }

  DocumentSource source(inputs);
  PreparedDocuments documents(source, settings.threads, "tokenizer");
  PreparedDocument document;
  const std::string model = train_tokenizer(
      [&](std::string& text) {
        if (!documents.next(document)) return false;
        text = std::move(document.normalized);
        return true;
      },
      settings.tokenizer);
  say(source.account().text());
  say(source.findings());
  say(documents.account().text());

  const Tokenizer tokenizer = Tokenizer::from_bytes(model, "the trained model");
  manifest.tokenizer = {tokenizer.vocab_size(), tokenizer.type(), tokenizer.digest(), digest_text(model)};
  manifest.counts = {{"documents", documents.account().kept().documents},
                     {"normalized_bytes", documents.account().kept().bytes},
                     {"input_bytes", source.account().input().bytes}};
  if (tokenizer.vocab_size() != settings.tokenizer.vocab_size) {
    say("the text supports ", tokenizer.vocab_size(), " entries of the ", settings.tokenizer.vocab_size,
        " asked for: the vocabulary has ", tokenizer.vocab_size());
  }
  const FolderLock lock =
      begin_folder(settings.output, manifest, settings.force);  // one writer until the manifest is there
  write_file_atomically(std::filesystem::path(settings.output) / kTokenizerFileName, model, ExitCode::kData);
  write_manifest(settings.output, manifest);
  say("wrote ", settings.output, ": ", tokenizer.vocab_size(), " entries, digest ", tokenizer.digest());
}

}  // namespace cram
