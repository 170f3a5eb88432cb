"""megapack-build trace: answers equal the steps of the run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import build, printed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peers import peer

from megapack import IndexedDataset, IndexedDatasetBuilder, SampleIndex, pack
from megapack.config import from_dict
from megapack.errors import ConfigError

peer("torch")  # which megapack.data needs

NAMES = ("web", "code")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of two byte sources with a stage; each document holds its own name."""
    folder = tmp_path_factory.mktemp("trace")
    for name in NAMES:
        with IndexedDatasetBuilder(folder / name, dtype="uint16", vocab_size=259) as builder:
            for number in range(60):
                text = f"{name} {number} " * (1 + number * 7 % 11)
                builder.add_document([*text.encode(), 256])
            builder.add_document([])
        dataset = IndexedDataset(folder / name)
        index = pack(dataset.document_lengths, "bucket", buckets=[32, 64])
        index.save(folder / f"{name}.samples", source=dataset)
    sources = [
        {"name": name, "prefix": name, "index": f"{name}.samples", "weight": weight}
        for name, weight in zip(NAMES, (1, 0), strict=True)
    ]
    stages = [{"from_step": 6, "weights": {"web": 1, "code": 2}}]
    (folder / "blend.yaml").write_text(yaml.safe_dump({"sources": sources, "stages": stages}))
    data = {"blend": str(folder / "blend.yaml"), "tokens_per_step": 256, "micro_batch_tokens": 64}
    model = {"preset": "llama_tiny"}
    run = {"run_dir": "run", "seed": 3, "num_steps": 40, "data": data, "model": model}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def schedule_of(config: Path) -> Any:
    from megapack.data import Schedule, load_blend, open_blend  # noqa: PLC0415

    packed = open_blend(load_blend(config.with_name("blend.yaml")))
    return Schedule(packed, tokens_per_step=256, seed=3)


def ask(config: Path, *words: str) -> Any:
    return json.loads(printed("trace", config, *words, "--json"))


def test_a_blend_of_another_directory_is_named_with_the_remedy(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = printed("trace", config, "--set", "data.blend=blend.yaml", status=1)
    assert "there is no blend.yaml (data.blend)" in said
    assert f"{tmp_path}: change the directory, or" in said


def test_the_documents_of_a_step(config: Path) -> None:
    schedule = schedule_of(config)
    found = ask(config, "--step", "9")
    bases = dict(zip(NAMES, schedule.samples.bases.tolist(), strict=False))
    ids = [bases[s["source"]] + s["sample"] for s in found["samples"]]
    assert ids == schedule.step(9).sample_ids.tolist()
    assert (found["tokens_before"], found["stage_from_step"]) == (9 * 256, 6)
    for shown in found["samples"]:
        index = schedule.samples.indices[NAMES.index(shown["source"])]
        assert [tuple(s) for s in shown["segments"]] == index.sample(shown["sample"])[1]
    text = printed("trace", config, "--step", "9", "--tokenizer", "bytes", "--full")
    for shown in found["samples"]:
        document, begin, _ = shown["segments"][0]
        if begin == 0:
            assert f"{shown['source']} {document} " in text
    assert "of the stage from step 6" in printed("trace", config, "--step", "9")


def test_fim_documents_show_their_cuts(config: Path, tmp_path: Path) -> None:
    """Their text equals the batches of training, also with --ranks."""
    from megapack.data.run import OpenRun  # noqa: PLC0415
    from megapack.training.config import PretrainConfig  # noqa: PLC0415

    folder = config.parent
    blend = yaml.safe_load((folder / "blend.yaml").read_text())
    for source in blend["sources"]:
        source["prefix"] = str(folder / source["name"])
        lengths = IndexedDataset(source["prefix"]).document_lengths
        index = pack(lengths, "bucket", buckets=[32, 64], fim_room=3)
        source["index"] = f"{source['name']}.samples"
        index.save(tmp_path / source["index"], source=IndexedDataset(source["prefix"]))
    blend["fim"] = {"sentinels": {"prefix": 257, "suffix": 258, "middle": 0}, "tokenizer": "bytes"}
    blend["fim"]["rate"] = 0.9
    blend["stages"][0]["fim_rates"] = {"code": 0.2}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(blend))
    run = yaml.safe_load(config.read_text())
    run["data"]["blend"] = str(tmp_path / "blend.yaml")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    opened = OpenRun(from_dict(PretrainConfig, run))

    def told(step: int) -> int:
        batches = [b for rank in range(2) for b in opened.sampler(rank, 2).micro_batches(step)]
        tokens = [opened.data.micro_batch(**batch.gathered_by)["tokens"] for batch in batches]
        return sum(int((own == 257).sum()) for own in tokens)

    step = max(range(6, 20), key=told)
    asked = ("trace", tmp_path / "run.yaml", "--step", step)
    found = json.loads(printed(*asked, "--ranks", 2, "--json"))["samples"]
    assert {(s["source"], s["fim_rate"]) for s in found} == {("web", 0.9), ("code", 0.2)}
    turned = sum(len(shown["fim"]) for shown in found)
    assert turned == told(step) > 3
    table = printed(*asked, "--ranks", 2)
    assert table.count(" PSM ") + table.count(" SPM ") == turned
    text = printed(*asked, "--tokenizer", "bytes", "--full")
    assert (
        text.count(" tokens, as PSM") + text.count(" tokens, as SPM")
        == turned
        == text.count("<bos>")
    )
    shown = next(s for s in found if s["fim"] and s["source"] == "web")
    [how, *_] = shown["fim"]
    options = ("--fim", tmp_path / "blend.yaml", "--epoch", shown["epoch"], "--seed", 3)
    picture = printed("inspect", tmp_path / "web.samples", "--sample", shown["sample"], *options)
    assert f" tokens, as {how['how']}, cut at {how['cuts'][0]} and {how['cuts'][1]}; " in picture


