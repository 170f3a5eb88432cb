"""Run the code blocks of pages; a page must say why a block is not run.

    python tests/pages.py README.md                  # the quick blocks, in a fresh folder
    python tests/pages.py --slow README.md           # all of them; MEGAPACK_URL=. clones from here
    python tests/pages.py --measured                 # write README's table anew, from docs/results

Blocks of ``bash``, ``console`` and ``python`` are run in the order of their page: in one folder,
with one namespace of Python, each shell beginning where the one before it ended (folder, PATH).
The output of Python equals the ``text`` block after it; the lines that a console block shows must
appear in the output of its command, in that order, with any numbers. ``yaml`` and ``json`` are
parsed. A comment on the line above the fence changes that:

    <!-- not run: WHY -->         only read, by bash -n or Python's compiler
    <!-- slow: WHY -->            run with --slow
    <!-- smaller: A -> B | C -> D -->  put in before it is run: a page speaks of a cluster's sizes
    <!-- given: WHAT -->          names that the page takes as known: a key of GIVEN

The folder holds what pages call corpus (300 documents, packed; in web/ two more),
docs.jsonl (text), and tests/ and examples/ of the checkout. With --slow it holds nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
    """Block of code: line of its fence, language, text and the comment above."""

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
        """Typed text; in a console, the text after its prompts."""
        if self.language != "console":
            return self.text
        return "".join(re.findall(r"^\$ ((?:.*\\\n)*.*\n)", self.text, re.MULTILINE))

    @property
    def shown(self) -> list[str]:
        """Lines of output that a console shows, without elisions (...)."""
        if self.language != "console":
            return []
        without = re.sub(r"^\$ (?:.*\\\n)*.*\n", "", self.text, flags=re.MULTILINE)
        return [line for line in without.splitlines() if line.strip(" .")]


def pages() -> list[Path]:
    """Return the pages that are written by hand (a command writes docs/results.md)."""
    found = {path for place in PLACES for path in ROOT.glob(place) if path.parent.name[0] != "."}
    return sorted(found - {ROOT / "docs" / "results.md"})


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        said = dict(re.findall(r"<!-- ([a-z ]+): (.*?) -->", match[1]))
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page, line, match[2], match[3], said))
    return found


def prepare(folder: Path) -> None:
    """Write the files that pages use: corpus.*, data/, web/, docs.jsonl, tests/ and examples/."""
    import numpy as np  # noqa: PLC0415  (a page is read without)

    from megapack.packing import pack  # noqa: PLC0415
    from megapack.storage import IndexedDataset, IndexedDatasetBuilder  # noqa: PLC0415

    (folder / "data").mkdir()
    for name in ("tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "web").mkdir()
    for name in ("corpus", "data/corpus", "web/part0", "web/part1"):
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


def plain_model() -> dict[str, Any]:
    """Return the model of the page on plain PyTorch."""
    import torch  # noqa: PLC0415
    from torch.nn import functional as F  # noqa: PLC0415

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(100, 100)

        def forward(self, tokens: Any, positions: Any, cu_seqlens: Any, max_seqlen: int) -> Any:
            assert tokens.shape == positions.shape and int(cu_seqlens[-1]) == tokens.numel()
            assert max_seqlen <= tokens.numel()
            return self.table(tokens[0])

    model = Embedding()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return {"model": model, "optimizer": optimizer, "F": F, "rank": 0, "world_size": 1, "step": 0}


def llama() -> dict[str, Any]:
    """Write a model with 100 tokens; return the names that pages use for it."""
    import transformers  # noqa: PLC0415

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=100, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512,
        pad_token_id=0, eos_token_id=1, **sizes,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("llama")
    names = ("AutoModelForCausalLM", "TrainingArguments")
    return {"name": "llama", **{name: getattr(transformers, name) for name in names}}


def trl() -> dict[str, Any]:
    """Return texts and prompts of numbers, their tokenizer, a reward, and TRL's trainers."""
    import datasets  # noqa: PLC0415
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer  # noqa: PLC0415

    numbers = Tokenizer(models.WordLevel({str(n): n for n in range(100)}, unk_token="1"))
    numbers.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(str(n % 97 + 2) for n in range(i, 2 * i + 2)) for i in range(64)]
    return {
        "model": llama()["AutoModelForCausalLM"].from_pretrained("llama"),
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=numbers, pad_token="0", eos_token="1"
        ),
        "texts": datasets.Dataset.from_dict({"text": texts}),
        "prompts": datasets.Dataset.from_dict({"prompt": texts[:8]}),
        "reward": lambda completions, **_: [float(len(text)) for text in completions],
        "SFTConfig": SFTConfig, "SFTTrainer": SFTTrainer,
        "GRPOConfig": GRPOConfig, "GRPOTrainer": GRPOTrainer,
    }  # fmt: skip


def accelerate() -> dict[str, Any]:
    """Return documents, a model and the objects of a loop with Accelerate."""
    import torch  # noqa: PLC0415
    from accelerate import Accelerator  # noqa: PLC0415

    model = llama()["AutoModelForCausalLM"].from_pretrained("llama")
    return {
        "documents": [{"input_ids": [2 + n % 90 for n in range(i % 30 + 2)]} for i in range(128)],
        "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "accelerator": Accelerator(cpu=True), "cross_entropy": torch.nn.functional.cross_entropy,
    }  # fmt: skip


