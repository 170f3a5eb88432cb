"""Scripts as users start them: launchers, one plain process, dry runs, evaluation."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ports import free_port
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from megapack.errors import ConfigError, DataError
from megapack.storage import IndexedDataset
from megapack.training.config import ModelConfig
from megapack.training.curves import Curve, read_curve, smooth, standings
from megapack.training.engine.inputs import open_validation
from megapack.training.evaluate import build_parser, check_documents, evaluate
from megapack.training.model.architecture import model_configuration
from megapack.training.model.flops import ModelFlops
from megapack.training.model.opening import build_model

from .conftest import BUCKETS, Corpus, NewRun, drawn_from
from .packing_helpers import tiny_model
from .processes import FORKED, ROOT, Ranks, Zygote

EVALUATE = ROOT / "launch" / "evaluate.py"


def run_script(zygote: Zygote, log: Path, *argv: object, **env: str) -> Ranks:
    """Run one process, without a launcher's variables."""
    return zygote.start([str(word) for word in argv], 1, log, {0: {"env": env}})


def test_deepspeed_launcher_trains_two_ranks(
    zygote: Zygote, new_run: NewRun, tmp_path: Path
) -> None:
    run = new_run(num_steps=4, logging={"every": 2, "tensorboard": True})
    launcher = [FORKED, "deepspeed.launcher.runner", "--num_accelerators", "2"]
    launcher += ["--master_port", str(free_port()), "--module", "megapack.training.pretrain"]
    ranks = run_script(zygote, tmp_path / "log", *launcher, "--config", run.config)
    lines = ("opening the data", "probing whether", "step 1/4, loss ", "then a line every 2 steps")
    ranks.succeed(*lines, "step 4/4", "after step 4: validation perplexity")
    assert [line["step"] for line in run.log] == [0, 1, 2, 3]
    assert len(list((run.dir / "batches").glob("rank_*.jsonl"))) == 2
    assert list((run.dir / "tensorboard").glob("events*"))


def test_one_process_trains_a_blend(new_run: NewRun, blend: Path) -> None:
    classic = {"attention": "sample", "positions": "sample", "label_boundary": "sample"}
    run = new_run(
        num_steps=3,
        data={**drawn_from(blend), **classic},
        model={"preset": "gpt2_tiny_alibi"},
        engine={"precision": "bf16", "activation_checkpointing": True},
        checkpoint={"every": None, "export": True},
    )
    alone = run.start(words=["--local_rank", "0"], launcher=False)
    output = alone.succeed("step 3/3", "kept apart: probed")
    assert output.count(" steps of ") == 1, "the probe must not print a second plan"
    line = run.log[0]
    assert line["label_tokens"] > line["useful_tokens"] * 0.97, "labels cross documents"
    exported = {path.name for path in (run.dir / "model").iterdir()}
    assert {"config.json", "model.safetensors", "modeling_gpt2_alibi.py"} <= exported


def test_dry_run_prints_the_plan(new_run: NewRun) -> None:
    run = new_run(num_steps=None, num_epochs=2, engine={"precision": "bf16"})
    words = ["--dry-run", "--device", "H100", "--show-config", "--world-size"]
    output = run.start(words=[*words, "4"], launcher=False).succeed(
        *("precision: bf16", "positions: segment", "model: llama, 82,240 parameters"),
        "ranks: 4, 1 micro step of 256 tokens each",
        "ZeRO: stage 1; 321 KiB of gradients (float32) are reduced once per step",
        *("parameters", "optimizer state", "activations", " KiB", "FLOP", "on 4 ranks"),
    )
    assert "epochs: 2.0" in output or "epochs: 1.9" in output
    first = {line.split()[0] for line in output.splitlines() if line.strip()}
    assert first >= set(map(str, BUCKETS))
    assert output.index("model: llama") < output.index("precision: bf16"), "the plan comes first"
    assert "time: 0.0 " not in output
    assert not run.dir.exists()
    refused = run.start(words=[*words, "3"], launcher=False)
    refused.end_with(2, "3 ranks do not divide the 4 micro batches")


