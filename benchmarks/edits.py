"""Tests of the autopilot and of edits of runs, in real processes; a part of ``make faults``.

    make bench-edits                  # ten minutes
    ONLY="noise,mirror" make bench-edits    # keeps the logged rows of other parts

- noise: 200 noise documents in a corpus, without the autopilot and with it, on 1, 2 and 4 ranks,
  killed at random steps and resumed; ZeRO-3; and ten runs without noise, for false alarms. The
  learning rate falls to 0, as in a real run, so a damaged model cannot simply relearn
- seeds: the same with three more seeds; a run has recovered if its loss 100 steps after the noise
  is at most the loss before it
- mixing: a rule doubles the weight of the source that is learned fastest; the run is resumed five
  times, also on different numbers of ranks
- branches: two from one milestone, one with a different mixture, each compared with a run of its
  configuration from step 0 on
- mirror: a node's disk is emptied and restored from moto's S3 server

Every row compares a run with an undisturbed run: decisions, samples, the largest relative
difference of a loss, and the largest difference of a weight at the end. With equal numbers of ranks
and equal ZeRO stages, all are bit-identical; otherwise rounding makes losses and weights differ,
more with every step.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from common import compare_logs, only, quick, show, write_results
from object_store import BUCKET, environment_of, serve_objects
from ports import free_port

from megapack.config import load_config
from megapack.data.run import OpenRun, read_decisions
from megapack.storage.metadata import file_checksum
from megapack.training.config import PretrainConfig
from megapack.training.engine.directory import read_jsonl
from tests.training.conftest import (
    PER_STEP,
    ROW,
    Corpus,
    blend_config,
    make_corpus,
    noisy_blend,
    write_blend,
)
from tests.training.processes import Zygote, read_log, start_run

Found = dict[str, Any]
Lines = list[dict[str, Any]]

BEGIN, NOISE = 80, 25  # first step and number of steps of the noise (200 documents)
NUM_STEPS = BEGIN + NOISE + 105
BRANCH_AT, MIXED_EVERY = 30, 8
SEEDS = range(2 if quick() else 10)
OTHER_SEEDS = range(1, 2 if quick() else 4)  # the rows of "noise" have seed 0
RANKS = (1, 2) if quick() else (1, 2, 4)


def stages(run_dir: Path) -> list[Any]:
    """Return the decisions of a run, without revoked ones."""
    decided = read_decisions(run_dir)
    return [one.stage for one in decided.decisions if not one.void] if decided else []


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint in float32, merged from all partitions."""
    home = run_dir / "checkpoints"
    found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(
        str(home), (home / "latest").read_text()
    )
    return found


def beside(ours: Path, theirs: Path) -> Found:
    """Compare a run with the undisturbed run; both are given by their configuration files."""
    runs = [config.with_suffix("") for config in (ours, theirs)]
    decided, logs = ([of(run) for run in runs] for of in (stages, read_log))
    mine, other = map(weights, runs)
    assert mine.keys() == other.keys()
    found = {"same_decisions": decided[0] == decided[1]} if any(decided) else {}
    differ = torch.stack([(mine[name] - other[name]).abs().max() for name in mine]).max()
    return {**found, **compare_logs(*logs), "weights_differ": float(differ)}


