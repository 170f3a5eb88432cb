"""Training part of `make bench-papers`: runs are cached, and one rule decides claims."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import report
from papers import all as everything
from papers import corpus, given, invented_facts, runs
from papers.claims import alike, below, corrected, difference, less, near, same, shown, together
from papers.corpus import Corpus
from papers.ranks import mean_of_ranks
from papers.recipes import (
    atom_size,
    bucketllm,
    fim,
    groups,
    masking,
    packing,
    repetition,
    seamless,
    steps,
)  # fmt: skip
from papers.run import Run
from papers.runs import SCALES, Result, run_all, worker_pool
from papers.settings import shifted

from megapack.packing import pack
from megapack.packing.groups import read_groups
from megapack.training.config import EngineConfig

pytestmark = pytest.mark.pages

PROSE = Corpus(domain="prose", train_bytes=40_000, valid_bytes=5_000, max_bytes=2_000)
RUN = Run(
    recipe="test",
    name="concat",
    seed=0,
    corpus=PROSE,
    strategy="concat",
    buckets=(64,),
    config={
        "num_steps": 3,
        "model": {"preset": "gpt2_tiny_alibi"},
        "data": {"tokens_per_step": 512, "micro_batch_tokens": 256},
        "optimizer": {"lr": 1e-3},
        "engine": {"precision": "fp32", "zero_stage": 0},
    },
    validate={"prose": PROSE},
    valid_bucket=64,
    evaluate_every=2,
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an empty cache, and a small tokenizer."""
    folder = tmp_path_factory.mktemp("work")
    caches = (corpus.prepare, corpus.tokenizer, invented_facts.vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        for module in (corpus, runs):
            patch.setattr(module, "WORK", folder)
        patch.setattr(corpus, "TOKENIZER_BYTES", 200_000)
        patch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}")
        for cached in caches:
            cached.cache_clear()
        yield folder
        for cached in caches:
            cached.cache_clear()


@pytest.fixture(scope="module")
def pool(work: Path) -> Iterator[Executor]:
    """Start one process that trains."""
    with worker_pool(1) as workers:
        yield workers


def test_a_run_is_done_once_and_a_run_that_continues_it_begins_with_its_weights(
    work: Path, pool: Executor
) -> None:
    further = dataclasses.replace(
        RUN, name="further", start=RUN, config={**RUN.config, "num_steps": 1, "model": {}}
    )
    other = dataclasses.replace(RUN, name="again, alone", keep_model=True)
    with pytest.raises(RuntimeError, match="test: broken, seed 0"):
        broken = {**RUN.config, "data": {"tokens_per_step": 512, "micro_batch_tokens": 96}}
        run_all([other, dataclasses.replace(RUN, name="broken", config=broken)], pool)
    first, continued = run_all([RUN, further], pool)  # a failed run leaves the pool usable
    log = first.log()
    assert [line["step"] for line in log] == [0, 1, 2]
    assert [line["step"] for line in first.evaluations()] == [2, 3]
    assert first.evaluations()[-1]["perplexity"] == first.perplexity("prose")
    assert continued.log()[0]["loss"] < log[0]["loss"] - 0.01  # not from scratch
    written = (first.folder / "result.json").stat().st_mtime_ns
    again = run_all([RUN, further], pool)
    assert (first.folder / "result.json").stat().st_mtime_ns == written
    assert [r.summary for r in again] == [first.summary, continued.summary]
    assert run_all([other], pool)[0].perplexity("prose") == first.perplexity("prose")


def test_length_of_a_run_may_be_said_in_epochs(work: Path) -> None:
    """The recipes atom_size and seamless do so for longer runs."""
    from papers import worker  # noqa: PLC0415  # what a process that trains imports

    run = dataclasses.replace(RUN, config={**RUN.config, "num_steps": None, "num_epochs": 2})
    task = runs.Task(run=run, folder=work, prepared={}, start=None, keep_model=False)
    config = worker.configuration(task, work)
    assert (config.num_steps, config.num_epochs) == (None, 2)


