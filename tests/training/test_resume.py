"""Runs that are killed, stopped, damaged or moved resume exactly."""

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

from megapack.config import load_config
from megapack.data import Schedule, load_blend, open_blend
from megapack.data.resume import is_within
from megapack.storage.locks import make_own_folder
from megapack.training.config import PretrainConfig
from megapack.training.engine.directory import RunDirectory, read_jsonl
from megapack.training.engine.inputs import NO_EFFECT
from megapack.training.monitoring.heartbeat import LOST_CONTACT
from megapack.training.monitoring.signals import PREEMPTED

from .conftest import Corpus, NewRun, Run
from .processes import FORKED, PRETRAIN, ROOT, Ranks, not_logged, wait_for_step
from .test_run_record import field_changes

FIRST, MIDDLE, LAST = (f"step_0000000{i}_tokens_{i * 1024}" for i in (3, 6, 8))


def _samples(run: Run) -> dict[int, list[int]]:
    """Return step -> sorted sample ids of all ranks."""
    found: dict[int, list[int]] = {}
    for path in sorted((run.dir / "batches").glob("rank_*.jsonl")):
        for line in read_jsonl(path):
            found.setdefault(line["step"], []).extend(line["sample_ids"])
    return {step: sorted(ids) for step, ids in found.items()}


def _same_curve(run: Run, other: Run | list[dict[str, Any]], rel: float) -> None:
    a, b = run.log, other.log if isinstance(other, Run) else other
    for name in ("step", "samples", "bucket", "lr", "label_tokens", "tokens"):
        assert [line[name] for line in a] == [line[name] for line in b], name
    assert [line["loss"] for line in a] == pytest.approx([line["loss"] for line in b], rel=rel)


@pytest.fixture(scope="module")
def whole(module_run: NewRun) -> Run:
    """An undisturbed run of two ranks; checkpoints at steps 3, 6 and 8."""
    run = module_run(checkpoint={"every": 3, "keep": 3, "export": True})
    run.succeed()
    return run


@pytest.fixture
def copy(new_run: NewRun, whole: Run) -> NewRun:
    """A copy of the run after some steps, to resume with a changed configuration."""

    def make(*, after: int, **sections: object) -> Run:
        run = new_run(**sections)
        shutil.copytree(whole.dir, run.dir)
        for path in run.checkpoints.glob("step_*"):
            if int(path.name.split("_")[1]) > after:
                shutil.rmtree(path)
        return run

    return make


def test_ranks_share_buckets_and_no_sample_repeats(whole: Run) -> None:
    ranks = [list(read_jsonl(p)) for p in sorted((whole.dir / "batches").glob("rank_*.jsonl"))]
    places = [[(b["step"], b["micro_step"], b["bucket"]) for b in rank] for rank in ranks]
    assert len(ranks) == 2 and places[0] == places[1]
    log = whole.log
    assert len(log) == 8 and len({line["bucket"] for line in log}) > 1
    assert [line["bucket"] for line in log] == [p[2] for p in places[0] if p[1] == 0]
    for step, ids in _samples(whole).items():
        assert len(set(ids)) == len(ids), f"step {step} repeats a sample"
        assert len(ids) * log[step]["capacity"] == log[step]["tokens"]
    assert log[0]["capacity"] == 128, "the largest bucket comes first"
    assert log[-1]["loss"] < log[0]["loss"] - 0.1


@pytest.mark.pages
@pytest.mark.parametrize("part", range(4))
def test_keys_without_effect_continue_the_curve(copy: NewRun, whole: Run, part: int) -> None:
    config = load_config(PretrainConfig, whole.config)
    changes = [item for item in field_changes(config) if is_within(item[0], NO_EFFECT)]
    # These are compared as other keys, or end the run elsewhere.
    compared = re.compile("seed|model|data.(tokens|order|row|cost|loss)|num_steps|stop_at")
    changes = [(key, value) for key, _, value in changes if not compared.match(key)]
    assert len(changes) >= 20
    for key, value in changes[part::4]:
        run = copy(after=6)
        shutil.rmtree(run.dir / "model", ignore_errors=True)
        run.start(f"{key}={json.dumps(value)}").succeed("continuing at step 6")
        _same_curve(run, whole, rel=2e-3)
        print(f"{key:40} no effect: the same losses")
        shutil.rmtree(run.dir)


