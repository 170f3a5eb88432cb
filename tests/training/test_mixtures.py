"""Mixtures tried on proxies: design, evidence keyed by content, runs, and the proposal."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import build, printed
from patience import PATIENCE, wait_until
from programs import started, tell

from megapack.errors import ConfigError, DataError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training.mixtures import Evidence, design, propose

from .processes import PRETRAIN, Zygote

NAMES = ["web", "code", "math"]
PRIOR = [0.6, 0.3, 0.1]
# A trainer in place of megapack-pretrain, for tests of the runner: it logs losses that depend on
# the weights as in `loss_of`, and counts its starts.
TRAINER = """
import json, math, pathlib, sys, yaml
config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
blend = yaml.safe_load(open(config["data"]["blend"]))
weights = {s["name"]: s["weight"] for s in blend["sources"]}
run = pathlib.Path(config["run_dir"]); run.mkdir(exist_ok=True)
with open(run.parent / "starts", "a") as file: file.write("x")
if (run.parents[1] / "broken").exists(): sys.exit("no device")
losses = {name: 2 + math.exp(-4 * weight) for name, weight in weights.items()}
line = {"step": config["num_steps"], "loss": 0.0, "source_loss": losses}
(run / "evaluation.jsonl").write_text(json.dumps(line) + chr(10))
"""


def loss_of(weights: list[float]) -> list[float]:
    return [2 + math.exp(-4 * weight) for weight in weights]


def test_designs() -> None:
    first, *rows = design(NAMES, PRIOR, "dirichlet", number=400, seed=1)
    assert first == (0.6, 0.3, 0.1) and len(rows) == 399
    assert np.allclose(np.sum(rows, axis=1), 1, atol=1e-5) and np.min(rows) > 0
    assert np.allclose(np.mean(rows, axis=0), PRIOR, atol=0.05)
    near = design(NAMES, PRIOR, "dirichlet", number=400, concentration=50, seed=1)
    assert np.std(near, axis=0).max() < 0.3 * np.std(rows, axis=0).min()
    assert design(NAMES, PRIOR, "dirichlet", number=5) == design(
        NAMES, PRIOR, "dirichlet", number=5
    )
    one = np.array(design(NAMES, PRIOR, "one", number=0))
    assert len(one) == 7 and np.allclose(one[1] / one[1][1], [4, 1, 1 / 3], atol=1e-4)
    listed = design(
        NAMES, PRIOR, [{"web": 3, "math": 1}, {"web": 6, "code": 3, "math": 1}], number=0
    )
    assert [round(weight, 3) for weight in listed[1]] == [0.75, 0, 0.25] and len(listed) == 2
    for kind in ("dirichlet", "one"):  # a source of weight 0 keeps it, others are above 0
        without = np.array(design(NAMES, [0.7, 0, 0.3], kind, number=50, concentration=0.01))
        assert len(without) > 2 and not without[:, 1].any() and without[:, [0, 2]].all()
    [_, listed] = design(NAMES, [0.7, 0, 0.3], [{"code": 1}], number=0)
    assert listed == (0, 1, 0)
    for wrong, message in (
        ({"maths": 1}, r"unknown source 'maths'; did you mean 'math'\?"),
        ({"web": -1}, "web is -1; it must be at least 0"),
        ({"web": 0}, "weights is 0; it must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            design(NAMES, PRIOR, [wrong], number=0)


def evidence(rows: list[Any], held_out: list[str] = NAMES) -> list[Evidence]:
    return [
        Evidence(dict(zip(NAMES, row, strict=True)), dict(zip(held_out, loss_of(row), strict=True)))
        for row in rows
    ]


def test_proposal_has_a_lower_loss_than_the_prior_and_all_trials() -> None:
    """With these losses the best mixture has equal weights."""
    rows = design(NAMES, PRIOR, "dirichlet", number=40, seed=2)
    found = propose(evidence(rows), NAMES, NAMES, PRIOR, limits=[1.0] * 3)
    assert np.allclose(found.weights, 1 / 3, atol=0.06) and math.isclose(sum(found.weights), 1)
    assert np.mean(loss_of(list(found.weights))) < np.mean([loss_of(row) for row in rows], 1).min()
    assert found.loss < found.prior_loss and found.rank_correlation > 0.95
    bounds = zip(found.low, found.weights, found.high, strict=True)
    assert all(low <= weight <= high for low, weight, high in bounds)
    assert found == propose(evidence(rows), NAMES, NAMES, PRIOR, limits=[1.0] * 3)
    limited = propose(evidence(rows), NAMES, NAMES, PRIOR, limits=[1.0, 1.0, 0.2])
    assert limited.weights[2] <= 0.2 and limited.loss > found.loss


def test_evidence_survives_an_added_source_and_an_added_held_out_set() -> None:
    """Runs without a source gave it the weight 0. Runs with a removed source are ignored."""
    rows = design(NAMES, PRIOR, "dirichlet", number=20, seed=3)
    old, more = evidence(rows), [*NAMES, "chat"]
    new = [
        Evidence({**e.weights, "chat": 0.2}, {**e.losses, "chat": 3.0 - i / 100})
        for i, e in enumerate(evidence(design(NAMES, PRIOR, "dirichlet", number=6, seed=4)))
    ]
    found = propose([*old, *new], more, more, [0.25] * 4, limits=[1.0] * 4)
    assert (found.num_trials, found.num_ignored) == (26, 0)
    removed = propose([*old, *new], NAMES, NAMES, PRIOR, limits=[1.0] * 3)
    assert (removed.num_trials, removed.num_ignored) == (20, 6)
    unused = [Evidence({**e.weights, "chat": 0.0}, e.losses) for e in old]
    assert propose(unused, NAMES, NAMES, PRIOR, limits=[1.0] * 3) == propose(
        old, NAMES, NAMES, PRIOR, limits=[1.0] * 3
    )
    with pytest.raises(DataError, match="20 finished trials"):
        propose(old, more, more, [0.25] * 4, limits=[1.0] * 4)  # no trial scored "chat"
    with pytest.raises(DataError, match="raise it, or add data"):
        propose(old, NAMES, NAMES, PRIOR, limits=[0.1] * 3)


def test_a_source_that_no_run_draws_has_weight_0_in_the_proposal() -> None:
    """Its held-out loss does not depend on its weight."""
    prior = [0.7, 0, 0.3]
    rows = design(NAMES, prior, "dirichlet", number=12, seed=6)
    found = propose(evidence(rows), NAMES, NAMES, prior, limits=[1.0] * 3)
    assert found.weights[1] == found.low[1] == found.high[1] == 0
    assert np.allclose(found.weights, [0.5, 0, 0.5], atol=0.1) and found.rank_correlation > 0.9


def test_noise_widens_the_intervals_and_lowers_the_rank_correlation() -> None:
    rows = design(NAMES, PRIOR, "dirichlet", number=24, seed=5)
    random = np.random.default_rng(0)
    noisy = [
        Evidence(e.weights, {n: loss * random.lognormal(0, 0.3) for n, loss in e.losses.items()})
        for e in evidence(rows)
    ]
    clear, unclear = (
        propose(found, NAMES, NAMES, PRIOR, limits=[1.0] * 3) for found in (evidence(rows), noisy)
    )
    widths = [np.subtract(found.high, found.low).sum() for found in (clear, unclear)]
    assert widths[1] > 2 * widths[0] and unclear.rank_correlation < 0.7 < clear.rank_correlation


# ---- the command


@pytest.fixture
def blend(tmp_path: Path) -> Path:
    """Write three sources with held-out documents, and a run."""
    for number, name in enumerate([*NAMES, "chat"]):
        for part, count in (("train", 2000), ("valid", 30)):
            random = np.random.default_rng(number)
            lengths = random.integers(5, 60, count)
            with IndexedDatasetBuilder(tmp_path / f"{name}_{part}", np.uint16) as builder:
                tokens = random.integers(0, 60, lengths.sum()).astype(np.uint16)
                builder.add_documents(tokens, np.append(0, np.cumsum(lengths)))
        data = IndexedDataset(tmp_path / f"{name}_train")
        index = pack(data.document_lengths, buckets=[32, 64])
        index.save(tmp_path / f"{name}.samples", source=data)
    write_blend(tmp_path, dict(zip(NAMES, PRIOR, strict=True)))
    run = {
        "run_dir": "x",
        "num_steps": 320,
        "model": {"preset": "llama_tiny", "vocab_size": 64},
        "data": {"blend": str(tmp_path / "blend.yaml")}
        | {"tokens_per_step": 256, "micro_batch_tokens": 256},
        "checkpoint": {"every": None, "export": False},
        "engine": {"precision": "fp32", "zero_stage": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    (tmp_path / "trainer.py").write_text(TRAINER)
    return tmp_path


def write_blend(folder: Path, weights: dict[str, float], **renamed: str) -> None:
    sources = [
        {"name": renamed.get(name, name), "prefix": f"{name}_train", "index": f"{name}.samples"}
        | {"weight": weight, "valid_prefix": f"{name}_valid"}
        for name, weight in weights.items()
    ]
    stages = [{"from_step": 160, "weights": {source["name"]: 1 for source in sources}}]
    tree = {"sources": sources, "stages": stages, "max_epochs": 50}
    (folder / "blend.yaml").write_text(yaml.safe_dump(tree))


def tried(folder: Path, *options: object) -> Any:
    command = ("mixtures", folder / "run.yaml", folder / "tries", "--scale", "1/4")
    launch = ("--launch", f"{sys.executable} {folder / 'trainer.py'}")
    return json.loads(printed(*command, *launch, "--json", *options))


def test_command_prepares_runs_resumes_and_proposes(blend: Path) -> None:
    planned = tried(blend, "--number", 12, "--dry-run")
    assert not (blend / "tries").exists() and len(planned["trials"]) == 12
    prepared = tried(blend, "--number", 12)
    assert prepared["trials"] == planned["trials"] and prepared["proposal"] is None
    (blend / "tries" / "broken").touch()
    command = ("mixtures", blend / "run.yaml", blend / "tries", "--scale", "1/4", "--number", 12)
    launch = ("--launch", f"{sys.executable} {blend / 'trainer.py'}")
    failed = build(*command, *launch, "--run", "--workers", 1)
    assert failed.returncode == 1 and "ended with status 1: see the end of" in failed.stderr
    (blend / "tries" / "broken").unlink()
    half = tried(blend, "--number", 12, "--run", "--part", "0/2", "--workers", 2)
    assert [trial["losses"] is not None for trial in half["trials"]] == [True, False] * 6
    done = tried(blend, "--number", 12, "--run", "--workers", 2)
    starts = [len(path.read_text()) for path in sorted((blend / "tries").glob("*/starts"))]
    assert sorted(starts) == [1] * 11 + [2]  # only the one that failed started again
    assert done["trials"][0]["weights"] == PRIOR
    assert done["proposal"]["num_trials"] == 12 and done["proposal"]["rank_correlation"] > 0.5
    shown = printed(*command, *launch)
    assert "predicted held-out loss" in shown and "12 runs, rank correlation" in shown
    run = yaml.safe_load((Path(done["trials"][1]["command"][-1])).read_text())
    mixture = yaml.safe_load(Path(run["data"]["blend"]).read_text())
    weights = {source["name"]: source["weight"] for source in mixture["sources"]}
    [stage] = mixture["stages"]
    for name, before in zip(NAMES, PRIOR, strict=True):  # stages change by the same factor
        assert math.isclose(stage["weights"][name], weights[name] / before)


def test_a_run_that_was_validated_and_has_not_ended_is_no_evidence(blend: Path) -> None:
    """It starts again, and its losses are those of the last step."""
    [trial] = tried(blend, "--number", 1)["trials"]
    run = Path(trial["command"][-1]).parent / "run"
    run.mkdir()
    early = {"step": 40, "source_loss": dict.fromkeys(NAMES, 9.0)}
    (run / "evaluation.jsonl").write_text(json.dumps(early) + "\n")
    assert tried(blend, "--number", 1)["trials"][0]["losses"] is None
    [trial] = tried(blend, "--number", 1, "--run")["trials"]
    assert list(trial["losses"].values()) == loss_of(PRIOR)
    assert (run.parent / "starts").read_text() == "x"


def train(zygote: Zygote, trial: dict[str, Any], log: Path) -> None:
    """Train the run of a trial by its command, in a fork, which needs no imports."""
    assert trial["command"][1:4] == ["-m", "megapack.training.pretrain", "--config"]
    zygote.start([str(PRETRAIN), *trial["command"][3:]], 1, log).succeed()


def test_a_real_run_is_evidence(blend: Path, zygote: Zygote) -> None:
    """megapack-pretrain scores the held-out documents of every source after the last step."""
    command = ("mixtures", blend / "run.yaml", blend / "tries", "--scale", "1/64", "--number", 1)
    [trial] = json.loads(printed(*command, "--json"))["trials"]
    train(zygote, trial, blend / "log")
    facts = json.loads(printed(*command, "--json"))
    ((folder, losses),) = [(Path(t["command"][-1]).parent, t["losses"]) for t in facts["trials"]]
    assert losses.keys() == set(NAMES) and all(2 < loss < 12 for loss in losses.values())
    assert len((folder / "run" / "log.jsonl").read_text().splitlines()) == 5
    assert json.loads(printed(*command, "--run", "--json"))["trials"] == facts["trials"]


def started_command(folder: Path, *options: object) -> subprocess.Popen[str]:
    """Start `megapack-build mixtures` in a new process group."""
    words = ["mixtures", folder / "run.yaml", folder / "tries", "--scale", "1/4", *options]
    command = [sys.executable, "-m", "megapack.cli.main", *map(str, words)]
    # A test run in the background of a shell ignores Ctrl-C, and so would its children.
    return subprocess.Popen(
        command,
        stdout=-1,
        stderr=-1,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )


def finish(process: subprocess.Popen[str]) -> Any:
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


def test_sources_of_weight_0_are_not_drawn_and_their_documents_are_scored(
    blend: Path, zygote: Zygote
) -> None:
    """Mixtures without a source, without stages; a source without weight and held-out documents
    is not part of the run. The real trainer, audit and report."""
    tree = yaml.safe_load((blend / "blend.yaml").read_text())
    del tree["stages"], tree["sources"][2]["valid_prefix"]
    (blend / "blend.yaml").write_text(yaml.safe_dump(tree))
    (blend / "mixtures.yaml").write_text("mixtures: [{web: 1}]")
    command = ("mixtures", blend / "run.yaml", blend / "tries", "--scale", "1/64", "--json")
    options = ("--design", blend / "mixtures.yaml")
    train(zygote, json.loads(printed(*command, *options))["trials"][1], blend / "log")
    trial = json.loads(printed(*command, *options))["trials"][1]
    assert trial["weights"] == [1, 0, 0] and trial["losses"].keys() == {"web", "code"}
    run = Path(trial["command"][-1]).parent / "run"
    audit = json.loads(printed("audit", run, "--json"))
    assert {s["name"]: s["epochs"] for s in audit["sources"]}["code"] == 0
    assert "code" in (printed("report", run), (run / "report.html").read_text())[1]


def test_a_source_of_weight_0_in_a_stage_keeps_it(blend: Path) -> None:
    """In the proxy and in every mixture, which change only the other sources."""
    write_blend(blend, {"web": 0.6, "code": 0.4, "math": 0})
    planned = json.loads(
        printed("proxy", blend / "run.yaml", blend / "p", "--scale", "1/4", "--json")
    )
    assert planned["sources"][2]["epochs"][0] == planned["sources"][2]["of_epochs"][0] == 0
    prepared = tried(blend, "--number", 3)
    assert [trial["weights"][2] for trial in prepared["trials"]] == [0] * 3
    for trial in prepared["trials"]:
        run = yaml.safe_load(Path(trial["command"][-1]).read_text())
        mixture = yaml.safe_load(Path(run["data"]["blend"]).read_text())
        assert mixture["sources"][2]["weight"] == 0 and mixture["stages"][0]["weights"]["math"] == 1
    (blend / "mixtures.yaml").write_text("mixtures: [{web: 1}, {code: 1}, {web: 1, code: 1}]")
    done = tried(blend, "--design", blend / "mixtures.yaml", "--run", "--workers", 1)
    assert done["proposal"]["weights"][2] == done["proposal"]["high"][2] == 0
    tree = yaml.safe_load((blend / "blend.yaml").read_text())
    tree["stages"][0]["weights"] = {"code": 1}
    (blend / "blend.yaml").write_text(yaml.safe_dump(tree))
    command = ("mixtures", blend / "run.yaml", blend / "tries", "--scale", "1/4")
    wrong = printed(*command, "--design", blend / "mixtures.yaml", status=2)
    assert "mixture of the design gives 0 (code): give one of them a weight" in wrong


@pytest.mark.multiprocess
def test_command_killed_while_a_run_trains_resumes_to_the_same_losses(
    blend: Path, zygote: Zygote
) -> None:
    """kill -9 of the command ends the run that it started; repeated at once, it waits for the end
    of that run, and resumes it."""
    tree = yaml.safe_load((blend / "run.yaml").read_text())
    tree["checkpoint"] = {"every": 20, "export": False}
    (blend / "run.yaml").write_text(yaml.safe_dump(tree))
    options = ("--number", 1, "--run", "--workers", 1, "--json")
    process = started_command(blend, *options)
    calm = ("mixtures", blend / "run.yaml", blend / "calm", "--scale", "1/4", "--number", 1)
    train(zygote, json.loads(printed(*calm, "--json"))["trials"][0], blend / "log")

    def trains() -> bool:
        assert process.poll() is None, process.communicate()
        return any((blend / "tries").glob("*/run/checkpoints/step_*/manifest.json"))

    wait_until(trains)
    process.kill()
    process.communicate()
    [resumed] = finish(started_command(blend, *options))["trials"]
    [undisturbed] = json.loads(printed(*calm, "--json"))["trials"]
    run, other = (Path(t["command"][-1]).parent / "run" for t in (resumed, undisturbed))
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2
    losses = [[(line["step"], line["loss"]) for line in log_of(each)] for each in (run, other)]
    assert [step for step, _ in losses[0]] == list(range(80)) and losses[0] == losses[1]
    assert resumed["losses"] == undisturbed["losses"]


def log_of(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


# A trainer that sleeps: it writes its process id to a file.
SLEEPER = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[-1]).with_name("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_runs_end_with_the_command(blend: Path, number: int) -> None:
    (blend / "sleeper.py").write_text(SLEEPER)
    launch = ("--launch", f"{sys.executable} {blend / 'sleeper.py'}")
    process = started_command(blend, *launch, "--number", 2, "--run", "--workers", 2)

    def trainers() -> list[int]:
        texts = [path.read_text() for path in (blend / "tries").glob("*/pid")]
        return [int(text) for text in texts if text]

    wait_until(lambda: len(trainers()) == 2)
    os.kill(process.pid, number)
    process.communicate(timeout=PATIENCE)
    try:
        wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in trainers()))
    finally:
        for pid in trainers():
            if Path("/proc", str(pid)).exists():
                os.kill(pid, signal.SIGKILL)


# Another command that trains the runs of all trials: it holds the locks, and writes the losses.
OTHER = """
import json, sys
from pathlib import Path
from megapack.storage.locks import WriterLock
runs = [path.parent / "run" for path in Path(sys.argv[1]).glob("*/mixture.json")]
locks = [WriterLock(run, what="training") for run in runs]
print("ready", flush=True)
sys.stdin.readline()
for run in runs:
    run.mkdir()
    losses = {"step": 80, "source_loss": {"web": 1.0}}
    (run / "evaluation.jsonl").write_text(json.dumps(losses) + chr(10))
