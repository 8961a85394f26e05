// Files, digests, errors: what every room stands on.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <thread>

#include "base/check.h"
#include "base/digest.h"
#include "base/file_io.h"
#include "support/expect_error.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using test::expect_error;

std::size_t entries_of(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator{}));
}

TEST(Check, ThrowsWithCodeAndConcatenatedParts) {
  expect_error(ExitCode::kData, {"expected 3 rows, got 2.5"},
               [] { CRAM_CHECK(1 > 2, ExitCode::kData, "expected ", 3, " rows, got ", 2.5); });
  EXPECT_NO_THROW(CRAM_CHECK(true, ExitCode::kOther, "never"));
}

TEST(Check, EvaluatesTheConditionOnceAndThePartsOnlyOnFailure) {
  int conditions = 0, parts = 0;
  CRAM_CHECK(++conditions > 0, ExitCode::kOther, ++parts);
  EXPECT_EQ(conditions, 1);
  EXPECT_EQ(parts, 0);
}

TEST(Check, IsOneStatement) {
  // With a dangling if in the macro the else would belong to it.
  bool other = false;
  if (false)
    CRAM_CHECK(true, ExitCode::kOther, "x");
  else
    other = true;
  EXPECT_TRUE(other);
}

TEST(Check, ExitCodesAreThoseOfTheReadme) {
  const std::pair<ExitCode, int> table[] = {{ExitCode::kOk, 0},
                                            {ExitCode::kOther, 1},
                                            {ExitCode::kUsage, 2},
                                            {ExitCode::kNoCheckpoint, 20},
                                            {ExitCode::kCheckpointStorage, 21},
                                            {ExitCode::kData, 22},
                                            {ExitCode::kPeerLost, 30},
                                            {ExitCode::kReplicasDiffer, 31},
                                            {ExitCode::kNonFinite, 32},
                                            {ExitCode::kOutOfMemory, 33},
                                            {ExitCode::kPreempted, 75}};
  for (const auto& [code, number] : table) EXPECT_EQ(static_cast<int>(code), number);
}

TEST(Check, DebugChecksStopTheProcessOrAreOff) {
#ifdef NDEBUG
  int evaluated = 0;
  CRAM_DCHECK(++evaluated > 0);
  EXPECT_EQ(evaluated, 0);
#else
  EXPECT_DEATH(CRAM_DCHECK(1 > 2), "internal check failed: 1 > 2");
#endif
}

TEST(Digest, KnownAnswers) {
  // XXH3-128 of the reference implementation (xxhsum -H2).
  EXPECT_EQ(digest_text(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(digest_text("a"), "a96faf705af16834e6c632b61e964e1f");
  EXPECT_EQ(digest_text("abc"), "06b05ab6733a618578af5f94892f3950");
  EXPECT_EQ(hash64("", 0), 0x2d06800538d394c2U);
}

TEST(Digest, StreamingInAnyPiecesEqualsTheWhole) {
  std::string text;
  for (int i = 0; i < 5000; ++i) text += static_cast<char>(i * 7 + i / 251);
  for (const std::size_t piece : {1U, 3U, 64U, 1000U, 5000U, 9999U}) {
    Digest digest;
    for (std::size_t at = 0; at < text.size(); at += piece)
      digest.update(text.data() + at, std::min(piece, text.size() - at));
    digest.update(nullptr, 0);
    EXPECT_EQ(digest.hex(), digest_text(text)) << piece;
  }
}

TEST(Digest, OfAFileAndOfEveryFlippedBit) {
  const test::TemporaryFolder folder;
  std::string text = "twenty bytes of text";
  write_file_atomically(folder / "x", text);
  const std::string digest = digest_file(folder / "x");
  EXPECT_EQ(digest, digest_text(text));
  std::set<std::string> seen{digest};
  for (std::size_t bit = 0; bit < 8 * text.size(); ++bit) {
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_TRUE(seen.insert(digest_text(text)).second);
    text[bit / 8] = static_cast<char>(text[bit / 8] ^ (1 << (bit % 8)));
  }
  expect_error(ExitCode::kOther, {"missing"}, [&] { (void)digest_file(folder / "missing"); });
  expect_error(ExitCode::kOther, {}, [&] { (void)digest_file(folder.path().string()); });
  std::ofstream(folder / "empty");
  EXPECT_EQ(digest_file(folder / "empty"), digest_text(""));
}

TEST(Digest, Hash64DependsOnTextAndSeed) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    for (const char* text : {"", "a", "b", "ab"}) seen.insert(hash64(text, seed));
  }
  EXPECT_EQ(seen.size(), 40U);
}

TEST(ReadFile, ReadsBytesAndRefusesWhatItMust) {
  const test::TemporaryFolder folder;
  const std::string bytes("\0\xff\r\n\0x", 6);
  write_file_atomically(folder / "bytes", bytes);
  EXPECT_EQ(read_file(folder / "bytes"), bytes);
  EXPECT_EQ(read_file(folder / "bytes", ExitCode::kOther, 6), bytes);
  expect_error(ExitCode::kData, {"bytes", "6 bytes", "at most 5"},
               [&] { (void)read_file(folder / "bytes", ExitCode::kData, 5); });
  expect_error(ExitCode::kData, {"nothing", "No such file"},
               [&] { (void)read_file(folder / "nothing", ExitCode::kData); });
  expect_error(ExitCode::kUsage, {"is a folder"}, [&] { (void)read_file(folder.path(), ExitCode::kUsage); });
  // A device says that it has 0 bytes, and a FIFO would be waited for: only regular files are read.
  expect_error(ExitCode::kUsage, {"/dev/zero", "not a regular file"},
               [] { (void)read_file("/dev/zero", ExitCode::kUsage, 1000); });
}