def test_longer_run_reports_the_jump_of_the_learning_rate(copy: NewRun) -> None:
    """Also if the former run was complete."""
    run = copy(after=8, num_steps=20, checkpoint={"export": False})
    shutil.rmtree(run.dir / "model", ignore_errors=True)
    output = run.succeed("stop_at=9")
    assert re.search(r"learning rate of step 8 is 0\.00\d+, and .* would have had 0\.0003:", output)


def test_killed_run_continues(new_run: NewRun, whole: Run) -> None:
    run = new_run(checkpoint={"asynchronous": False})  # complete before the kill
    ranks = run.start(faults={1: {"kill_before_step": [4]}})
    assert ranks.wait() == [LOST_CONTACT, -signal.SIGKILL]
    assert "lost contact with rank 1 on " in ranks.output()
    assert run.latest == FIRST
    # As left by a kill during saving.
    make_own_folder(run.checkpoints / "step_00000006.partial")
    late = {0: {"slow_record": [0.5]}}  # the other rank waits
    alone = "data.check_ranks_every=0"  # it would wait, too
    run.start(alone, faults=late).succeed(f"continuing at step 3 from {FIRST}")
    _same_curve(run, whole, rel=1e-9)
    assert _samples(run) == _samples(whole)
    assert run.tags() == [MIDDLE, LAST], "keep=2 keeps two, and no partial ones"