def test_ranks_partition_the_step(config: Path) -> None:
    whole = ask(config, "--step", "7")["samples"]
    dealt = ask(config, "--step", "7", "--ranks", "2")["samples"]
    places = {(s["rank"], s["micro_step"]) for s in dealt}
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    one = ask(config, "--step", "7", "--ranks", "2", "--rank", "1")["samples"]
    assert one == [s for s in dealt if s["rank"] == 1]
    key = ("source", "sample")
    assert sorted([s[k] for k in key] for s in dealt) == sorted([s[k] for k in key] for s in whole)


def test_the_steps_of_a_document(config: Path) -> None:
    schedule = schedule_of(config)
    held: dict[tuple[int, int], set[int]] = {}
    for step in range(40):
        for sample in schedule.step(step).sample_ids.tolist():
            source, segments = schedule.samples.segments(sample)
            for document, _, _ in segments:
                held.setdefault((source, document), set()).add(step)
    for source, document in ((0, 0), (0, 59), (1, 8), (1, 31)):
        found = ask(config, "--document", f"{NAMES[source]}:{document}")
        assert {i for s in found["samples"] for i in s["steps"]} == held[source, document]
        assert found["max_step"] == 40
    many = ask(config, "--document", "web:0", "--max-step", "99999")["samples"][0]["steps"]
    last = f" {many[-2]:,} {many[-1]:,}\n"
    assert printed("trace", config, "--document", "web:0", "--max-step", "99999").endswith(last)
    few = ask(config, "--document", "code:8", "--max-step", "6")
    assert [s["steps"] for s in few["samples"]] == [[] for _ in few["samples"]]
    assert "no sample holds it" in printed("trace", config, "--document", "web:60")
    said = printed("trace", config, "--document", "web:7000", status=2)
    assert "document 7000 of web: it has 61 documents" in said


def test_tokens_of_every_source(config: Path) -> None:
    before, after = (ask(config, "--max-step", n)["datasets"] for n in ("6", "40"))
    assert [d["name"] for d in after] == list(NAMES)
    assert before[1]["tokens"] == 0 and sum(d["tokens"] for d in after) == 40 * 256
    other = ask(config, "--max-step", "6", "--set", "data.tokens_per_step=512")["datasets"]
    assert other[0]["tokens"] == 2 * before[0]["tokens"]


