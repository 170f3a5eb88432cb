"""Offline distillation: the loss equals its definition, the dump equals the teacher itself."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import distillation as definition
from torch import Tensor

from megapack.config import load_config
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.storage.column_edits import add_column
from megapack.storage.columns import ColumnSpec
from megapack.training.config import PretrainConfig
from megapack.training.engine.inputs import Inputs, check_teacher
from megapack.training.model.loss import (
    NO_TEACHER,
    Teacher,
    linear_cross_entropy,
    top_log_probabilities,
)

from .conftest import BUCKETS, VOCAB, NewRun
from .packing_helpers import check_gradients, plain, tiny_model
from .processes import ROOT, Zygote

# ---- The loss


def _teacher(num_tokens: int, vocab: int, k: int, seed: int, **how: Any) -> Teacher:
    """Return the most likely tokens of random scores; some positions have no teacher."""
    random = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(num_tokens, vocab, generator=random, dtype=torch.float64)
    values, ids = scores.log_softmax(1).topk(k)
    values[torch.rand(num_tokens, generator=random) < 0.2] = NO_TEACHER
    return Teacher(ids.int(), values, **how)


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 20),
    k=st.integers(1, 10),
    chunk=st.integers(1, 24),
    alpha=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([1.0, 2.5, 0.5]),
    softcap=st.sampled_from([0.0, 2.0]),
    z_loss=st.sampled_from([0.0, 0.3]),
    weighted=st.booleans(),
)
def test_loss_and_gradient_equal_the_definition(
    num_tokens: int,
    k: int,
    chunk: int,
    alpha: float,
    temperature: float,
    softcap: float,
    z_loss: float,
    weighted: bool,
) -> None:
    torch.manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (num_tokens,))
    labels[torch.rand(num_tokens) < 0.3] = -100
    factors = torch.rand(num_tokens, dtype=torch.float64) + 0.5 if weighted else None
    teacher = _teacher(num_tokens, 11, k, num_tokens, alpha=alpha, temperature=temperature)
    logits = hidden @ weight.T
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    expected = torch.zeros((), dtype=torch.float64)
    apart = torch.zeros(num_tokens, dtype=torch.float64)
    for i, label in enumerate(labels.tolist()):
        ids, numbers = teacher.ids[i].tolist(), teacher.log_probabilities[i].tolist()
        if label >= 0:
            how: Any = {"alpha": alpha, "temperature": temperature}
            loss = definition.loss(logits[i], label, ids, numbers, **how)
            loss = loss + z_loss * logits[i].exp().sum().log().square()
            expected = expected + loss * (1 if factors is None else factors[i])
            if numbers[0] <= 0:
                apart[i] = definition.divergence(logits[i], ids, numbers, temperature)
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
    options: Any = {"label_weights": factors, "scale": 0.5, "softcap": softcap, "z_loss": z_loss}
    options |= {"chunk_tokens": chunk, "teacher": teacher}
    loss, losses, divergences = linear_cross_entropy(hidden, weight, labels, **options)
    assert divergences is not None and not divergences.requires_grad
    close(loss, 0.5 * expected)
    close(divergences, apart.detach())
    close(losses, linear_cross_entropy(hidden, weight, labels, softcap=softcap)[1])
    if (labels >= 0).any():
        ours = torch.autograd.grad(loss * 2, (hidden, weight))
        close(ours, torch.autograd.grad(expected, (hidden, weight)))
    with torch.no_grad():
        close(linear_cross_entropy(hidden, weight, labels, **options)[0], 0.5 * expected)


def test_a_sure_student_has_an_exact_remainder_in_float32() -> None:
    """1 minus the sum of its probabilities would be 0 or a multiple of 6e-8."""
    scores = torch.tensor([[20.0, 3.0, 1.0, 0.0, -1.0]])
    teacher = Teacher(torch.tensor([[0, 1]]), torch.tensor([[-0.5, -1.5]]), alpha=1.0)
    weight = scores.T.contiguous().requires_grad_()
    loss, *_ = linear_cross_entropy(torch.ones(1, 1), weight, torch.tensor([0]), teacher=teacher)
    exact = scores.double().squeeze(0).requires_grad_()
    expected = definition.divergence(exact, [0, 1], [-0.5, -1.5], 1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (grad,), (slope,) = (
        torch.autograd.grad(loss, (weight,)),
        torch.autograd.grad(expected, (exact,)),
    )
    torch.testing.assert_close(grad.squeeze(1).double(), slope, rtol=1e-5, atol=1e-7)


def test_rounded_probabilities_above_one_leave_no_remainder() -> None:
    numbers = torch.tensor([[0.0, -6.0]])  # sum 1.0025
    teacher = Teacher(torch.tensor([[2, 0]]), numbers, alpha=1.0, temperature=2.0)
    weight = torch.tensor([[0.3], [-1.0], [0.8], [0.1]], requires_grad=True)
    loss, *_ = linear_cross_entropy(torch.ones(1, 1), weight, torch.tensor([1]), teacher=teacher)
    expected = definition.divergence(weight.detach().squeeze(1), [2, 0], [0.0, -6.0], 2.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_the_compiled_loss_is_the_same() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 6, requires_grad=True), torch.randn(11, 6)
    labels, results = torch.randint(0, 11, (40,)), []
    teacher = _teacher(40, 11, 3, 0, alpha=0.6, temperature=2.0)
    teacher = teacher._replace(log_probabilities=teacher.log_probabilities.bfloat16())
    for fused in (False, True):
        loss, *_ = linear_cross_entropy(hidden, weight, labels, teacher=teacher, fused=fused)
        results.append((loss.detach(), *torch.autograd.grad(loss, (hidden,))))
    torch.testing.assert_close(results[0], results[1])


@given(vocab=st.integers(1, 30), tokens=st.integers(1, 9), chunk=st.integers(1, 9))
def test_most_likely_tokens(vocab: int, tokens: int, chunk: int) -> None:
    torch.manual_seed(vocab)
    hidden, weight = torch.randn(tokens, 4), torch.randn(vocab, 4)
    k = (vocab + 1) // 2
    ids, best = top_log_probabilities(hidden, weight, k, softcap=5.0, chunk_tokens=chunk)
    scores = (torch.tanh(hidden @ weight.T / 5) * 5).log_softmax(1)
    expected: Tensor = scores.sort(1, descending=True)[0][:, :k]
    torch.testing.assert_close(best, expected)
    torch.testing.assert_close(scores.gather(1, ids.long()), best)


# ---- Runs


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Path:
    """Whole documents in their samples, with a teacher's columns in float32; and the teacher."""
    folder = tmp_path_factory.mktemp("documents")
    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(folder / "train", np.uint16, vocab_size=VOCAB) as builder:
        for length in random.integers(2, 120, 400).tolist():
            steps = random.choice([0, 1, 2], size=length, p=[0.2, 0.6, 0.2])
            builder.add_document((random.integers(VOCAB) + steps.cumsum()) % VOCAB)
    dataset = IndexedDataset(folder / "train")
    index = pack(dataset.document_lengths, "bucket", buckets=BUCKETS)
    index.save(folder / "train.samples", source=dataset)
    model = tiny_model("llama_tiny", seed=7, vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    model.save(folder / "teacher")
    words = ["--model", str(folder / "teacher"), "--data", str(folder / "train"), "--top-k", "6"]
    words += ["--dtype", "float32", "--context", "128", "--forward-tokens", "300", "--overlap", "0"]
    argv = [str(ROOT / "launch" / "teacher.py"), *words]
    zygote.start(argv, 2, folder / "log").succeed()
    halves = ["--dtype", "bfloat16", "--ids", "half_ids", "--logits", "half_logits"]
    zygote.start([*argv, *halves], 1, folder / "log").succeed()
    return folder


def _sections(documents: Path, **more: Any) -> dict[str, Any]:
    prefix = documents / "train"
    data = {"prefix": str(prefix), "index": f"{prefix}.samples"}
    data |= {"columns": ["teacher_ids", "teacher_logits"]}
    return {"data": data, "distill": {"alpha": 0.7, "temperature": 2.0}, **more}


@pytest.mark.parametrize("stage", [0, 3])
def test_columns_train_like_the_teacher_online(
    documents: Path, new_run: NewRun, stage: int
) -> None:
    """Loss and gradient of 2 ranks; the teacher forwards the micro batches of the run."""
    engine = {"precision": "fp32", "zero_stage": stage}
    run = new_run(num_steps=3, **_sections(documents, engine=engine))
    stored = run.worker(2)
    online = run.worker(2, env={"TEACHER_ONLINE": str(documents / "teacher")})
    assert min(stored["divergences"]) > 0.1
    for name in ("losses", "divergences", "norms"):
        assert stored[name] == pytest.approx(online[name], rel=1e-6), name
    for name, grad in online["grads"].items():
        error = (stored["grads"][name] - grad).abs().max() / grad.abs().max()
        assert error < 1e-6, f"{name}: {error:.1e}"


def test_bfloat16_columns_train_alike(documents: Path, new_run: NewRun) -> None:
    """Half the bytes of float32; 8 bits of a log-probability, so .4 % of a probability near 1/e."""
    sections = _sections(documents, engine={"precision": "fp32", "zero_stage": 0})
    whole = new_run("whole", num_steps=3, **sections).worker(1)
    names = {"ids": "half_ids", "logits": "half_logits"}
    sections["data"]["columns"] = list(names.values())
    sections["distill"] |= names
    half = new_run("half", num_steps=3, **sections).worker(1)
    assert half["divergences"] != whole["divergences"]
    assert half["divergences"] == pytest.approx(whole["divergences"], rel=5e-3)
    for name, grad in whole["grads"].items():
        error = (half["grads"][name] - grad).abs().max() / grad.abs().max()
        assert error < 1e-2, f"{name}: {error:.1e}"


def test_the_gradient_equals_the_definition(documents: Path, new_run: NewRun) -> None:
    """2 ranks with ZeRO 0, 3 and sequence parallelism, against documents one by one."""
    run = new_run(num_steps=1, **_sections(documents))
    inputs, student = plain(load_config(PretrainConfig, run.config))
    teacher = tiny_model("llama_tiny", seed=7, vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(2.0)
    teacher.model.set_attn_implementation("eager")
    total, apart, count = torch.zeros(()), 0.0, 0
    for sample in inputs.schedule.step(0).sample_ids.tolist():
        for document, begin, length in inputs.schedule.samples.segments(sample)[1]:
            tokens = torch.tensor(inputs.data.datasets[0].open(0)[document]).long()
            assert (begin, length) == (0, len(tokens))
            scores = student.model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            with torch.no_grad():
                theirs = teacher.model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            values, ids = theirs[:, :VOCAB].double().log_softmax(1).topk(6)
            for i, label in enumerate(tokens[1:].tolist()):
                row = (ids[i].tolist(), values[i].tolist())
                total = total + definition.loss(scores[i], label, *row, alpha=0.7, temperature=2.0)
                apart += float(definition.divergence(scores[i].detach(), *row, 2.0))
                count += 1
    (total / count).backward()
    alone = {"data": {"micro_batch_tokens": 64}}
    for ranks, engine, data in (
        (2, {"zero_stage": 0}, {}),
        (2, {"zero_stage": 3}, {}),
        (2, {"zero_stage": 1, "sequence_parallel_size": 2}, alone),
    ):
        sections = _sections(documents, engine=engine)
        sections["data"] |= data.get("data", {})
        found = new_run("_".join(map(str, engine.values())), num_steps=1, **sections).worker(ranks)
        assert found["divergences"][0] == pytest.approx(apart / count, rel=1e-5)
        check_gradients(found["grads"], student)


def test_a_killed_run_resumes_exactly(documents: Path, new_run: NewRun) -> None:
    checkpoint = {"asynchronous": False}
    whole = new_run("whole", **_sections(documents, checkpoint=checkpoint))
    assert "distillation " in whole.succeed()
    run = new_run("killed", **_sections(documents, checkpoint=checkpoint))
    codes = run.start(faults={1: {"kill_before_step": [4]}}).wait()
    assert codes[1] == -signal.SIGKILL
    changed = run.start("distill.alpha=0.5")
    changed.end_with(1, "distill.alpha was 0.7 and is 0.5")
    run.succeed()
    for name in ("step", "samples", "loss", "distillation_loss", "grad_norm"):
        assert [line[name] for line in run.log] == [line[name] for line in whole.log], name


def test_other_columns_do_not_continue_a_run(
    documents: Path, new_run: NewRun, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(documents, copy)
    run = new_run("run", **_sections(copy))
    run.succeed("stop_at=3")
    column = IndexedDataset(copy / "train").columns["teacher_logits"]
    changed = column.rows - np.float32(0.1)
    add_column(copy / "train", "teacher_logits", changed, column.spec, overwrite=True)
    run.start().end_with(1, "data.content was")


def test_columns_that_are_no_teacher_are_refused(
    documents: Path, new_run: NewRun, tmp_path: Path
) -> None:
    prefix = tmp_path / "train"
    for suffix in (".bin", ".idx", ".meta.json", ".samples"):
        shutil.copy(f"{documents}/train{suffix}", f"{prefix}{suffix}")
    meta = IndexedDataset(documents / "train")
    num = meta.num_tokens
    Path(f"{prefix}.meta.json").unlink()
    ids = np.tile(np.arange(3), (num, 1))
    target: dict[str, Any] = {"shape": (3,), "of": "target"}
    columns = {
        "ids": (ids, ColumnSpec(dtype="int32", **target)),
        "logits": (ids - 4.0, ColumnSpec(dtype="float32", fill=1, **target)),
        "floats": (ids + 1.0, ColumnSpec(dtype="float32", **target)),
        "wide": (np.zeros((num, 4)), ColumnSpec(dtype="float32", shape=(4,), of="target")),
        "of_token": (ids, ColumnSpec(dtype="int32", shape=(3,))),
        "no_fill": (ids - 4.0, ColumnSpec(dtype="float32", **target)),
        "twice": (ids * 0, ColumnSpec(dtype="int32", **target)),
        "large": (ids + 126, ColumnSpec(dtype="int32", **target)),
    }
    for name, (values, spec) in columns.items():
        add_column(prefix, name, values, spec)

    def check(**distill: str) -> None:
        sections = _sections(tmp_path, distill=distill, model={"vocab_size": VOCAB})
        sections["data"]["columns"] = list(columns)
        config = load_config(PretrainConfig, new_run("run", **sections).config)
        assert config.distill is not None
        check_teacher(config.distill, Inputs(config).data, 128)

    check(ids="ids", logits="logits")
    for ids_of, logits, message in (
        ("teacher_ids", "logits", r"do not carry column teacher_ids; write it \(megapack-teacher"),
        ("floats", "logits", "ids are integers and logits are floats"),
        ("ids", "wide", r"both have the same shape \[k\]"),
        ("of_token", "logits", "both are of: target"),
        ("ids", "no_fill", "the fill value of logits is above 0"),
        ("twice", "logits", "column twice of .* repeats an id in a row"),
        ("large", "logits", "has ids from 126 to 128, and the model has 128 ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(ids=ids_of, logits=logits)
