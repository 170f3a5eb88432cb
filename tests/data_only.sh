#!/usr/bin/env bash
# make test-data PYTHON=python3.13: the tests of what builds data (storage, tokenization, packing,
# planning, comparisons, the command line, the C++ core) where neither torch nor Megatron nor
# DeepSpeed is installed, in an environment of its own for each Python.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
venv=.venv-data-$version
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

wanted=$(sed -n '/^dependencies/,/^\[project.scripts/p' pyproject.toml | cat - constraints.txt | sha256sum)
if [[ $(cat "$venv/.ready" 2>/dev/null) != "$wanted" ]]; then
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "${pip[@]}" --upgrade "pip>=24" wheel "setuptools>=77" "pybind11>=3"
    MEGAPACK_NO_EXTENSION=1 "${pip[@]}" -c constraints.txt --no-build-isolation \
        -e '.[dev-data]'
    echo "$wanted" >"$venv/.ready"
fi
MEGAPACK_WERROR=1 "$venv/bin/python" setup.py --quiet build_ext --inplace

run=(tests/cli tests/compare tests/fuzz tests/packing tests/planning tests/storage tests/tokenization
    tests/test_config.py tests/test_cpp.py tests/test_devices.py tests/test_layers.py
    tests/test_outputs.py tests/test_pages.py tests/test_bindings.py)
left=()
for path in tests/*/ tests/test_*.py; do
    path=${path%/}
    if [[ " ${run[*]} " != *" $path "* && -n $(find "$path" -name 'test_*.py') ]]; then
        left+=("$path")
    fi
done

"$venv/bin/python" - <<'PYTHON'
import importlib.util
import sys

found = [name for name in ("torch", "megatron", "deepspeed") if importlib.util.find_spec(name)]
if found:
    sys.exit(f"{sys.prefix} is not an environment without {', '.join(found)}; delete it")
PYTHON
# --at-least: about eight tenths of what is collected, so that a folder that is not collected is noticed.
MEGAPACK_TEST_DATA_ONLY=1 "$venv/bin/python" -m pytest -q -n "${JOBS:-2}" --dist worksteal \
    --at-least 1250 "$@" "${run[@]}"
echo "Python $version; left out, they train or compare with who trains: ${left[*]}"
