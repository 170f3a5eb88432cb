"""A dry run predicts the work of ranks, and explains the buckets of a step."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel

from megapack.cli.main import main
from megapack.config import load_config, to_dict
from megapack.data import BucketBatchSampler, PackedDataset, Schedule
from megapack.errors import ConfigError, ResumeError
from megapack.packing import pack
from megapack.packing.second import second_per_sample
from megapack.storage import IndexedDataset
from megapack.training.command import RECIPES, check_hub, read_config
from megapack.training.config import ModelConfig, PretrainConfig
from megapack.training.dry_run import dry_run
from megapack.training.engine.directory import CheckpointManifest
from megapack.training.engine.inputs import Inputs, check_run, run_record
from megapack.training.model import opening
from megapack.training.model.flops import ModelFlops
from megapack.training.monitoring.monitor import StepWork
from megapack.training.pretrain import planned_model
from megapack.training.start import check_tokenizer
from megapack.units import size

from .conftest import Corpus, blend_config, drawn_from, write_blend
from .packing_helpers import plain

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("ranks", "data", "engine"),
    [
        (1, {}, {}),
        (4, {}, {}),
        (2, {}, {}),
        (3, {"pad_last": True}, {}),
        (8, {"micro_batch_tokens": 64}, {"sequence_parallel_size": 4}),
    ],
    ids=["one rank", "one micro step", "two micro steps", "uneven ranks", "shared samples"],
)
def test_busiest_rank_equals_that_of_drawn_samples(
    corpus: Corpus, tmp_path: Path, ranks: int, data: dict[str, object], engine: dict[str, object]
) -> None:
    path = corpus.config(tmp_path / "run", num_steps=10, data=data, engine=engine)
    config = load_config(PretrainConfig, path)
    inputs, model = plain(config)
    flops = ModelFlops.of(model, model.configuration)
    tokens = config.data.micro_batch_tokens
    work = np.array([_work(inputs, config, rank, ranks) for rank in range(ranks)])
    work = flops.attention(1) * work + flops.per_token * tokens  # (ranks, steps, micro steps)
    mean = work.sum() / ranks
    per_step, per_micro_step = work.sum(2).max(0).sum() / mean, work.max(0).sum() / mean
    plan = dry_run(config, world_size=ranks)
    found = re.findall(r"predicted: (\S+) per step, (\S+) per micro step", plan)
    assert found == [(f"{per_step:.4f}", f"{per_micro_step:.4f}")]
    assert (per_micro_step > 1.0005) == (ranks > 1), "the case must have an imbalance"


def test_one_check_of_positions_serves_all_data(
    corpus: Corpus, blend: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It builds and runs tiny models, and a blend may have hundreds of held-out datasets."""
    config = load_config(PretrainConfig, blend_config(blend, corpus, tmp_path / "run"))
    run, checked = Inputs(config), []
    original = opening.check_positions

    def check(configuration: Any, *, longest: int, **how: Any) -> None:
        checked.append(longest)
        original(configuration, longest=longest, **how)

    monkeypatch.setattr(opening, "check_positions", check)
    check_run(config, run, 1)
    assert len(run.held_out) == 2
    assert checked == [max(data.longest_position() for data in (run.data, *run.held_out))]


def test_flops_are_those_of_the_whole_run(corpus: Corpus, blend: Path, tmp_path: Path) -> None:
    """Regression: only the first steps counted, but a growing window makes later ones costlier."""
    grows = {"from_step": 60, "attention_window": 128, "window_steps": 100}
    write_blend(blend, corpus, attention_window=2, stages=[grows])
    config = load_config(
        PretrainConfig, blend_config(blend, corpus, tmp_path / "run", num_steps=300)
    )
    inputs, model = plain(config)
    flops, schedule = ModelFlops.of(model, model.configuration), inputs.schedule
    work = [StepWork.of(schedule, schedule.step(i), flops) for i in range(300)]
    padding = sum(step.tokens - step.useful_tokens for step in work) * flops.per_token
    (flop,) = re.findall(r"arithmetic: (\S+) FLOP", dry_run(config))
    assert float(flop) == pytest.approx(sum(step.flops for step in work) + padding, rel=0.01)
    uneven = replace(config, data=replace(config.data, pad_last=True))
    (flop,) = re.findall(r"arithmetic: (\S+) FLOP", dry_run(uneven, world_size=3))
    idle = (6 * config.data.micro_batch_tokens - config.data.tokens_per_step) * flops.per_token
    assert float(flop) == pytest.approx(sum(step.flops + idle for step in work) + padding, rel=0.01)


