"""Runs that are killed, stopped, damaged or moved continue as if nothing had happened."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from megapack.data import Schedule, load_blend, open_blend
from megapack.training.engine.directory import RunDirectory, read_jsonl
from megapack.training.monitoring.heartbeat import LOST_CONTACT
from megapack.training.monitoring.signals import PREEMPTED

from .conftest import Corpus
from .processes import FORKED, PRETRAIN, ROOT, Zygote, read_end, read_log, start_run, wait_for_step

RANKS = 2


def _samples(run_dir: Path) -> dict[int, list[int]]:
    """Step -> the sample ids of all ranks, in order of id."""
    found: dict[int, list[int]] = {}
    for path in sorted((run_dir / "batches").glob("rank_*.jsonl")):
        for line in read_jsonl(path):
            found.setdefault(line["step"], []).extend(line["sample_ids"])
    return {step: sorted(ids) for step, ids in found.items()}


def _same_curve(a: list[dict[str, Any]], b: list[dict[str, Any]], rel: float) -> None:
    assert [line["step"] for line in a] == [line["step"] for line in b]
    for name in ("samples", "bucket", "lr", "label_tokens", "tokens"):
        assert [line[name] for line in a] == [line[name] for line in b], name
    ours, theirs = [line["loss"] for line in a], [line["loss"] for line in b]
    assert ours == pytest.approx(theirs, rel=rel)


@pytest.fixture(scope="module")
def whole(zygote: Zygote, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nobody disturbed; checkpoints at steps 3, 6 and 8."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    config = corpus.config(run_dir, checkpoint={"every": 3, "keep": 3, "export": True})
    start_run(zygote, config, "all").succeed()
    return run_dir


def _copy(whole: Path, tmp_path: Path, corpus: Corpus, *, after: int, **sections: object) -> Path:
    """The run as it stood after some steps, to be continued under a changed configuration."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for path in (run_dir / "checkpoints").glob("step_*"):
        if int(path.name.split("_")[1]) > after:
            shutil.rmtree(path)
    corpus.config(run_dir, **sections)
    return run_dir


def test_all_ranks_have_the_same_bucket_and_no_sample_is_dealt_twice(whole: Path) -> None:
    ranks = [list(read_jsonl(p)) for p in sorted((whole / "batches").glob("rank_*.jsonl"))]
    assert len(ranks) == RANKS
    places = [[(b["step"], b["micro_step"], b["bucket"]) for b in rank] for rank in ranks]
    assert places[0] == places[1]
    log = read_log(whole)
    assert len(log) == 8 and len({line["bucket"] for line in log}) > 1
    assert [line["bucket"] for line in log] == [p[2] for p in places[0] if p[1] == 0]
    for step, ids in _samples(whole).items():
        assert len(set(ids)) == len(ids), f"step {step} deals a sample twice"
        assert len(ids) * log[step]["capacity"] == log[step]["tokens"]
    assert log[0]["capacity"] == 128, "the largest bucket comes first"
    assert log[-1]["loss"] < log[0]["loss"] - 0.1


def test_killed_run_continues(zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, checkpoint={"asynchronous": False})  # there before the kill
    ranks = start_run(zygote, config, "killed", of_rank={1: {"faults": {"kill_before_step": [4]}}})
    assert ranks.wait() == [LOST_CONTACT, -signal.SIGKILL]
    assert "lost contact to rank 1 on " in ranks.output()
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_00000003_tokens_3072"
    # What a kill in the middle of saving would leave behind.
    (run_dir / "checkpoints" / "step_00000006.partial").mkdir()
    late = {0: {"faults": {"slow_record": [0.5]}}}  # and the other rank waits for it
    alone = "data.check_ranks_every=0"  # which would wait, too
    output = start_run(zygote, config, "resumed", alone, of_rank=late).succeed()
    assert "continuing at step 3 from step_00000003_tokens_3072" in output
    _same_curve(read_log(run_dir), read_log(whole), rel=1e-9)
    assert _samples(run_dir) == _samples(whole)
    assert sorted(p.name for p in (run_dir / "checkpoints").glob("step_*")) == [
        "step_00000006_tokens_6144",
        "step_00000008_tokens_8192",
    ], "keep=2 keeps two, and nothing half-written"


