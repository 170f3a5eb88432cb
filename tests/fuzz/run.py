"""Fuzz every reader for FUZZ_SECONDS in all (default 60), in C++ under ASan and in Python.

    make fuzz                                   # or: FUZZ_SECONDS=3600 make fuzz
    python tests/fuzz/run.py idx                # one target
    python tests/fuzz/run.py --changes 10000 damage samples   # a number of inputs, and outcomes
    python tests/fuzz/run.py idx tests/fuzz/corpus/idx/some-input     # one input

A Python target is ``fuzz_<name>.py`` with ``SEEDS`` (inputs to change) and
``run(data, directory)``, which may raise only ValueError (megapack's errors are ValueErrors) or
OSError. With a function ``change(rng)``, which makes the inputs, ``run`` returns the outcome and
may raise only megapack's errors and OSError. A C++ target is ``fuzz_<name>.cpp`` with libFuzzer's
entry point (driver.cpp runs it without clang); it gets the inputs of the Python target of its name,
and a line
``// core: text/a.cpp`` lists its sources in csrc/core. Inputs that fail are kept in
``corpus/<name>``; tests/fuzz/test_corpus.py runs them.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import itertools
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

from test_cpp import SANITIZERS, compile_all, compiler  # noqa: E402

from fuzz.mutate import mutate  # noqa: E402
from megapack.errors import MegapackError  # noqa: E402

SECONDS_TO_HANG = 60.0  # for one input; most take milliseconds
BATCH = 10_000  # inputs per process of a C++ target


def python_targets() -> dict[str, ModuleType]:
    names = sorted(path.stem.removeprefix("fuzz_") for path in HERE.glob("fuzz_*.py"))
    return {name: importlib.import_module(f"fuzz.fuzz_{name}") for name in names}


def cpp_targets() -> dict[str, Path]:
    return {path.stem.removeprefix("fuzz_"): path for path in sorted(HERE.glob("fuzz_*.cpp"))}


def corpus(name: str) -> list[Path]:
    return sorted((HERE / "corpus" / name).glob("*"))


def run_one(target: ModuleType, data: bytes) -> str | None:
    """Return the traceback of a failure, or None."""
    return handle(target, data)[1]


def handle(target: ModuleType, data: bytes) -> tuple[str, str | None]:
    """Return the outcome of an input and the traceback of a failure. A hang ends the process."""
    typed = (MegapackError, OSError) if hasattr(target, "change") else (ValueError, OSError)
    faulthandler.dump_traceback_later(SECONDS_TO_HANG, exit=True)
    with tempfile.TemporaryDirectory() as directory:
        try:
            return str(target.run(data, Path(directory))), None
        except typed:
            return "refused at load", None
        except BaseException:
            return "failed", traceback.format_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()


def keep(name: str, data: bytes) -> Path:
    path = HERE / "corpus" / name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def inputs(name: str, target: ModuleType) -> Iterator[bytes]:
    """Yield inputs without end, a sequence per FUZZ_SEED."""
    rng = random.Random(name + os.environ.get("FUZZ_SEED", ""))
    seeds = [*target.SEEDS, *(path.read_bytes() for path in corpus(name))]
    while True:
        yield target.change(rng) if hasattr(target, "change") else mutate(rng, seeds)


def fuzz_python(
    name: str, target: ModuleType, seconds: float = 1e9, most: int | None = None
) -> bool:
    begin, outcomes = time.monotonic(), Counter[str]()
    for count, data in enumerate(itertools.islice(inputs(name, target), most), 1):
        outcome, problem = handle(target, data)
        if problem is not None:
            print(f"{problem}\n{name}: input {count} failed; kept as {keep(name, data)}")
            return False
        outcomes[outcome] += 1
        if time.monotonic() - begin > seconds:
            break
    print(f"{name} (Python): {count:,} inputs in {time.monotonic() - begin:.0f} s")
    for outcome, times in outcomes.most_common():
        print(f"  {times:6,}  {'handled' if outcome == 'None' else outcome}")
    print("       0  wrong batch, unexpected exception or hang")
    return True


def build_cpp(source: Path, binary: Path) -> None:
    """Compile a C++ target and the sources it needs under AddressSanitizer and UBSan."""
    needed = re.findall(r"^// core: (.+)$", source.read_text(), re.MULTILINE)
    core = [ROOT / "csrc" / "core" / name for line in needed for name in line.split()]
    objects = compile_all(
        [source, HERE / "driver.cpp", *core], ROOT / "build/sanitizers/fuzz", SANITIZERS["address"]
    )
    command = [compiler(), *SANITIZERS["address"], "-pthread", *objects, "-o", binary]
    subprocess.run(command, check=True)


def run_cpp(binary: Path, data: list[bytes]) -> bytes | None:
    """Return the input that crashes the core, or None."""
    given, current = binary.with_name("inputs"), binary.with_name("current")
    given.write_bytes(b"".join(len(one).to_bytes(8, "little") + one for one in data))
    done = subprocess.run([str(binary), str(given), str(current)], check=False, capture_output=True)
    if done.returncode != 0:
        print(done.stderr.decode(errors="replace"))
        return data[int.from_bytes(current.read_bytes(), "little")]
    assert int(done.stdout) == len(data)
    return None


def fuzz_cpp(name: str, source: Path, seconds: float) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        binary = Path(directory, "fuzz")
        build_cpp(source, binary)
        new, count, begin = inputs(name, python_targets()[name]), 0, time.monotonic()
        while time.monotonic() - begin < seconds:
            batch = list(itertools.islice(new, BATCH))
            failed = run_cpp(binary, batch)
            if failed is not None:
                print(f"{name}: failed; kept as {keep(name, failed)}")
                return False
            count += len(batch)
        print(f"{name} (C++): {count:,} inputs, nothing found")
        return True


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--changes"]:
        chosen = {n: t for n, t in python_targets().items() if n in arguments[2:]}
        return int(not all([fuzz_python(n, t, most=int(arguments[1])) for n, t in chosen.items()]))
    chosen = arguments[:1] or sorted({*python_targets(), *cpp_targets()})
    if len(arguments) > 1:
        problems = [
            run_one(python_targets()[chosen[0]], Path(p).read_bytes()) for p in arguments[1:]
        ]
        print(*filter(None, problems), sep="\n")
        return int(any(problems))
    jobs = [(fuzz_python, n, t) for n, t in python_targets().items() if n in chosen]
    jobs += [(fuzz_cpp, n, t) for n, t in cpp_targets().items() if n in chosen]
    seconds = float(os.environ.get("FUZZ_SECONDS", "60")) / len(jobs)
    results = [fuzz(name, target, seconds) for fuzz, name, target in jobs]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
