"""The rule of pages: a block of code in a page is run, or the page says why it is not.

    python tests/pages.py README.md                  # the quick blocks, in a fresh folder
    python tests/pages.py --slow README.md           # all of them; MEGAPACK_URL=. clones from here

Blocks of ``bash``, ``console`` and ``python`` are run in the order of their page: in one folder,
with one namespace of Python, each shell beginning where the one before it ended (folder, PATH).
What Python prints is the ``text`` block after it, to the letter; what a console block shows of a
command's output is found in it, in that order, whatever the numbers are. ``yaml`` and ``json`` are
parsed. A comment on the line above the fence changes that:

    <!-- not run: WHY -->         only read, by bash -n or Python's compiler
    <!-- slow: WHY -->            run with --slow
    <!-- smaller: A -> B | C -> D -->  put in before it is run: a page speaks of a cluster's sizes
    <!-- given: STATEMENTS -->    Python that is run before: names that the page takes as known

The folder holds what pages call corpus (300 documents, packed), docs.jsonl (text), and tests/ and
examples/ of the checkout. With --slow it holds nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/guides/*.md", "*/README.md")
SHELLS = ("bash", "console")
_BLOCK = re.compile(
    r"^((?:<!-- .*? -->\n)*)(?: *)```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A block of code: the line of its fence, its language, its text and what is said of it."""

    page: Path
    line: int
    language: str
    text: str
    said: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.page.parent.name}/{self.page.name}:{self.line}"

    @property
    def commands(self) -> str:
        """What is typed: of a console, what stands behind its prompts."""
        if self.language != "console":
            return self.text
        return "".join(re.findall(r"^\$ ((?:.*\\\n)*.*\n)", self.text, re.MULTILINE))

    @property
    def shown(self) -> list[str]:
        """What a console shows of the output, without what it leaves out (...)."""
        if self.language != "console":
            return []
        without = re.sub(r"^\$ (?:.*\\\n)*.*\n", "", self.text, flags=re.MULTILINE)
        return [line for line in without.splitlines() if line.strip(" .")]


def pages() -> list[Path]:
    """The pages that are written by hand; docs/results.md is written by a command."""
    found = {path for place in PLACES for path in ROOT.glob(place)}
    return sorted(found - {ROOT / "docs" / "results.md"})


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        said = dict(re.findall(r"<!-- ([a-z ]+): (.*?) -->", match[1]))
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, match[2], match[3], said))
    return found


def prepare(folder: Path) -> None:
    """corpus.bin, .idx and .samples, the same as data/corpus; docs.jsonl; what a checkout has."""
    import numpy as np  # noqa: PLC0415  (a page is read without)

    from megapack.packing import pack  # noqa: PLC0415
    from megapack.storage import IndexedDataset, IndexedDatasetBuilder  # noqa: PLC0415

    (folder / "data").mkdir()
    for name in ("tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("corpus", "data/corpus"):
        generator = np.random.default_rng(0)
        with IndexedDatasetBuilder(folder / name, np.uint16, vocab_size=100) as builder:
            for length in generator.integers(2, 900, 300):
                builder.add_document(generator.integers(0, 100, length))
        dataset = IndexedDataset(folder / name)
        index = pack(dataset.document_lengths, buckets=[128, 256, 512])
        index.save(folder / f"{name}.samples", source=dataset)
    words = "the cat sat on a mat and a dog ran to the far end of the long road".split()  # noqa: SIM905
    with (folder / "docs.jsonl").open("w", encoding="utf-8") as out:
        for i in range(200):
            text = " ".join(words[(i * j) % len(words)] for j in range(1, 5 + i % 60))
            out.write(json.dumps({"text": text}) + "\n")


class Reader:
    """Goes through a page as somebody would who copies its blocks into a terminal."""

    def __init__(self, folder: Path, *, slow: bool) -> None:
        self.folder, self.slow = folder, slow
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.environment = {**os.environ, "COLUMNS": "120"}
        self.printed: str | None = None

    def read(self, block: Block) -> bool:
        """Run the block, if it is one to run; raises AssertionError where it does not hold."""
        if block.language == "text" and self.printed is not None:
            assert self.printed == block.text, f"{block.name}: printed was\n{self.printed}"
            self.printed = None
        if block.language not in (*SHELLS, "python"):
            return False
        assert not self.printed, f"{block.name}: the page does not show\n{self.printed}"
        if "not run" in block.said or ("slow" in block.said and not self.slow):
            return False
        text = block.commands
        for pair in filter(None, block.said.get("smaller", "").split(" | ")):
            large, small = html.unescape(pair).split(" -> ")
            assert large in text, f"{block.name} has no {large}"
            text = text.replace(large, small)
        if block.language == "python":
            self.printed = self._python(block, text)
        else:
            self._compare(block, self._shell(block, text))
        return True

    def _python(self, block: Block, text: str) -> str | None:
        os.chdir(self.folder)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(html.unescape(block.said.get("given", "")), self.names)
            exec(compile(text, block.name, "exec"), self.names)
        return output.getvalue() or None

    def _shell(self, block: Block, text: str) -> str:
        url = self.environment.get("MEGAPACK_URL")
        if url:
            text = re.sub(r"(git clone )https://\S+", rf"\g<1>{shlex.quote(url)}", text)
        with tempfile.NamedTemporaryFile("r") as left:
            end = 'trap \'printf "%s\\0%s" "$PWD" "$PATH" > "$LEFT"\' EXIT\n'
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail"], input=end + text, text=True, check=False,
                cwd=self.folder, env={**self.environment, "LEFT": left.name},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            assert done.returncode == 0, f"{block.name}: status {done.returncode}\n{done.stdout}"
            folder, self.environment["PATH"] = left.read().split("\0")
            self.folder = Path(folder)
        return done.stdout

    def _compare(self, block: Block, output: str) -> None:
        lines = iter([_without_numbers(line) for line in output.splitlines()])
        for shown in block.shown:
            # A line is looked for behind the one before it.
            found = any(_without_numbers(shown) == line for line in lines)
            assert found, f"{block.name} shows {shown!r}; printed was\n{output}"


def _without_numbers(line: str) -> str:
    """Numbers, the width of columns and of bars apart, and where a remark begins."""
    line = re.sub(r"\s{2,}# .*", "", line)
    return re.sub(r"[ #]+", " ", re.sub(r"[\d.,]*\d", "#", line)).strip()


def main() -> int:
    """Run pages; one line a block."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--slow", action="store_true", help="also blocks that install or train")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for page in [page.resolve() for page in options.pages]:
        with tempfile.TemporaryDirectory() as folder:
            if not options.slow:
                prepare(Path(folder))
            reader = Reader(Path(folder), slow=options.slow)
            for block in blocks_of(page):
                start = time.perf_counter()
                if reader.read(block):
                    print(f"{block.name}: {time.perf_counter() - start:.1f} s", flush=True)
            assert not reader.printed, f"{page}: it does not show\n{reader.printed}"
    return 0


if __name__ == "__main__":
    sys.exit(main())