@pytest.mark.parametrize(("ranks", "stage"), [(3, 1), (2, 2)])
def test_another_number_of_ranks_or_zero_stage_continues_the_same_curve(
    zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path, ranks: int, stage: int
) -> None:
    run_dir = _copy(whole, tmp_path, corpus, after=6, engine={"zero_stage": stage})
    config = run_dir.with_suffix(".yaml")
    # Three ranks do not divide the four micro batches of a step.
    output = start_run(zygote, config, "moved", "data.uneven=pad", ranks=ranks).succeed()
    assert "written by 2 ranks with ZeRO-1" in output
    _same_curve(read_log(run_dir), read_log(whole), rel=2e-3)
    last, positions = read_log(run_dir)[-1], 1536 if ranks == 3 else 1024  # of six micro batches
    assert last["padding"] == pytest.approx(1 - last["useful_tokens"] / positions)
    assert _samples(run_dir) == _samples(whole)
    leftovers = [p.name for p in (run_dir / "checkpoints").iterdir() if "universal" in p.name]
    assert not leftovers


@pytest.mark.parametrize("stage", [0, 3])
def test_without_zero_and_with_zero_3_the_number_of_ranks_may_change_too(
    zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path, stage: int
) -> None:
    run_dir = tmp_path / "run"
    export = {"every": 6, "keep": 2, "export": stage == 3}
    config = corpus.config(run_dir, engine={"zero_stage": stage}, checkpoint=export)
    start_run(zygote, config, "whole").succeed()
    _same_curve(read_log(run_dir), read_log(whole), rel=2e-3)
    ours, theirs = (next(read_jsonl(d / "evaluation.jsonl")) for d in (run_dir, whole))
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=5e-3)
    assert ours["label_tokens"] == theirs["label_tokens"]
    if stage == 3:  # gathered from all ranks
        ours = load_file(run_dir / "model" / "model.safetensors")
        theirs = load_file(whole / "model" / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[n], theirs[n], atol=2e-3) for n in theirs)
    shutil.rmtree(run_dir / "checkpoints" / "step_00000008_tokens_8192")
    alone = read_log(run_dir)
    start_run(zygote, config, "moved", "checkpoint.export=false", ranks=1).succeed()
    _same_curve(read_log(run_dir), alone, rel=1e-6)
    ranks = start_run(zygote, config, "refused", "engine.zero_stage=1")
    assert ranks.wait() == [1, 1]
    assert f"written with ZeRO-{stage} and this run has ZeRO-1" in ranks.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_and_leaves_with_the_known_code(
    zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, checkpoint={"every": None, "export": False})
    ranks = start_run(zygote, config, "stopped", "num_steps=100000")
    wait_for_step(run_dir, 1)
    ranks.signal(number, [1])
    assert ranks.wait() == [PREEMPTED] * RANKS, ranks.output()
    assert f"megapack: {number.name}: saving after this step" in ranks.output()
    end = read_end(run_dir)
    assert end["reason"] == "signal" and 2 <= end["step"] < 100000
    assert len(read_log(run_dir)) == end["step"], "all steps that were done are in the log"
    if number == signal.SIGTERM and end["step"] < 8:
        start_run(zygote, config, "resumed").succeed()
        # The learning rate of the first steps was that of a longer run.
        ours, theirs = read_log(run_dir), read_log(whole)
        assert [line["samples"] for line in ours] == [line["samples"] for line in theirs]


def test_a_validation_that_a_signal_left_out_is_made_up(
    zygote: Zygote, corpus: Corpus, tmp_path: Path
) -> None:
    """A run that is told to stop saves at once, also where a validation is due."""
    config = corpus.config(tmp_path / "run", evaluation={"every": 4, "max_tokens": 256})
    path = tmp_path / "run" / "evaluation.jsonl"
    start_run(zygote, config, "begun", "stop_at=4", ranks=1).succeed()
    (before,) = read_jsonl(path)
    path.unlink()
    for name in ("resumed", "again"):
        start_run(zygote, config, name, ranks=1).succeed()
        found = list(read_jsonl(path))
        assert [line["step"] for line in found] == [4, 8] and found[0] == before