TEST(WriteFile, ReplacesAndLeavesNoTemporary) {
  const test::TemporaryFolder folder;
  write_file_atomically(folder / "x", "old");
  write_file_atomically(folder / "x", "");
  EXPECT_EQ(read_file(folder / "x"), "");
  const std::string large(300'000, 'y');
  write_file_atomically(folder / "x", large);
  EXPECT_EQ(read_file(folder / "x"), large);
  EXPECT_EQ(entries_of(folder.path()), 1U);
}

TEST(WriteFile, ADiskThatFillsUpLeavesTheOldFile) {
  const test::TemporaryFolder folder;
  write_file_atomically(folder / "x", "old");
  {
    const test::FileSizeLimit limit(100'000);
    expect_error(ExitCode::kCheckpointStorage, {"x", "300000 bytes"},
                 [&] { write_file_atomically(folder / "x", std::string(300'000, 'y'), ExitCode::kCheckpointStorage); });
  }
  EXPECT_EQ(read_file(folder / "x"), "old");
  EXPECT_EQ(entries_of(folder.path()), 1U);
  write_file_atomically(folder / "x", std::string(300'000, 'y'));
  EXPECT_EQ(fs::file_size(folder / "x"), 300'000U);
}

TEST(WriteFile, AFailedRenameLeavesNothingBehind) {
  const test::TemporaryFolder folder;
  fs::create_directories(folder / "x/full");
  expect_error(ExitCode::kOther, {"cannot rename", "x"}, [&] { write_file_atomically(folder / "x", "text"); });
  EXPECT_EQ(entries_of(folder.path()), 1U);
  EXPECT_TRUE(fs::is_directory(folder / "x/full"));
}

TEST(WriteFile, NamesTheMissingFolder) {
  const test::TemporaryFolder folder;
  expect_error(ExitCode::kData, {"cannot create", "nowhere", "No such file"},
               [&] { write_file_atomically(folder / "nowhere/x", "text", ExitCode::kData); });
}

TEST(WriteFile, TwoWritersAtOnceLeaveOneWholeFile) {
  const test::TemporaryFolder folder;
  const std::string a(200'000, 'a'), b(200'000, 'b');
  std::thread other([&] {
    for (int i = 0; i < 20; ++i) write_file_atomically(folder / "x", a);
  });
  for (int i = 0; i < 20; ++i) write_file_atomically(folder / "x", b);
  other.join();
  const std::string found = read_file(folder / "x");
  EXPECT_TRUE(found == a || found == b);
  EXPECT_EQ(entries_of(folder.path()), 1U);
}

TEST(Folders, AreMadeWithParentsOrRefused) {
  const test::TemporaryFolder folder;
  make_folders(folder / "a/b/c");
  make_folders(folder / "a/b/c");
  EXPECT_TRUE(fs::is_directory(folder / "a/b/c"));
  write_file_atomically(folder / "file", "");
  expect_error(ExitCode::kCheckpointStorage, {"cannot create the folder", "file"},
               [&] { make_folders(folder / "file", ExitCode::kCheckpointStorage); });
  expect_error(ExitCode::kCheckpointStorage, {"cannot create the folder", "file"},
               [&] { make_folders(folder / "file/below", ExitCode::kCheckpointStorage); });
  expect_error(ExitCode::kData, {"missing"}, [&] { sync_folder(folder / "missing", ExitCode::kData); });
  expect_error(ExitCode::kData, {"missing"}, [&] { sync_file(folder / "missing", ExitCode::kData); });
  EXPECT_NO_THROW(sync_file(folder / "file"));
  EXPECT_NO_THROW(sync_folder(folder.path()));
}

TEST(RemoveTree, RemovesFoldersAndFilesButFollowsNoLinks) {
  const test::TemporaryFolder folder;
  make_folders(folder / "kept");
  write_file_atomically(folder / "kept/x", "x");
  make_folders(folder / "tree/a/b");
  write_file_atomically(folder / "tree/a/b/file", "x");
  ASSERT_EQ(::symlink((folder / "kept").c_str(), (folder / "tree/a/link").c_str()), 0);
  remove_tree(folder / "tree");
  EXPECT_FALSE(fs::exists(folder / "tree"));
  EXPECT_EQ(read_file(folder / "kept/x"), "x");
  remove_tree(folder / "kept/x");
  EXPECT_FALSE(fs::exists(folder / "kept/x"));
  EXPECT_NO_THROW(remove_tree(folder / "nothing"));
  expect_error(ExitCode::kData, {"/proc/self/stat"}, [] { remove_tree("/proc/self/stat", ExitCode::kData); });
}

TEST(TemporaryNames, AreUniqueAndRecognised) {
  std::set<std::string> names;
  for (int i = 0; i < 1000; ++i) names.insert(temporary_suffix());
  EXPECT_EQ(names.size(), 1000U);
  EXPECT_TRUE(is_temporary_name("step-000000050" + *names.begin()));
  EXPECT_FALSE(is_temporary_name("step-000000050"));
  EXPECT_FALSE(is_temporary_name("tmp-step"));
}

}  // namespace
}  // namespace cram
