"""transformers' Trainer, TRL and Accelerate on packed micro batches: tiny models, CPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    TrainingArguments,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megapack import attention
from megapack.data import PackedDataset, Schedule, Stage, build_loader
from megapack.errors import ConfigError
from megapack.integrations.hosts.transformers import (
    MicroBatches,
    PackedTrainer,
    check_model,
    model_inputs,
    sft_trainer,
)
from megapack.packing import pack
from megapack.storage import IndexedDataset
from megapack.storage.column_edits import add_column
from megapack.storage.columns import INTERPRETED, ColumnSpec
from megapack.storage.merge import merge
from tests.data.corpora import random_rows, write_columns
from tests.integrations.harness import run_ranks
from tests.integrations.samples import make_dataset

STEP, MICRO = 256, 64


@pytest.fixture(autouse=True)
def on_a_cpu() -> None:
    """The name belongs to the process, and other tests give it to other backends."""
    attention.register("sdpa")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers")
    rng = np.random.default_rng(0)
    dataset = make_dataset(
        folder, np.minimum(rng.lognormal(2.6, 0.9, 400), 100).astype(int).tolist()
    )
    pack(dataset.document_lengths, buckets=[16, 32, 64]).save(
        folder / "text.samples", source=dataset
    )
    return folder


def micro_batches(folder: Path, **options: Any) -> MicroBatches:
    dataset = PackedDataset(IndexedDataset(folder / "text"), folder / "text.samples")
    schedule = Schedule(dataset, tokens_per_step=STEP)
    return MicroBatches(dataset, schedule, micro_batch_tokens=MICRO, **options)


def test_stages_must_keep_the_tokens_per_step(folder: Path) -> None:
    def staged(**change: Any) -> MicroBatches:
        stages = [Stage(from_step=2, **change)]
        dataset = PackedDataset(folder / "text", folder / "text.samples", stages=stages)
        schedule = Schedule(dataset, tokens_per_step=STEP)
        return MicroBatches(dataset, schedule, micro_batch_tokens=MICRO)

    with pytest.raises(ConfigError, match=r"micro steps\) take {0: 4, 2: 8}, and Trainer"):
        assert staged(tokens_per_step=2 * STEP).num_micro_steps
    weighed = staged(loss_weights={str(folder / "text"): 2})
    assert "loss_weights" not in weighed[0]
    with pytest.raises(ConfigError, match="would take the plain mean of its labels"):
        weighed[8]
    cut = staged(attention_window=8)
    for i, window in ((7, MICRO), (8, 8)):
        same = cut.sampler.micro_batches(i // 4)[i % 4].sample_ids
        whole = model_inputs(cut.dataset.micro_batch(same))
        lengths = [
            min(window, n - at)
            for n in whole["cu_seq_lens_q"].diff().tolist()
            for at in range(0, n, window)
        ]
        assert cut[i]["cu_seq_lens_q"].diff().tolist() == lengths
        assert cut[i]["max_length_q"] == cut[i]["max_length_k"] == max(lengths)
        for name in ("input_ids", "position_ids", "labels"):
            assert torch.equal(cut[i][name], whole[name])
    with pytest.raises(ConfigError, match=r"windows \[8\], and attention 'sdpa' builds its"):
        check_model(tiny_llama("sdpa"), cut.dataset)
    check_model(tiny_llama("megapack"), cut.dataset)
    skipping, plain = staged(skip_steps=1), micro_batches(folder)
    assert torch.equal(skipping[2 * 4]["input_ids"], plain[3 * 4]["input_ids"])


def tiny_llama(implementation: str = "megapack") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": 4,
        "gradient_accumulation_steps": STEP // MICRO,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**options, **changes})


def test_a_loss_of_your_own_gets_columns_and_the_model_does_not(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [20, 40, 7, 64, 30] * 20)
    index = pack(dataset.document_lengths, buckets=[16, 32, 64])
    index.save(tmp_path / "text.samples", source=dataset)
    spec = ColumnSpec(dtype="bfloat16", shape=(5,), of="target")
    write_columns(tmp_path / "text", {"logits": (spec, random_rows(spec, dataset.num_tokens))})
    data = PackedDataset(tmp_path / "text", tmp_path / "text.samples", columns=["logits"])
    batches = MicroBatches(data, Schedule(data, tokens_per_step=STEP), micro_batch_tokens=MICRO)
    shapes = []

    class Distilling(PackedTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **how: Any) -> Any:
            shapes.append((inputs["logits"].shape, inputs["logits"].dtype))
            return super().compute_loss(model, inputs, *args, **how)

    model = tiny_llama()
    seen: set[str] = set()
    model.register_forward_pre_hook(lambda m, a, inputs: seen.update(inputs), with_kwargs=True)
    Distilling(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=batches).train()
    assert set(shapes) == {((1, MICRO, 5), torch.bfloat16)}
    assert "input_ids" in seen and "logits" not in seen


def test_inputs_have_the_names_of_flash_attention(folder: Path) -> None:
    batches = micro_batches(folder)
    for number in range(len(batches)):
        inputs = batches[number]
        assert "attention_mask" not in inputs and inputs["use_cache"] is False
        cu_seqlens = inputs["cu_seq_lens_q"]
        assert cu_seqlens.dtype == torch.int32 and int(cu_seqlens[-1]) == MICRO
        assert cu_seqlens is inputs["cu_seq_lens_k"]
        assert inputs["max_length_q"] == inputs["max_length_k"] == int(cu_seqlens.diff().max())
        # A model that shifts labels gets the same ones, except at a row's last position.
        shifted = inputs["labels"][:, 1:]
        assert torch.equal(shifted, inputs["shift_labels"][:, :-1])
        has_label = inputs["labels"] >= 0
        assert torch.equal(inputs["labels"][has_label], inputs["input_ids"][has_label])
    with pytest.raises(IndexError):
        batches[len(batches)]


def test_items_lie_in_the_rows_of_the_schedule(folder: Path) -> None:
    dataset = PackedDataset(folder / "text", folder / "text.samples")
    schedule = Schedule(dataset, tokens_per_step=288, row_tokens=72)
    batches = MicroBatches(dataset, schedule, micro_batch_tokens=72)
    ranks = {"data_parallel_rank": 0, "data_parallel_size": 1}
    loader = build_loader(dataset, schedule, micro_batch_tokens=72, **ranks)
    for number, batch in enumerate(loader):
        assert torch.equal(batches[number]["input_ids"], batch["tokens"])
    assert number + 1 == len(batches)


def documents_of_step(batches: MicroBatches, step: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) of every segment with labels in the first ``MicroBatches`` of a step."""
    found = []
    for number in range(step * batches.num_micro_steps, (step + 1) * batches.num_micro_steps):
        inputs = batches[number]
        bounds = inputs["cu_seq_lens_q"].tolist()
        for begin, end in itertools.pairwise(bounds):
            tokens = inputs["input_ids"][:, begin:end]
            labels = inputs["shift_labels"][:, begin:end]
            if bool((labels >= 0).any()):
                found.append((tokens, labels))
    return found


