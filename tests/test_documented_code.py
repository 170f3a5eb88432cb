"""Every block of code in README, docs and guides is run, or read by what would read it.

Blocks stand between fences or are indented by four. What a CPU can run in seconds is run; commands
of trainers and clusters are read by the shell, and by the real argument parser where it is ours.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megapack.cli.main import COMMANDS, main
from megapack.integrations import index as integrations_index
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training import pretrain
from megapack.training.command import read_config

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[1]
# docs/concepts.md is run by test_concepts.py; docs/results.md is written by a command.
PAGES = sorted(
    path
    for place in ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/guides/*.md",
                  "launch/README.md", "examples/README.md", "csrc/README.md")
    for path in ROOT.glob(place)
    if path.name not in ("concepts.md", "results.md")
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A block of code: where it begins, what its fence says, its lines."""

    path: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def kind(self) -> str:
        """python, shell, json or picture."""
        first = self.text.lstrip().split(maxsplit=1)[0]
        if self.language in ("bash", "sh", "console"):
            return "shell"
        if self.language == "python" or first in ("import", "from"):
            return "python"
        if first[0] in '{"':
            return "json"
        if first[0] in "#-" or first in ("python", "torchrun", "megapack-build"):
            return "shell"
        return "picture"


def blocks_of(path: Path) -> list[Block]:
    """Fenced, and indented by four after an empty line."""
    text = path.read_text(encoding="utf-8")
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [
        Block(path, text.count("\n", 0, match.start()) + 1, match[1], match[2])
        for match in fenced.finditer(text)
    ]
    blank = fenced.sub(lambda match: "\n" * match[0].count("\n"), text)
    indented = re.compile(r"(?<=\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)")
    for match in indented.finditer(blank):
        if match[1].strip():
            line = blank.count("\n", 0, match.start()) + 1
            found.append(Block(path, line, "", textwrap.dedent(match[1])))
    return found


BLOCKS = [block for path in PAGES for block in blocks_of(path)]


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(b, id=b.name) for b in BLOCKS if b.kind == kind]


def test_blocks_are_found_where_they_are_known_to_stand() -> None:
    """The tests below cannot pass because nothing was found."""
    found = {(block.path.name, block.kind) for block in BLOCKS}
    assert {("README.md", kind) for kind in ("python", "shell", "picture")} <= found
    for guide in ("pytorch.md", "transformers.md", "gpt_neox.md", "megatron_deepspeed.md"):
        assert (guide, "python") in found
    assert {("megatron.md", "shell"), ("megatron.md", "json"), ("gpt_neox.md", "json")} <= found
    pictures = [block.name for block in BLOCKS if block.kind == "picture"]
    # Figures and drawings; in launch/README.md what Slurm and a job say.
    known = {"README.md", "CONTRIBUTING.md", "launch/README.md"}
    assert {name.partition(":")[0] for name in pictures} <= known, pictures


# --- python ---------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The datasets that pages name, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    generator = np.random.default_rng(0)
    for name in ("corpus", "data/corpus", "web_text_document", "code_text_document"):
        with IndexedDatasetBuilder(name, np.uint16, vocab_size=100) as builder:
            for length in generator.integers(2, 900, 300):
                builder.add_document(generator.integers(0, 100, length))
    dataset = IndexedDataset("corpus")
    index = pack(dataset.document_lengths, buckets=[128, 256, 512])
    index.save("corpus.samples", source=dataset)
    return tmp_path


class Embedding(nn.Module):
    """A model with the arguments of the page on plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 100)

    def forward(self, tokens: Any, positions: Any, cu_seqlens: Any, max_seqlen: Any) -> Any:
        assert tokens.shape == positions.shape and int(cu_seqlens[-1]) == tokens.numel()
        assert max_seqlen <= tokens.numel()
        return self.table(tokens[0])


def llama(folder: Path) -> str:
    """A tiny model for ``from_pretrained``."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    configuration = LlamaConfig(vocab_size=100, max_position_embeddings=512, **sizes, **heads)
    AutoModelForCausalLM.from_config(configuration).save_pretrained(folder)
    return str(folder)


# On a page sizes are those of a cluster. What stands left must stand in the block.
SMALLER = {
    "README.md": {"2**20": "2**16", "data_parallel_size=8": "data_parallel_size=2"},
    "simulation.md": {},
    "pytorch.md": {"524_288": "4_096", "8_192": "1_024", 'device="cuda"': 'device="cpu"'},
    "transformers.md": {
        "524_288": "4_096",
        "8_192": "512",
        "flash_attention_2": "sdpa",
        "max_steps=schedule.num_steps()": "max_steps=1, use_cpu=True, report_to=[]",
    },
    "planned_steps.md": {"16_384": "64"},
}  # fmt: skip


