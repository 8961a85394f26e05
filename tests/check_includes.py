"""Which room may include which, and what may stand in a header. Exit code 1 and one line for each violation.

usage: check_includes.py [--self-test] [ROOT]
"""

import re
import sys
from pathlib import Path

# The include graph of docs/architecture.md. A room may always include itself; nothing else is allowed.
ALLOWED = {
    "base": set(),
    "data": {"base"},
    "parallel": {"base"},
    "model": {"parallel", "base"},
    "run": {"parallel", "model", "base"},
    "train": {"run", "data", "parallel", "model", "base"},
    "eval": {"run", "train", "data", "parallel", "model", "base"},
    "apps": {"base", "data", "parallel", "model", "run", "train", "eval"},
}
# Outside src/ everything may be included except another program.
TOP_FOLDERS = ("src", "tests", "bench")
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
HEADERS = {".h", ".cuh"}

# Vendor interfaces stay behind factory functions: a header that named one would spread it to every room above.
ONLY_IN_SOURCES = re.compile(
    r"(mpi|nccl|hdf5|H5\w+|utf8proc|zlib|zstd|cxxopts|cuda_runtime(_api)?|sentencepiece\w*)\.(h|hpp)$|toml\+\+/|toml\.hpp$"
)
# Parsing these costs several times what ATen/core/Tensor.h costs.
HEAVY_IN_HEADERS = re.compile(r"(ATen/(ATen|Functions|NativeFunctions)\.h|ATen/ops/.*|torch/.*)$")
NOWHERE = {"torch/torch.h", "torch/all.h", "torch/extension.h"}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^">]+)[">]', re.MULTILINE)
COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def without_comments(text):
    """Comments go, strings stay (an include is one), line numbers stay."""
    return COMMENT_OR_STRING.sub(lambda m: m[0] if m[0][0] == '"' else "\n" * m[0].count("\n"), text)


def violations(path, text, rooms=frozenset(ALLOWED)):
    """path is relative to the repository root, as a tuple of its parts."""
    header = Path(path[-1]).suffix in HEADERS
    code = without_comments(text)
    found = []

    def report(offset, message):
        found.append(f"{'/'.join(path)}:{code.count(chr(10), 0, offset) + 1}: {message}")

    if header and not re.search(r"^#pragma once$", code, re.MULTILINE):
        report(0, "a header needs #pragma once")
    for match in re.finditer(r"\btorch::nn\b", re.sub(r'"(?:\\.|[^"\\\n])*"', '""', code)):
        report(match.start(), "torch::nn is not used: layers are structs of tensors in a parameter store")
    room = path[1] if path[0] == "src" and len(path) > 2 else None
    if room and room not in ALLOWED:
        report(0, f"src/{room} is not a known room: add it to ALLOWED in tests/check_includes.py")
        return found
    for match in INCLUDE.finditer(code):
        quote, target = match.groups()
        first = target.split("/")[0]
        if target in NOWHERE:
            report(match.start(), f"{target} is not used: include what is needed of ATen, or torch/types.h in a .cpp")
        elif header and ONLY_IN_SOURCES.search(target):
            report(match.start(), f"{target} belongs in a .cpp: vendor interfaces stay out of headers")
        elif header and path[0] == "src" and HEAVY_IN_HEADERS.match(target):
            report(match.start(), f"{target} is too heavy for a header: use ATen/core/Tensor.h")
        if quote != '"':
            if first in rooms and "/" in target:
                report(match.start(), f'include our own files with quotes: "{target}"')
        elif room:
            if "/" not in target or first not in rooms:
                report(match.start(), f'"{target}" is not a path from src/: write "room/file.h"')
            elif first != room and first not in ALLOWED[room]:
                allowed = ", ".join(sorted(ALLOWED[room])) or "nothing"
                report(match.start(), f"src/{room} may not include {target} (allowed besides itself: {allowed})")
        elif first == "apps":
            report(match.start(), f"{target} is part of a program: move what is shared into another room")
    return found


def check_tree(root):
    found, files = [], 0
    for top in TOP_FOLDERS:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                files += 1
                parts = path.relative_to(root).parts
                found += violations(parts, path.read_text(encoding="utf-8"))
    return found, files


def self_test():
    once = "#pragma once\n"
    bad = [
        ("src/data/a.h", once + '#include "parallel/mesh.h"\n'),
        ("src/train/a.cpp", '#include "eval/glue.h"\n'),
        ("src/base/a.cpp", '#include "data/text.h"\n'),
        ("src/parallel/a.cpp", '#  include "model/linear.h"\n'),
        ("src/model/a.cpp", '#include "data/text.h"\n'),
        ("src/data/a.cpp", '#include "text.h"\n'),
        ("src/data/a.cpp", "#include <base/log.h>\n"),
        ("src/base/a.h", '#include "base/log.h"\n'),
        ("src/parallel/a.h", once + "#include <mpi.h>\n"),
        ("src/parallel/a.h", once + "#include <nccl.h>\n"),
        ("src/data/a.h", once + "#include <hdf5.h>\n"),
        ("src/data/a.h", once + "#include <sentencepiece_processor.h>\n"),
        ("src/base/a.h", once + "#include <toml++/toml.h>\n"),
        ("tests/support/a.h", once + "#include <mpi.h>\n"),
        ("src/model/a.cpp", "#include <torch/torch.h>\n"),
        ("src/model/a.h", once + "#include <torch/types.h>\n"),
        ("src/model/a.h", once + "#include <ATen/ATen.h>\n"),
        ("src/model/a.cpp", "struct Layer : torch::nn::Module {};\n"),
        ("src/misc/a.cpp", "\n"),
        ("tests/model/a.cpp", '#include "apps/cram_train.h"\n'),
    ]
    good = [
        ("src/data/a.h", once + '#include <string>\n#include "base/log.h"\n#include "data/text.h"\n'),
        ("src/data/a.cpp", '// #include "model/linear.h"\n/* #include <torch/torch.h> */\n#include <hdf5.h>\n'),
        ("src/model/a.h", once + '#include <ATen/core/Tensor.h>\n#include "parallel/mesh.h"\n// not torch::nn\n'),
        ("src/model/a.cpp", '#include <torch/types.h>\nconst char* what = "torch::nn";\n'),
        ("src/eval/a.cpp", '#include "train/trainer.h"\n'),
        ("src/apps/a.cpp", '#include <cxxopts.hpp>\n#include "eval/mlm.h"\n'),
        ("tests/model/a.cpp", '#include "model/linear.h"\n#include "support/ranks.h"\n'),
    ]
    failures = [f"not caught: {path}: {text!r}" for path, text in bad if len(violations(tuple(path.split("/")), text)) != 1]
    failures += [f"false alarm: {v}" for path, text in good for v in violations(tuple(path.split("/")), text)]
    print("\n".join(failures) or f"include check: {len(bad)} bad and {len(good)} good examples told apart")
    return 1 if failures else 0


def main():
    arguments = sys.argv[1:]
    if "--self-test" in arguments:
        return self_test()
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    found, files = check_tree(root)
    if files == 0:
        print(f"include check: no source files below {root}")
        return 1
    print("\n".join(found) or f"include check: {files} files agree with the include graph")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
