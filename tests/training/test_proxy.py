"""Proxies of runs: an image of the program, and of the epochs of every source at every stage."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import build, printed

from megapack.config import load_config
from megapack.data import Schedule
from megapack.data.blend import BlendConfig, Source, Stage, load_blend
from megapack.data.run import OpenRun
from megapack.data.stage_settings import spans
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training.config import PretrainConfig
from megapack.training.proxy import plan_proxy, write_config
from tests.data.test_programs import NAMES, edited_run

BUCKETS = [64, 128, 256]
UNIT = 1024  # steps of the run per step of a generated program
SCALES = (4, 16, 64, 256)
# Options of `pack` of the six sources.
OPTIONS: list[dict[str, Any]] = [
    {}, {"promote": "on"}, {"pool_size": 5000}, {"seed": 9}, {"groups": True}, {"promote": "off"}
]  # fmt: skip


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write six sources of different lengths and packings."""
    folder = tmp_path_factory.mktemp("sources")
    for number, (name, options) in enumerate(zip(NAMES, OPTIONS, strict=True)):
        random, count = np.random.default_rng(number), 24_000 // (number + 1)
        lengths = random.lognormal(3 + 0.2 * number, 0.8, count).astype(np.int64) + 1
        with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
            tokens = random.integers(0, 60, lengths.sum()).astype(np.uint16)
            builder.add_documents(tokens, np.append(0, np.cumsum(lengths)))
        groups = None
        if options.get("groups"):
            ids = groups = random.integers(-1, count // 3, count).astype(np.int32)
            with IndexedDatasetBuilder(
                folder / f"{name}.groups", np.int32, allow_negative=True
            ) as builder:
                builder.add_documents(ids, np.arange(count + 1))
        data = IndexedDataset(folder / name)
        index = pack(data.document_lengths, buckets=BUCKETS, **{**options, "groups": groups})
        index.save(folder / f"{name}.samples", source=data)
    return folder


def scaled_up(stage: Stage) -> Stage:
    """Return a generated stage for a run of ``UNIT`` times as many steps, with larger steps."""
    changes: dict[str, Any] = {
        name: UNIT * getattr(stage, name) for name in ("from_step", "skip_steps")
    }
    if stage.ramp is not None:
        changes["ramp"] = replace(stage.ramp, until_step=UNIT * stage.ramp.until_step)
    if stage.tokens_per_step is not None:
        changes["tokens_per_step"] = 16 * stage.tokens_per_step
    order = "proportional" if stage.order == "uniform" else stage.order
    return replace(stage, **changes, exclude=None, order=order)


def written_run(folder: Path, number: int, out: Path) -> PretrainConfig:
    """Write a generated program as the manifest and configuration of a run."""
    run = edited_run(number, num_edits=5)
    blend = BlendConfig(
        sources=tuple(
            Source(
                name=NAMES[s],
                prefix=str(folder / NAMES[s]),
                index=str(folder / f"{NAMES[s]}.samples"),
                weight=weight,
            )
            for s, weight in zip(run.sources, run.weights, strict=True)
        ),
        stages=tuple(scaled_up(stage) for stage in run.stages if stage.exclude is None),
    )
    write_config(out / "blend.yaml", blend, "generated", overwrite=True)
    tree = {
        "run_dir": str(out / "run"),
        "num_steps": UNIT * (run.step + 20),
        "model": {"preset": "llama_tiny"},
        "data": {"blend": str(out / "blend.yaml"), "tokens_per_step": 16 * run.tokens}
        | {"micro_batch_tokens": 256, "cost_window": run.cost_window}
        # Random draws have a random error, as that of the run itself.
        | {"order": "proportional" if run.order == "uniform" else run.order},
    }
    (out / "run.yaml").write_text(yaml.safe_dump(tree))
    return load_config(PretrainConfig, out / "run.yaml")


def resolution(schedule: Schedule, step: int) -> np.ndarray:
    """Return for every source what whole steps, draws and samples of a program allow: the tokens of
    half a step, of a draw of each bucket in every stage and of the 1.69 samples of a blend, as a
    share of the tokens drawn before a step."""
    drawn, coarse = np.zeros((2, len(schedule.samples.indices)))
    for stage, end in spans(schedule.stages, step):
        for capacity, numbers, counts in stage.taken(end):
            share = counts / max(1, counts.sum())
            # The order of a cycle places whole draws: a bucket may be ahead at the begin and end.
            drawn[numbers] += counts * capacity
            coarse[numbers] += share * 2.5 * stage.config.draw_tokens + 1.69 * capacity
    return coarse / np.maximum(drawn, 1)


def test_programs_and_their_proxies_repeat_sources_equally_often(
    sources: Path, tmp_path: Path
) -> None:
    """Ten random programs: at the end of every stage the epochs of every source differ by less than
    1 %, or by the resolution of whole documents, samples and draws; scales are nested."""
    within, compared, kinds = 0, 0, set[str]()
    for number in range(14, 24):
        config = written_run(sources, number, tmp_path)
        kinds |= {k for s in load_blend(config.data.blend).stages for k, v in vars(s).items() if v}
        documents: dict[str, set[int]] = {}
        for scale in SCALES:
            proxy = plan_proxy(config, Fraction(1, scale), tmp_path / f"{number}-{scale}")
            assert proxy.config.num_steps == -(-config.num_steps // scale)
            proxy.write("a proxy")
            run, small = OpenRun(config).schedule, OpenRun(proxy.config).schedule
            for i, (of, step) in enumerate(proxy.stages):
                assert abs(step - of / scale) <= 1
                allowed = resolution(run, of) + resolution(small, step) + 0.5 / step
                for source, limit in zip(proxy.sources, allowed.tolist(), strict=True):
                    if source.of_epochs[i]:
                        error = abs(source.epochs[i] / source.of_epochs[i] - 1)
                        assert error <= max(0.01, limit + abs(source.samples.error)), (
                            number,
                            scale,
                        )
                        within, compared = within + (error <= 0.01), compared + 1
            for source in proxy.sources:
                [index] = source.samples.shards
                held = set(np.unique(index.segment_document).tolist())
                assert held <= documents.get(source.name, held)
                documents[source.name] = held
    assert compared > 200 and within > 0.7 * compared, within
    assert kinds >= {"from_step", "weights", "ramp", "tokens_per_step", "skip_steps", "order"}


def the_run(folder: Path, out: Path, **changes: Any) -> Path:
    """Write a run with one of each kind of number that scales."""
    blend = {
        "sources": [
            {"name": "a", "prefix": f"{folder}/s0", "index": f"{folder}/s0.samples", "weight": 3},
            {"name": "b", "prefix": f"{folder}/s1", "index": f"{folder}/s1.samples", "weight": 1},
        ],
        "max_epochs": 90,
        "run_tokens": 512 * 640,
        "attention_window": 64,
        "stages": [
            {
                "from_step": 160,
                "weights": {"a": 1, "b": 1},
                "ramp": {"until_step": 240, "pieces": 4},
            },
            {"from_step": 260, "skip_steps": 2},
            {"from_tokens": 512 * 320, "attention_window": 128, "window_steps": 80},
            {"from_step": 480, "tokens_per_step": 1024, "skip_steps": 40},
        ],
    }
    config = {
        "run_dir": "runs/large",
        "num_steps": 640,
        "stop_at": 500,
        "model": {"preset": "llama_tiny"},
        "data": {"blend": str(out / "blend.yaml")}
        | {"tokens_per_step": 512, "micro_batch_tokens": 256},
        "learning_rate": {"warmup_steps": 20},
        "checkpoint": {"keep_steps": [320], "every": 100},
        "evaluation": {"every": 100},
        **changes,
    }
    (out / "blend.yaml").write_text(yaml.safe_dump(blend))
    (out / "run.yaml").write_text(yaml.safe_dump(config))
    return out / "run.yaml"


def test_command_scales_every_number_of_steps_and_tokens(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, folder = the_run(sources, tmp_path), tmp_path / "small"
    facts = json.loads(printed("proxy", run, "small", "--scale", "1/16", "--dry-run", "--json"))
    assert not folder.exists() and (facts["num_steps"], facts["tokens_per_step"]) == (40, 512)
    shown = printed("proxy", run, "small", "--scale", "1/16")
    assert "40 of 640 steps, 512 tokens per step, in micro batches of 256" in shown
    assert "learning_rate.warmup_steps: 20 -> 1 (exactly 1.25)" in shown
    assert "stages[1].skip_steps: 2 -> 0 (exactly 0.125)" in shown
    assert facts["stages"] == [
        {"of_step": of, "step": step}
        for of, step in [(160, 10), (240, 15), (320, 20), (480, 30), (640, 40)]
    ]
    tree = yaml.safe_load((folder / "run.yaml").read_text())
    assert tree == {
        "run_dir": str(folder / "run"),
        "num_steps": 40,
        "stop_at": 31,
        "model": {"preset": "llama_tiny"},
        "data": {
            "tokens_per_step": 512,
            "blend": str(folder / "blend.yaml"),
            "micro_batch_tokens": 256,
        },
        "learning_rate": {"warmup_steps": 1},
        "checkpoint": {"every": 100, "keep_steps": [20]},
        "evaluation": {"every": 6},
    }
    blend = load_blend(folder / "blend.yaml")
    assert (blend.run_tokens, blend.max_epochs, blend.attention_window) == (512 * 40, 90, 64)
    assert [source.prefix for source in blend.sources] == [f"{sources}/s0", f"{sources}/s1"]
    ramp, window, last = blend.stages  # without the skip of an eighth of a step
    assert ramp.from_step == 10 and ramp.ramp is not None
    assert (ramp.ramp.until_step, ramp.ramp.pieces) == (15, 4)
    assert (window.from_tokens, window.window_steps) == (512 * 20, 5)
    assert (last.from_step, last.tokens_per_step, last.skip_steps) == (30, 1024, 3)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert len(before) == 4
    printed("proxy", run, "small", "--scale", "1/16")  # keeps all files
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*.*")}
    assert "exists already" in printed("proxy", run, "small", "--scale", "1/8", status=2)
    printed("proxy", run, "small", "--scale", "1/8", "--overwrite")
    assert load_config(PretrainConfig, folder / "run.yaml").num_steps == 80


def test_renamed_and_added_sources_keep_their_samples(sources: Path, tmp_path: Path) -> None:
    run, folder = the_run(sources, tmp_path), tmp_path / "small"
    printed("proxy", run, folder, "--scale", "1/16")
    samples = {path.name: path.stat().st_mtime_ns for path in (folder / "samples").iterdir()}
    tree = yaml.safe_load((tmp_path / "blend.yaml").read_text())
    tree["sources"][0]["name"] = "web"
    more = {"name": "c", "prefix": f"{sources}/s4", "index": f"{sources}/s4.samples", "weight": 1}
    tree["sources"].append(more)
    del tree["stages"]
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(tree))
    printed("proxy", run, folder, "--scale", "1/16", "--overwrite")
    after = {path.name: path.stat().st_mtime_ns for path in (folder / "samples").iterdir()}
    assert samples.items() < after.items() and len(after) == 3


def test_same_number_of_steps_with_fewer_tokens(sources: Path, tmp_path: Path) -> None:
    run = the_run(sources, tmp_path)
    small = ("--scale", "1/2", "--tokens-per-step", 256, "--json")
    facts = json.loads(printed("proxy", run, tmp_path / "small", *small))
    assert (facts["num_steps"], facts["micro_batch_tokens"], facts["rounded"]) == (640, 256, [])
    blend = load_blend(tmp_path / "small" / "blend.yaml")
    assert blend.stages[-1].tokens_per_step == 512 and blend.stages[-1].skip_steps == 40
    schedule = OpenRun(load_config(PretrainConfig, tmp_path / "small" / "run.yaml")).schedule
    assert schedule.tokens_before(640) == 256 * 480 + 512 * 160


def test_a_run_of_one_dataset_has_a_proxy(sources: Path, tmp_path: Path) -> None:
    data = {"prefix": f"{sources}/s2", "index": f"{sources}/s2.samples", "tokens_per_step": 512}
    run = the_run(sources, tmp_path, data={**data, "micro_batch_tokens": 512}, num_steps=None)
    printed("proxy", run, tmp_path / "small", "--scale", "1/4")
    config = load_config(PretrainConfig, tmp_path / "small" / "run.yaml")
    large = OpenRun(load_config(PretrainConfig, run))
    small = OpenRun(config)
    assert abs(small.num_steps - large.num_steps / 4) <= 0.5 and config.data.blend is None
    assert abs(small.schedule.epochs(small.num_steps) - 1) < 0.02


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scale", "1/100"], "give --scale 1/91, the smallest that fits"),
        (["--scale", "1e-300"], "give --scale 1/128, the smallest that fits"),
        (["--seed", "-1", "--scale", "1/2"], "seed is -1"),
        (["--scale", "2"], "'2' is not a share above 0 and at most 1; write 0.02 or 1/50"),
        (["--scale", "0.5", "--tokens-per-step", "100"], "with --tokens-per-step 100: a draw of"),
        (["--scale", "0.5", "--tokens-per-step", "300"], "give a multiple of 256, as in 256"),
        (["--scale", "1/2", "--group-file", "more.npy"], "--group-file more.npy has the groups of"),
        (["--scale", "1/2", "--set", "checkpoint.branch_from=x"], "leave it out (--set checkpoint"),
    ],
)
def test_what_cannot_be_scaled_is_refused(
    sources: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    run = the_run(sources, tmp_path)
    assert message in printed("proxy", run, tmp_path / "small", *options, status=2)
    assert not (tmp_path / "small").exists()


def test_the_scale_that_a_refusal_names_is_the_smallest(sources: Path, tmp_path: Path) -> None:
    run = the_run(sources, tmp_path)
    printed("proxy", run, tmp_path / "small", "--scale", "1/91", "--dry-run")
    for scale in range(92, 100):
        printed("proxy", run, tmp_path / "small", "--scale", f"1/{scale}", "--dry-run", status=2)


def test_buckets_without_samples_do_not_limit_the_tokens_per_step(tmp_path: Path) -> None:
    """No document is longer than 128 tokens: steps need not consist of samples of 256."""
    lengths = np.random.default_rng(0).integers(5, 129, 20_000)
    with IndexedDatasetBuilder(tmp_path / "short", np.uint16) as builder:
        tokens = np.zeros(lengths.sum(), np.uint16)
        builder.add_documents(tokens, np.append(0, np.cumsum(lengths)))
    index = pack(lengths, buckets=BUCKETS, promote="off")
    assert index.buckets[-1] == 256 and not index.metrics()["samples_per_bucket"][-1]
    index.save(tmp_path / "short.samples", source=IndexedDataset(tmp_path / "short"))
    data = {"prefix": str(tmp_path / "short"), "index": str(tmp_path / "short.samples")}
    tree = {
        "run_dir": "x",
        "num_steps": 400,
        "model": {"preset": "llama_tiny"},
        "data": data | {"tokens_per_step": 512, "micro_batch_tokens": 256},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    command = ("proxy", tmp_path / "run.yaml", tmp_path / "small", "--scale", "1/4", "--json")
    wrong = printed(*command, "--tokens-per-step", 100, status=2)
    assert "give a multiple of 128, as in 128" in wrong
    facts = json.loads(printed(*command, "--tokens-per-step", 128))
    assert (facts["num_steps"], facts["tokens_per_step"]) == (400, 128)


def test_tokens_of_all_stages_must_scale_to_whole_numbers(sources: Path, tmp_path: Path) -> None:
    run = the_run(sources, tmp_path)
    tree = yaml.safe_load((tmp_path / "blend.yaml").read_text())
    tree["stages"][3]["tokens_per_step"] = 768
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(tree))
    small = ("--scale", "1/2", "--tokens-per-step", 257)
    wrong = printed("proxy", run, tmp_path / "small", *small, status=2)
    assert "512, 768 tokens" in wrong and "a multiple of 512, as in 512" in wrong
    assert "is a file" in printed("proxy", run, run, "--scale", "1/2", status=2)


def test_whole_documents_that_are_too_large_name_a_scale(sources: Path, tmp_path: Path) -> None:
    run = the_run(sources, tmp_path, num_steps=4000)
    done = build("proxy", run, tmp_path / "small", "--scale", "1/400", "--set", "data.blend=b.yaml")
    assert done.returncode == 1 and "b.yaml" in done.stderr
    tree = yaml.safe_load((tmp_path / "blend.yaml").read_text())
    del tree["stages"], tree["run_tokens"], tree["max_epochs"]
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(tree))
    shown = printed("proxy", run, tmp_path / "small", "--scale", "1/2000")
    assert "whole documents miss the scale by" in shown and "by less than 1 % at scale 1/" in shown


