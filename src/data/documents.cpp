#include "data/documents.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "base/log.h"
#include "data/byte_reader.h"
#include "data/json_text.h"

namespace cram {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
constexpr int kWarnedFiles = 10;

std::string_view without_compression(std::string_view name) {
  for (const std::string_view ending : {".gz", ".zst"}) {
    if (name.ends_with(ending)) return name.substr(0, name.size() - ending.size());
  }
  return name;
}

bool is_jsonl_name(std::string_view name) { return without_compression(name).ends_with(".jsonl"); }
bool is_known_name(std::string_view name) { return is_jsonl_name(name) || without_compression(name).ends_with(".txt"); }

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\v\f") == std::string_view::npos; }

/// Standard input can be read once, and preparation digests its inputs before it reads them: keep a copy on disk.
InputFile spool_standard_input() {
  const std::shared_ptr<std::FILE> copy(std::tmpfile(), [](std::FILE* file) {
    if (file != nullptr) std::fclose(file);
  });
  CRAM_CHECK(copy, ExitCode::kData,
             "cannot make a temporary file for standard input: set TMPDIR to a folder with space");
  std::vector<char> block(std::size_t{1} << 20U);
  std::size_t got = 0;
  char first = 0;
  while ((got = std::fread(block.data(), 1, block.size(), stdin)) > 0) {
    if (first == 0) first = block[0];
    CRAM_CHECK(std::fwrite(block.data(), 1, got, copy.get()) == got, ExitCode::kData,
               "no space for the copy of standard input: set TMPDIR to a folder with space");
  }
  CRAM_CHECK(std::ferror(stdin) == 0 && std::fflush(copy.get()) == 0, ExitCode::kData, "reading standard input failed");
  return {concat("/proc/self/fd/", ::fileno(copy.get())), "standard input", first == '{', copy};
}

void add_folder(const std::string& folder, InputList& list) {
  std::vector<std::string> paths;
  try {
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
      if (!entry.is_regular_file()) continue;
      const std::string path = entry.path().string();
      if (is_known_name(path)) {
        paths.push_back(path);
      } else if (list.skipped_files++ == 0) {
        list.first_skipped = path;
      }
    }
  } catch (const fs::filesystem_error& error) {
    fail(ExitCode::kData, "cannot list ", folder, ": ", error.code().message());
  }
  std::sort(paths.begin(), paths.end());
  for (const std::string& path : paths) list.files.push_back({path, path, is_jsonl_name(path), nullptr});
}

std::string digest_of(const std::vector<InputFile>& files) {
  Digest digest;
  std::vector<char> block(std::size_t{1} << 20U);
  for (const InputFile& file : files) {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> in(std::fopen(file.path.c_str(), "rb"), std::fclose);
    CRAM_CHECK(in, ExitCode::kData, "cannot read ", file.name, ": missing or no permission");
    Digest content;
    std::size_t got = 0;
    while ((got = std::fread(block.data(), 1, block.size(), in.get())) > 0) content.update(block.data(), got);
    CRAM_CHECK(std::ferror(in.get()) == 0, ExitCode::kData, "reading ", file.name, " failed");
    const std::string line = content.hex() + (file.jsonl ? " jsonl\n" : " txt\n");
    digest.update(line.data(), line.size());
  }
  return digest.hex();
}

/// Splits a byte stream at LF, CR LF and lone CR.
class LineReader {
 public:
  explicit LineReader(std::unique_ptr<ByteReader> bytes) : bytes_(std::move(bytes)), buffer_(std::size_t{1} << 18U) {}

  /// The first bytes of the file, without consuming them.
  [[nodiscard]] std::string_view peek() {
    if (at_ == end_) fill();
    return std::string_view(buffer_.data() + at_, std::min<std::size_t>(end_ - at_, 4));
  }