def _work(inputs: Inputs, config: PretrainConfig, rank: int, ranks: int) -> list[list[float]]:
    """Return the squared lengths of a rank's segments, per step and micro step."""
    sampler = BucketBatchSampler(
        inputs.schedule,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        micro_batch_tokens=config.data.micro_batch_tokens,
        pad_last=config.data.pad_last,
        sequence_parallel_size=config.engine.sequence_parallel_size,
    )
    (index,) = inputs.schedule.samples.indices
    steps = []
    for step in range(10):
        row = []
        for batch in sampler.micro_batches(step):
            total = 0
            for sample in batch:
                begin, end = index.sample_segment_offsets[sample : sample + 2]
                lengths = index.segment_length[begin:end].tolist()
                total += sum(n * n for n in [*lengths, batch.capacity - sum(lengths)])
            row.append(total / batch.sequence_parallel_size)
        steps.append(row)
    return steps


def test_plan_names_the_other_mix(corpus: Corpus, tmp_path: Path) -> None:
    """The setting that the dry run proposes is valid, and its plan confirms it."""

    def plan_text(name: str, ranks: int, **data: object) -> str:
        config = load_config(PretrainConfig, corpus.config(tmp_path / name, data=data))
        (line,) = re.findall(r"^buckets per step: .*$", dry_run(config, world_size=ranks), re.M)
        return str(line)

    one = plan_text("step", 2)
    assert "one, the same on all ranks (mix: step)" in one
    proposed = re.findall(r"mix: (micro_step) and micro_step_tokens: (\d+) each of its (\d+)", one)
    ((mix, tokens, micro_steps),) = proposed
    assert int(tokens) == 2 * 256 and int(micro_steps) == 1024 // int(tokens)
    several = plan_text("micro_step", 2, mix=mix, micro_step_tokens=int(tokens))
    assert several.startswith(f"buckets per step: several, one for every {int(tokens):,} tokens")
    assert "mix: step would fill each step from one bucket" in several
    assert "needs several micro steps in a step" in plan_text("one micro step", 4)
    assert "share its micro steps evenly" in plan_text("uneven", 3, pad_last=True)


def test_missing_tokenizer_is_found_before_the_start(corpus: Corpus, tmp_path: Path) -> None:
    """Regression: the plan was printed, and the start failed."""
    model = {"vocab_size": 64, "tokenizer": str(tmp_path / "no.model")}
    config = load_config(PretrainConfig, corpus.config(tmp_path / "run", model=model))
    with pytest.raises(ConfigError, match=r"no\.model"):
        dry_run(config)
    assert "steps: " in dry_run(config, lengths="lognormal:60,50,900", buckets=[128])


def test_a_tokenizer_without_ids_of_the_documents(corpus: Corpus, tmp_path: Path) -> None:
    """Regression: the model was exported with a tokenizer that cannot decode its tokens."""
    path = tmp_path / "small.json"
    vocabulary = {f"word{i}": i for i in range(3)}
    Tokenizer(WordLevel(vocabulary, unk_token="word0")).save(str(path))
    settings = corpus.config(tmp_path / "run", model={"vocab_size": 64, "tokenizer": str(path)})
    config = load_config(PretrainConfig, settings)
    with pytest.raises(ConfigError, match=r"small\.json', whose ids are below 3, and .* holds tok"):
        dry_run(config)