def trl_names(folder: Path) -> dict[str, Any]:
    """What the page on planned steps has before its blocks: data, a model, TRL."""
    import trl  # noqa: PLC0415
    from accelerate import Accelerator  # noqa: PLC0415
    from datasets import Dataset  # noqa: PLC0415
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(f"w{j}" for j in range(i, i + 2 + i % 30)) for i in range(2, 66)]
    model = AutoModelForCausalLM.from_pretrained(llama(folder))
    once: dict[str, Any] = {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": []}
    return {
        "texts": Dataset.from_dict({"text": texts}),
        "prompts": Dataset.from_dict({"prompt": [f"w{i}" for i in range(64)]}),
        "documents": [{"input_ids": list(range(2, 4 + i % 30))} for i in range(64)],
        "reward": lambda completions, **_: [float(len(text)) for text in completions],
        "tokenizer": PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="w0", eos_token="w1"
        ),
        "SFTTrainer": trl.SFTTrainer,
        "GRPOTrainer": trl.GRPOTrainer,
        "SFTConfig": partial(trl.SFTConfig, **once),
        "GRPOConfig": partial(trl.GRPOConfig, **once, max_completion_length=8),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "accelerator": Accelerator(cpu=True),
        "cross_entropy": nn.functional.cross_entropy,
    }


@pytest.mark.parametrize(
    "block", [p for p in of_kind("python") if SMALLER.get(p.values[0].path.name)]
)
def test_a_python_block_runs(block: Block, corpus: Path) -> None:
    text = block.text
    for large, small in SMALLER[block.path.name].items():
        assert large in text, f"{block.name} has no {large}"
        text = text.replace(large, small)
    names: dict[str, Any] = {}
    if block.path.name == "pytorch.md":
        model = Embedding()
        names = {"rank": 0, "world_size": 1, "step": 0, "model": model, "F": nn.functional}
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    if block.path.name == "transformers.md":
        from transformers import AutoModelForCausalLM, TrainingArguments  # noqa: PLC0415

        names = {"name": llama(corpus / "model"), "TrainingArguments": TrainingArguments}
        names["AutoModelForCausalLM"] = AutoModelForCausalLM
    if block.path.name == "planned_steps.md":
        names = trl_names(corpus / "model")
    exec(compile(text, block.name, "exec"), names)
    if "trainer" in names:
        assert names["trainer"].state.global_step == 1
    elif block.path.name == "planned_steps.md":
        assert 0 < float(names["loss"]) < 10 and len(names["steps"]) == 1
    else:
        batch = names["batch"]  # of the last turn of its loop
        assert batch["micro_step"] + 1 == batch["num_micro_steps"]
        assert batch["step"] + 1 == names["schedule"].num_steps()