  /// Sets the line and the number of bytes of its terminator (0 at the end of the file).
  [[nodiscard]] bool next(std::string& line, int& terminator_bytes) {
    line.clear();
    terminator_bytes = 0;
    while (true) {
      if (at_ == end_ && !fill()) return !line.empty();
      const std::string_view rest(buffer_.data() + at_, end_ - at_);
      const std::size_t stop = rest.find_first_of("\r\n");
      line.append(rest.substr(0, stop));
      if (stop == std::string_view::npos) {
        at_ = end_;
        continue;
      }
      at_ += stop + 1;
      terminator_bytes = 1;
      if (rest[stop] == '\r' && (at_ < end_ || fill()) && buffer_[at_] == '\n') {
        ++at_;
        terminator_bytes = 2;
      }
      return true;
    }
  }

 private:
  bool fill() {
    at_ = 0;
    end_ = bytes_->read(buffer_.data(), buffer_.size());
    return end_ > 0;
  }

  std::unique_ptr<ByteReader> bytes_;
  std::vector<char> buffer_;
  std::size_t at_ = 0;
  std::size_t end_ = 0;
};

}  // namespace

InputList find_inputs(const std::vector<std::string>& inputs) {
  InputList list;
  bool standard_input_used = false;
  for (const std::string& input : inputs) {
    if (input == "-") {
      CRAM_CHECK(!standard_input_used, ExitCode::kUsage, "standard input ('-') was given twice");
      standard_input_used = true;
      list.files.push_back(spool_standard_input());
      continue;
    }
    std::error_code error;
    const fs::file_status status = fs::status(input, error);
    CRAM_CHECK(fs::exists(status), ExitCode::kData, "the input ", input, " does not exist");
    if (fs::is_directory(status)) {
      add_folder(input, list);
    } else {
      list.files.push_back({input, input, is_jsonl_name(input), nullptr});
    }
  }
  CRAM_CHECK(!list.files.empty(), ExitCode::kData,
             "no input files: expected .txt or .jsonl (plain, .gz or .zst), folders of them, or '-'",
             list.skipped_files > 0
                 ? concat("; found ", list.skipped_files, " files of other names such as ", list.first_skipped)
                 : std::string());
  list.digest = digest_of(list.files);
  return list;
}

struct DocumentSource::State {
  explicit State(const InputList& list) : files(list.files) {}

  const std::vector<InputFile> files;
  std::size_t file_index = 0;
  std::unique_ptr<LineReader> lines;
  std::int64_t line_number = 0;
  CleanCounts counts;  // of the present file
  std::int64_t first_bad_line = 0;
  bool last_line_ended = false;  // did the last line of the open document have a terminator?

  Account account{"read"};
  std::int64_t blank_lines = 0;
  std::int64_t bad_json_lines = 0;
  CleanCounts all_counts;
  int warned_files = 0;

  std::string raw;    // the line as read
  std::string clean;  // the line without bytes we never keep

  void open_file() {
    const InputFile& file = files[file_index];
    lines = std::make_unique<LineReader>(open_bytes(file.path, file.name));
    line_number = 0;
    counts = {};
    first_bad_line = 0;
    const std::string encoding = foreign_encoding(lines->peek());
    CRAM_CHECK(encoding.empty(), ExitCode::kData, file.name, " is ", encoding,
               " by its byte order mark, expected UTF-8: convert it with `iconv -f ", encoding, " -t UTF-8`");
  }

  void close_file() {
    lines.reset();
    all_counts.invalid_bytes += counts.invalid_bytes;
    all_counts.nul_bytes += counts.nul_bytes;
    if (counts.invalid_bytes + counts.nul_bytes > 0 && warned_files++ < kWarnedFiles) {
      log_warning(files[file_index].name, ": dropped ", counts.invalid_bytes, " bytes that are not UTF-8 and ",
                  counts.nul_bytes, " NULs, the first on line ", first_bad_line,
                  ". If the file is in another encoding, convert it first: iconv -f LATIN1 -t UTF-8");
    }
    ++file_index;
  }

  /// Reads one line into `clean`; books what will never be kept. False at the end of the file.
  bool next_line(bool& has_terminator) {
    int terminator = 0;
    if (!lines->next(raw, terminator)) return false;
    ++line_number;
    account.take(static_cast<std::int64_t>(raw.size()) + terminator);
    if (terminator == 2) account.drop(drop_reason::kCarriageReturn, 1);
    has_terminator = terminator > 0;
    std::string_view line = raw;
    if (line.starts_with(kByteOrderMark)) {
      account.drop(drop_reason::kByteOrderMark, static_cast<std::int64_t>(kByteOrderMark.size()));
      line.remove_prefix(kByteOrderMark.size());
    }
    clean.clear();
    book_clean(line, clean);
    return true;
  }

