"""Fixtures: a small dataset, once per test process, and runs on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from patience import PATIENCE_MINUTES

from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training.engine.directory import read_jsonl

from .processes import PRETRAIN, Ranks, Zygote

VOCAB = 64
BUCKETS = [32, 64, 128]
ROW, PER_STEP = 64, 8  # of ``noisy_blend``: tokens of a document, documents of a step


@dataclass(frozen=True)
class Corpus:
    """Training and validation documents, a bucket index, a configuration."""

    directory: Path

    @property
    def train(self) -> Path:
        return self.directory / "train"

    @property
    def valid(self) -> Path:
        return self.directory / "valid"

    def config(self, run_dir: Path, **sections: object) -> Path:
        """Write a YAML for ``megapack-pretrain``; ``sections`` are merged one level deep."""
        tree: dict[str, object] = {
            "run_dir": str(run_dir),
            "num_steps": 8,
            "model": {"preset": "llama_tiny"},
            "data": {
                "prefix": str(self.train),
                "index": f"{self.train}.samples",
                "valid_prefix": str(self.valid),
                "tokens_per_step": 1024,
                "micro_batch_tokens": 256,
                "check_ranks_every": 1,
            },
            "optimizer": {"lr": 0.003, "clip": 0.5},
            "learning_rate": {"warmup_steps": 2},
            "checkpoint": {"every": 3, "keep": 2, "export": False},
            "logging": {"every": 2, "tensorboard": False, "batches": True},
            "engine": {"precision": "fp32", "zero_stage": 1, "timeout_minutes": PATIENCE_MINUTES},
        }
        for name, value in sections.items():
            before = tree.get(name)
            merged = isinstance(before, dict) and isinstance(value, dict)
            tree[name] = {**before, **value} if merged else value  # type: ignore[dict-item]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        path = run_dir.with_suffix(".yaml")
        path.write_text(yaml.safe_dump(tree))
        return path


def write_documents(prefix: Path, num_documents: int, seed: int) -> IndexedDataset:
    """Write documents that a model can learn: random walks over tokens, of skewed lengths."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(3.2, 0.9, num_documents).astype(int), 2, 180)
    with IndexedDatasetBuilder(prefix, dtype=np.uint16, vocab_size=VOCAB) as builder:
        for length in lengths:
            steps = random.choice([0, 1, 2], size=length, p=[0.2, 0.6, 0.2])
            tokens = (random.integers(VOCAB) + steps.cumsum()) % VOCAB
            builder.add_document(tokens.astype(np.uint16))
        builder.finalize()
    return IndexedDataset(prefix)


def make_corpus(directory: Path) -> Corpus:
    for name, count in (("train", 700), ("valid", 60)):
        dataset = write_documents(directory / name, count, seed=count)
        index = pack(dataset.document_lengths, "bucket", buckets=BUCKETS)
        index.save(f"{directory / name}.samples", source=dataset)
    return Corpus(directory)


def noisy_blend(folder: Path, *, num_steps: int, begin: int, noise: int) -> Path:
    """Write a manifest of one ordered source: walks, ``noise`` steps of noise, walks."""
    random = np.random.default_rng(3)
    with IndexedDatasetBuilder(folder / "web", np.uint16, vocab_size=VOCAB) as builder:
        for i in range(num_steps * PER_STEP):
            if begin <= i // PER_STEP < begin + noise:
                tokens = random.integers(0, VOCAB, ROW)
            else:
                walk = random.choice([0, 1, 2], ROW, p=[0.1, 0.8, 0.1]).cumsum()
                tokens = (random.integers(VOCAB) + walk) % VOCAB
            builder.add_document(tokens.astype(np.uint16))
    pack([ROW] * (num_steps * PER_STEP), buckets=[ROW]).save(folder / "web.samples")
    np.save(folder / "scores.npy", np.arange(num_steps * PER_STEP, dtype=np.float64))
    source = {"prefix": "web", "index": "web.samples", "scores": "scores.npy", "name": "web"}
    (folder / "blend.yaml").write_text(yaml.safe_dump({"sources": [source]}))
    return folder / "blend.yaml"