def test_the_page_on_simulation_shows_what_its_commands_say(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its Python, then its commands; the time of plans may move by a hundredth."""
    blocks = [block for block in BLOCKS if block.path.name == "simulation.md"]
    names: dict[str, Any] = {}
    for block in blocks:
        if block.kind == "python":
            exec(compile(block.text, block.name, "exec"), names)
    assert capsys.readouterr().out == "0.1579\n" and names["found"].over_ideal < 1.5
    data = {"prefix": "corpus", "index": "corpus.samples", "tokens_per_step": 4096}
    run = {"run_dir": "run", "num_steps": 3, "data": {**data, "micro_batch_tokens": 512}}
    (corpus / "run.yaml").write_text(json.dumps({**run, "model": {"preset": "llama_tiny"}}))
    shown = 0
    for block in (b for b in blocks if b.kind == "shell"):
        (command,) = commands_of(block).splitlines()
        assert main(shlex.split(command)[1:]) == 0
        said = capsys.readouterr().out.splitlines()
        for line, real in zip(block.text.splitlines()[1:], said, strict=False):
            here, there = re.split(r" {2,}", line.strip()), re.split(r" {2,}", real.strip())
            if here[0].startswith("plan_step"):
                assert float(here[2]) == pytest.approx(float(there[2]), abs=0.01), line
                here[1:] = there[1:]
            assert here == there
            shown += 1
    assert shown > 8


@pytest.mark.parametrize(
    "block", [p for p in of_kind("python") if p.values[0].path.name not in SMALLER]
)
def test_names_in_a_block_that_needs_its_host_exist(block: Block) -> None:
    """Launchers of hosts that are not installed: what they take from megapack is there."""
    tree = ast.parse(block.text)
    checked = 0
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and str(imported.module).startswith("megapack"):
            for alias in imported.names:
                module = importlib.import_module(f"{imported.module}.{alias.name}")
                called = [
                    node.attr
                    for node in ast.walk(tree)
                    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == alias.name
                ]
                assert called and all(callable(getattr(module, name)) for name in called)
                checked += 1
    assert checked, block.name


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of_kind("json"))
def test_a_configuration_is_json(block: Block) -> None:
    text = block.text.strip()
    value = json.loads(text if text.startswith("{") else f"{{{text.rstrip(',')}}}")
    assert value


def test_the_manifest_of_the_guide_is_packed_by_the_command_of_the_guide(corpus: Path) -> None:
    guide = [block for block in BLOCKS if block.path.name == "megatron.md"]
    (manifest,) = (json.loads(block.text) for block in guide if block.kind == "json")
    (command,) = (block.text for block in guide if "megapack.integrations.index" in block.text)
    manifest["buckets"] = [n // 8 for n in manifest["buckets"]]
    manifest["rows_per_block"] //= 64
    (corpus / "mix.json").write_text(json.dumps(manifest))
    command = command.replace("8192", "1024").replace("/scratch/idx", "cache")
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "megapack.integrations.index"]
    assert integrations_index.main(words[3:]) == 0
    assert list((corpus / "cache").iterdir())


# --- shell ----------------------------------------------------------------------------------------


def commands_of(block: Block) -> str:
    """What is typed: of a console, what stands behind its prompts."""
    if block.language != "console":
        return block.text
    return "".join(re.findall(r"^\$ (.*\n)", block.text, re.MULTILINE))


@pytest.mark.parametrize("block", of_kind("shell"))
def test_a_shell_block_is_read_by_the_shell(block: Block) -> None:
    text = commands_of(block)
    assert text.strip(), block.name
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{block.name}: {done.stderr}"


def words_of_lines() -> list[tuple[Block, list[str]]]:
    """Every command of every shell block, continued lines joined, comments left out."""
    found = []
    for block in BLOCKS:
        if block.kind == "shell":
            for line in commands_of(block).replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and not words[0].startswith("-"):
                    found.append((block, words))
    return found


LINES = words_of_lines()


def test_every_command_is_one_that_a_test_knows() -> None:
    """megapack-build is read by test_documented_commands.py, the others below."""
    known = {"megapack-build", "megapack-pretrain", "python", "torchrun", "deepspeed"}
    known |= {"make", "pip"}
    programs = {words[0] for _, words in LINES}
    scripts = {name for name in programs if (ROOT / name).is_file()}
    assert programs - scripts <= known, programs
    assert {"megapack-build", "deepspeed", "make", "pip"} <= programs
    for name in scripts:
        assert os.access(ROOT / name, os.X_OK), name
    for _, words in LINES:
        if words[0] == "megapack-build":
            assert words[1] in COMMANDS


def test_modules_that_are_launched_exist_and_take_these_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = 0
    for _, words in LINES:
        if pretrain.__name__ in words:
            rest = words[words.index(pretrain.__name__) + 1 :]
        elif words[0] == "megapack-pretrain":
            rest = words[1:]
        elif "-m" in words:
            assert importlib.util.find_spec(words[words.index("-m") + 1]), words
            continue
        else:
            launched = words[0] in ("python", "torchrun", "deepspeed")
            # The host's own script.
            assert not launched or any(word.endswith(".py") for word in words), words
            continue
        monkeypatch.setattr(sys, "argv", ["megapack-pretrain", *rest])
        config = pretrain.parse_arguments().config
        if config != "...":
            read_config(str(ROOT / config) if "/" in config else config)  # raises
        read += 1
    assert read >= 5


def test_targets_of_make_and_extras_of_pip_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    targets = {words[1] for _, words in LINES if words[0] == "make"}
    targets |= set(re.findall(r"`(?:[A-Z]+=\S+ )*make ([\w-]+)", text))
    assert {"demo", "test", "bench-data"} <= targets
    for target in targets:
        bench = ROOT / "benchmarks" / f"{target.removeprefix('bench-')}.py"
        known = re.search(rf"^{target}:", makefile, re.MULTILINE) or bench.is_file()
        assert known, f"make {target}"
    offered = importlib.metadata.metadata("megapack").get_all("Provides-Extra")
    extras = set(re.findall(r"\[((?:\w+,?)+)\]['\"]", text))
    assert extras
    for extra in ",".join(extras).split(","):
        assert extra in offered, extra


def test_no_page_installs_a_package_that_is_not_published() -> None:
    for path in PAGES:
        assert not re.search(r"pip install ['\"]?megapack", path.read_text()), path
