"""Faults that the tests must find: ``make mutants``, ``ONLY=name,... JOBS=2 make mutants``.

Each mutant is one small wrong edit of the product. It is applied to a copy of the tree, the copy is
built (one object), and the tests of its module run there until the first one fails. If all pass,
the tests have a gap. Before that, the same tests must pass on a copy without mutants.

A mutant is stale if its old text is not in its file exactly once: update the text, or choose
another fault of the same kind. ``test_mutants.py`` finds stale ones in every run of the tests.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mutant_list import LIST, TESTS

ROOT = Path(__file__).parents[1]
SECONDS = 900  # for the tests of a mutant; a hang is noticed, too
LEFT_OUT = (".git", ".venv*", "runs", "demo", "dist", "docs", "sanitizers", ".hypothesis")
NOTICED = "killed"


@dataclass(frozen=True)
class Mutant:
    """Replacement of ``old``, which is in ``file`` once, by ``new``.

    ``tests`` are paths and other arguments of pytest; ``breaks`` describes the fault.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    breaks: str


# --- running mutants ----------------------------------------------------------------------------


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """Copy a tree with its built objects, so that only changed ones are built."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        yield copy


def finish(command: Sequence[str], cwd: Path, log: Path, seconds: float) -> int | None:
    """Run a command and return its exit status, or None after a timeout; kill its processes."""
    # MEGAPACK_WERROR as in make build: other flags would compile everything again.
    env = {**os.environ, "PYTHONPATH": str(cwd), "MEGAPACK_WERROR": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def result_of(copy: Path, tests: Sequence[str], build: bool, seconds: float) -> str:
    """Build and test a copy; return ``survived``, ``killed``, or ``broken`` and the log."""
    log = copy.parent / "log"
    if build:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        if finish(command, copy, log, seconds) != 0:
            return f"broken: it does not compile\n{log.read_text()[-2000:]}"
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    status = finish([sys.executable, "-m", "pytest", *options, *tests], copy, log, seconds)
    if status == 0:
        return "survived"
    if status in (2, 3, 4, 5):  # of pytest: not a test that failed
        return f"broken: its tests do not run\n{log.read_text()[-2000:]}"
    return NOTICED


def judge(mutant: Mutant, root: Path) -> str:
    """Apply a mutant; return ``killed``, ``survived``, ``stale`` or ``broken``, with the reason."""
    with copy_of(root) as copy:
        path = copy / mutant.file
        text = path.read_text()
        if text.count(mutant.old) != 1:
            return f"stale: its old text is {text.count(mutant.old)} times in {mutant.file}"
        path.write_text(text.replace(mutant.old, mutant.new))
        return result_of(copy, shlex.split(mutant.tests), mutant.file.startswith("csrc"), SECONDS)


def run(mutants: Sequence[Mutant], root: Path, jobs: int) -> bool:
    """Run mutants and print their results; return whether all were killed."""
    paths = sorted(
        {word for mutant in mutants for word in shlex.split(mutant.tests) if "/" in word}
    )
    with copy_of(root) as copy:
        before = result_of(copy, paths, (root / "csrc").exists(), 8 * SECONDS)
        if before != "survived":
            log = (copy.parent / "log").read_text()
            print(f"the tests fail without any mutant: {before}\n{log[-4000:]}")
            return False
    results = []
    width = max(len(mutant.name) for mutant in mutants)

    def one(mutant: Mutant) -> None:
        begin = time.monotonic()
        result = judge(mutant, root)
        results.append(result)
        spent = f"{time.monotonic() - begin:4.0f} s"
        print(f"{mutant.name:{width}}  {spent}  {result:8}  {mutant.breaks}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, mutants))
    print(f"{results.count(NOTICED)} of {len(mutants)} killed")
    return results == [NOTICED] * len(mutants)


def listed() -> Iterator[Mutant]:
    """The mutants of LIST."""
    for paragraph in LIST.split("\n\n"):
        header, _, rest = paragraph.strip("\n").partition("\n")
        file, _, words = header.partition(": ")
        tests = " ".join(TESTS.get(word, word) for word in words.split())
        for name, breaks, old, new in re.findall(ENTRY, rest, re.MULTILINE):
            yield Mutant(name, file, _text(old), _text(new), tests, breaks)


ENTRY = r"^(\w+): (.+)\n((?:- .*\n)+)((?:\+.*(?:\n|\Z))+)"


def _text(lines: str) -> str:
    return "\n".join(line[2:] for line in lines.splitlines())


MUTANTS = list(listed())


def main() -> int:
    names = [name for name in os.environ.get("ONLY", "").split(",") if name]
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        print(f"no mutant is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    return 0 if run(chosen, ROOT, int(os.environ.get("JOBS") or 1)) else 1


if __name__ == "__main__":
    sys.exit(main())