def write_blend(path: Path, corpus: Corpus, **more: object) -> Path:
    """Write a manifest of two sources of equal weight, each with held-out documents."""
    pairs = {"web": (corpus.train, corpus.valid), "math": (corpus.valid, corpus.train)}
    sources = [
        {
            "name": name,
            "prefix": str(prefix),
            "index": f"{prefix}.samples",
            "weight": 1,
            "valid_prefix": str(held_out),
            "valid_index": f"{held_out}.samples",
        }
        for name, (prefix, held_out) in pairs.items()
    ]
    path.write_text(yaml.safe_dump({"sources": sources, **more}))
    return path


def drawn_from(blend: Path) -> dict[str, object]:
    """Return the section ``data`` of a run of a blend."""
    return {"prefix": None, "index": None, "valid_prefix": None, "blend": str(blend)}


def blend_config(path: Path, corpus: Corpus, run_dir: Path, **sections: object) -> Path:
    return corpus.config(run_dir, data=drawn_from(path), **sections)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


class Run:
    """A run of launch/pretrain.py: configuration, ranks, files."""

    def __init__(self, zygote: Zygote, folder: Path, config: Path) -> None:
        self.zygote, self.dir, self.config = zygote, folder, config
        self._num_starts = 0

    def start(
        self,
        *overrides: str,
        ranks: int = 2,
        words: Sequence[str] = (),
        faults: dict[int, dict[str, list[Any]]] | None = None,
        launcher: bool = True,
        **more: Any,
    ) -> Ranks:
        """Start ranks, some with faults of sabotage.py; without ``launcher``, one plain process.
        ``more``: see ``Zygote.start``."""
        argv = [str(PRETRAIN), "--config", str(self.config), *words]
        for override in overrides:
            argv += ["--set", override]
        self._num_starts += 1
        log = self.config.with_name(f"{self.dir.name}-{self._num_starts}.log")
        of_rank: dict[int, Any] = {rank: {"faults": f} for rank, f in (faults or {}).items()}
        if not launcher:
            ranks, of_rank = 1, {0: {"env": {}}}
        return self.zygote.start(argv, ranks, log, of_rank, **more)

    def succeed(self, *overrides: str, **more: Any) -> str:
        """Start, require success, return the output."""
        return self.start(*overrides, **more).succeed()

    def worker(
        self, ranks: int, name: str = "gradient_worker", more: Sequence[str] = (), env: Any = None
    ) -> dict[Any, Any]:
        """Run a script of this folder on ranks; return the results that it saves."""
        import torch  # noqa: PLC0415

        out = self.config.with_suffix(".pt")
        argv = [str(Path(__file__).with_name(f"{name}.py")), str(self.config), str(out), *more]
        self.zygote.start(argv, ranks, self.config.with_suffix(".log"), env=env).succeed()
        results: dict[Any, Any] = torch.load(out)
        return results

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of NAME.jsonl."""
        return list(read_jsonl(self.dir / f"{name}.jsonl"))

    @property
    def log(self) -> list[dict[str, Any]]:
        return self.lines("log")

    @property
    def end(self) -> dict[str, Any]:
        """Content of ``end.json``."""
        tree: dict[str, Any] = json.loads((self.dir / "end.json").read_text())
        return tree

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    def tags(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("step_*"))

    @property
    def latest(self) -> str:
        return (self.checkpoints / "latest").read_text()


NewRun = Callable[..., Run]


def _runs_in(folder: Path, zygote: Zygote, corpus: Corpus) -> NewRun:
    def make(name: str = "run", **sections: object) -> Run:
        config = corpus.config(folder / name, **sections)
        return Run(zygote, folder / name, config)

    return make


@pytest.fixture
def new_run(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> NewRun:
    """``new_run(NAME, **sections)``: a run on the corpus, in a new folder."""
    return _runs_in(tmp_path, zygote, corpus)


@pytest.fixture(scope="module")
def module_run(zygote: Zygote, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> NewRun:
    """Return a function like ``new_run``, for runs that the tests of a module share."""
    return _runs_in(tmp_path_factory.mktemp("module"), zygote, corpus)


@pytest.fixture
def blend(corpus: Corpus, tmp_path: Path) -> Path:
    return write_blend(tmp_path / "blend.yaml", corpus)
