// `cram_data tokenizer`: text in, a folder with tokenizer.model and manifest.json out.
#pragma once

#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace cram {

struct TokenizerFolderSettings {
  std::vector<std::string> inputs;
  std::string output;
  TokenizerSettings tokenizer;
  int threads = 1;     ///< of our normaliser; they do not change the result
  bool force = false;  ///< replace an output that was made from something else
};

/// Trains and writes, or says that the folder already holds this. Nothing is written when it fails.
void make_tokenizer_folder(const TokenizerFolderSettings& settings);

}  // namespace cram