class Place:
    """Folder of runs; starts and kills them."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        folder.mkdir()
        self.folder, self.zygote = folder, zygote
        self.random = random.Random(0)

    def train(self, config: Path, *overrides: str, ranks: int, **more: Any) -> Lines:
        """Train a run to its end; return its log."""
        start_run(self.zygote, config, "run", *overrides, ranks=ranks, **more).succeed()
        return read_log(config.with_suffix(""))

    def kill(self, config: Path, step: int, *, ranks: int, **more: Any) -> None:
        """Start a run whose ranks are all killed just before ``step``."""
        fault = {rank: {"faults": {"kill_before_step": [step]}} for rank in range(ranks)}
        started = start_run(self.zygote, config, f"to{step}", ranks=ranks, of_rank=fault, **more)
        assert -signal.SIGKILL in started.wait(), started.output()[-3000:]

    def killed(self, config: Path, times: int, of_ranks: Sequence[int], **more: Any) -> list[int]:
        """Kill all ranks at ``times`` random steps, with the next of ``of_ranks`` ranks each time,
        then train to the end. Return the steps."""
        num_steps = yaml.safe_load(config.read_text())["num_steps"]
        victims = sorted(self.random.sample(range(num_steps // 10, num_steps), times))
        for turn, victim in enumerate(victims):
            ranks = of_ranks[turn % len(of_ranks)]
            self.kill(config, victim, ranks=ranks, **more)
        self.train(config, ranks=of_ranks[times % len(of_ranks)], **more)
        return victims


# ---- Noise


def noise_config(folder: Path, name: str, *, noise: int = NOISE, **sections: Any) -> Path:
    """Write the configuration of a run with steps of noise. Gradients are not clipped, so the noise
    raises the loss far."""
    data = folder / f"noise{noise}"
    if not data.exists():
        data.mkdir()
        noisy_blend(data, num_steps=300, begin=BEGIN, noise=noise)
    tree = {
        "num_steps": NUM_STEPS,
        "data": {
            "blend": str(data / "blend.yaml"), "prefix": None, "index": None, "valid_prefix": None,
            "tokens_per_step": PER_STEP * ROW, "micro_batch_tokens": 2 * ROW,
        },
        "optimizer": {"lr": 0.03, "betas": [0.9, 0.999], "clip": 1e9},
        "learning_rate": {"kind": "cosine", "warmup_steps": 10, "min_ratio": 0.0},
        "checkpoint": {"every": 5, "keep": 8, "export": False, "asynchronous": False},
        "logging": {"every": 2, "tensorboard": False, "batches": False},
        "autopilot": {"spikes": True, "window": 32},
    }  # fmt: skip
    return Corpus(folder).config(folder / name, **{**tree, **sections})


def _levels(lines: Lines, after: int) -> list[float]:
    """Return the median of ten losses before the noise, and of ten about 100 steps later."""
    return [median(line["loss"] for line in lines[i : i + 10]) for i in (BEGIN - 15, after + 95)]


def _said(lines: Lines, after: int) -> str:
    return "loss {:.2f} before, {:.2f} 100 steps after".format(*_levels(lines, after))


def noise(place: Place) -> Iterator[Found]:
    """Yield rows of runs with noise: without the autopilot, with it, killed and resumed."""
    config = noise_config(place.folder, "without", autopilot={"spikes": False})
    row = {"what": "200 documents of noise", "how": "no autopilot", "ranks": "1"}
    yield {**row, "found": _said(place.train(config, ranks=1), BEGIN + NOISE)}
    first: Path | None = None
    for ranks in RANKS:
        row["ranks"], whole = str(ranks), noise_config(place.folder, f"ranks{ranks}")
        lines, decided = place.train(whole, ranks=ranks), stages(whole.with_suffix(""))
        skipped = sum(stage.skip_steps for stage in decided)
        said = f"back {len(decided)} times, {skipped} steps skipped; {_said(lines, BEGIN)}"
        first = first or whole
        yield row | {"how": "autopilot; beside 1 rank", "found": said} | beside(whole, first)
        config = noise_config(place.folder, f"killed{ranks}")
        victims = place.killed(config, 3, [ranks])
        yield row | {"how": f"killed at {victims}, resumed", "found": ""} | beside(config, whole)


def seeds(place: Place) -> Iterator[Found]:
    """Yield rows for more seeds: which runs recover, and whether 1 and 2 ranks decide alike."""
    recovered = dict.fromkeys(("without", "1", "2"), 0)
    same: list[Found] = []
    for seed in OTHER_SEEDS:
        configs = {}
        for name in recovered:
            with_pilot = name != "without"
            pilot = {"seed": seed, "autopilot": {"spikes": with_pilot, "window": 32}}
            config = configs[name] = noise_config(place.folder, f"seed{seed}-{name}", **pilot)
            lines = place.train(config, ranks=int(name) if with_pilot else 1)
            before, later = _levels(lines, BEGIN if with_pilot else BEGIN + NOISE)
            recovered[name] += later <= before
            decided = stages(config.with_suffix(""))
            print(f"seed {seed}, {name}: {before:.2f}, {later:.2f}, {decided}")
        same.append(beside(configs["2"], configs["1"]))
    num_seeds = len(OTHER_SEEDS)
    alike = sum(row.get("same_decisions", True) for row in same)  # no key: no decisions
    row = {"what": f"200 documents of noise, seeds {min(OTHER_SEEDS)} to {max(OTHER_SEEDS)}"}
    said = f"{recovered['without']} of {num_seeds} recovered"
    yield {**row, "how": "no autopilot", "ranks": "1", "found": said}
    said = f"{recovered['1']} of {num_seeds} recovered on 1 rank, {recovered['2']} on 2; "
    said += f"1 and 2 ranks decided alike in {alike}"
    worst = {}
    for key in same[0]:
        worst_of = np.all if key.startswith("same") else np.max
        worst[key] = worst_of([found.get(key, True) for found in same]).item()
    yield {**row, "how": "autopilot; 2 ranks beside 1", "ranks": "1; 2", "found": said, **worst}


def zero_3(place: Place) -> Iterator[Found]:
    """Yield the row about rollbacks in the same processes with partitioned parameters."""
    configs = {}
    for stage in (1, 3):
        engine = {"precision": "fp32", "zero_stage": stage}
        configs[stage] = noise_config(place.folder, f"stage{stage}", engine=engine)
        lines = place.train(configs[stage], ranks=2)
    back = len(stages(configs[3].with_suffix("")))
    said = f"back {back} times in the same processes; {_said(lines, BEGIN)}"
    row = {"what": "200 documents of noise", "how": "ZeRO-3; beside ZeRO-1", "ranks": "2"}
    yield {**row, "found": said, **beside(configs[3], configs[1])}


def false_alarms(place: Place) -> Iterator[Found]:
    """Yield the row about runs without noise."""
    found = []
    for seed in SEEDS:
        config = noise_config(place.folder, f"clean{seed}", noise=0, seed=seed)
        place.train(config, ranks=1)
        found.append(len(stages(config.with_suffix(""))))
    said = f"{sum(found)} decisions in {len(SEEDS)} runs of {NUM_STEPS} steps"
    how = f"autopilot, {len(SEEDS)} seeds"
    yield {"what": "no noise", "how": how, "ranks": "1", "found": said}


# ---- Mixtures, branches, a mirror


def mixing(place: Place) -> Iterator[Found]:
    """Yield rows of a rule that doubles the weight of the source that is learned fastest."""
    corpus = make_corpus(place.folder)
    blend = write_blend(place.folder / "blend.yaml", corpus)
    sections: dict[str, Any] = {
        "num_steps": 7 * MIXED_EVERY,
        "mixing": {"rule": "tests.training.mixing_rules:doubles", "every": MIXED_EVERY},
        "checkpoint": {"every": 3, "asynchronous": False, "export": False},
        "evaluation": {"every": None},
    }
    whole = blend_config(blend, corpus, place.folder / "whole", **sections)
    place.train(whole, ranks=2)
    for of_ranks in ([2], [2, 1, 4, 2, 4, 1]):
        config = blend_config(blend, corpus, place.folder / f"moved{len(of_ranks)}", **sections)
        victims = place.killed(config, 5, of_ranks)
        row = {"what": "a rule doubles what is learned fastest"}
        row |= {"ranks": f"2; {', '.join(map(str, of_ranks))}"}
        row |= {"how": f"killed at {victims}, resumed"}
        found = f"{len(stages(config.with_suffix('')))} decisions"
        yield {**row, "found": found, **beside(config, whole)}


def branches(place: Place) -> Iterator[Found]:
    """Yield rows of branches from one milestone: a learning rate decay, a different mixture."""
    corpus = make_corpus(place.folder)
    blend = write_blend(place.folder / "blend.yaml", corpus)
    sections: dict[str, Any] = {
        "num_steps": 2 * BRANCH_AT,
        "checkpoint": {"every": 10, "keep": 1, "keep_steps": [BRANCH_AT], "export": False},
        "evaluation": {"every": None},
        "learning_rate": {"kind": "constant", "warmup_steps": 2},
    }
    trunk_config = blend_config(blend, corpus, place.folder / "trunk", **sections)
    trunk = place.train(trunk_config, ranks=2)
    home = trunk_config.with_suffix("")
    before = {path: file_checksum(path) for path in home.rglob("*") if path.is_file()}
    (milestone,) = (home / "checkpoints").glob(f"step_{BRANCH_AT:08d}_*")
    other = [{"from_step": BRANCH_AT, "weights": {"web": 1, "math": 3}}]
    changed = write_blend(place.folder / "other.yaml", corpus, stages=other)
    decay = {"kind": "wsd", "warmup_steps": 2, "decay_fraction": 0.5}
    for name, ranks in itertools.product(("decay", "mixture"), (2, 1)):
        manifest, more = (blend, {"learning_rate": decay}) if name == "decay" else (changed, {})
        of = {**sections, **more}
        whole = blend_config(manifest, corpus, place.folder / f"{name}-whole", **of)
        if ranks == 2:
            place.train(whole, ranks=2)
        config = blend_config(manifest, corpus, place.folder / f"{name}{ranks}", **of)
        log = place.train(config, f"checkpoint.branch_from={milestone}", ranks=ranks)
        says = OpenRun(load_config(PretrainConfig, config)).schedule
        steps = (np.ascontiguousarray(says.step(line["step"]).sample_ids, np.int64) for line in log)
        as_program = [f"{zlib.crc32(ids.tobytes()):08x}" for ids in steps]
        agree = "" if as_program == [line["samples"] for line in log] else "NOT "
        pairs = zip(log, trunk, strict=True)
        differ = (f"from step {a['step']} on" for a, b in pairs if a["samples"] != b["samples"])
        same_files = before == {p: file_checksum(p) for p in home.rglob("*") if p.is_file()}
        found = f"{agree}as the program says; other samples than the trunk "
        found += f"{next(differ, 'nowhere')}; trunk {'untouched' if same_files else 'CHANGED'}"
        row = {"what": f"branch from step {BRANCH_AT}: {name}"}
        row |= {"how": "beside its configuration from step 0 on", "ranks": f"{ranks} from 2"}
        yield {**row, "found": found, **beside(config, whole)}


def mirror(place: Place) -> Iterator[Found]:
    """Yield the row of a restore after a node's run directory and cache are deleted."""
    corpus, cache = make_corpus(place.folder), place.folder / "cache"
    address = f"s3://{BUCKET}/run"
    with serve_objects(free_port()) as url:
        env = {"MEGAPACK_CACHE": str(cache), **environment_of(url)}
        sections: dict[str, Any] = {
            "num_steps": 60,
            "checkpoint": {"every": 10, "keep": 2, "export": False},
            "evaluation": {"every": None},
        }
        whole = corpus.config(place.folder / "whole", **sections)
        place.train(whole, ranks=2)
        sections["checkpoint"] = {**sections["checkpoint"], "mirror": address}
        config = corpus.config(place.folder / "run", **sections)
        place.kill(config, 37, ranks=2, env=env)
        shutil.rmtree(config.with_suffix(""))
        shutil.rmtree(cache, ignore_errors=True)
        place.train(config, ranks=2, env=env)
    (start,) = read_jsonl(config.with_suffix("") / "starts.jsonl")
    yield {
        "what": "killed at step 37 and its disk emptied",
        "how": f"mirror {address}, moto's server",
        "ranks": "2",
        "found": f"restored with its log, went on at step {start['step']}",
        **beside(config, whole),
    }


EDITS: dict[str, Callable[[Place], Iterator[Found]]] = {
    "noise": noise, "seeds": seeds, "zero 3": zero_3, "false alarms": false_alarms,
    "mixing": mixing, "branches": branches, "mirror": mirror,
}  # fmt: skip


def main() -> None:
    setup = {"noise": f"steps {BEGIN} to {BEGIN + NOISE - 1}", "steps": NUM_STEPS}
    zygote, rows = Zygote(), []
    with tempfile.TemporaryDirectory() as temporary:
        for name in only(EDITS, others="bench-faults"):
            place, own = Place(Path(temporary) / name.replace(" ", "-"), zygote), []
            for row in EDITS[name](place):
                own.append({"part": name, **row})
                print(json.dumps(own[-1]), flush=True)
            write_results("edits", {"setup": setup, "by itself": own}, parts="part")
            rows += own
    zygote.close()
    if rows:
        show("by itself", rows)


if __name__ == "__main__":
    main()