  void book_clean(std::string_view from, std::string& to) {
    CleanCounts here;
    append_clean_utf8(from, to, here);
    account.drop(drop_reason::kInvalid, here.invalid_bytes);
    account.drop(drop_reason::kNul, here.nul_bytes);
    counts.invalid_bytes += here.invalid_bytes;
    counts.nul_bytes += here.nul_bytes;
    if (first_bad_line == 0 && here.invalid_bytes + here.nul_bytes > 0) first_bad_line = line_number;
  }

  void book_blank(bool has_terminator) {
    ++blank_lines;
    account.drop(drop_reason::kBlankLine, static_cast<std::int64_t>(clean.size()) + (has_terminator ? 1 : 0));
  }

  void finish(Document& document) {
    document.code_points = count_code_points(document.text);
    account.take(0, 1);
    account.keep(static_cast<std::int64_t>(document.text.size()), 1);
    if (last_line_ended) account.drop(drop_reason::kLineEnd, 1);
    last_line_ended = false;
  }

  /// Text: lines up to a blank one.
  bool next_text(Document& document) {
    document.text.clear();
    bool has_terminator = false;
    while (next_line(has_terminator)) {
      if (is_blank(clean)) {
        book_blank(has_terminator);
        if (!document.text.empty()) break;
        continue;
      }
      if (!document.text.empty()) document.text.push_back('\n');  // the last line's terminator, booked with the text
      document.text += clean;
      last_line_ended = has_terminator;
    }
    if (document.text.empty()) return false;
    finish(document);
    return true;
  }

  bool next_json(Document& document) {
    bool has_terminator = false;
    while (next_line(has_terminator)) {
      if (is_blank(clean)) {
        book_blank(has_terminator);
        continue;
      }
      const auto line_bytes = static_cast<std::int64_t>(clean.size());
      last_line_ended = has_terminator;
      std::string text;
      const JsonText found = read_json_text(clean, text);
      if (found == JsonText::kOk) {
        // An escape is never shorter than what it stands for.
        account.drop(drop_reason::kJsonSyntax, line_bytes - static_cast<std::int64_t>(text.size()));
        document.text.clear();
        book_clean(text, document.text);  // \u0000 is legal JSON
        if (document.text.empty()) {
          account.take(0, 1);
          account.drop(drop_reason::kEmpty, has_terminator ? 1 : 0, 1);
          continue;
        }
        finish(document);
        return true;
      }
      const char* reason = found == JsonText::kNoText ? drop_reason::kNoText : drop_reason::kNotJson;
      account.take(0, 1);
      account.drop(reason, line_bytes + (has_terminator ? 1 : 0), 1);
      if (bad_json_lines++ < kWarnedFiles) {
        log_warning(files[file_index].name, ":", line_number, ": dropped, expected an object with a string \"text\"");
      }
    }
    last_line_ended = false;
    return false;
  }
};

DocumentSource::DocumentSource(const InputList& inputs) : state_(std::make_unique<State>(inputs)) {}
DocumentSource::~DocumentSource() = default;

bool DocumentSource::next(Document& document) {
  State& s = *state_;
  while (s.file_index < s.files.size()) {
    if (!s.lines) s.open_file();
    if (s.files[s.file_index].jsonl ? s.next_json(document) : s.next_text(document)) return true;
    s.close_file();
  }
  return false;
}

const Account& DocumentSource::account() const { return state_->account; }
std::int64_t DocumentSource::blank_lines() const { return state_->blank_lines; }

std::string DocumentSource::findings() const {
  const State& s = *state_;
  return concat("found: ", with_commas(s.all_counts.invalid_bytes), " invalid bytes, ",
                with_commas(s.all_counts.nul_bytes), " NULs, ", with_commas(s.blank_lines), " empty lines, ",
                with_commas(s.bad_json_lines), " bad JSON lines in ",
                with_commas(static_cast<std::int64_t>(s.files.size())), " files");
}

}  // namespace cram
