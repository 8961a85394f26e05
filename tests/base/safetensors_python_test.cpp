// The official safetensors package reads what we write, with equal values, and accepts no less than we do.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "base/file_io.h"
#include "base/safetensors.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

constexpr const char* kScript = R"py(
import sys
import torch
from safetensors import safe_open
from safetensors.torch import load_file

path, expected_path = sys.argv[1:]
tensors = load_file(path)
with safe_open(path, "pt") as file:
    metadata = file.metadata()
assert metadata == {"format": "pt", "note": "\u00e9 \"quoted\""}, metadata
expected = {
    "a": torch.tensor([[1.5, -2.0, 3e300], [0.0, -0.0, 5e-324]], dtype=torch.float64),
    "layer.b": torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]),
    "c": torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16),
    "h": torch.tensor([1.0, -2.0, 0.5], dtype=torch.float16),
    "scalar": torch.tensor(-5),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
}
assert sorted(tensors) == sorted(expected), sorted(tensors)
for name, value in expected.items():
    found = tensors[name]
    assert found.dtype == value.dtype and found.shape == value.shape, (name, found)
    assert torch.equal(found, value), (name, found)
    assert bool((torch.signbit(found) == torch.signbit(value)).all()), name
open(expected_path, "w").write("equal")
)py";

TEST(SafetensorsPython, TheOfficialPackageReadsWhatWeWrite) {
  const test::TemporaryFolder folder;
  const double a[] = {1.5, -2, 3e300, 0, -0.0, 5e-324};
  const float b[] = {1, 2, 3, 4};
  const std::uint16_t c[] = {0x3f80, 0xc000, 0x3f00}, h[] = {0x3c00, 0xc000, 0x3800};
  const std::int64_t scalar = -5;
  const std::uint8_t flags[] = {1, 0, 1};
  write_safetensors(folder / "x.safetensors",
                    {{"a", "F64", {2, 3}, a},
                     {"layer.b", "F32", {2, 1, 2}, b},
                     {"c", "BF16", {3}, c},
                     {"h", "F16", {3}, h},
                     {"scalar", "I64", {}, &scalar},
                     {"empty", "F32", {0, 4}, nullptr},
                     {"flags", "BOOL", {3}, flags}},
                    {{"format", "pt"}, {"note", "\xc3\xa9 \"quoted\""}});
  write_file_atomically(folder / "read.py", kScript);
  const std::string command =
      concat(CRAM_PYTHON, " -B '", folder / "read.py", "' '", folder / "x.safetensors", "' '", folder / "result", "'");
  EXPECT_EQ(std::system(command.c_str()), 0);
  EXPECT_EQ(read_file(folder / "result"), "equal");
}

}  // namespace
}  // namespace cram