GIVEN = {
    "a model of plain PyTorch": plain_model,
    "a model of transformers": llama,
    "a model, texts and prompts of TRL": trl,
    "a model and documents of Accelerate": accelerate,
}


class Reader:
    """Reader that runs the blocks of a page one after the other."""

    def __init__(self, folder: Path, *, slow: bool) -> None:
        self.folder, self.slow = folder, slow
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.environment = {**os.environ, "COLUMNS": "120"}
        self.printed: str | None = None

    def read(self, block: Block) -> bool:
        """Run the block, unless its comment forbids it. Raises AssertionError if it fails."""
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
            if "given" in block.said:
                self.names.update(GIVEN[block.said["given"]]())
            exec(compile(text, block.name, "exec"), self.names)
        # Pages do not show the logs of trainers.
        return (output.getvalue() or None) if "print(" in text else None

    def _shell(self, block: Block, text: str) -> str:
        url = self.environment.get("MEGAPACK_URL")
        if url:
            ours = rf"git clone --quiet {shlex.quote(str(Path(url).absolute()))} \1"
            text = re.sub(r"git clone https://\S+/(\S+)", ours, text)
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
            # Lines must appear in order.
            found = any(_without_numbers(shown) == line for line in lines)
            assert found, f"{block.name} shows {shown!r}; printed was\n{output}"


# --- the table of README: the newest logged runs, two digits --------------------------------------


def measured() -> str:
    """Return six rows: task, the peer at its best setting, our result, the command."""

    def found(bench: str, key: str, **wanted: Any) -> float:
        text = (ROOT / "docs" / "results" / f"{bench}.json").read_text(encoding="utf-8")
        (value,) = {v for v in _values(json.loads(text)["results"], key, wanted)}
        return float(value)

    def split(item: str, quantity: str = "r_tru %") -> float:
        of = {"source": "BucketLLM Table 1", "corpus": "fineweb_edu_like", "item": item}
        return found("composition", "measured", quantity=quantity, **of)

    inside = [
        found("data", "ratio", dataset="PackedGPTDataset", loader=f"mbs {size}, workers 0")
        for size in (1, 4)
    ]
    ten_million = {"num_documents": 10_000_000}
    index = [
        found("packing", "times_faster", name=f"concat, {order}", **ten_million)
        for order in ("shuffled", "file order")
    ]
    build = [
        found("build", "times_megatron", what=what)
        for what in ("ours, tokenizers", "ours, gigatoken", "bare gigatoken, one call")
    ]
    merge = found("merge", "times_faster", side="megapack, merge", mean_tokens=64)
    bucket = "bucket (the default)"
    work = {"case": "bucket 16384, 3 per rank"}
    random, ours = (found("schedule", key, **work) for key in ("random", "ours"))
    rows = [
        ("documents split, 10 million of web lengths", "concatenation at 16,384: "
         f"{_two(split('Fixed-16384'))} %", f"{_two(split(bucket))} %, "
         f"{_two(split(bucket, 'r_pad %'))} % padding", "composition"),
        ("busiest of 64 ranks, attention, 3 samples of 16,384 each; mean = 1",
         f"assigned at random: {_two(random)}", f"{ours:.2f}", "schedule"),
        ("samples a second inside Megatron, one or four a micro batch",
         "GPTDataset without workers (with two it is slower)",
         f"{_two(inside[0])} and {_two(inside[1])} times", "data"),
        ("index of ten million documents, concatenated", "megatron-core, shuffled; in file order",
         f"{_two(index[0])}; {_two(index[1])} times", "packing"),
        ("text to .bin/.idx", "a pool with megatron-core's builder", f"{_two(build[0])} times with "
         f"the same tokenizer, {_two(build[1])} with gigatoken (alone: {_two(build[2])})", "build"),
        ("merging shards of short documents", "megatron-core's add_index", f"{_two(merge)} times",
         "merge"),
    ]  # fmt: skip
    lines = ["| task | peer | megapack | `make` |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {a} | {b} | {c} | `bench-{d}` |" for a, b, c, d in rows)])


def _values(tree: Any, key: str, wanted: dict[str, Any]) -> Iterator[float]:
    if isinstance(tree, dict):
        if key in tree and all(tree.get(name) == value for name, value in wanted.items()):
            yield tree[key]
        tree = list(tree.values())
    for branch in tree if isinstance(tree, list) else ():
        yield from _values(branch, key, wanted)


def _two(value: float) -> str:
    """Format two digits: 0.034, 1.4, 49, 120."""
    digits = max(0, 1 - math.floor(math.log10(abs(value))))
    return f"{float(f'{value:.1e}'):.{digits}f}"


def with_table(text: str) -> str:
    """Return the README with a new table, from | task | to the next empty line."""
    return re.sub(r"^\| task \|.*?\n(?=\n)", measured() + "\n", text, flags=re.M | re.S)


def _without_numbers(line: str) -> str:
    """Remove numbers, the widths of columns and bars, and remarks."""
    line = re.sub(r"\s{2,}# .*", "", line)
    return re.sub(r"[ #]+", " ", re.sub(r"[\d.,]*\d", "#", line)).strip()


def main() -> int:
    """Run pages; print one line per block."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE")
    parser.add_argument("--slow", action="store_true", help="also blocks that install or train")
    parser.add_argument("--measured", action="store_true", help="write README's table anew")
    options = parser.parse_args()
    if options.measured:
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")
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