def tiny(run: Run) -> Run:
    """Shorten a run to a few steps, with lengths divided by eight."""
    small = Corpus(
        domain="prose",
        train_bytes=30_000,
        valid_bytes=4_000,
        min_bytes=40,
        max_bytes=300,
        folders=run.corpus.folders,
    )
    sizes = {k: v // 8 for k, v in run.config["data"].items() if isinstance(v, int)}
    data = {**run.config["data"], **sizes}
    return dataclasses.replace(
        run,
        corpus=small,
        other=run.other and small,
        buckets=tuple(n // 8 for n in run.buckets),
        config={**run.config, "num_steps": 12, "data": data},
        validate=dict.fromkeys(run.validate, small),
        valid_bucket=run.valid_bucket // 8,
        contexts=tuple(n // 8 for n in run.contexts),
    )


def test_each_recipe_runs_measures_claims_and_draws(work: Path, pool: Executor) -> None:
    # One arm of each is trained; what is computed from arms takes its results for all of them.
    arms = {
        bucketllm: "BucketLLM",
        masking: masking.DEFAULT,
        packing: packing.MIXED,
        steps: steps.ON,
        groups: groups.GROUPS,
        repetition: repetition.FOUR,
        fim: fim.HALF,
    }
    runs = {recipe: [tiny(run) for run in recipe.runs(SCALES["quick"])] for recipe in arms}
    chosen = [next(r for r in runs[recipe] if r.name == arm) for recipe, arm in arms.items()]
    trained = dict(zip(runs, run_all(chosen, pool), strict=True))
    for recipe, result in trained.items():
        results = [dataclasses.replace(result, run=run) for run in runs[recipe]]
        assert len(recipe.rows(results)) >= len(results)
        claims = recipe.claims(results)
        assert len(claims) >= 7
        compared = [claim for claim in claims if "gradient" not in claim.claim]
        assert {claim.agrees for claim in compared} == {"undecided"}, "one seed decides nothing"
        recipe.plots(results, work / "figures")
    assert len(list((work / "figures").glob("*.png"))) == 9
    probe = trained[steps].summary["probe"]
    assert probe["gradient"] < 1e-5
    assert all(len(step) == 4 for times in probe["times"].values() for step in times)


def test_the_cut_tears_every_invented_fact_and_a_window_of_seamless_packing_holds_it(
    work: Path,
) -> None:
    encode = invented_facts.vocabulary().encode
    facts, texts = invented_facts.facts(), invented_facts.documents()
    assert len(texts) == len(facts) * invented_facts.NUM_COPIES
    assert len({fact.about for fact in facts}) == len(facts)
    lengths = np.full(3, invented_facts.DOCUMENT_TOKENS, np.int32)
    capacity = invented_facts.CAPACITY
    case = seamless.CASES["SP"]
    windows = pack(lengths, case["strategy"], buckets=[capacity], **case["parameters"])
    begins = {begin for i in range(windows.num_samples) for _, begin, _ in windows.sample(i)[1]}
    assert begins == {0, 24}
    for fact, text in zip(facts, texts[:: invented_facts.NUM_COPIES], strict=True):
        tokens, wanted = encode(text), encode(fact.prompt + fact.answer)
        [place] = [i for i in range(len(tokens)) if tokens[i : i + len(wanted)] == wanted]
        assert place >= 24 and place + len(wanted) <= len(tokens)  # whole in the second window
        about = len(encode(fact.prompt)) - 2  # without "value is"
        answer = place + len(encode(fact.prompt))
        assert place + about < capacity < answer  # and torn by a cut at 32


def test_rule_says_yes_no_and_undecided() -> None:
    low, high = [10.0, 11.0, 12.0], [10.5, 11.4, 12.6]  # apart by seed, though they overlap
    near_low = [10.01, 11.02, 11.99]
    for (verdict, p), wanted in (
        (less(low, high), "yes"),
        (less(high, low), "no"),
        (less(low, [10.5, 10.4, 12.6]), "undecided"),
        (less(low, low), "undecided"),
        (less([1.0], [2.0]), "undecided"),  # one seed decides nothing
        (alike(low, near_low, within=0.01), "yes"),
        (alike(low, [20.0, 21.0, 22.1], within=0.01), "no"),
        (alike(low, [9.0, 11.0, 13.0], within=0.01), "undecided"),
        (alike([1.0], [1.0], within=0.01), "undecided"),
    ):
        assert verdict == wanted and (p < 0.05) == (wanted != "undecided")
    assert near(1.25, 1.23, within=0.05) == "yes" and near(1.4, 1.23, within=0.05) == "no"
    found = difference(low, high)
    assert found.mean == pytest.approx(-0.5)
    assert found.low < found.mean < found.high < 0
    with pytest.raises(ValueError, match="there are 3 and 1"):
        difference(low, [1.0])
    assert shown(low) == "11.00 +- 1.00" and shown([1.0]) == "1.00"


def test_several_statements_hold_with_their_largest_p_and_fail_with_the_smallest_of_all() -> None:
    assert together([("yes", 0.01), ("yes", 0.03)]) == {"agrees": "yes", "p": 0.03}
    assert together([("yes", 0.01), ("undecided", 0.3)]) == {"agrees": "undecided", "p": 0.3}
    found = together([("yes", 0.001), ("no", 0.01), ("no", 0.02)])
    assert found == {"agrees": "no", "p": pytest.approx(0.03)}


def made_up(run: Run, folder: Path, loss: float) -> Result:
    """Return an invented result with a flat curve at ``loss``."""
    folder.mkdir(parents=True)
    steps = 25 if "padding" in run.name or "SP" in run.name else 20
    loss += 0.01 * run.seed  # seeds are paired, so this is no spread
    step = {"loss": loss, "perplexity": math.exp(loss)}
    lines = [{"step": i, "epoch": i / steps, "epoch_end": (i + 1) / steps} for i in range(steps)]
    (folder / "log.jsonl").write_text("".join(json.dumps({**x, **step}) + "\n" for x in lines))
    # 0.2 above the end of the run when a fifth of it is left.
    evaluations = [{"step": 20, "loss": loss + 0.2}, {"step": steps, "loss": loss}]
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(x) + "\n" for x in evaluations))
    summary = {
        "steps": steps,
        "steps_per_epoch": steps,
        "index": {"repeated_ratio": 0.1, "dropped_ratio": 0.0, "padding_ratio": 0.0},
        "valid": {name: step for name in run.validate},
    }
    if run.probe is not None:
        summary["probe"] = {"loss": loss, "right": 0.5}
    return Result(run, folder, summary)


def test_atom_sizes_are_judged_by_what_was_measured(tmp_path: Path) -> None:
    def loss(name: str) -> float:
        share = float(name.split(", atom ")[1].split(maxsplit=1)[0])
        return 4.0 + 0.2 * abs(math.log2(share)) - (0.1 if "padding" in name else 0.0)

    runs = atom_size.runs(SCALES["cpu"])
    assert len({run.name for run in runs}) == 2 * 5 + 2 * 2 + 3 and len(runs) == 3 * 17
    results = [made_up(run, tmp_path / str(i), loss(run.name)) for i, run in enumerate(runs)]
    assert len(atom_size.rows(results)) == 17
    claims = atom_size.claims(results)
    assert len(claims) == 3 * 5 + 3 * 3 + 1
    steps = [claim for claim in claims if "more steps" in claim.claim]
    assert ["1.25 times" in claim.measured for claim in steps] == [True] * 3
    assert {claim.agrees for claim in claims if claim not in steps[::2]} == {"yes"}
    assert steps[2].agrees == "no"  # 1.46 times in the paper
    worse = [made_up(run, tmp_path / f"w{i}", -loss(run.name)) for i, run in enumerate(runs)]
    verdicts = [claim.agrees for claim in atom_size.claims(worse)]
    exact = [claim.claim for claim in claims].index(steps[1].claim)
    assert verdicts[:15] == ["no"] * 15 and verdicts[exact : exact + 3] == ["yes", "no", "no"]
    assert verdicts[-1] == "yes"  # evaluations are written as they are in both
    atom_size.plots(results, tmp_path / "images")
    assert len(list((tmp_path / "images").glob("atom_size_*.png"))) == 2


def test_seamless_packing_is_judged_by_what_was_measured(work: Path) -> None:
    order = ["SP", "BFD", "CT, as", "CT"]  # from low to high; what is none of them is SP's kind

    def loss(name: str) -> float:
        place = [i for i, word in enumerate(order) if name.startswith((word, f"facts, {word}"))]
        return 4.0 + 0.005 * min(place, default=0) + (0.1 if "SP, " in name else 0.0)

    runs = seamless.runs(dataclasses.replace(SCALES["quick"], num_seeds=3))
    results = [made_up(run, work / "r" / str(i), loss(run.name)) for i, run in enumerate(runs)]
    claims = seamless.claims(results)
    verdicts = {claim.claim: claim.agrees for claim in claims}
    assert len(verdicts) == 12
    against = [claim.agrees for claim in claims if "placement" in claim.claim]
    assert against == ["no"]  # 10 % worse, and within 1 % was asked
    assert {v for claim, v in verdicts.items() if "placement" not in claim} == {"yes"}
    assert {row["strategy"] for row in seamless.rows(results)} == {r.name for r in runs}
    seamless.plots(results, work / "images")
    assert len(list((work / "images").glob("seamless_*.png"))) == 2


def test_verdicts_use_holms_correction() -> None:
    """Holm's correction: the smallest p is held to 5 % over the number of claims, and so on."""
    base = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8]
    clear, weak = [x - 1 for x in base], [x - d for x, d in zip(base, (0, 3, 1, 2, 0.5, 1.5))]  # noqa: B905
    words = {"source": "", "claim": "", "paper": "", "why": ""}
    strong, lone = below(clear, base, **words), below(weak, base, **words)
    assert strong.agrees == lone.agrees == "yes"
    assert strong.p is not None and strong.p < 1e-6
    assert lone.p is not None and 0.05 / 4 < lone.p < 0.05
    assert [claim.agrees for claim in corrected([lone])] == ["yes"]
    assert [claim.agrees for claim in corrected([lone, strong])] == ["yes", "yes"]
    nothing = below(base, base[::-1], **words)
    assert nothing.agrees == "undecided"
    many = corrected([nothing, lone, strong, nothing])
    assert [claim.agrees for claim in many] == ["undecided", "undecided", "yes", "undecided"]
    alike_ones = same(base, [x * 1.001 for x in base], within=0.05, **words)
    assert alike_ones.agrees == "yes" and alike_ones.p is not None and alike_ones.p < 0.001
    apart = same([2 * x for x in base], base, within=0.05, **words)
    assert apart.agrees == "no" and apart.p is not None and apart.p < 0.001
    some = [x * f for x, f in zip(base, (1.03, 1.08, 1.06, 1.05, 1.07, 1.04), strict=True)]
    beyond = same(some, base, within=0.05, **words)
    assert beyond.agrees == "undecided" and beyond.p is not None and beyond.p > 0.5, (
        "half a percent beyond a limit of five is not far beyond"
    )