def reference_step(model: LlamaForCausalLM, batches: MicroBatches, learning_rate: float) -> float:
    """One SGD step on the mean over the label tokens of the step, document by document."""
    documents = documents_of_step(batches, 0)
    count = sum(int((labels >= 0).sum()) for _, labels in documents)
    model.zero_grad()
    total = 0.0
    for tokens, labels in documents:
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        loss = nn.functional.cross_entropy(logits, labels[0], ignore_index=-100, reduction="sum")
        (loss / count).backward()
        total += float(loss)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(learning_rate * parameter.grad)
    return total / count


@pytest.mark.parametrize("implementation", ["megapack", "sdpa"])
def test_a_trainer_step_is_the_token_mean_over_the_documents_of_the_step(
    folder: Path, tmp_path: Path, implementation: str
) -> None:
    trainer = PackedTrainer(
        model=tiny_llama(implementation),
        args=arguments(tmp_path, max_steps=1),
        train_dataset=micro_batches(folder),
    )
    trainer.train()
    expected = tiny_llama("eager")
    loss = reference_step(expected, micro_batches(folder), 0.1)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert_same_parameters(trainer.model, expected)


def divided(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """A compute_loss_func as users write it."""
    logits, labels = outputs.logits[0, :-1], labels[0, 1:]
    return cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_that_shift_labels_are_means_over_the_visible_labels(
    folder: Path, tmp_path: Path, smoothing: float
) -> None:
    """A compute_loss_func and label smoothing; they cannot see the label after a row's end."""
    trainer = PackedTrainer(
        model=tiny_llama(),
        args=arguments(tmp_path, max_steps=1, label_smoothing_factor=smoothing),
        compute_loss_func=None if smoothing else divided,
        train_dataset=micro_batches(folder),
        eval_dataset=micro_batches(folder),
    )
    evaluated = trainer.evaluate()["eval_loss"]
    trained = trainer.train().training_loss
    step = [micro_batches(folder)[i] for i in range(STEP // MICRO)]
    model, cut, found = tiny_llama(), 0, []
    for items in (step, trainer.get_eval_dataloader()):
        total, count = 0.0, 0
        for item in items:
            labels = item["labels"][0, 1:]
            logits = model(**{**item, "labels": None}).logits[0, :-1].detach()
            options = {"reduction": "sum", "label_smoothing": smoothing}
            total += float(cross_entropy(logits, labels, **options))
            count += int((labels >= 0).sum())
            cut += int(item["shift_labels"][0, -1] >= 0)
        found.append(total / count)
    assert cut > 0
    assert trained == pytest.approx(found[0], rel=1e-6)
    assert evaluated == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("sft", [False, True])
def test_trainer_step_uses_loss_weights(folder: Path, tmp_path: Path, sft: bool) -> None:
    """Weights of sources and tokens, or a mean of sequences; the loss of single documents."""
    documents = IndexedDataset(folder / "text")
    random = np.random.default_rng(0)
    prefix = tmp_path / "text"
    weights = random.choice([0, 0.5, 2], size=documents.num_tokens)
    merge([documents.prefix], prefix)
    add_column(prefix, "weights", weights, INTERPRETED["weights"])

    def batches() -> MicroBatches:
        dataset = PackedDataset(
            prefix,
            folder / "text.samples",
            loss="longalign",
            loss_weights=[3],
        )
        schedule = Schedule(dataset, tokens_per_step=STEP)
        found = MicroBatches(dataset, schedule, micro_batch_tokens=MICRO)
        found.with_loss_weights = True
        return found

    if sft:
        trainer = tiny_sft(tmp_path, batches())
    else:
        args = arguments(tmp_path, max_steps=1)
        trainer = PackedTrainer(model=tiny_llama(), args=args, train_dataset=batches())
    trainer.train()
    expected = tiny_llama("eager")
    sequences = weighted_documents(batches(), documents, weights)
    mean = 0.0
    for tokens, labels, factors in sequences:
        logits = expected(input_ids=tokens, use_cache=False).logits[0]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = (losses * factors).sum() / factors.sum() / len(sequences)
        loss.backward()
        mean += float(loss)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.sub_(0.1 * parameter.grad)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(mean, rel=1e-4)
    assert_same_parameters(trainer.model, expected)


def weighted_documents(
    batches: MicroBatches, documents: IndexedDataset, weights: NDArray[np.float64]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(tokens, labels, weights) of every sequence of the first step that has some weight."""
    samples, found = batches.dataset.samples, []
    for sample in batches.schedule.step(0).sample_ids.tolist():
        for document, begin, length in samples.segments(sample)[1]:
            tokens = torch.from_numpy(documents[document][begin : begin + length + 1].astype(int))
            first, end = documents.document_offsets[document : document + 2]
            own = weights[first:end][begin + 1 : begin + length + 1]
            of_labels = torch.from_numpy(own.astype(np.float32))
            if float(of_labels.sum()):
                found.append((tokens[None, : len(own)], tokens[1:], of_labels))
    return found


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    before = tiny_llama()
    for (name, found), wanted, start in zip(
        model.named_parameters(), expected.parameters(), before.parameters(), strict=True
    ):
        moved = float((wanted - start).abs().max())
        assert moved > 0, name
        assert float((found - wanted).abs().max()) < 1e-3 * moved, name


def tiny_mixtral() -> Any:
    """Routers with preferences, so that balancing has something to do."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        attn_implementation="megapack",
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.add_(torch.randn(parameter.shape))
    return model


def balanced_step(model: Any, batches: MicroBatches, learning_rate: float) -> None:
    """One SGD step, the balance by transformers' own function over tokens except padding."""
    items = [batches[number] for number in range(batches.num_micro_steps)]
    count = sum(int((item["shift_labels"] >= 0).sum()) for item in items)
    model.zero_grad()
    for number, item in enumerate(items):
        chosen = batches.sampler.micro_batches(0)[number]
        batch = batches.dataset.micro_batch(chosen.sample_ids, layout=batches.layout)
        bounds = batch["cu_seqlens"].tolist()
        mask = torch.zeros(1, bounds[-1])
        for (begin, end), source in zip(
            itertools.pairwise(bounds), batch["dataset_ids"].tolist(), strict=False
        ):
            mask[0, begin:end] = source >= 0
        names = item.keys() - {"labels", "shift_labels", "token_mask"}
        outputs = model(**{name: item[name] for name in names})
        labels = item["shift_labels"][0]
        loss = nn.functional.cross_entropy(
            outputs.logits[0], labels, ignore_index=-100, reduction="sum"
        )
        balance = load_balancing_loss_func(outputs.router_logits, 6, 2, mask)
        ((loss + 0.5 * int((labels >= 0).sum()) * balance) / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(learning_rate * parameter.grad)


def _train_experts(rank: int, world_size: int, folder: str, out: str) -> Any:
    attention.register("sdpa")
    trainer = PackedTrainer(
        model=tiny_mixtral(),
        args=arguments(
            Path(out),
            max_steps=1,
            gradient_accumulation_steps=STEP // MICRO // world_size,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=micro_batches(Path(folder)),
    )
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


@pytest.mark.multiprocess
def test_experts_are_balanced_over_micro_batches_and_ranks_as_defined(
    folder: Path, tmp_path: Path, free_port: int
) -> None:
    two_ranks = run_ranks(_train_experts, 2, free_port, str(folder), str(tmp_path))[0]
    sft = tiny_sft(tmp_path, micro_batches(folder), tiny_mixtral())
    sft.train()
    trained = {name: value.detach().numpy() for name, value in sft.model.named_parameters()}
    expected, before = tiny_mixtral(), tiny_mixtral()
    balanced_step(expected, micro_batches(folder), 0.1)
    for (name, wanted), start in zip(expected.named_parameters(), before.parameters(), strict=True):
        moved = float((wanted - start).abs().max())
        assert moved > 0, name
        for found in (two_ranks, trained):
            assert float((torch.from_numpy(found[name]) - wanted).abs().max()) < 2e-3 * moved, name


def test_wrong_numbers_are_refused_with_the_right_ones(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loader(**changes: Any) -> Any:
        trainer = PackedTrainer(
            model=tiny_llama(),
            args=arguments(tmp_path, **changes),
            train_dataset=micro_batches(folder),
        )
        return trainer.get_train_dataloader()

    with pytest.raises(ConfigError, match="take 4"):
        loader(gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"max_steps=\d+ is one epoch"):
        loader(max_steps=-1)
    with pytest.raises(ConfigError, match="ignore_data_skip is True: a resumed run would train"):
        loader(ignore_data_skip=True)
    assert len(loader(max_steps=3)) == 3 * 4
    monkeypatch.setattr(PackedTrainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ConfigError, match=r"the tensor parallel size is 2"):
        loader()


def evaluated(rank: int, world_size: int, folder: str, out: str) -> float:
    attention.register("sdpa")
    trainer = PackedTrainer(
        model=tiny_llama(),
        args=arguments(Path(out), prediction_loss_only=True, per_device_eval_batch_size=3),
        eval_dataset=micro_batches(Path(folder)),
    )
    return float(trainer.evaluate()["eval_loss"])


def test_evaluation_without_a_label_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [1] * 64)
    pack(dataset.document_lengths, buckets=[16]).save(tmp_path / "text.samples", source=dataset)
    batches = micro_batches(tmp_path)
    trainer = PackedTrainer(model=tiny_llama(), args=arguments(tmp_path), eval_dataset=batches)
    with pytest.raises(ConfigError, match="no token has a label"):
        trainer.evaluate()


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [1, 4])
def test_evaluation_loss_equals_that_of_single_documents(
    folder: Path, tmp_path: Path, ranks: int, free_port: int
) -> None:
    """A cut sample is evaluated segment by segment; some ranks end without a label."""
    found = run_ranks(evaluated, ranks, free_port, str(folder), str(tmp_path))
    dataset, model = micro_batches(folder).dataset, tiny_llama().eval()
    total, labels = 0.0, 0
    with torch.no_grad():
        for sample in range(len(dataset)):
            batch = dataset[sample]
            for begin, end in itertools.pairwise(batch["cu_seqlens"].tolist()):
                targets = batch["labels"][begin:end]
                logits = model(input_ids=batch["tokens"][None, begin:end]).logits[0]
                total += float(cross_entropy(logits.double(), targets, reduction="sum"))
                labels += int((targets >= 0).sum())
    assert found == pytest.approx([total / labels] * ranks, rel=1e-6)


def test_prediction_is_an_evaluation(folder: Path, tmp_path: Path) -> None:
    evaluation = micro_batches(folder)
    trainer = PackedTrainer(model=tiny_llama(), args=arguments(tmp_path), eval_dataset=evaluation)
    found = trainer.predict(evaluation)
    assert found.metrics["test_loss"] == trainer.evaluate()["eval_loss"]
    assert found.predictions.shape == (len(found.label_ids), MICRO, 1000)
    trainer.args.batch_eval_metrics = True
    trainer.compute_metrics = lambda told, compute_result: {"last": compute_result}
    assert trainer.evaluate()["eval_last"] is True


def tiny_sft(tmp_path: Path, batches: MicroBatches, model: Any = None, **changed: Any) -> Any:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415
    from trl import SFTConfig  # noqa: PLC0415

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_vocabulary(), pad_token="[PAD]")
    names = (
        "output_dir max_steps gradient_accumulation_steps learning_rate optim lr_scheduler_type "
        "max_grad_norm use_cpu save_strategy logging_steps disable_tqdm"
    )
    given = arguments(tmp_path, max_steps=1)
    options = {name: getattr(given, name) for name in names.split()}
    config = SFTConfig(**options, report_to=[], packing=False, bf16=False, **changed)
    config.gradient_checkpointing = False
    return sft_trainer(
        model=model or tiny_llama(),
        args=config,
        train_dataset=batches,
        processing_class=tokenizer,
    )


def test_sft_trainer_trains_on_micro_batches(folder: Path, tmp_path: Path) -> None:
    trainer = tiny_sft(tmp_path, micro_batches(folder))
    trainer.train()
    expected = tiny_llama("eager")
    reference_step(expected, micro_batches(folder), 0.1)
    assert_same_parameters(trainer.model, expected)
    config = trainer.args
    config.packing = True
    with pytest.raises(ConfigError, match="packing is True: rows are packed already"):
        sft_trainer(model=tiny_llama(), args=config, train_dataset=micro_batches(folder))
    with pytest.raises(ConfigError, match=r"completion_only_loss is True: column labels"):
        tiny_sft(tmp_path, micro_batches(folder), completion_only_loss=True)
    balanced = tiny_sft(tmp_path, micro_batches(folder), tiny_mixtral(), loss_type="dft")
    item = next(iter(balanced.get_train_dataloader()))
    with pytest.raises(ConfigError, match="balances experts, and compute_loss_func"):
        balanced.compute_loss(balanced.model, item)  # in train() Accelerate would stay in its step


def _vocabulary() -> Any:
    from tokenizers import Tokenizer  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415

    return Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))


def test_accelerate_loop_keeps_the_loader(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    batches = micro_batches(folder)
    loader = build_loader(
        batches.dataset,
        batches.schedule,
        data_parallel_rank=accelerator.process_index,
        data_parallel_size=accelerator.num_processes,
        micro_batch_tokens=MICRO,
        num_steps=1,
    )
    model, optimizer = tiny_llama(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        inputs = model_inputs(batch)
        loss = model(**inputs, num_items_in_batch=batch["num_step_label_tokens"]).loss
        accelerator.backward(loss)
    optimizer.step()
    expected = tiny_llama("eager")
    reference_step(expected, batches, 0.1)
    assert_same_parameters(accelerator.unwrap_model(model), expected)
