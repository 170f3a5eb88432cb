"""A run whose mix and batch size change while it goes, edited when it resumes."""

from __future__ import annotations

from pathlib import Path

import yaml

from megapack.data import Schedule, load_blend, open_blend
from megapack.training.engine.directory import read_jsonl

from .conftest import Corpus
from .processes import PRETRAIN, Zygote


def _manifest(corpus: Corpus, path: Path, *stages: dict[str, object]) -> Path:
    sources = [
        {"name": name, "prefix": str(prefix), "index": f"{prefix}.samples", "weight": weight}
        for name, prefix, weight in (("web", corpus.train, 1), ("math", corpus.valid, 0))
    ]
    path.write_text(yaml.safe_dump({"sources": sources, "stages": list(stages)}))
    return path


def test_stages_are_edited_at_a_resume(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    grow = {"from_step": 2, "tokens_per_step": 2048, "weights": {"web": 3, "math": 1}}
    manifest = _manifest(corpus, tmp_path / "blend.yaml", grow)
    run_dir = tmp_path / "run"
    data = {"prefix": None, "index": None, "blend": str(manifest)}

    def start(ranks: int, num_steps: int) -> tuple[list[int], str]:
        options = {"num_steps": num_steps, "evaluation": {"buckets": [32, 64, 128]}}
        config = corpus.config(run_dir, data=data, **options)
        started = zygote.start([str(PRETRAIN), "--config", str(config)], ranks, tmp_path / "log")
        return started.wait(), started.output()

    assert start(2, 4)[0] == [0, 0]
    _manifest(corpus, manifest, {**grow, "from_step": 3})
    codes, output = start(1, 6)
    assert codes == [1]
    assert "of the stages before step 4 (the first difference is at 2)" in output
    back = {"from_step": 5, "tokens_per_step": 1024, "weights": {"math": 1}, "skip_steps": 1}
    _manifest(corpus, manifest, grow, back)
    codes, output = start(1, 6)
    assert codes == [0]
    change = "from step 5 on skip_steps was 0 and is 1, tokens_per_step was 2048 and is 1024"
    assert f"the data order is changed: {change}" in output

    log = list(read_jsonl(run_dir / "log.jsonl"))
    assert [line["tokens"] for line in log] == [1024, 1024, 2048, 2048, 2048, 1024]
    first, second = read_jsonl(run_dir / "starts.jsonl")
    assert first["data_order_changes"] == [] and len(first["data_order"]["stages"]) == 1
    assert second["data_order_changes"][0].startswith(change)
    assert len(second["data_order"]["stages"]) == 2
    schedule = Schedule(open_blend(load_blend(manifest)), tokens_per_step=1024)
    found: dict[int, list[int]] = {}
    for path in sorted((run_dir / "batches").glob("rank_*.jsonl")):
        for line in read_jsonl(path):
            found.setdefault(line["step"], []).extend(line["sample_ids"])
    for step in range(6):
        assert sorted(found[step]) == sorted(schedule.step(step).sample_ids.tolist())
    assert (schedule.step(5).sample_ids >= schedule.samples.bases[1]).all()
