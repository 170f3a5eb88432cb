"""megapack-build trace says of every rank what the sampler and the loader of the run deal to it."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import peer

from megapack import IndexedDataset, IndexedDatasetBuilder, SampleIndex, pack
from megapack.cli.main import main
from megapack.errors import ConfigError

peer("torch")  # which megapack.data needs

NAMES = ("web", "code")
BUCKETS = [32, 64, 128]
NUM_STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, and a blend of them with loss weights and stages."""
    folder = tmp_path_factory.mktemp("runs")
    for place, name in enumerate(NAMES):
        with IndexedDatasetBuilder(folder / name, dtype="uint16", vocab_size=64) as builder:
            for number in range(150):
                builder.add_document([(number + i) % 64 for i in range(3 + number * 29 % 121)])
        dataset = IndexedDataset(folder / name)
        index = pack(dataset.document_lengths, "bucket", buckets=BUCKETS, seed=place)
        index.save(folder / f"{name}.samples", source=dataset)
    sources = [
        {"name": name, "prefix": name, "index": f"{name}.samples", "weight": weight}
        for name, weight in zip(NAMES, (2, 1), strict=True)
    ]
    sources[1]["loss_weight"] = 3.0
    stages = [
        {"from_step": 5, "weights": {"code": 1}, "order": "shrink-p2", "attention_window": 24},
        {"from_step": 11, "weights": {"web": 1, "code": 1}, "tokens_per_step": 1024},
        {"from_step": 14, "skip_steps": 2},
    ]
    (folder / "plain.yaml").write_text(yaml.safe_dump({"sources": sources}))
    (folder / "staged.yaml").write_text(yaml.safe_dump({"sources": sources, "stages": stages}))
    return folder


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """A configuration of megapack-pretrain without paths, and how many ranks it has."""
    mixed, size = draw(st.booleans()), draw(st.sampled_from([1, 2, 4]))
    data = {
        "attention": draw(st.sampled_from(["document", "sample"])),
        "labels": draw(st.sampled_from(["document", "sample"])),
        "positions": draw(st.sampled_from(["segment", "document", "sample"])),
        "order": draw(st.sampled_from(["proportional", "uniform", "grow-p2", "sequential"])),
        "uneven": draw(st.sampled_from(["error", "pad"])),
        "tokens_per_step": 512,
        "micro_batch_tokens": draw(st.sampled_from([128, 128 // size])),
        **({"mix": "micro_step", "micro_step_tokens": 256} if mixed else {}),
    }
    return {
        "source": draw(st.sampled_from(["one", "plain.yaml", "staged.yaml"])),
        "ranks": size * draw(st.sampled_from([1, 1, 2, 3])),
        "step": draw(st.integers(0, NUM_STEPS - 1)),
        "tree": {
            "run_dir": "run",
            "seed": draw(st.integers(0, 3)),
            "num_steps": NUM_STEPS,
            "model": {"preset": "llama_tiny"},
            "data": data,
            "engine": {"sequence_parallel_size": size},
        },
    }


def trained_on(folder: Path, run: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(rank, micro step, sample id) of a step, as ``build_loader`` has them, told every option."""
    from megapack.data import (  # noqa: PLC0415
        PackedDataset,
        Schedule,
        build_loader,
        load_blend,
        open_blend,
    )

    tree, data = run["tree"], dict(run["tree"]["data"])
    options = {name: data.pop(name) for name in ("attention", "labels", "positions")}
    dealing = {name: data.pop(name) for name in ("uneven", "micro_batch_tokens")}
    if run["source"] == "one":
        packed = PackedDataset(str(folder / "web"), str(folder / "web.samples"), **options)
    else:
        packed = open_blend(load_blend(folder / run["source"]), **options)
    schedule = Schedule(packed, seed=tree["seed"], **data)
    found = []
    for rank in range(run["ranks"]):
        loader = build_loader(
            packed,
            schedule,
            data_parallel_rank=rank,
            data_parallel_size=run["ranks"],
            start_step=run["step"],
            num_steps=1,
            sequence_parallel_size=tree["engine"]["sequence_parallel_size"],
            weighted_loss=True,
            prefetch=0,
            **dealing,
        )
        for batch in loader:
            run["labels"] = batch["num_step_label_tokens"]
            found += [(rank, batch["micro_step"], i) for i in batch["sample_ids"].tolist()]
    return found


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(run=runs())
def test_trace_of_a_rank_is_what_the_run_deals_to_it(folder: Path, run: dict[str, Any]) -> None:
    paths = {"prefix": str(folder / "web"), "index": str(folder / "web.samples")}
    if run["source"] != "one":
        paths = {"blend": str(folder / run["source"])}
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump({**run["tree"], "data": {**run["tree"]["data"], **paths}}))
    words = ["trace", str(config), "--step", str(run["step"]), "--ranks", str(run["ranks"])]
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        status = main([*words, "--json"])
    try:
        expected = trained_on(folder, run)
    except ConfigError:
        assert status == 2, "the run refuses what trace answers"
        return
    assert status == 0, errors.getvalue()
    answer = json.loads(said.getvalue())
    web = SampleIndex.load(folder / "web.samples").num_samples
    found = [
        (s["rank"], s["micro_step"], s["sample"] + (web if s["source"] == "code" else 0))
        for s in answer["samples"]
    ]
    assert found == expected
    assert answer["num_label_tokens"] == run["labels"]
