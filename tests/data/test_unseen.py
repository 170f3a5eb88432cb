"""What a run has not seen yet, and a source of it in another packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megapack.cli.main import main
from megapack.data import Schedule, load_blend, unseen_documents
from megapack.packing import SampleIndex, pack
from tests.data.corpora import packed_lengths, random_documents, write_documents
from tests.data.test_programs import times_seen


@pytest.fixture
def run_of(tmp_path: Path) -> Any:
    """A configuration of a run over one source, and what adds to its manifest."""
    lengths = packed_lengths(400, 32)
    dataset = write_documents(tmp_path / "web", random_documents(lengths))
    pack(lengths, "bucket", buckets=[16, 32]).save(tmp_path / "web.samples", source=dataset)
    web = {"name": "web", "prefix": "web", "index": "web.samples", "weight": 1}
    data = {
        "blend": str(tmp_path / "blend.yaml"),
        "tokens_per_step": 256,
        "micro_batch_tokens": 64,
    }
    run = {"run_dir": "run", "seed": 3, "model": {"preset": "llama_tiny"}, "data": data}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))

    def write(*sources: dict[str, Any], stages: Any = ()) -> Schedule:
        tree = {"sources": [web, *sources], "stages": [*stages]}
        (tmp_path / "blend.yaml").write_text(yaml.safe_dump(tree))
        return Schedule(load_blend(tmp_path / "blend.yaml").open(), tokens_per_step=256, seed=3)

    return write


def test_a_source_goes_on_in_another_packing(
    tmp_path: Path, run_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half an epoch in samples of 16 and 32, the rest in samples of 64: each document once."""
    plain, rest = run_of(), tmp_path / "rest.npy"
    half = plain.num_steps() // 2
    trace = ["trace", str(tmp_path / "run.yaml"), "--unseen", "web", "--until", str(half)]
    assert main([*trace, "--output", str(rest), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    documents = np.load(rest)
    assert facts["documents"] == len(documents) > 100 and facts["passes"] == 0
    packing = ["pack", str(tmp_path / "web"), "--buckets", "64", "--output"]
    target = str(tmp_path / "rest.samples")
    assert main([*packing, target, "--documents", str(rest)]) == 0
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
    assert len(seen) == 400  # all of them, though the first packing was left in its midst

    capsys.readouterr()
    assert main([*packing, target, "--documents", str(rest)]) == 0  # the same: nothing is done
    assert "nothing to do" in capsys.readouterr().err
    assert main([*packing, target]) == 2  # all documents are another packing
    assert "another" in (text := capsys.readouterr().err) or "other documents" in text
    assert main([*trace, "--output", str(rest)]) == 0
    assert main([*trace[:-1], str(half - 2), "--output", str(rest)]) == 2
    assert "it holds something else" in capsys.readouterr().err
    assert main([*trace[:-1], str(half - 2), "--output", str(rest), "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--unseen", "wep", "--output", "x"], "'wep' is none of the sources web"),
        (["--unseen", "web"], "writes the documents to a file: give --output"),
    ],
)
def test_what_cannot_be_asked(
    tmp_path: Path, run_of: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of()
    assert main(["trace", str(tmp_path / "run.yaml"), *words]) == 2
    assert message in capsys.readouterr().err


def test_documents_to_pack_exist(
    tmp_path: Path, run_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of()
    (tmp_path / "list").write_text("400\n")
    words = ["--buckets", "64", "--documents", str(tmp_path / "list")]
    assert main(["pack", str(tmp_path / "web"), *words]) == 2
    assert "has document 400, and" in capsys.readouterr().err


@pytest.mark.parametrize("skip", [0, 2])
def test_windows_of_cost_may_be_half_done(tmp_path: Path, run_of: Any, skip: int) -> None:
    run_of(stages=[{"from_step": 7, "skip_steps": skip, "attention_window": 8}])
    data = load_blend(tmp_path / "blend.yaml").open()
    schedule = Schedule(data, tokens_per_step=256, cost_window=4)
    for steps in range(30):
        found, passes = unseen_documents(schedule, 0, steps)
        seen = times_seen(schedule, 0, steps)
        assert passes == min(seen.values())
        assert found.tolist() == sorted(d for d in seen if seen[d] == passes)
