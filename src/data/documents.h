// Documents out of files: .txt with blank lines between documents, .jsonl with one object with a string `text` a line,
// both also as .gz and .zst, folders of them, and standard input.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/account.h"
#include "data/text.h"

namespace cram {

struct InputFile {
  std::string path;
  std::string name;  ///< for messages; differs from the path for standard input
  bool jsonl = false;
  std::shared_ptr<void> spool;  ///< keeps the copy of standard input alive
};

struct InputList {
  std::vector<InputFile> files;
  std::int64_t skipped_files = 0;  ///< files in folders whose names are of no known kind
  std::string first_skipped;
  std::string digest;  ///< of kind and content of the files in order; names do not count
};

/// Expands folders (recursively, in order of their paths; only .txt and .jsonl, plain, .gz or .zst), takes other files
/// by name (anything not .jsonl is text) and copies standard input ("-": JSON lines when it begins with '{') to a
/// temporary file. Error(kData) for what is missing or unreadable, or when nothing is left.
[[nodiscard]] InputList find_inputs(const std::vector<std::string>& inputs);

struct Document {
  std::string text;  ///< valid UTF-8 without NUL or CR; lines joined by '\n'
  std::int64_t code_points = 0;
};

/// Streams the documents of all inputs; memory is one document. Its account has every input byte.
class DocumentSource {
 public:
  explicit DocumentSource(const InputList& inputs);
  ~DocumentSource();
  DocumentSource(const DocumentSource&) = delete;
  DocumentSource& operator=(const DocumentSource&) = delete;

  /// Error(kData) for a file in another encoding (by its byte order mark) or with damaged compression.
  [[nodiscard]] bool next(Document& document);

  [[nodiscard]] const Account& account() const;
  [[nodiscard]] std::int64_t blank_lines() const;
  /// One line for people: invalid bytes, NULs, blank lines, bad JSON lines.
  [[nodiscard]] std::string findings() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A document after the normaliser, and what a worker made of it.
struct PreparedDocument {
  std::string normalized;  ///< not empty
  std::int64_t raw_bytes = 0;
  std::int64_t code_points = 0;  ///< of the raw document
  std::vector<std::uint32_t> ids;
};

/// Reads ahead in batches and normalises them with several threads; documents come out in order. `work` runs on the
/// threads after normalising. Prints a progress line every few seconds.
class PreparedDocuments {
 public:
  using Work = std::function<void(PreparedDocument&)>;
  PreparedDocuments(DocumentSource& source, int threads, std::string progress_label, Work work = nullptr);
  ~PreparedDocuments();
  PreparedDocuments(const PreparedDocuments&) = delete;
  PreparedDocuments& operator=(const PreparedDocuments&) = delete;

  [[nodiscard]] bool next(PreparedDocument& document);
  [[nodiscard]] const Account& account() const;  ///< raw documents to normalised ones

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The account's drop reasons, as tests and reports name them.
namespace drop_reason {
inline constexpr const char* kByteOrderMark = "byte order marks";
inline constexpr const char* kCarriageReturn = "carriage returns";
inline constexpr const char* kInvalid = "invalid UTF-8";
inline constexpr const char* kNul = "NUL";
inline constexpr const char* kBlankLine = "blank lines";
inline constexpr const char* kLineEnd = "line ends between documents";
inline constexpr const char* kJsonSyntax = "JSON around the text";
inline constexpr const char* kNotJson = "lines that are no JSON object";
inline constexpr const char* kNoText = "objects without a string \"text\"";
inline constexpr const char* kNormalizer = "non-ASCII, accents, controls, extra spaces";
inline constexpr const char* kEmpty = "empty documents";
}  // namespace drop_reason

}  // namespace cram