"""


@pytest.mark.multiprocess
def test_command_waits_for_a_run_of_another_command(blend: Path) -> None:
    """It does not start the run again if the other command finishes it."""
    launch = ("--launch", f"{sys.executable} {blend / 'trainer.py'}", "--number", 1)
    assert finish(started_command(blend, *launch, "--json"))["trials"][0]["losses"] is None
    other = started(OTHER, blend / "tries")
    process = started_command(blend, *launch, "--run", "--workers", 1, "--json")
    assert process.stderr is not None
    assert "being written by process" in process.stderr.readline()
    tell(other)
    assert finish(process)["trials"][0]["losses"] == {"web": 1.0}
    assert not list(blend.glob("tries/*/starts"))
    other.communicate("")


@pytest.mark.multiprocess
def test_command_killed_while_it_writes_the_set_leaves_whole_files(blend: Path) -> None:
    """Every file has its final content or is missing, and the repeated command writes the rest."""
    tries = blend / "tries"

    def files() -> dict[str, bytes]:
        paths = [path for path in tries.rglob("*") if path.is_file() and ".tmp-" not in path.name]
        return {str(path.relative_to(tries)): path.read_bytes() for path in paths}

    finish(started_command(blend, "--number", 60, "--json"))
    whole = files()
    shutil.rmtree(tries)

    def kill_after(num_files: int) -> None:
        process = started_command(blend, "--number", 60, "--json")
        wait_until(lambda: process.poll() is not None or len(files()) >= num_files)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL

    for num_files in (1, 5, 90):
        kill_after(num_files)
        assert files().items() < whole.items()
    finish(started_command(blend, "--number", 60, "--json"))
    assert files() == whole


def test_renamed_and_added_sources_keep_the_evidence(blend: Path) -> None:
    """Mixtures of renamed sources do not run again; a change of the run's settings drops their
    evidence."""
    (blend / "mixtures.yaml").write_text(
        "mixtures: [{web: 1}, {code: 1}, {math: 1}, {web: 1, code: 1}, {web: 1, math: 1}]"
    )
    first = tried(blend, "--design", blend / "mixtures.yaml", "--run", "--workers", 1)
    assert len(first["trials"]) == 6 and all(trial["losses"] for trial in first["trials"])
    write_blend(blend, dict(zip(NAMES, PRIOR, strict=True)), web="crawl")
    renamed = tried(blend, "--design", "one")
    assert renamed["proposal"] == first["proposal"]
    assert renamed["trials"][0]["losses"].keys() == {"crawl", "code", "math"}
    changed = tried(blend, "--design", "one", "--set", "optimizer.lr=1e-3")
    assert changed["proposal"] is None


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("valid_prefix", (), "give sources of the manifest a valid_prefix"),
        ("", ("--design", "run.yaml"), "run.yaml: unknown key 'checkpoint' (known: mixtures)"),
        ("", ("--design", "empty.yaml"), "empty.yaml lists no mixtures"),
        ("", ("--concentration", "0"), "mixtures: concentration is 0.0; it must be above 0"),
        ("", ("--set", "data.blend=null"), "give prefix and index"),
    ],
)
def test_wrong_commands_are_refused(
    blend: Path, change: str, options: tuple[str, ...], message: str, monkeypatch: Any
) -> None:
    monkeypatch.chdir(blend)
    Path("empty.yaml").write_text("mixtures: []")
    if change:
        tree = yaml.safe_load((blend / "blend.yaml").read_text())
        for source in tree["sources"]:
            del source[change]
        (blend / "blend.yaml").write_text(yaml.safe_dump(tree))
    command = ("mixtures", "run.yaml", "tries", "--scale", "1/4", *options)
    assert message in printed(*command, status=2)