def test_excluded_documents_are_hidden(config: Path) -> None:
    blend = yaml.safe_load(config.with_name("blend.yaml").read_text())
    blend["stages"].append({"from_step": 20, "exclude": {"web": "gone.txt"}})
    config.with_name("masking.yaml").write_text(yaml.safe_dump(blend))
    config.with_name("gone.txt").write_text("7\n30\n")
    masking = ("--set", f"data.blend={config.with_name('masking.yaml')}")
    [found] = ask(config, *masking, "--exclusions")
    plain = [ask(config, "--document", f"web:{d}")["samples"] for d in (7, 30)]
    steps = [i for samples in plain for shown in samples for i in shown["steps"]]
    assert max(steps) >= 20 > found["last_seen"] == max(i for i in steps if i < 20)
    assert found["draws_since"] == sum(i >= 20 for i in steps) and found["shown_since"] == 0
    late = next(i for i in steps if i >= 20)
    words = ("--step", str(late), "--tokenizer", "bytes", "--full")
    hidden = re.compile("web 7 web 7|web 30 web 30")
    assert hidden.search(printed("trace", config, *words))
    assert not hidden.search(printed("trace", config, *masking, *words))
    shown = ask(config, *masking, "--document", "web:7")
    assert shown["masked_from"] == 20
    before = [[i for i in sample["steps"] if i < 20] for sample in plain[0]]
    assert [sample["steps"] for sample in shown["samples"]] == before and any(before)
    for question in (("--document", "web:7"), ("--exclusions",)):
        assert "20" in printed("trace", config, *masking, *question)
    assert "no stage excludes any" in printed("trace", config, "--exclusions")


def test_written_skips_show_what_the_run_without_them_draws(config: Path) -> None:
    """The skipped steps are on both sides of a change of weights."""
    blend = yaml.safe_load(config.with_name("blend.yaml").read_text())
    blend["stages"].insert(0, {"from_step": 4, "skip_steps": 5})
    config.with_name("skipping.yaml").write_text(yaml.safe_dump(blend))
    skipping = ("--set", f"data.blend={config.with_name('skipping.yaml')}")
    answer = ask(config, *skipping, "--skipped")
    assert answer["decisions"] == [] and ask(config, "--skipped")["written"] == []
    [skip] = answer["written"]
    assert skip["from_step"] == 4
    assert skip["skipped"] == [ask(config, "--step", str(step))["samples"] for step in range(4, 9)]
    assert {s["source"] for samples in skip["skipped"] for s in samples} == {*NAMES}
    shown = printed("trace", config, *skipping, "--skipped")
    assert "from step 4 skips 5 steps" in shown and "step 8 of the run without this skip" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--document", "web"], "'web' is not SOURCE:D with a number D and one of the sources web"),
        (["--document", "wep:3"], "one of the sources web, code"),
        (["--document", f"web:{1 << 63}"], "is not SOURCE:D with a number D"),
        (["--ranks", "2"], "--ranks 2 works only with --step N"),
        (["--output", "x.npy"], "--output x.npy works only with --unseen SOURCE"),
        (["--step", "1", "--full"], "--full works only with --tokenizer T: give that"),
        (
            ["--skipped", "--max-step", "3"],
            "--max-step 3 has no effect with --step and --skipped: leave it out",
        ),
        (
            ["--document", "web:3", "--max-step", f"{10**12}"],
            "at most 100,000 are listed: consider",
        ),
        (
            ["--max-step", f"{10**16}"],
            "reaches step 10000000000000000, and a run has at most 2^53",
        ),
        (["--step", "-1"], "steps are counted from 0"),
        (["--step", "1", "--rank", "0"], "--rank 0 works only with --ranks N: give that"),
        (["--step", "1", "--ranks", "3"], "3 ranks do not divide the 4 micro batches"),
        (["--set", "data.blend=null"], "data: give prefix and index"),
    ],
)
def test_wrong_questions_exit_with_status_2(config: Path, words: list[str], message: str) -> None:
    assert message in printed("trace", config, *words, status=2)