@pytest.mark.parametrize("names", [["tokenizer.json"], ["vocab.json", "merges.txt"]])
def test_a_tokenizer_that_did_not_make_the_documents(
    names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text, prefix = tmp_path / "x.jsonl", tmp_path / "x"
    text.write_text('{"text": "abca"}\n')
    tokenizers = {"made": "abc", "other": "cba"}  # other ids for the same letters
    for name, letters in tokenizers.items():
        vocabulary = {token: i for i, token in enumerate(["<|endoftext|>", *letters, "ab"])}
        folder = tmp_path / name
        folder.mkdir()
        if names == ["tokenizer.json"]:
            Tokenizer(BPE(vocabulary, [("a", "b")])).save(str(folder / "tokenizer.json"))
        else:
            (folder / "vocab.json").write_text(json.dumps(vocabulary))
            (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    command = ["tokenize", "--input", text, "--tokenizer", tmp_path / "made"]
    assert main([*map(str, command), "--output-prefix", str(prefix)]) == 0
    data = PackedDataset(prefix, pack(IndexedDataset(prefix).document_lengths, buckets=[8]))
    for name in tokenizers:
        vocab = SimpleNamespace(get_vocab=lambda: {"<|endoftext|>": 0, "ab": 4})
        inputs: Any = SimpleNamespace(data=data)
        check_tokenizer(str(tmp_path / name), vocab, inputs)
        assert ("was tokenized with other files" in caplog.text) == (name == "other")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"checkpoint": {"resume": "never"}}, "has checkpoints and checkpoint.resume is never"),
        ({"checkpoint": {"mirror": "file:///{store}"}}, "is that of another run"),
        ({"mixing": {"rule": "no_such_rule"}, "blend": True}, "no_such_rule"),
        ({"evaluation": {"every": 2}, "data": {"valid_prefix": None}}, "data.valid_prefix"),
        ({"run_dir": "b", "checkpoint": {"branch_from": "{run}"}}, "name one of its checkpoints"),
    ],
    ids=["resume", "mirror", "mixing", "evaluation", "branch"],
)
def test_dry_run_refuses_what_a_start_refuses(
    corpus: Corpus, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    """Regression: the dry run printed a plan for each of these configurations."""
    (tmp_path / "run" / "checkpoints" / "step_00000002_tokens_9").mkdir(parents=True)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "run_id").write_text("of another")
    text = yaml.safe_dump(sections).replace("{store}", f"{tmp_path}/store")
    tree = yaml.safe_load(text.replace("{run}", f"{tmp_path}/run"))
    run_dir = tmp_path / tree.pop("run_dir", "run")
    if tree.pop("blend", False):
        tree["data"] = drawn_from(write_blend(tmp_path / "blend.yaml", corpus))
    path = corpus.config(run_dir, **tree)
    with pytest.raises(ConfigError, match=message):
        dry_run(load_config(PretrainConfig, path))


def test_dry_run_refuses_what_the_checkpoint_refuses(corpus: Corpus, tmp_path: Path) -> None:
    """Regression: the dry run printed a plan, and the run then ended at once, at step 9 of 8."""
    config = load_config(PretrainConfig, corpus.config(tmp_path / "run", num_steps=10))
    newest = tmp_path / "run" / "checkpoints" / "step_00000009_tokens_9"
    newest.mkdir(parents=True)
    inputs = Inputs(config)
    state: dict[str, Any] = {"data": inputs.schedule.state_dict(9)}
    manifest = CheckpointManifest(step=9, world_size=1, zero_stage=1, state=state, files={})
    manifest.write(newest)
    with pytest.raises(ResumeError, match="has no record of the run that wrote it"):
        dry_run(config)
    state["run"] = run_record(config, inputs, check_run(config, inputs, 1))
    manifest.write(newest)
    assert "steps: 10 " in dry_run(config)
    with pytest.raises(ResumeError, match="seed was 0 and is 3"):
        dry_run(replace(config, seed=3))
    shorter = replace(config, num_steps=8)
    with pytest.raises(ResumeError, match="has 9 steps done, and num_steps of the run is 8"):
        dry_run(shorter)
    (newest / "manifest.json").write_text("")
    with pytest.raises(ResumeError, match=r"manifest\.json is not valid JSON"):
        dry_run(shorter)
    fallback = replace(config.checkpoint, fallback=True)
    assert "steps: 8 " in dry_run(replace(shorter, checkpoint=fallback))


def test_json_has_the_figures_of_the_text(corpus: Corpus, tmp_path: Path) -> None:
    config = load_config(PretrainConfig, corpus.config(tmp_path / "run", num_steps=40))
    how: dict[str, Any] = {"world_size": 2, "device": "H100", "gpu_price": 1e9}
    text, plan = dry_run(config, **how), json.loads(dry_run(config, **how, json=True))
    busiest = plan["busiest_rank_over_mean"]
    for line in (
        f"{plan['model']['description']}; vocabulary {plan['model']['vocab_size']:,}",
        f"steps: 40 ({plan['warmup_steps']:,} of warmup), {plan['steps_per_epoch']:,} per epoch",
        f"tokens: {plan['tokens']:,} ({config.data.tokens_per_step:,} per step)",
        f"epochs: {plan['epochs']:.3f}",
        f"{busiest['step']:.4f} per step, {busiest['micro_step']:.4f} per micro step",
        f"ranks: 2, {plan['micro_steps']} micro steps",
        f", {plan['model']['parameters']:,} parameters",
        f"together: {size(plan['memory']['total']):>9}\n",
        f"arithmetic: {plan['flop']:.3e} FLOP",
        f"cost: {plan['cost']:,.2f} at 1e+09",
        f"ZeRO: stage {plan['zero_stage']}",
    ):
        assert line in text
    assert plan["cost"] == pytest.approx(plan["hours"] * 2e9) and plan["cost"] > 1
    [stage] = plan["stages"]
    draws = [f"{b['capacity']:,} {b['num_draws']:>10,}" for b in stage["buckets"]]
    assert draws and all(row in text for row in draws)
    assert [source["weight"] for source in plan["sources"]] == [1.0]
    assert "config" not in plan
    assert json.loads(dry_run(config, json=True, show_config=True))["config"] == to_dict(config)