def test_a_wrong_choice_of_recipes_or_scale_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUICK", raising=False)
    monkeypatch.setenv("ONLY", "atom_size,atoms")
    with pytest.raises(SystemExit, match=r"ONLY names atoms; there are composition, atom_size"):
        everything.chosen_recipes()
    monkeypatch.setenv("ONLY", "seamless,atom_size")
    assert everything.chosen_recipes() == ["atom_size", "seamless"]
    monkeypatch.setenv("SCALE", "laptop")
    with pytest.raises(SystemExit, match="SCALE is 'laptop'; choose cpu, long or gpu"):
        everything.chosen_scale()
    if not torch.cuda.is_available():
        monkeypatch.setenv("SCALE", "gpu")
        with pytest.raises(SystemExit, match="SCALE=gpu needs a CUDA device"):
            everything.chosen_scale()
    monkeypatch.setenv("SCALE", "long")
    monkeypatch.setenv("SEEDS", "3")
    assert everything.chosen_scale() == dataclasses.replace(SCALES["long"], num_seeds=3)
    monkeypatch.setenv("SEEDS", "0")
    with pytest.raises(SystemExit, match="SEEDS is '0'; it is a number of seeds"):
        everything.chosen_scale()


def test_a_share_of_the_training_documents_is_cut_and_no_text_is_lost(work: Path) -> None:
    def texts(of: Corpus, split: str) -> list[str]:
        lines = (corpus.prepare(of).train.parent / f"{split}.jsonl").read_text().splitlines()
        return [json.loads(line)["text"] for line in lines]

    cut = dataclasses.replace(PROSE, cut=0.3)
    whole, parts = texts(PROSE, "train"), texts(cut, "train")
    assert "".join(parts) == "".join(whole)
    assert 0.1 < len(parts) / len(whole) - 1 < 0.5
    assert texts(cut, "valid") == texts(PROSE, "valid"), "what is scored stays whole"


