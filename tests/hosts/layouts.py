"""Runs of Megatron-LM's pretrain_gpt.py to check, and the start of one of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patience import PATIENCE
from ports import free_port

from tests.hosts.corpus import ROW, STEP_ROWS, Corpus
from tests.hosts.processes import environment_of
from tests.hosts.ranks import Ranks

# A tiny model, on Megatron's local implementation: the fused kernels need a GPU.
MODEL = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --seq-length {ROW} --max-position-embeddings {ROW} --position-embedding-type rope
    --normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --transformer-impl local --no-rope-fusion --no-persist-layer-norm --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
    --clip-grad 0 --lr 1e-3 --distributed-backend gloo --tokenizer-type NullTokenizer
""".split()
# Flags that docs/guides/megatron.md requires.
PACKED = ["--dataloader-type", "single", "--calculate-per-token-loss"]
PACKED += ["--no-create-attention-mask-in-dataloader"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One run: its number of ranks, Megatron's flags, and its data."""

    name: str
    ranks: int
    flags: str = ""
    data: str = "web.json"
    """A manifest of corpus.py, ``list`` (weighted), ``apart`` (a list per split) or ``sets``
    (a large and a small one for validation)."""
    rows: str = ""
    """Runs of one name have the same rows; else those with the same data."""
    train_iters: int = 4
    train_samples: int = 0
    """Instead of iterations, where their number of rows changes."""
    align: int = 1
    splits: tuple[str, ...] = ("train", "valid")
    since: tuple[int, int] = (0, 16)
    until: tuple[int, int] = (99, 0)
    but: tuple[tuple[int, int], ...] = ()
    """Releases that take no such flags."""

    def runs_on(self, release: tuple[int, int]) -> bool:
        return self.since <= release <= self.until and release not in self.but


ONE_ROW_ONLY = ((0, 18),)
ALL_SPLITS = ("train", "valid", "test")
TP, PP, CP = (f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
PER_STAGE = "--num-layers 4 --sft --num-layers-per-virtual-pipeline-stage 1"
RAMP = {"ranks": 2, "data": "web", "rows": "blocks of 4"}

LAYOUTS = (
    Layout(name="DP 1, 3 epochs", ranks=1, train_iters=12),
    Layout(name="DP 2, blend", ranks=2, data="mix.json"),
    Layout(name="DP 2, micro batch 2", ranks=2, flags="--micro-batch-size 2", but=ONE_ROW_ONLY),
    Layout(name="DP 2, micro batch 3", ranks=2, flags="--micro-batch-size 3", but=ONE_ROW_ONLY),
    Layout(name="DP 2, 2 workers", ranks=2, flags="--num-workers 2"),
    Layout(name="DP 3, weighted list", ranks=3, data="list"),
    Layout(name="DP 4", ranks=4, train_iters=3),
    Layout(name="DP 2, stages and a window", ranks=2, data="program.json"),
    Layout(
        name="DP 2, ramp-up 4, 8, 12",
        flags="--rampup-batch-size 4 4 24 --global-batch-size 12",
        train_samples=52,
        until=(0, 17),  # later ones take the flag and keep to the global batch size
        **RAMP,
    ),
    Layout(
        name="DP 2, batch schedule 4, 12",
        flags="--step-batch-size-schedule '0:4 2048:12'",
        train_samples=40,
        since=(0, 18),
        **RAMP,
    ),
    Layout(
        name="DP 2, split 70,20,10, tested",
        ranks=2,
        rows="seven tenths",
        flags="--split 70,20,10",
        splits=ALL_SPLITS,
    ),
    Layout(name="DP 2, paths per split", ranks=2, data="apart", splits=ALL_SPLITS),
    Layout(name="TP 2", ranks=2, flags=f"{TP} 2"),
    Layout(name="TP 2, sequence parallel", ranks=2, flags=f"{TP} 2 --sequence-parallel"),
    Layout(name="PP 2", ranks=2, flags=f"{PP} 2"),
    Layout(name="TP 2 x PP 2", ranks=4, flags=f"{TP} 2 {PP} 2", train_iters=3),
    Layout(name="PP 3, --sft", ranks=3, flags=f"{PP} 3 --num-layers 3 --sft", since=(0, 18)),
    Layout(name="PP 2 x VP 2", ranks=2, flags=f"{PP} 2 {PER_STAGE}"),
    Layout(name="MTP 2", ranks=1, flags="--mtp-num-layers 2"),
    Layout(name="PP 2, MTP 1", ranks=2, flags=f"{PP} 2 --mtp-num-layers 1"),
    Layout(
        name="CP 2, each document cut", ranks=2, rows="aligned to 4", flags=f"{CP} 2 --sft", align=4
    ),
    Layout(
        name="evaluation by 3",
        ranks=1,
        flags="--eval-micro-batch-size 3 --eval-global-batch-size 6",
        since=(0, 19),
    ),
)


# Of one set Megatron's evaluation indexes a number (`eval_iters[0]`) and ends, with any dataset.
FULL_VALIDATION = tuple(
    Layout(name=f"full validation of two sets{name}", data="sets", ranks=ranks, flags=flags, **more)
    for name, ranks, flags, more in (
        ("", 2, "", {}),
        (", micro batch 2", 2, "--micro-batch-size 2", {"but": ONE_ROW_ONLY}),
        (", --sft", 2, "--sft", {}),
        (", PP 2", 2, f"{PP} 2", {}),
        (", DP 3", 3, "", {}),
    )
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
    """Flags that make the script read boundaries, see the guide; our get_batch needs none."""
    if release < (0, 18) or "--sft" in flags:
        return []
    return ["--sft"] if release == (0, 18) else ["--dataloader-inter-document-masking"]


def data_flags(corpus: Corpus, data: str) -> list[str]:
    cache = ["--data-cache-path", corpus.path("cache")]
    web, code = corpus.path("web"), corpus.path("code")
    if data == "apart":
        paths = ("--train-data-path", "0.7", web, "0.3", code)
        return [*cache, *paths, "--valid-data-path", code, "--test-data-path", "1", web, "1", code]
    if data == "sets":
        return [*cache, "--train-data-path", web, "--valid-data-path", web, corpus.path("few")]
    blend = ["0.7", web, "0.3", code] if data == "list" else [corpus.path(data)]
    return [*cache, "--data-path", *blend, "--split", "90,10,0"]


def arguments(release: tuple[int, int], layout: Layout, corpus: Corpus) -> list[str]:
    """Return flags of pretrain_gpt.py; those of the layout come last and count."""
    length = ("--train-iters", str(layout.train_iters))
    if layout.train_samples:
        length = ("--train-samples", str(layout.train_samples))
    sizes = ["--micro-batch-size", "1", "--global-batch-size", str(STEP_ROWS)]
    if "--step-batch-size-schedule" in layout.flags:
        sizes = sizes[:2]
    return [
        *MODEL,
        *PACKED,
        *boundary_flag(release, layout.flags),
        *("--vocab-size", str(corpus.vocabulary), "--num-workers", "0"),
        *sizes,
        *length,
        *("--eval-interval", "3", "--eval-iters", "1", "--log-interval", "1"),
        *("--save-interval", "1000"),
        *data_flags(corpus, layout.data),
        *shlex.split(layout.flags),
    ]


class Host:
    """A checkout, and the process that has imported it."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.release = tree, release_of(tree)
        self.ranks = Ranks(environment(tree))

    def run(
        self,
        layout: Layout,
        corpus: Corpus,
        folder: Path,
        *more: str,
        helpers: Path | None = None,
        options: Sequence[str] = (),
        fault: str | None = None,
    ) -> str:
        """Return the log of the run; AssertionError if it fails. Records are in the folder.

        With the host's compiled helpers it runs with its own datasets. Options are the launcher's,
        a fault is one of faults.py.
        """
        folder.mkdir(parents=True)
        given = [*arguments(self.release, layout, corpus), *more]
        if helpers is not None:
            ours = boundary_flag(self.release, layout.flags)
            given = [flag for flag in given if flag not in ours]
        ended = self.ranks.run(
            PATIENCE,
            ranks=layout.ranks,
            port=free_port(),
            folder=str(folder),
            script=str(self.tree / "pretrain_gpt.py"),
            arguments=given,
            helpers=None if helpers is None else str(helpers),
            options=list(options),
            fault=fault,
        )
        log = (folder / "log").read_text(errors="replace")
        assert ended, f"{layout.name} on {self.tree}:\n{log[-6000:]}"
        return log


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports this checkout and the host (Makefile)."""
    return {**environment_of(tree, "hosts"), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
