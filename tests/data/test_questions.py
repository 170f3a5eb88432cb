"""Queries about a run, answered without computing all its steps."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import printed
from hypothesis import given
from hypothesis import strategies as st

from megapack import _core
from megapack.cli.main import main
from megapack.data import Schedule, Stage, load_blend, open_blend
from megapack.errors import ConfigError
from megapack.packing import SampleIndex
from tests.data.corpora import (
    packed_documents,
    packed_index,
    packed_lengths,
    random_documents,
    samples_of_buckets,
)
from tests.data.test_programs import check_steps_of


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_permutation_has_an_inverse(size: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 1))
    whole = _core.permute_range(key, size, 0, size)
    assert _core.permute_range(key, size, first, size - first).tolist() == whole[first:].tolist()
    assert _core.permute_inverse(key, size, whole).tolist() == [*range(size)]


@pytest.mark.parametrize("order", ["proportional", "grow-p2", "sequential"])
@pytest.mark.parametrize(("window", "skip"), [(1, 0), (3, 4)])
def test_windows_and_micro_steps_are_inverted(order: str, window: int, skip: int) -> None:
    indices = [samples_of_buckets({4: 9, 8: 30, 16: 3}), samples_of_buckets({8: 7})]
    how = {"tokens_per_step": 64, "mix": "micro_step", "micro_step_tokens": 32}
    how |= {"order": order, "cost_window": window}
    stages = [Stage(from_step=5, skip_steps=skip)]
    check_steps_of(Schedule(indices, weights=[1, 2], stages=stages, **how), 33)


def test_every_sample_of_a_document_is_found() -> None:
    indices = [packed_index(300, (16, 32)), packed_index(200, (16, 32), 1)]
    schedule = Schedule(indices, tokens_per_step=64)
    held: dict[tuple[int, int], set[int]] = defaultdict(set)
    for sample in range(schedule.samples.num_samples):
        source, segments = schedule.samples.segments(sample)
        for document, _, _ in segments:
            held[source, document].add(sample)
    for (source, document), samples in held.items():
        assert schedule.samples.samples_of(source, document) == sorted(samples)
    assert any(len(samples) > 1 for samples in held.values())
    for document in (10**6, -1):
        with pytest.raises(ConfigError, match=rf"document {document} of .* counted from 0"):
            schedule.samples.samples_of(0, document)


@pytest.fixture
def run_of(tmp_path: Path) -> Any:
    """Return the configuration of a run over one source, and the additions to its manifest."""
    packed_documents(tmp_path / "web", random_documents(packed_lengths(400, 32)), [16, 32])
    web = {"name": "web", "prefix": "web", "index": "web.samples", "weight": 1}
    data = {"blend": str(tmp_path / "blend.yaml"), "tokens_per_step": 256, "micro_batch_tokens": 64}
    run = {"run_dir": "run", "seed": 3, "model": {"preset": "llama_tiny"}, "data": data}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))

    def write(*sources: dict[str, Any], stages: Any = ()) -> Schedule:
        tree = {"sources": [web, *sources], "stages": [*stages]}
        (tmp_path / "blend.yaml").write_text(yaml.safe_dump(tree))
        data = open_blend(load_blend(tmp_path / "blend.yaml"))
        return Schedule(data, tokens_per_step=256, seed=3)

    return write


def test_repacked_source(tmp_path: Path, run_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Half an epoch in samples of 16 and 32, the rest in samples of 64: each document once."""
    plain, unseen_file = run_of(), tmp_path / "rest.npy"
    half = plain.num_steps() // 2
    trace = ["trace", str(tmp_path / "run.yaml"), "--unseen", "web", "--max-step", str(half)]
    facts = json.loads(printed(*trace, "--output", unseen_file, "--json"))
    documents = np.load(unseen_file)
    assert facts["documents"] == len(documents) > 100 and facts["passes"] == 0
    packing = ["pack", str(tmp_path / "web"), "--buckets", "64", "--output"]
    target = str(tmp_path / "rest.samples")
    assert main([*packing, target, "--documents", str(unseen_file)]) == 0
    index = SampleIndex.load(target)
    assert set(index.segment_document.tolist()) == set(documents.tolist())
    assert main(["verify", target]) == 0

    other = {"name": "web-64", "prefix": "web", "index": "rest.samples", "weight": 0}
    changed = run_of(other, stages=[{"from_step": half, "weights": {"web-64": 1}}])
    state = plain.state_dict(half)
    assert changed.check_state(state)
    steps = half + changed.stages[1].steps_per_epoch
    seen: set[int] = set()
    for step in range(steps):
        for sample in changed.step(step).sample_ids.tolist():
            source, segments = changed.samples.segments(sample)
            assert source == (step >= half)
            if source:
                assert {d for d, _, _ in segments} <= set(documents.tolist())
            seen |= {d for d, _, _ in segments}
    assert len(seen) == 400  # all, although the run left the first packing within an epoch

    capsys.readouterr()
    assert (
        main([*packing, target, "--documents", str(unseen_file)]) == 0
    )  # the same, without any step taken
    assert "nothing to do" in capsys.readouterr().err
    assert "packed with other documents of this dataset" in printed(*packing, target, status=2)
    assert main([*trace, "--output", str(unseen_file)]) == 0
    assert "it holds something else" in printed(
        *trace[:-1], half - 2, "--output", unseen_file, status=2
    )
    assert main([*trace[:-1], str(half - 2), "--output", str(unseen_file), "--overwrite"]) == 0


def test_missing_documents_and_sources_are_refused(
    tmp_path: Path, run_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of()
    (tmp_path / "list").write_text("400\n")
    monkeypatch.chdir(tmp_path)
    for command, message in (
        ("trace run.yaml --unseen wep --output x", "'wep' is none of the sources web"),
        ("trace run.yaml --unseen web", "writes the documents to a file: give --output"),
        ("pack web --buckets 64 --documents list", "has document 400, and"),
    ):
        assert message in printed(*command.split(), status=2)
