// Files that are either whole or absent: temporary name, write, fsync, rename, fsync of the folder.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "base/check.h"

namespace cram {

/// Reads a whole file; throws Error(code) with path and reason. `limit` refuses larger files before reading.
[[nodiscard]] std::string read_file(const std::filesystem::path& path, ExitCode code = ExitCode::kOther,
                                    std::uintmax_t limit = UINTMAX_MAX);

/// Writes `content` under a temporary name beside `path`, fsyncs it and renames it into place. On any failure the
/// temporary is removed, an older file of that name is untouched and Error(code) says path, bytes and reason.
void write_file_atomically(const std::filesystem::path& path, std::string_view content,
                           ExitCode code = ExitCode::kOther);

/// fsync of a closed file by name, and of a folder (so that a rename in it survives a power cut).
void sync_file(const std::filesystem::path& path, ExitCode code = ExitCode::kOther);
void sync_folder(const std::filesystem::path& folder, ExitCode code = ExitCode::kOther);

/// rename() with a message; the caller syncs the folder afterwards.
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to, ExitCode code = ExitCode::kOther);

/// Creates the folder and its parents; throws Error(code) with path and reason.
void make_folders(const std::filesystem::path& folder, ExitCode code = ExitCode::kOther);

/// Removes a file, or a folder with all it holds (links are not followed); nothing there is fine. Not
/// std::filesystem::remove_all: libtorch.so exports a copy of it that calls a null pointer, and that copy is the one a
/// program gets.
void remove_tree(const std::filesystem::path& path, ExitCode code = ExitCode::kOther);

/// A suffix that no other process or earlier run uses: ".tmp-<pid>-<nonce>". Names with it are leftovers of a crash
/// and may be deleted by whoever owns the folder.
[[nodiscard]] std::string temporary_suffix();
[[nodiscard]] bool is_temporary_name(std::string_view name);

}  // namespace cram