def test_mix_of_one_bucket_has_no_alternative(corpus: Corpus, tmp_path: Path) -> None:
    config = corpus.config(tmp_path / "run", model={"vocab_size": 64})
    one = dry_run(load_config(PretrainConfig, config), lengths="lognormal:60,50,900", buckets=[128])
    assert "buckets per step: one, the only one" in one


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*bucket*.yaml")))
def test_recipes_with_several_micro_steps_mix_by_micro_step(name: str) -> None:
    """The recipes are for 64 ranks."""
    data = read_config(name, []).data
    several = data.tokens_per_step > 64 * data.micro_batch_tokens
    assert (data.mix == "micro_step") == several
    assert not several or data.draw_tokens == 64 * data.micro_batch_tokens


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [("qwen3_0.6b_bucket", 596_049_920, 596e6), ("qwen3_30b_a3b_bucket", 30_532_122_624, 3.04e9)],
)
def test_qwen3_is_planned_without_data(name: str, parameters: int, active: float) -> None:
    """Sizes equal the published ones; 8 of 128 experts count as work, embeddings do not."""
    config = read_config(name)
    plan = dry_run(config, world_size=64, device="H100", lengths="lognormal:999,603,1e4")
    assert f"{parameters:,} parameters" in plan and "GiB" in plan and "hours" not in plan
    (flop,) = re.findall(r"\((\S+) per step\)", plan)[-1:]
    per_token = float(flop) / config.data.tokens_per_step / 6
    assert active < per_token < 1.35 * active, "the difference is attention"
    assert ("load-balancing loss of 128 experts" in plan) == ("a3b" in name)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith("qwen3")])
def test_every_recipe_is_planned_from_lengths_alone(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No data, no further keys, no network; the checkpoint of a recipe is planned as a preset."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = read_config(recipe)
    model = planned_model(config.model, from_lengths=True)
    plan = dry_run(replace(config, model=model), lengths="lognormal:999,603,2e4")
    assert "(assumed, see model.vocab_size)" in plan and "tokens: " in plan
    assert (model.preset == "qwen2.5_1.5b") == (recipe == "continual_qwen2.5")
    assert "1,543,714,304 parameters" in plan or model.preset != "qwen2.5_1.5b"


def test_names_of_a_hub_that_does_not_answer_are_refused_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # the check sets it, and this restores it
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        for model in (
            {"preset": "llama_tiny", "tokenizer": "nobody/no-such-tokenizer"},
            {"pretrained": "nobody/no-such-model"},
            {"config": "no/folder/here"},
        ):
            with pytest.raises(ConfigError, match=r"is neither a file or folder.*the hub does not"):
                check_hub(ModelConfig(**model))
            check_hub(ModelConfig(preset="llama_tiny", tokenizer=str(Path(__file__).parent)))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        server.listen()
        check_hub(ModelConfig(pretrained="nobody/no-such-model"))


def test_work_of_a_step_has_the_padding_of_second_capacities() -> None:
    """Only samples whose source was packed with second sizes count."""
    lengths, images = np.tile([3, 5, 4, 9, 2], 40), np.tile([2, 0, 1, 3, 1], 40)
    one = pack(lengths, buckets=[8, 16], second=images, second_capacity=[3, 6])
    other = pack(lengths, buckets=[8, 16])
    schedule, alone = (Schedule(s, tokens_per_step=64) for s in ([one, other], other))
    flops = ModelFlops(**{field.name: 1 for field in fields(ModelFlops)})
    held = second_per_sample(one)
    for number in range(12):
        step = schedule.step(number)
        ids = step.sample_ids[step.sample_ids < one.num_samples]
        room = np.where(ids < one.bucket_sample_offsets[1], 3, 6).sum()
        assert len(ids), "both sources are in every step"
        found = StepWork.of(schedule, step, flops).second_padding
        assert found == pytest.approx(1 - held[ids].sum() / room)
    assert StepWork.of(alone, alone.step(0), flops).second_padding is None
