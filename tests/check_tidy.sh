#!/usr/bin/env bash
# clang-tidy over sources that are configured in build/. Slow where LibTorch is parsed, so name the files you changed:
#   tests/check_tidy.sh src/base/log.cpp src/train/trainer.cpp        (no names: all of src)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -f build/compile_commands.json ] || cmake --preset release
mkdir -p build/tidy
# clang cannot read g++'s precompiled header but finds it beside the text, so it gets a copy of the text elsewhere.
python3 - <<'PYTHON'
import json
import os
import shlex
import shutil

database = json.load(open("build/compile_commands.json", encoding="utf-8"))
for entry in database:
    words, kept = shlex.split(entry.pop("command")), []
    while words and not words[0].endswith(("c++", "g++", "clang++")):
        words.pop(0)
    while words:
        word = words.pop(0)
        if word == "-include" and words and "cmake_pch" in words[0]:
            shutil.copyfile(words.pop(0), "build/tidy/pch.hxx")
            kept += [word, os.path.abspath("build/tidy/pch.hxx")]
        elif word not in ("-fpch-preprocess", "-Winvalid-pch"):
            kept.append(word)
    entry["arguments"] = kept
json.dump(database, open("build/tidy/compile_commands.json", "w", encoding="utf-8"), indent=0)
PYTHON
if [ $# -eq 0 ]; then
  mapfile -t files < <(find src -name '*.cpp' | sort)
  set -- "${files[@]}"
fi
printf '%s\0' "$@" | xargs -0 -n 1 -P "$(nproc)" clang-tidy -p build/tidy --quiet