def test_the_report_counts_verdicts_and_marks_a_quick_run_as_no_evidence() -> None:
    claims = [
        {"source": "s", "claim": f"c{i}", "paper": "1", "measured": "2", "agrees": verdict}
        for i, verdict in enumerate(("yes", "yes", "no", "undecided", None))
    ]
    run = {"benchmark": "papers-atom_size", "date": "d", "machine": "m", "cpu": "c", "num_cpus": 2,
           "python": "3", "versions": {}, "quick": False}  # fmt: skip
    results = {"title": "Atoms", "seconds": 1, "claims": claims}
    text = report.papers_section([{**run, "results": results}])
    assert "2 claims agree, 1 do not, 1 are undecided" in text and "no evidence" not in text
    assert "| s | c3 | 1 | 2 | undecided |" in text and "### Atoms" in text
    assert "no evidence" in report.papers_section([{**run, "quick": True, "results": results}])


def test_shifted_labels_are_the_next_tokens_of_the_sample_and_the_last_has_none() -> None:
    batch = {
        "tokens": torch.tensor([[1, 2, 3, 4, 5, 6, 0, 0]]),
        # Two samples of three tokens, then padding; an atom that was cut has its true successor.
        "labels": torch.tensor([[2, 99, 98, 5, 97, -100, -100, -100]]),
        "cu_seqlens": torch.tensor([0, 3, 6, 8], dtype=torch.int32),
        "num_step_label_tokens": 5,
    }
    changed = shifted(batch)
    assert changed["labels"].tolist() == [[2, 3, -100, 5, 6, -100, -100, -100]]
    assert changed["num_step_label_tokens"] == 4
    assert batch["labels"].tolist()[0][1] == 99