# ---- Assignment to ranks: trace equals the sampler and the loader of the run


NUM_STEPS = 24


@pytest.fixture(scope="module")
def folder(config: Path) -> Path:
    """Write the same sources, and blends of them with loss weights and stages."""
    folder = config.parent
    sources = yaml.safe_load((folder / "blend.yaml").read_text())["sources"]
    sources[0]["weight"], sources[1]["weight"], sources[1]["loss_weight"] = 2, 1, 3.0
    stages = [
        {"from_step": 5, "weights": {"code": 1}, "order": "shrink-p2", "attention_window": 12},
        {"from_step": 11, "weights": {"web": 1, "code": 1}, "tokens_per_step": 512},
        {"from_step": 14, "skip_steps": 2},
    ]
    (folder / "plain.yaml").write_text(yaml.safe_dump({"sources": sources}))
    (folder / "staged.yaml").write_text(yaml.safe_dump({"sources": sources, "stages": stages}))
    return folder


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a configuration of megapack-pretrain without paths, and its number of ranks."""
    mixed, size = draw(st.booleans()), draw(st.sampled_from([1, 2, 4]))
    data = {
        "attention": draw(st.sampled_from(["document", "sample"])),
        "label_boundary": draw(st.sampled_from(["document", "sample"])),
        "positions": draw(st.sampled_from(["segment", "document", "sample"])),
        "order": draw(st.sampled_from(["proportional", "uniform", "grow-p2", "sequential"])),
        "pad_last": draw(st.booleans()),
        "tokens_per_step": 256,
        "micro_batch_tokens": draw(st.sampled_from([64, 64 // size])),
        **({"mix": "micro_step", "micro_step_tokens": 128} if mixed else {}),
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
    """Return (rank, micro step, sample id) of a step from ``build_loader``, with all options."""
    from megapack import data as api  # noqa: PLC0415

    tree, data = run["tree"], dict(run["tree"]["data"])
    options = {name: data.pop(name) for name in ("attention", "label_boundary", "positions")}
    dealing = {name: data.pop(name) for name in ("pad_last", "micro_batch_tokens")}
    if run["source"] == "one":
        packed = api.PackedDataset(str(folder / "web"), str(folder / "web.samples"), **options)
    else:
        packed = api.open_blend(api.load_blend(folder / run["source"]), **options)
    schedule = api.Schedule(packed, seed=tree["seed"], **data)
    found = []
    for rank in range(run["ranks"]):
        where = {"data_parallel_rank": rank, "data_parallel_size": run["ranks"], **tree["engine"]}
        when = {"start_step": run["step"], "num_steps": 1, "prefetch": 0}
        loader = api.build_loader(packed, schedule, weighted_loss=True, **where, **when, **dealing)
        for batch in loader:
            run["labels"] = batch["num_step_label_tokens"]
            found += [(rank, batch["micro_step"], i) for i in batch["sample_ids"].tolist()]
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=runs())
def test_trace_of_a_rank_equals_its_batches(folder: Path, run: dict[str, Any]) -> None:
    paths = {"prefix": str(folder / "web"), "index": str(folder / "web.samples")}
    if run["source"] != "one":
        paths = {"blend": str(folder / run["source"])}
    config = folder / "asked.yaml"
    config.write_text(yaml.safe_dump({**run["tree"], "data": {**run["tree"]["data"], **paths}}))
    done = build("trace", config, "--step", run["step"], "--ranks", run["ranks"], "--json")
    try:
        expected = trained_on(folder, run)
    except ConfigError:
        assert done.returncode == 2, "the run refuses what trace answers"
        return
    assert done.returncode == 0, done
    answer = json.loads(done.stdout)
    web = SampleIndex.load(folder / "web.samples").num_samples
    found = [
        (s["rank"], s["micro_step"], s["sample"] + (web if s["source"] == "code" else 0))
        for s in answer["samples"]
    ]
    assert found == expected
    assert answer["num_label_tokens"] == run["labels"]