@pytest.mark.parametrize(("ranks", "stage"), [(3, 1), (2, 2)])
def test_other_ranks_or_zero_stage_continue_the_curve(
    copy: NewRun, whole: Run, ranks: int, stage: int
) -> None:
    run = copy(after=6, engine={"zero_stage": stage})
    # Three ranks do not divide the four micro batches of a step.
    run.start("data.pad_last=true", ranks=ranks).succeed("written by 2 ranks with ZeRO-1")
    _same_curve(run, whole, rel=2e-3)
    last, positions = run.log[-1], 1536 if ranks == 3 else 1024  # six micro batches or four
    assert last["padding"] == pytest.approx(1 - last["useful_tokens"] / positions)
    assert _samples(run) == _samples(whole)
    assert not list(run.checkpoints.glob("*universal*"))


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_may_change_without_zero_and_with_zero_3(
    new_run: NewRun, whole: Run, stage: int
) -> None:
    export = {"every": 6, "keep": 2, "export": stage == 3}
    run = new_run(engine={"zero_stage": stage}, checkpoint=export)
    run.succeed()
    _same_curve(run, whole, rel=2e-3)
    ours, theirs = (one.lines("evaluation")[0] for one in (run, whole))
    assert ours["perplexity"] == pytest.approx(theirs["perplexity"], rel=5e-3)
    assert ours["label_tokens"] == theirs["label_tokens"]
    if stage == 3:  # gathered from all ranks
        ours, theirs = (load_file(one.dir / "model" / "model.safetensors") for one in (run, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.allclose(ours[n], theirs[n], atol=2e-3) for n in theirs)
    shutil.rmtree(run.checkpoints / LAST)
    before = run.log
    run.succeed("checkpoint.export=false", ranks=1)
    _same_curve(run, before, rel=1e-6)
    message = f"written with ZeRO-{stage} and this run has ZeRO-1"
    run.start("engine.zero_stage=1").end_with(1, message)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_to_one_rank_saves_and_exits(
    new_run: NewRun, whole: Run, number: signal.Signals
) -> None:
    run = new_run(checkpoint={"every": None, "export": False})
    slow = {
        rank: {"slow_forward": [0.2]} for rank in range(2)
    }  # so that the run does not pass step 8
    ranks = run.start("num_steps=100000", faults=slow)
    wait_for_step(run.dir, 1)
    ranks.signal(number, [1])
    ranks.end_with(PREEMPTED, f"megapack: {number.name}: saving after this step")
    end = run.end
    assert end["reason"] == "signal" and 2 <= end["step"] < 8
    assert len(run.log) == end["step"], "all steps that were done are in the log"
    if number == signal.SIGTERM:
        run.succeed()
        # The learning rate of the first steps was that of a longer run.
        assert [line["samples"] for line in run.log] == [line["samples"] for line in whole.log]


def test_validation_skipped_by_a_signal_is_done_at_resume(new_run: NewRun) -> None:
    """After a signal the run saves at once, also if validation is due."""
    run = new_run(evaluation={"every": 4, "max_tokens": 256})
    run.succeed("stop_at=4", ranks=1)
    (before,) = run.lines("evaluation")
    (run.dir / "evaluation.jsonl").unlink()
    for _ in range(2):
        run.succeed(ranks=1)
        found = run.lines("evaluation")
        assert [line["step"] for line in found] == [4, 8] and found[0] == before


def test_damage_is_named(copy: NewRun, whole: Run) -> None:
    run = copy(after=8)
    shard = next((run.checkpoints / LAST).glob("*rank_1*optim_states.pt"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    manifest = run.checkpoints / LAST / "manifest.json"
    sound = manifest.read_text()
    manifest.write_text(sound.replace('"step": 8,\n   "order', '"step": 7,\n   "order'))
    run.start().end_with(1, "manifest.json is damaged: its state")
    manifest.write_text(sound)
    shard.write_bytes(data)
    messages = f"{shard.name} has a different checksum", "checkpoint.fallback=true"
    assert "Traceback" not in run.start().end_with(1, *messages)

    shard.unlink()
    manifest = run.checkpoints / MIDDLE / "manifest.json"
    manifest.write_text(manifest.read_text()[:100])
    messages = f"{shard.name} is missing", "manifest.json is not valid JSON"
    run.start("checkpoint.fallback=true").succeed(*messages, "continuing at step 3")
    _same_curve(run, whole, rel=1e-9)
    assert (run.checkpoints / f"{LAST}.damaged").is_dir(), "nothing is deleted"
    never = run.start("checkpoint.resume=never")
    never.end_with(2, "has checkpoints and checkpoint.resume is never")


def test_other_order_is_refused(copy: NewRun, whole: Run) -> None:
    run = copy(after=6, seed=5)
    run.start().end_with(1, "seed was 0 and is 5")
    output = run.start("checkpoint.allow_change=[seed]").succeed("continuing at step 6")
    assert output.count("the data order has changed") == 1, "every rank logs it"
    ours, theirs = ([line["samples"] for line in one.log] for one in (run, whole))
    assert ours[:6] == theirs[:6] and ours[6] != theirs[6]


@pytest.mark.parametrize("changed", [{"weight_decay": 50.0}, {"clip": 0.001}], ids=str)
def test_resumed_optimizer_has_the_configured_settings(
    copy: NewRun, whole: Run, changed: dict[str, float]
) -> None:
    """The saved state contains the settings of the saving run."""
    run = copy(after=6, optimizer=changed)
    [(key, value)] = changed.items()
    run.start(ranks=1).end_with(1, f"optimizer.{key} was ", f" and is {value}")
    run.start("checkpoint.allow_change=[optimizer]").succeed(f"optimizer.{key} was ")
    ours, theirs = run.log, whole.log
    assert ours[6]["loss"] == pytest.approx(theirs[6]["loss"], rel=1e-9), "before an update"
    assert ours[7]["loss"] != pytest.approx(theirs[7]["loss"], rel=1e-5)


def test_nan_loss_ends_the_run(new_run: NewRun) -> None:
    steep = {"optimizer": {"lr": 1e9, "clip": 0.0}, "learning_rate": {"warmup_steps": 0}}
    run = new_run(num_steps=40, **steep)
    run.start().end_with(1, "is not a number; further training would be wasted")
    assert run.log[0]["loss"] > 0 and run.log[-1]["loss"] is None


def test_other_model_is_refused(copy: NewRun) -> None:
    model = {"preset": "llama_tiny", "overrides": {"num_hidden_layers": 3}}
    copy(after=6, model=model).start().end_with(1, "model.num_hidden_layers was 2 and is 3")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.lr", "0.1", "optimizer.lr is 0.1 on .*, 0.003 on the first rank"),
        ("data.index", "valid.samples", "indices is .* on rank 1 and .* on the other 1"),
    ],
)
def test_ranks_with_other_configuration_stop(
    new_run: NewRun, corpus: Corpus, key: str, value: str, message: str
) -> None:
    run = new_run()
    argv = [str(PRETRAIN), "--config", str(run.config)]
    other = [*argv, "--set", f"{key}={value}"]
    if key == "data.index":  # paths may differ between nodes
        other = [*argv, "--set", f"{key}={corpus.directory / value}"]
        other += ["--set", f"data.prefix={corpus.valid}"]
    ranks = run.zygote.start(argv, 2, run.config.with_name("mixed.log"), {1: {"argv": other}})
    assert all(code != 0 for code in ranks.wait())
    assert re.search(message, ranks.output()), ranks.output()[-2000:]


def test_resumed_run_keeps_evaluations_of_kept_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.batches.mkdir()
    for path in (run.log, run.evaluation, run.batches / "rank_00000.jsonl"):
        # An evaluation after step 2 is logged at step 3, with its tokens.
        shift = 0 if path == run.evaluation else 1
        lines = ({"step": i, "tokens_seen": 100 * (i + shift)} for i in range(6))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.truncate_logs(300)
    assert [line["step"] for line in read_jsonl(run.log)] == [0, 1, 2]
    assert [line["step"] for line in read_jsonl(run.evaluation)] == [0, 1, 2, 3]
    assert len(list(read_jsonl(run.batches / "rank_00000.jsonl"))) == 3


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b"3", b"{}", b"[" * 5000], ids=str)
def test_damaged_log_does_not_stop_a_resume(damage: bytes, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    lines = [json.dumps({"step": i, "tokens_seen": 100 * (i + 1)}).encode() for i in range(6)]
    lines[2] = damage
    before = b"\n".join(lines) + b"\n"
    run.log.write_bytes(before)
    [problem] = run.truncate_logs(500)
    assert "line 3 is damaged (1 in all)" in problem
    assert [line["step"] for line in read_jsonl(run.log)] == [0, 1, 3, 4]
    assert (tmp_path / "log.jsonl.damaged").read_bytes() == before, "nothing is lost"
    assert run.truncate_logs(500) == []
    [problem] = run.truncate_logs(800)
    assert "ends at 500 tokens, but the checkpoint was saved at 800" in problem
    run.log.write_bytes(damage + b"\n")
    run.truncate_logs(0)
    assert (tmp_path / "log.jsonl.damaged").read_bytes() == before
    assert (tmp_path / "log.jsonl.damaged1").read_bytes() == damage + b"\n"


def test_unwritable_run_directory_is_refused_before_ranks_connect(
    new_run: NewRun, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    run = new_run()
    output = run.start(f"run_dir={tmp_path / 'file' / 'run'}", ranks=1).end_with(2, "Not a dir")
    assert "Traceback" not in output and len(not_logged(output.splitlines())) == 1
    assert "run_dir is " in output and "--set run_dir=FOLDER" in output


def test_checkpoint_exports_to_a_model(copy: NewRun, whole: Run, tmp_path: Path) -> None:
    """One process exports checkpoints of two ranks."""
    run = copy(after=8)
    before = sorted(p.name for p in run.checkpoints.iterdir())

    def export(*words: str | Path) -> Ranks:
        argv = [str(ROOT / "launch" / "export.py"), str(run.dir), "--output", *map(str, words)]
        return run.zygote.start(argv, 1, tmp_path / f"log{len(list(tmp_path.iterdir()))}")

    for step in ("3", "8"):
        export(tmp_path / step, "--step", step).succeed()
    third, last, ended = (
        load_file(directory / "model.safetensors")
        for directory in (tmp_path / "3", tmp_path / "8", whole.dir / "model")
    )
    assert all(torch.equal(last[name], ended[name]) for name in ended)
    assert not any(torch.equal(third[name], ended[name]) for name in ended)
    assert not list(tmp_path.glob(".export*"))
    export(tmp_path / "x", "--step", "5").end_with(1, "(its steps: 3, 6, 8)")
    other = ("--set", "model.overrides={hidden_act: gelu}")  # the same shapes
    export(tmp_path / "y", *other).end_with(1, "model.hidden_act was 'silu' and is 'gelu'")
    export(run.dir).end_with(2, "exists and has no config.json")
    for manifest in run.dir.glob("checkpoints/*/manifest.json"):
        facts = json.loads(manifest.read_text())
        facts["state"]["run"]["model.tokenizer"] = "a digest"
        manifest.write_text(json.dumps(facts))
    message = "model.tokenizer was 'a digest' and is None"  # another tokenizer of equal size
    export(tmp_path / "z").end_with(1, message)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == before


def test_run_directory_records_the_run(whole: Run) -> None:
    (start,) = whole.lines("starts")
    assert start["world_size"] == 2 and start["attention"]["name"] == "sdpa"
    assert {"python", "torch", "deepspeed", "transformers"} <= set(start["versions"])
    assert start["git"] is None or len(start["git"]["commit"]) == 40
    assert len(start["fingerprints"]["documents"]) == len(start["fingerprints"]["samples"]) == 1
    assert "num_steps: 8" in (whole.dir / "config.yaml").read_text()
    line = whole.log[3]
    assert 0 < line["useful_tokens"] <= line["tokens"] == 1024
    assert line["padding"] == pytest.approx(1 - line["useful_tokens"] / 1024)
    assert 0 <= line["data_wait_share"] < 1 and line["imbalance"] >= 1
    assert line["epoch_end"] > line["epoch"] and line["grad_norm"] > 0
    (evaluation,) = whole.lines("evaluation")
    assert evaluation["step"] == 8
    assert evaluation["perplexity"] == pytest.approx(np.exp(evaluation["loss"]))
    assert (whole.dir / "model" / "model.safetensors").exists()


def test_run_id_does_not_depend_on_the_folder_name(tmp_path: Path) -> None:
    mine, yours = tmp_path / "mine" / "run", tmp_path / "yours" / "run"
    for path in (mine, yours):
        path.mkdir(parents=True)
    first = RunDirectory(mine).create_id()
    assert RunDirectory(mine).create_id() == first != RunDirectory(yours).create_id()


# ---- torchrun's elastic agent restarts a job that lost a worker
#
# torch 2.13 gives restarted workers the former store, in which gloo finds dead addresses;
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives them a new one.


@pytest.mark.multiprocess
def test_lost_worker_restarts_the_job(new_run: NewRun, whole: Run, tmp_path: Path) -> None:
    run = new_run(checkpoint={"asynchronous": False})
    torchrun = [FORKED, "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    torchrun += ["--max-restarts", "1", "-m", "megapack.training.pretrain"]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    lost = {"env": env, "faults": {"kill_at_first_start": [1, 4]}}
    argv = [*torchrun, "--config", str(run.config)]
    run.zygote.start(argv, 1, tmp_path / "output", {0: lost}).succeed()
    assert [start["step"] for start in run.lines("starts")] == [0, 3]
    _same_curve(run, whole, rel=1e-4)


# ---- Mix and batch size change in stages, edited at a resume


def test_stages_are_edited_at_a_resume(new_run: NewRun, corpus: Corpus, tmp_path: Path) -> None:
    manifest = tmp_path / "blend.yaml"
    sources = [
        {"name": name, "prefix": str(prefix), "index": f"{prefix}.samples", "weight": weight}
        for name, prefix, weight in (("web", corpus.train, 1), ("math", corpus.valid, 0))
    ]

    def write(*stages: dict[str, object]) -> None:
        manifest.write_text(yaml.safe_dump({"sources": sources, "stages": list(stages)}))

    grow = {"from_step": 2, "tokens_per_step": 2048, "weights": {"web": 3, "math": 1}}
    write(grow)
    data = {"prefix": None, "index": None, "blend": str(manifest)}
    run = new_run(data=data, evaluation={"buckets": [32, 64, 128]})
    run.succeed("num_steps=4")
    write({**grow, "from_step": 3})
    message = "of the stages before step 4 (the first difference is at 2)"
    run.start("num_steps=6", ranks=1).end_with(1, message)
    back = {"from_step": 5, "tokens_per_step": 1024, "weights": {"math": 1}, "skip_steps": 1}
    write(grow, back)
    change = "skip_steps was 0 and is 1, tokens_per_step was 2048 and is 1024"
    run.start("num_steps=6", ranks=1).succeed("the data order has changed: from step 5 on ", change)

    assert [line["tokens"] for line in run.log] == [1024, 1024, 2048, 2048, 2048, 1024]
    first, second = run.lines("starts")
    assert first["data_order_changes"] == [] and len(first["data_order"]["stages"]) == 1
    assert change in second["data_order_changes"][0]
    assert len(second["data_order"]["stages"]) == 2
    schedule = Schedule(open_blend(load_blend(manifest)), tokens_per_step=1024)
    expected = {step: sorted(schedule.step(step).sample_ids.tolist()) for step in range(6)}
    assert _samples(run) == expected
    assert (schedule.step(5).sample_ids >= schedule.samples.bases[1]).all()