def test_dry_run_plans_from_lengths(new_run: NewRun, corpus: Corpus, tmp_path: Path) -> None:
    """Steps and FLOPs equal those of documents with these lengths."""
    lengths = tmp_path / "lengths.npy"
    np.save(lengths, IndexedDataset(corpus.train).document_lengths)
    run = new_run(num_steps=None, model={"vocab_size": 64})
    words = ["--dry-run", "--device", "H100", "--gpu-price", "2.5"]
    real = run.start(words=words, launcher=False).succeed("cost: ", "at 2.5 per rank and hour")
    assert "run_dir:" not in real
    nowhere = [f"data.prefix={tmp_path}/no", f"data.index={tmp_path}/no.samples"]
    nowhere += ["data.valid_prefix=null"]
    plan = [*words, "--lengths", str(lengths), "--buckets", ",".join(map(str, BUCKETS))]
    assert run.succeed(*nowhere, words=plan, launcher=False) == real
    refused = run.start(*nowhere, words=words, launcher=False)
    refused.end_with(2, f"{tmp_path}/no", "--dry-run --lengths")


def test_unsupported_attention_is_one_line(new_run: NewRun) -> None:
    ranks = new_run().start("model.attention_backend=flash2", ranks=1)
    assert "Traceback" not in ranks.end_with(2, "cannot serve")


def test_damaged_index_is_refused(new_run: NewRun, corpus: Corpus, tmp_path: Path) -> None:
    """A changed segment start would silently give batches of other tokens."""
    index = tmp_path / "train.samples"
    data = bytearray(Path(f"{corpus.train}.samples").read_bytes())
    data[-5] ^= 1  # in the array of segments, which loading does not read
    index.write_bytes(data)
    run = new_run(data={"index": str(index)}, num_steps=1)
    assert "Traceback" not in run.start().end_with(1, str(index), "checksum")
    assert not run.dir.exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model and its tokenizer, a vocabulary of 64 letters."""
    directory = tmp_path_factory.mktemp("exported") / "model"
    tiny_model("llama_tiny", vocab_size=64).save(directory)
    letters = [chr(ord("0") + i) for i in range(64)]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, letters[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(directory.parent / "tokenizer.json"))
    return directory


def write_log(folder: Path, losses: list[float], steps_per_epoch: int, cut: str = "") -> Path:
    """Write the log of a run, maybe with a cut last line."""
    folder.mkdir(exist_ok=True)
    epochs = [i / steps_per_epoch for i in range(len(losses) + 1)]
    lines = [
        {"step": i, "loss": loss, "epoch": epochs[i], "epoch_end": epochs[i + 1]}
        for i, loss in enumerate(losses)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + cut
    (folder / "log.jsonl").write_text(text)
    return folder


def test_models_are_scored(zygote: Zygote, corpus: Corpus, exported: Path, tmp_path: Path) -> None:
    runs = [
        f"{name}={write_log(tmp_path / name, [factor / (i + 1) for i in range(4)], 4)}"
        for name, factor in (("first", 1.0), ("second", 2.0))
    ]
    held_out = {"prefix": "nowhere", "valid_prefix": str(corpus.valid), "name": "web"}
    (tmp_path / "blend.json").write_text(json.dumps({"sources": [held_out]}))
    out = tmp_path / "out"
    output = run_script(
        *(zygote, tmp_path / "log", EVALUATE, "--model", f"tiny={exported}"),
        *("--data", corpus.valid, "--buckets", *BUCKETS, "--contexts", 16, 64, "--output", out),
        *("--micro-batch-tokens", 512, "--run", runs[0], "--run", runs[1]),
        *("--blend", tmp_path / "blend.json"),
    ).succeed("tiny: perplexity", "context     16")
    assert "in epochs 0 to 1, the last of all runs:\nfirst: " in output
    assert output.index("first: final perplexity") < output.index("second: final perplexity")
    found = json.loads((out / "evaluation.json").read_text())
    assert found["runs"]["first"]["mean_rank"] == 1.0
    model = found["models"]["tiny"]
    assert set(model["contexts"]) == {"16", "64"} and model["perplexity"] > 1
    assert model["source_perplexity"] == {"web": model["perplexity"]}
    assert f"source web: perplexity {model['perplexity']:.4f}" in output
    for plot in ("perplexity_by_context.png", "training_perplexity.png"):
        assert (out / plot).read_bytes()[:4] == b"\x89PNG"
    assert f"note: {exported}: scoring " in output


def test_runs_are_compared_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"--run=run{i}={write_log(tmp_path / str(i), [1.0 + i, 1.0 + i], 2)}" for i in (0, 1)]
    assert evaluate(build_parser().parse_args([*words, "--json"])) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["runs"]["run0"]["mean_rank"] == 1.0
    assert "run0: final perplexity" in printed.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model x=a --model x=b --data nowhere", "two --model have the same name"),
        ("--run x=a --run x=b", "two --run have the same name"),
        ("--model x=a --data nowhere --max-tokens -5", "--max-tokens is -5"),
        ("--model x=a --run b", "--model needs one of --data"),
        ("--data nowhere --run b", "--model needs one of --data"),
        ("--lm-eval piqa", "--model needs one of --data"),
        ("--model x=a --data nowhere --contexts 8 0", "--contexts is 0"),
    ],
)
def test_evaluation_refuses_incomplete_options(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(build_parser().parse_args(words.split()))


def test_model_must_have_ids_and_positions_of_documents(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a traceback of torch for missing rows, no warning about long documents."""
    held = (open_validation(str(corpus.valid), None, buckets=[256]), {})
    longest = int(IndexedDataset(corpus.valid).document_lengths.max())
    assert 32 < longest <= 256

    def check(configuration: Any, contexts: Sequence[int] = ()) -> None:
        configuration.save_pretrained(tmp_path)
        check_documents(str(tmp_path), held, contexts)

    check(GPT2Config(vocab_size=64, n_positions=longest))
    check(LlamaConfig(vocab_size=64, max_position_embeddings=longest), [16, longest])
    assert "positions; --buckets" not in caplog.text
    with pytest.raises(ConfigError, match="the model has ids below 40"):
        check(GPT2Config(vocab_size=40))
    with pytest.raises(ConfigError, match=f"is 32, and held-out documents take {longest} posit"):
        check(GPT2Config(vocab_size=64, n_positions=32), [16])
    check(LlamaConfig(vocab_size=64, max_position_embeddings=32))
    assert f"is 32, and held-out documents take {longest} positions; --buckets" in caplog.text