def test_the_means_of_ranks_weigh_every_micro_batch_equally() -> None:
    batch = {
        "labels": torch.tensor([[5, -100, 7, -100]]),
        "num_micro_steps": 4,
        "num_step_label_tokens": 999,
    }
    changed = mean_of_ranks(batch)
    assert changed["num_step_label_tokens"] == 2 * 4
    assert batch["num_step_label_tokens"] == 999


def test_files_of_a_folder_follow_each_other_and_are_held_out_with_it(work: Path) -> None:
    wanted = Corpus(
        domain="code", train_bytes=40_000, valid_bytes=8_000, max_bytes=1_500, folders=True
    )
    prepared = corpus.prepare(wanted)
    folders = {}
    for split in ("train", "valid"):
        text = (prepared.train.parent / f"{split}.jsonl").read_text()
        folders[split] = [json.loads(line)["folder"] for line in text.splitlines()]
        ids = read_groups("auto", str(prepared.train.with_name(split)), len(folders[split]))
        changes = sum(a != b for a, b in pairwise(folders[split]))
        assert changes + 1 == len(set(folders[split])) == len(np.unique(ids)) > 1
        assert (np.diff(ids) != 0).tolist() == [a != b for a, b in pairwise(folders[split])]
    assert not set(folders["train"]) & set(folders["valid"])


def test_documents_that_are_passed_over_are_the_first(work: Path) -> None:
    def texts(of: Corpus) -> list[str]:
        lines = (corpus.prepare(of).train.parent / "train.jsonl").read_text().splitlines()
        return [json.loads(line)["text"] for line in lines]

    whole = texts(PROSE)
    later = texts(dataclasses.replace(PROSE, after_bytes=25_000, train_bytes=15_000))
    assert whole[-len(later) :] == later and len(later) < len(whole)
    over = sum(len(text.encode()) for text in whole[: -len(later)])
    assert 25_000 <= over < 25_000 + PROSE.max_bytes


def _model(name: str) -> Any:
    """Model whose loss per token is a value of the batch, which shows which tokens are scored."""

    def losses(**batch: Any) -> tuple[torch.Tensor]:
        scored = batch["labels"] >= 0
        return (0.001 * batch[name][scored].double().sum(),)

    return losses


def test_a_file_behind_others_is_scored_on_the_same_tokens(work: Path) -> None:
    wanted = Corpus(
        domain="code", train_bytes=2_000, valid_bytes=8_000, max_bytes=1_500, folders=True
    )
    run = dataclasses.replace(RUN, validate={"files": wanted}, valid_bucket=1024)

    here, config = SimpleNamespace(device=torch.device("cpu")), EngineConfig()
    by_token, by_place = (
        given.behind(_model(name), here, config, run)  # type: ignore[arg-type]
        for name in ("labels", "position_ids")
    )
    assert by_token["alone"] == by_token["behind"] and by_token["files"] >= 1
    assert by_place["alone"] < by_place["behind"]


def test_middles_are_scored_on_the_same_tokens_whatever_is_given(work: Path) -> None:
    sentinels = {"prefix": 1024, "suffix": 1025, "middle": 1026}
    run = dataclasses.replace(RUN, fim={"sentinels": sentinels}, valid_bucket=1024)
    here, config = SimpleNamespace(device=torch.device("cpu")), EngineConfig()
    by_token, by_place = (
        given.middle(_model(name), here, config, run)  # type: ignore[arg-type]
        for name in ("labels", "position_ids")
    )
    files, tokens = (by_token[name] for name in ("files", "tokens"))
    assert 0 < files < tokens
    assert len({by_token[name] for name in ("prefix", "text", "PSM", "SPM")}) == 1
    assert by_place["prefix"] < by_place["text"] < by_place["PSM"] == by_place["SPM"]
    three = math.log(by_place["PSM"]) - math.log(by_place["text"])
    assert three == pytest.approx(3 * 0.001), "three sentinels stand before every middle"