def test_shards_scores_exclusions_and_fim_keep_their_meaning(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents keep their numbers, so that files of scores and exclusions stay valid."""
    monkeypatch.chdir(tmp_path)
    run = the_run(sources, tmp_path, num_steps=400, stop_at=None)
    names = [sources / "s2", sources / "s3"]
    room = ("--buckets", "64,128,256", "--fim-room", 3, "--output")
    printed("pack", *names, *room, "all.shards.json")
    printed("pack", sources / "s0", *room, "a.samples")
    count = IndexedDataset(sources / "s0").num_documents
    np.save(tmp_path / "scores.npy", np.arange(count)[::-1])
    (tmp_path / "taken.txt").write_text("\n".join(map(str, range(0, count, 2))))
    scored = {"name": "a", "prefix": f"{sources}/s0", "index": "a.samples"}
    tree = {
        "sources": [
            {**scored, "weight": 1, "scores": "scores.npy"},
            {"name": "b", "index": "all.shards.json", "weight": 1},
        ],
        "fim": {
            "rate": 0.5,
            "eod": "none",
            "sentinels": {"prefix": 61, "suffix": 62, "middle": 63},
        },
        "stages": [{"from_step": 200, "exclude": {"a": "taken.txt"}}],
    }
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(tree))
    printed("proxy", run, "small", "--scale", "1/4", "--dry-run")
    printed("proxy", run, "small", "--scale", "1/4")
    small = OpenRun(load_config(PretrainConfig, tmp_path / "small" / "run.yaml"))
    samples = small.schedule.samples
    assert samples.fingerprints[0] != samples.indices[0].fingerprint  # with its order by score
    assert samples.indices[1].num_documents == sum(IndexedDataset(n).num_documents for n in names)
    before, after = small.schedule.step(49), small.schedule.step(50)
    assert not before.view.has_exclusions and after.view.has_exclusions
    held = {d for i in after.sample_ids for d, _, _ in samples.segments(i, after.view)[1]}
    of_a = [i for i in after.sample_ids if samples.segments(i, after.view)[0] == 0]
    kept = {d for i in of_a for d, _, _ in samples.segments(i, after.view)[1]}
    assert held and kept and all(document % 2 for document in kept)
    assert after.view.fim_rates is not None and set(after.view.fim_rates) == {0.5}
