"""One rank of a run that is not started: the script's own flags, datasets and loaders, no GPU.

The script runs in this process with a process group that only knows its size (torch's "fake"
backend) and with a ``pretrain()`` that draws micro batches instead of training.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megapack.errors import ConfigError
from megapack.integrations.megatron.dataset import PackedGPTDataset
from megapack.integrations.megatron.host import HOST
from megapack.integrations.megatron.swap import OwnGetBatch, install

__all__ = ["Drawn", "RankLayout", "RankPlace", "RankReport", "draw_rank"]

SHOWN_DOCUMENTS = 3
SHOWN_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """How many ranks, along each axis."""

    data: int
    tensor: int
    pipeline: int
    context: int

    @property
    def size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        return f"DP {self.data} x TP {self.tensor} x PP {self.pipeline} x CP {self.context}"


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """A rank that reads data: the first of its tensor-parallel group."""

    data: int
    pipeline: int = 0
    context: int = 0


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A micro batch of one rank. Counts are of tokens and segments, padding not among them."""

    step: int
    """Iteration, from 0."""
    rows: tuple[int, ...]
    capacity: int
    segments: int
    longest: int
    """max_seqlen."""
    labels: int
    padding: int


@dataclass(kw_only=True)
class RankReport:
    """What one rank would read."""

    host: str = HOST
    row: int = 0
    block: int = 0
    num_rows: dict[str, int] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    """The first of them, as text where the run's tokenizer can decode."""


def draw_rank(
    world: RankLayout,
    place: RankPlace,
    script: str,
    arguments: list[str],
    *,
    steps: int,
    own_get_batch: OwnGetBatch = "auto",
) -> RankReport:
    """Run the script as this rank until it would train, and draw the first steps.

    A process can do it once: Megatron keeps its arguments and groups for good.

    Raises:
        ConfigError: flags, a manifest or sizes that do not go together.
        MegapackError, OSError: data that cannot be read.
        SystemExit: the script's own parser refuses its arguments.
    """
    report = RankReport()

    def pretrain(*given: Any, **named: Any) -> None:
        provider = _provider(given, named)
        args = _arguments(named)
        _place_in(world, place, args)
        _draw(provider, args, steps, report)

    rank = _begin(world, place, arguments)
    training: Any = importlib.import_module("megatron.training")
    training.pretrain = pretrain
    install(own_get_batch=own_get_batch)
    sizes = {
        "--tensor-model-parallel-size": world.tensor,
        "--pipeline-model-parallel-size": world.pipeline,
        "--context-parallel-size": world.context,
    }
    sys.argv = [script, *arguments, *(str(part) for pair in sizes.items() for part in pair)]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")
    if not report.num_rows:
        raise ConfigError(f"{script} has not called pretrain() of megatron.training on rank {rank}")
    return report


def _begin(world: RankLayout, place: RankPlace, arguments: list[str]) -> int:
    """The environment and the process group of the rank; its number."""
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    inner, outer, size = place.data, place.pipeline, world.data
    if "--use-tp-pp-dp-mapping" in arguments:
        inner, outer, size = place.pipeline, place.data, world.pipeline
    rank = world.tensor * (place.context + world.context * (inner + size * outer))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": "0"}
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=world.size)
    if not torch.cuda.is_available():  # validate_args() asks which GPU it is, for fp8 and streams
        gpu = SimpleNamespace(major=9, minor=0)
        cuda: Any = torch.cuda
        cuda.get_device_capability = lambda *_: (gpu.major, gpu.minor)
        cuda.get_device_properties = lambda *_: gpu
    return rank


