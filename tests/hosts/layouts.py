"""Runs of Megatron-LM's pretrain_gpt.py that are checked, and how one of them is started."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ports import free_port

from tests.hosts.corpus import Corpus
from tests.hosts.processes import LAUNCHERS, environment_of, finish

ROW = 128
GLOBAL_BATCH = 12

# A tiny model, on Megatron's local implementation: the fused kernels want a GPU.
MODEL = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length {ROW} --max-position-embeddings {ROW} --position-embedding-type rope
    --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
    --clip-grad 0 --lr 1e-3 --distributed-backend gloo --tokenizer-type NullTokenizer
""".split()
# What docs/guides/megatron.md asks for.
PACKED = [
    "--dataloader-type",
    "single",
    "--no-create-attention-mask-in-dataloader",
    "--calculate-per-token-loss",
]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: how many ranks, which of Megatron's flags, which data."""

    name: str
    ranks: int
    flags: str = ""
    data: str = "web.json"
    """A manifest of corpus.py, or ``list``: a weighted list and a list per split."""
    train_iters: int = 4
    since: tuple[int, int] = (0, 16)
    but: tuple[tuple[int, int], ...] = ()
    """Releases that take no such flags."""

    def runs_on(self, release: tuple[int, int]) -> bool:
        return release >= self.since and release not in self.but


ONE_ROW_ONLY = ((0, 18),)

LAYOUTS = (
    Layout(name="DP 1, 3 epochs", ranks=1, train_iters=12),
    Layout(name="DP 2, blend", ranks=2, data="mix.json"),
    Layout(name="DP 2, micro batch 2", ranks=2, flags="--micro-batch-size 2", but=ONE_ROW_ONLY),
    Layout(name="DP 3, weighted list", ranks=3, data="list"),
    Layout(name="DP 2, stages and a window", ranks=2, data="program.json"),
    Layout(name="TP 2", ranks=2, flags="--tensor-model-parallel-size 2"),
    Layout(name="PP 2", ranks=2, flags="--pipeline-model-parallel-size 2"),
    Layout(
        name="PP 3, --sft",
        ranks=3,
        flags="--pipeline-model-parallel-size 3 --num-layers 3 --sft",
        since=(0, 18),
    ),
    Layout(
        name="evaluation by 3",
        ranks=1,
        flags="--eval-micro-batch-size 3 --eval-global-batch-size 6",
        since=(0, 19),
    ),
)


def release_of(tree: Path) -> tuple[int, int]:
    """Major and minor number of a checkout."""
    text = (tree / "megatron" / "core" / "package_info.py").read_text()
    major, minor = (
        int(re.search(rf"^{name} = (\d+)", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("MAJOR", "MINOR")
    )
    return major, minor


def boundary_flag(release: tuple[int, int], flags: str) -> list[str]:
    """What makes the script read boundaries, see the guide; our get_batch needs none."""
    if release < (0, 18) or "--sft" in flags:
        return []
    return ["--sft"] if release == (0, 18) else ["--dataloader-inter-document-masking"]


def data_flags(corpus: Corpus, data: str) -> list[str]:
    paths = ["0.7", corpus.path("web"), "0.3", corpus.path("code")]
    if data != "list":
        paths = [corpus.path(data)]
    return ["--data-path", *paths, "--split", "90,10,0", "--data-cache-path", corpus.path("cache")]


def run(tree: Path, layout: Layout, corpus: Corpus, records: Path, *more: str) -> str:
    """Run the layout under torchrun; what it logged. Raises AssertionError where it fails."""
    records.mkdir(parents=True)
    release = release_of(tree)
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(layout.ranks), "--master-port", str(free_port())),
        *(str(LAUNCHERS / "launch.py"), str(records), str(tree / "pretrain_gpt.py")),
        *MODEL,
        *PACKED,
        *boundary_flag(release, layout.flags),
        *("--vocab-size", str(corpus.vocabulary), "--num-workers", "0"),
        *("--micro-batch-size", "1", "--global-batch-size", str(GLOBAL_BATCH)),
        *("--train-iters", str(layout.train_iters), "--eval-interval", "3", "--eval-iters", "1"),
        *("--log-interval", "1", "--save-interval", "1000"),
        *data_flags(corpus, layout.data),
        *layout.flags.split(),
        *more,
    ]
    return finish(command, records, environment(tree), f"{layout.name} on {tree}")


def environment(tree: Path) -> dict[str, str]:
    """Of a process that imports this checkout, and what it imports beside torch (Makefile)."""
    return {**environment_of(tree, "hosts"), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