def test_damage_is_named(zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    run_dir = _copy(whole, tmp_path, corpus, after=8)
    config = run_dir.with_suffix(".yaml")
    newest = run_dir / "checkpoints" / "step_00000008_tokens_8192"
    shard = next(newest.glob("*rank_1*optim_states.pt"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    manifest = newest / "manifest.json"
    sound = manifest.read_text()
    manifest.write_text(sound.replace('"step": 8,\n   "order', '"step": 7,\n   "order'))
    ranks = start_run(zygote, config, "moved")
    assert ranks.wait() == [1, 1] and "manifest.json is damaged: its state" in ranks.output()
    manifest.write_text(sound)
    shard.write_bytes(data)

    ranks = start_run(zygote, config, "refused")
    assert ranks.wait() == [1, 1]
    assert f"{shard.name} has another checksum" in ranks.output()
    assert "checkpoint.fallback=true" in ranks.output()
    assert "Traceback" not in ranks.output()

    shard.unlink()
    middle = run_dir / "checkpoints" / "step_00000006_tokens_6144"
    manifest = middle / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    output = start_run(zygote, config, "fallback", "checkpoint.fallback=true").succeed()
    assert f"{shard.name} is missing" in output
    assert "manifest.json cannot be read" in output
    assert "continuing at step 3" in output
    _same_curve(read_log(run_dir), read_log(whole), rel=1e-9)
    assert (run_dir / "checkpoints" / f"{newest.name}.damaged").is_dir(), "nothing is deleted"
    ranks = start_run(zygote, config, "never", "checkpoint.resume=never")
    assert ranks.wait() == [2, 2]
    assert "has checkpoints and checkpoint.resume is never" in ranks.output()


def test_other_order_is_refused(
    zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:
    run_dir = _copy(whole, tmp_path, corpus, after=6, seed=5)
    config = run_dir.with_suffix(".yaml")
    ranks = start_run(zygote, config, "refused")
    assert ranks.wait() == [1, 1]
    assert "seed was 0 and is 5" in ranks.output()
    allow = "checkpoint.allow_change=[seed]"
    output = start_run(zygote, config, "allowed", allow).succeed()
    assert "continuing at step 6" in output
    assert output.count("the data order is changed") == 1, "every rank says so"
    ours, theirs = read_log(run_dir), read_log(whole)
    assert [line["samples"] for line in ours[:6]] == [line["samples"] for line in theirs[:6]]
    assert ours[6]["samples"] != theirs[6]["samples"]


@pytest.mark.parametrize("changed", [{"weight_decay": 50.0}, {"clip": 0.001}], ids=str)
def test_optimizer_is_that_of_the_configuration_after_a_resume_too(
    zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path, changed: dict[str, float]
) -> None:
    """Its state brings those of the run that saved it along."""
    run_dir = _copy(whole, tmp_path, corpus, after=6, optimizer=changed)
    start_run(zygote, run_dir.with_suffix(".yaml"), "changed").succeed()
    ours, theirs = read_log(run_dir), read_log(whole)
    assert ours[6]["loss"] == pytest.approx(theirs[6]["loss"], rel=1e-9), "before an update"
    assert ours[7]["loss"] != pytest.approx(theirs[7]["loss"], rel=1e-5)


def test_nan_loss_ends_the_run(zygote: Zygote, corpus: Corpus, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    clip = {"lr": 1e9, "clip": 0.0}
    config = corpus.config(run_dir, optimizer=clip, num_steps=40, learning_rate={"warmup_steps": 0})
    ranks = start_run(zygote, config, "nan")
    assert ranks.wait() == [1, 1], ranks.output()[-3000:]
    assert "is not a number; everything from here on would be lost time" in ranks.output()
    log = read_log(run_dir)
    assert log[0]["loss"] > 0 and log[-1]["loss"] is None


def test_other_model_is_refused(
    zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:
    model = {"preset": "llama_tiny", "overrides": {"num_hidden_layers": 3}}
    run_dir = _copy(whole, tmp_path, corpus, after=6, model=model)
    ranks = start_run(zygote, run_dir.with_suffix(".yaml"), "refused")
    assert ranks.wait() == [1, 1]
    assert "does not fit this run" in ranks.output()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.lr", "0.1", "optimizer.lr is 0.1 on .*, 0.003 on the first rank"),
        ("data.index", "valid.samples", "indices is .* on rank 1 and .* on the other 1"),
    ],
)
def test_ranks_that_differ_stop(
    zygote: Zygote, corpus: Corpus, tmp_path: Path, key: str, value: str, message: str
) -> None:
    config = corpus.config(tmp_path / "run")
    words = [f"{key}={value}"]
    if key == "data.index":  # files may lie elsewhere on another node, and hold the same
        words = [f"{key}={corpus.directory / value}", f"data.prefix={corpus.valid}"]
    other = [str(PRETRAIN), "--config", str(config)]
    for word in words:
        other += ["--set", word]
    ranks = start_run(zygote, config, "mixed", of_rank={1: {"argv": other}})
    assert all(code != 0 for code in ranks.wait())
    assert re.search(message, ranks.output()), ranks.output()[-2000:]


def test_a_resumed_run_keeps_the_evaluations_of_the_steps_it_keeps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.batches.mkdir()
    for path in (run.log, run.evaluation, run.batches / "rank_00000.jsonl"):
        # An evaluation after step 2 stands at step 3: as many tokens are seen.
        shift = 0 if path == run.evaluation else 1
        lines = ({"step": i, "tokens_seen": 100 * (i + shift)} for i in range(6))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.forget_after(300)
    assert [line["step"] for line in read_jsonl(run.log)] == [0, 1, 2]
    assert [line["step"] for line in read_jsonl(run.evaluation)] == [0, 1, 2, 3]
    assert len(list(read_jsonl(run.batches / "rank_00000.jsonl"))) == 3


def test_checkpoint_is_a_model(zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path) -> None:
    """Checkpoints of two ranks, exported by one."""
    run_dir = _copy(whole, tmp_path, corpus, after=8)
    before = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    export = [str(ROOT / "launch" / "export.py"), str(run_dir), "--output"]
    for step in (3, 8):
        argv = [*export, str(tmp_path / str(step)), "--step", str(step)]
        zygote.start(argv, 1, tmp_path / f"log-{step}").succeed()
    third, last, ended = (
        load_file(directory / "model.safetensors")
        for directory in (tmp_path / "3", tmp_path / "8", whole / "model")
    )
    assert all(torch.equal(last[name], ended[name]) for name in ended)
    assert not any(torch.equal(third[name], ended[name]) for name in ended)
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == before
    assert not list(tmp_path.glob(".export*"))
    refused = zygote.start([*export, str(tmp_path / "x"), "--step", "5"], 1, tmp_path / "log-5")
    assert refused.wait() == [1] and "(steps: 3, 6, 8)" in refused.output()
    refused = zygote.start([*export, str(run_dir)], 1, tmp_path / "log-run")
    assert refused.wait() == [2] and "is there and is no model" in refused.output()
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == before


def test_the_run_directory_says_what_was_run(whole: Path, corpus: Corpus) -> None:
    starts = list(read_jsonl(whole / "starts.jsonl"))
    assert len(starts) == 1
    start = starts[0]
    assert start["world_size"] == 2 and start["attention"]["name"] == "sdpa"
    assert {"python", "torch", "deepspeed", "transformers"} <= set(start["versions"])
    assert start["git"] is None or len(start["git"]["commit"]) == 40
    assert len(start["fingerprints"]["documents"]) == len(start["fingerprints"]["samples"]) == 1
    assert "num_steps: 8" in (whole / "config.yaml").read_text()
    line = read_log(whole)[3]
    assert 0 < line["useful_tokens"] <= line["tokens"] == 1024
    assert line["padding"] == pytest.approx(1 - line["useful_tokens"] / 1024)
    assert 0 <= line["data_wait_share"] < 1 and line["imbalance"] >= 1
    assert line["epoch_end"] > line["epoch"] and line["grad_norm"] > 0
    evaluations = list(read_jsonl(whole / "evaluation.jsonl"))
    assert [e["step"] for e in evaluations] == [8]
    assert evaluations[0]["perplexity"] == pytest.approx(np.exp(evaluations[0]["loss"]))
    assert (whole / "model" / "model.safetensors").exists()


def test_curves_on_a_server_belong_to_one_run_and_not_to_its_folders_name(tmp_path: Path) -> None:
    mine, yours = tmp_path / "mine" / "run", tmp_path / "yours" / "run"
    for path in (mine, yours):
        path.mkdir(parents=True)
    first = RunDirectory(mine).own_id()
    assert RunDirectory(mine).own_id() == first != RunDirectory(yours).own_id()


# ---- torchrun's elastic agent: a lost worker restarts the job, without anybody's help
#
# torch 2.13 gives restarted workers the store of those before, in which gloo finds the addresses of
# the dead; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives them a new one.


@pytest.mark.multiprocess
def test_lost_worker_restarts_the_job(
    zygote: Zygote, corpus: Corpus, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = corpus.config(run_dir, checkpoint={"asynchronous": False})
    torchrun = [FORKED, "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    torchrun += ["--max-restarts", "1", "-m", "megapack.training.pretrain", "--config", str(config)]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    lost = {"env": env, "faults": {"kill_at_first_start": [1, 4]}}
    zygote.start(torchrun, 1, tmp_path / "output", {0: lost}).succeed()
    assert [start["step"] for start in read_jsonl(run_dir / "starts.jsonl")] == [0, 3]
    _same_curve(read_log(run_dir), read_log(whole), rel=1e-4)


# ---- A run whose mix and batch size change while it goes, edited when it resumes


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