# One process, because importing the harness takes longest, and without its built-in tasks, which
# take ten seconds to list.
TWICE = """
import functools, lm_eval.tasks, runpy, sys
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
for argv in {commands!r}:
    sys.argv = argv
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as leaving:
        print("exit code", leaving.code)
"""
TASK = """
task: next_letter
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["A", "B"]
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


def test_lm_eval_scores_exported_model(zygote: Zygote, exported: Path, tmp_path: Path) -> None:
    data, tasks, texts = tmp_path / "task.json", tmp_path / "tasks", ("CDEF", "KJIH", "ABAB")
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tasks.mkdir()
    (tasks / "next_letter.yaml").write_text(TASK.format(data=data))
    tokenizer = str(exported.parent / "tokenizer.json")
    commands = [
        [str(EVALUATE), "--model", str(exported), "--lm-eval", name, "--lm-eval-path", str(tasks)]
        + ["--tokenizer", tokenizer, "--output", str(tmp_path / "out")]
        for name in ("next_letter", "no_such_task")
    ]
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    script = tmp_path / "twice.py"
    script.write_text(TWICE.format(commands=commands))
    messages = "exit code 0", "exit code 2", "has no task no_such_task"
    run_script(zygote, tmp_path / "log", script, **env).succeed(*messages)
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    accuracy = found["lm_eval"][str(exported)]["next_letter"]["acc,none"]
    model: Any = LlamaForCausalLM.from_pretrained(exported)
    tokens = torch.tensor([[ord(c) - ord("0") for c in text] for text in texts])
    scores = model(tokens).logits[:, -1]
    right = scores[:, ord("A") - ord("0")] > scores[:, ord("B") - ord("0")]
    assert accuracy == pytest.approx(float(right.float().mean()))


def test_flops_equal_those_of_matrix_products() -> None:
    model = tiny_model("llama_tiny")
    flops = ModelFlops.of(model, model.configuration)
    width, kv, mlp, layers, vocab = 64, 32, 128, 2, 384
    layer = width * width * 2 + width * kv * 2 + 3 * width * mlp
    assert flops.per_token == 6 * (layers * layer + vocab * width)
    # One document of n tokens: scores and values, 2 products of n^2/2 pairs, times 3.
    assert flops.attention([10]) == 3 * layers * 2 * 2 * width * 10 * 10 / 2
    assert flops.attention([10, 20]) == flops.attention([10]) + flops.attention([20])
    untied = tiny_model("llama_tiny", overrides={"tie_word_embeddings": False})
    assert ModelFlops.of(untied, untied.configuration).per_token == flops.per_token
    gemma = tiny_model("gemma2_tiny", backend="eager")  # a window of 64 in one of two layers
    counted = ModelFlops.of(gemma, gemma.configuration)
    assert counted.attention([64]) == 6 * 64 * 2 * 64**2
    assert counted.attention([100]) == 6 * 64 * (100**2 + 100**2 - 36**2)


WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4},
        {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64, **WIDE},
        {"model_type": "gpt_neox", "intermediate_size": 128, **WIDE},
        {"model_type": "deepseek_v3", "v_head_dim": 16, "intermediate_size": 128,
         "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
         **LATENT, **WIDE},
    ],
    ids=lambda keys: keys["model_type"],
)  # fmt: skip
def test_flops_equal_those_counted_by_torch(keys: dict[str, Any]) -> None:
    """Regression: position tables counted as matrices, latent attention with the width of RoPE."""
    config = ModelConfig(config=keys)
    model = build_model(config, model_configuration(config, 256), backend="sdpa", seed=0)
    flops, plain = ModelFlops.of(model, model.configuration), model.model
    plain.set_attn_implementation("eager")  # it computes masked pairs, too
    plain.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        plain(input_ids=torch.arange(64).unsqueeze(0)).logits.sum().backward()
    assert counter.get_total_flops() == flops.per_token * 64 + 2 * flops.attention([64])


# ---- Final perplexity, ranking and smoothing, computed by hand


def _curve(perplexities: list[float], steps_per_epoch: int) -> Curve:
    epoch = np.arange(len(perplexities) + 1) / steps_per_epoch
    return Curve(epoch, np.array(perplexities))


def test_the_last_epoch_decides_and_ranks_are_averaged_over_ranges() -> None:
    # Two epochs of 2 steps; in the last one a leads in its first half, b in its second.
    a = _curve([1.0, 1.0, 10.0, 40.0], 2)
    b = _curve([9.0, 9.0, 20.0, 30.0], 2)
    standing = standings({"a": a, "b": b}, num_ranges=4)
    assert standing["a"].mean_rank == standing["b"].mean_rank == 1.5
    assert (standing["a"].final_perplexity, standing["b"].final_perplexity) == (40.0, 30.0)
    better = standings({"a": a, "b": b, "c": _curve([5.0] * 40, 20)}, num_ranges=10)
    assert better["c"].mean_rank == 1.0 and better["a"].mean_rank == 2.5


def test_runs_are_compared_by_epoch() -> None:
    coarse = _curve([4.0], 1)
    fine = _curve([float(i) for i in range(200)], 200)
    standing = standings({"coarse": coarse, "fine": fine})
    assert standing["coarse"].final_perplexity == 4.0
    assert standing["fine"].final_perplexity == pytest.approx(198.5)
    # fine is below 4 in the first two ranges (0.5, 2.5), above in the other 98
    assert standing["fine"].mean_rank == pytest.approx((2 * 1 + 98 * 2) / 100)


def test_short_runs_are_compared_over_their_common_part() -> None:
    """Only the first half of ``long`` counts, in which it is worse."""
    short = Curve(np.array([0.0, 0.25, 0.5]), np.array([3.0, 2.0]))
    standing = standings({"short": short, "long": _curve([9.0, 1.0], 1)})
    assert standing["short"].final_perplexity == 2.0 and standing["short"].mean_rank == 1.0
    assert standing["long"].final_perplexity == 9.0


def test_curve_is_read_without_a_cut_last_line(tmp_path: Path) -> None:
    losses = [math.log(i + 2) for i in range(2)]
    curve = read_curve(write_log(tmp_path, losses, 2, cut='{"step": 2, "lo'))
    assert curve.perplexity.tolist() == pytest.approx([2.0, 3.0])
    assert curve.epoch.tolist() == [0.0, 0.5, 1.0]
    with pytest.raises(DataError, match="has no steps"):
        read_curve(write_log(tmp_path, [], 2))


def test_smoothing_is_unbiased_and_forgets() -> None:
    assert smooth([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0] * 3)
    assert smooth([1.0, 5.0], 0.0) == [1.0, 5.0]
    half = smooth([0.0, 1.0], 0.25)  # weight of the past: 0.5
    assert half == pytest.approx([0.0, (0.5 * 1) / 0.75])
    with pytest.raises(ValueError, match="within 0 and 1"):
        smooth([1.0], 2.0)


@pytest.mark.parametrize("command", ["pretrain", "evaluate", "export", "teacher"])
def test_environment_without_torch_is_told_what_to_install(command: str) -> None:
    """All missing packages are named, not the first failing import; ``make wheel`` expects it."""
    without = f"import sys; sys.modules['deepspeed'] = None; import megapack.training.{command}"
    done = subprocess.run(
        [sys.executable, "-c", without], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    [expected] = re.findall(r'^grep "(.+)" ', (ROOT / "tests" / "wheel.sh").read_text(), re.M)
    assert "training needs deepspeed" in done.stderr and expected in done.stderr