def _provider(given: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
    """The script's function that builds datasets: pretrain()'s first argument that is one."""
    found = named.get("train_valid_test_dataset_provider")
    for value in given:
        if found is None and hasattr(value, "__code__"):
            found = value
    if found is None:
        raise ConfigError("the script gives pretrain() no function that builds its datasets")
    return found  # type: ignore[no-any-return]


def _arguments(named: dict[str, Any]) -> Any:
    """Of the script, parsed by its own parser: before pretrain() from 0.18 on, else in it."""
    variables = importlib.import_module("megatron.training.global_vars")
    if variables._GLOBAL_ARGS is None:
        parser = importlib.import_module("megatron.training.arguments")
        args = parser.parse_args(named.get("extra_args_provider"))
        parser.validate_args(args, named.get("args_defaults", {}))
        variables.set_global_variables(args)
    return variables.get_args()


def _place_in(world: RankLayout, place: RankPlace, args: Any) -> None:
    state = importlib.import_module("megatron.core.parallel_state")
    mapped = getattr(args, "use_tp_pp_dp_mapping", False)
    state.initialize_model_parallel(
        world.tensor,
        world.pipeline,
        context_parallel_size=world.context,
        order="tp-cp-ep-pp-dp" if mapped else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    found = RankPlace(
        data=state.get_data_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
        context=state.get_context_parallel_rank(),
    )
    if found != place or state.get_tensor_model_parallel_rank():
        raise ConfigError(f"{HOST} puts the rank at {found}, and it was meant to be {place}")


def _draw(provider: Callable[..., Any], args: Any, steps: int, report: RankReport) -> None:
    training = importlib.import_module("megatron.training.training")
    samplers = importlib.import_module("megatron.training.datasets.data_samplers")
    counts = importlib.import_module("megatron.core.num_microbatches_calculator")
    training.update_train_iters(args)
    args.num_workers = 0  # the same rows, and nobody to wait for
    train, valid, test = provider(training.get_train_valid_test_num_samples())
    for name, part in (("train", train), ("valid", valid), ("test", test)):
        parts = part if isinstance(part, list) else [part]
        report.num_rows[name] = sum(len(one) for one in parts if one is not None)
    if train is None:
        return
    if not isinstance(train, PackedGPTDataset) or train.rows is None:
        raise ConfigError(
            f"the script trains on {type(train).__name__}, not on packed rows: leave out "
            "--mock-data and --fim-data, and give --data-path and a --split with training data"
        )
    report.row, report.block = args.seq_length, train.rows.options.rows_per_block
    loader = samplers.build_pretraining_data_loader(train, 0)
    pairs = zip(iter(loader.batch_sampler), loader, strict=False)
    consumed = 0
    for step in range(min(steps, args.train_iters)):
        counts.update_num_microbatches(consumed, consistency_check=True)
        for _ in range(counts.get_num_microbatches()):
            numbers, batch = next(pairs)
            report.drawn.append(_measure(step, train, numbers, batch))
        consumed += counts.get_current_global_batch_size()
    report.documents = list(_first_documents(train, report.drawn[0].rows[0]))


def _measure(step: int, train: Any, numbers: list[int], batch: dict[str, Any]) -> Drawn:
    samples = [segments for i in numbers for _, segments in train.rows.segments_of(i)]
    lengths = [length for segments in samples for _, _, length in segments]
    return Drawn(
        step=step,
        rows=tuple(int(i) for i in numbers),
        capacity=batch["tokens"].numel() // len(samples),
        segments=len(lengths),
        longest=int(batch["max_seqlen"].max()),
        labels=int(batch["loss_mask"].sum()),
        padding=batch["tokens"].numel() - sum(lengths),
    )


def _first_documents(train: Any, row: int) -> Iterator[str]:
    """How the first segments of a row begin."""
    tokenizer = importlib.import_module("megatron.training").get_tokenizer()
    samples, rows = train.rows.packed.samples, train.rows
    bounds, tokens = rows[row]["cu_seqlens"].tolist(), train[row]["tokens"]
    if "cu_seqlens_padded" in rows[row]:
        bounds = rows[row]["cu_seqlens_padded"].tolist()
    source, segments = rows.segments_of(row)[0]
    for at, (document, begin, length) in list(zip(bounds, segments, strict=False))[
        :SHOWN_DOCUMENTS
    ]:
        ids = tokens[at : at + min(length, SHOWN_TOKENS)].tolist()
        try:
            text = repr(tokenizer.detokenize(ids))
        except Exception:  # whatever a tokenizer that cannot decode raises
            text = f"tokens {ids}"
        place = f"{samples.names[source]}, document {document}, tokens {begin} to {begin + length}"
        yield f"{place}: {text}"
