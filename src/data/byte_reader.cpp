#include "data/byte_reader.h"

#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"

namespace cram {
namespace {

struct FileCloser {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, FileCloser>;

class PlainReader : public ByteReader {
 public:
  PlainReader(File file, std::string name) : file_(std::move(file)), name_(std::move(name)) {}
  std::size_t read(char* out, std::size_t bytes) override {
    const std::size_t got = std::fread(out, 1, bytes, file_.get());
    CRAM_CHECK(got > 0 || std::ferror(file_.get()) == 0, ExitCode::kData, "reading ", name_,
               " failed: ", std::strerror(errno));
    return got;
  }

 private:
  File file_;
  std::string name_;
};

/// Inflates over a plain reader. One class of our own instead of gzFile: gzread takes a truncated file and trailing
/// rubbish for a good end.
class GzipReader : public ByteReader {
 public:
  GzipReader(std::unique_ptr<ByteReader> source, std::string name)
      : source_(std::move(source)), name_(std::move(name)), input_(std::size_t{1} << 16U) {
    CRAM_CHECK(inflateInit2(&stream_, kGzipWindow) == Z_OK, ExitCode::kOutOfMemory, "zlib has no memory");
  }
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;
  ~GzipReader() override { inflateEnd(&stream_); }

  std::size_t read(char* out, std::size_t bytes) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = static_cast<uInt>(std::min(bytes, std::size_t{1} << 30U));
    const uInt wanted = stream_.avail_out;
    while (stream_.avail_out == wanted) {
      if (stream_.avail_in == 0) refill();
      if (stream_.avail_in == 0) {
        CRAM_CHECK(at_member_end_, ExitCode::kData, name_, " is truncated: its last gzip member does not end");
        break;
      }
      if (at_member_end_) inflateReset(&stream_);  // gzip files may be concatenated
      at_member_end_ = false;
      const int status = inflate(&stream_, Z_NO_FLUSH);
      CRAM_CHECK(status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR, ExitCode::kData, name_,
                 " is damaged gzip: ", stream_.msg != nullptr ? stream_.msg : "bad data");
      at_member_end_ = status == Z_STREAM_END;
    }
    return wanted - stream_.avail_out;
  }

 private:
  static constexpr int kGzipWindow = 15 + 16;

  void refill() {
    stream_.next_in = reinterpret_cast<Bytef*>(input_.data());
    stream_.avail_in = static_cast<uInt>(source_->read(input_.data(), input_.size()));
  }

  std::unique_ptr<ByteReader> source_;
  std::string name_;
  std::vector<char> input_;
  z_stream stream_{};
  bool at_member_end_ = false;
};

class ZstdReader : public ByteReader {
 public:
  ZstdReader(std::unique_ptr<ByteReader> source, std::string name)
      : source_(std::move(source)),
        name_(std::move(name)),
        input_(ZSTD_DStreamInSize()),
        stream_(ZSTD_createDStream()) {
    CRAM_CHECK(stream_, ExitCode::kOutOfMemory, "zstd has no memory");
  }

  std::size_t read(char* out, std::size_t bytes) override {
    ZSTD_outBuffer output{out, bytes, 0};
    while (output.pos == 0) {
      if (buffer_.pos == buffer_.size) {
        buffer_ = {input_.data(), source_->read(input_.data(), input_.size()), 0};
      }
      if (buffer_.size == 0 && frame_done_) break;
      const std::size_t before = buffer_.pos;
      const std::size_t hint = ZSTD_decompressStream(stream_.get(), &output, &buffer_);
      CRAM_CHECK(ZSTD_isError(hint) == 0, ExitCode::kData, name_, " is damaged zstd: ", ZSTD_getErrorName(hint));
      frame_done_ = hint == 0;
      CRAM_CHECK(output.pos > 0 || buffer_.size > 0 || frame_done_ || buffer_.pos > before, ExitCode::kData, name_,
                 " is truncated: its last zstd frame does not end");
    }
    return output.pos;
  }

 private:
  struct StreamFree {
    void operator()(ZSTD_DStream* stream) const noexcept { ZSTD_freeDStream(stream); }
  };

  std::unique_ptr<ByteReader> source_;
  std::string name_;
  std::vector<char> input_;
  ZSTD_inBuffer buffer_{nullptr, 0, 0};
  std::unique_ptr<ZSTD_DStream, StreamFree> stream_;
  bool frame_done_ = false;
};

}  // namespace

std::unique_ptr<ByteReader> open_bytes(const std::string& path, const std::string& name) {
  File file(std::fopen(path.c_str(), "rb"));
  CRAM_CHECK(file, ExitCode::kData, "cannot read ", name, ": ", std::strerror(errno));
  char magic[4] = {};
  const std::size_t got = std::fread(magic, 1, sizeof magic, file.get());
  CRAM_CHECK(got > 0 || std::ferror(file.get()) == 0, ExitCode::kData, "cannot read ", name, ": ",
             std::strerror(errno));
  std::rewind(file.get());
  const std::string_view first(magic, got);
  const bool gzip = first.substr(0, 2) == "\x1F\x8B";
  const bool zstd = first == "\x28\xB5\x2F\xFD";
  const std::string_view ending = name;
  CRAM_CHECK(gzip || !ending.ends_with(".gz"), ExitCode::kData, name,
             " is named .gz but is not gzip: rename or repack it");
  CRAM_CHECK(zstd || !ending.ends_with(".zst"), ExitCode::kData, name,
             " is named .zst but is not zstd: rename or repack it");
  auto plain = std::make_unique<PlainReader>(std::move(file), name);
  if (gzip) return std::make_unique<GzipReader>(std::move(plain), name);
  if (zstd) return std::make_unique<ZstdReader>(std::move(plain), name);
  return plain;
}

}  // namespace cram
