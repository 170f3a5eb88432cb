"""A step on packed trees equals one on separate rows, on 1 and 2 ranks, with ZeRO 0 and 3."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.data import TreeBatch

if TYPE_CHECKING:
    from training.processes import Zygote

SIZES = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
FIELDS: dict[str, Any] = {**SIZES, **HEADS}
SEEDS = (0, 1, 2, 7)  # forests of the step: the last is empty, one token of padding


def batches_of(rank: int, num_ranks: int) -> list[TreeBatch]:
    """Return the micro batches of a rank."""
    from attention.tree_cases import as_batch, forest  # noqa: PLC0415

    return [as_batch(forest(seed), seed) for seed in SEEDS[rank::num_ranks]]


@pytest.fixture(scope="module")
def separate() -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of all sequences one by one, with transformers' own attention."""
    from attention.tree_cases import forest, loss_weights  # noqa: PLC0415

    torch.manual_seed(0)
    configuration = AutoConfig.for_model("llama", **FIELDS)
    model = AutoModelForCausalLM.from_config(configuration, attn_implementation="eager")
    loss = torch.zeros(())
    for seed in SEEDS:
        sequences = forest(seed)
        weights = loss_weights(sequences, seed)
        for number, tokens in sequences.items():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
            picked = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]
            loss = loss - (torch.tensor(weights[number])[1:].float() * picked).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.pages
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (1, 3), (2, 3)])
def test_ranks_train_on_trees_like_on_separate_rows(
    ranks: int,
    stage: int,
    zygote: Zygote,
    separate: tuple[float, dict[str, torch.Tensor]],
    tmp_path: Path,
) -> None:
    script, out = Path(__file__).with_name("tree_worker.py"), tmp_path / "result.pt"
    zygote.start([str(script), str(out), str(stage)], ranks, tmp_path / "rank.log").succeed()
    result, (loss, grads) = torch.load(out), separate
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["grads"].keys() == grads.keys()
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, expected in grads.items():
        error = float((result["grads"][name] - expected).abs().max())
        assert error <= 1e-5 * max(1.0, largest), f"{name}: {error:.1e}"
