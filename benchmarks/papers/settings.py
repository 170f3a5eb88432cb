"""Settings of the recipes: plain causal training, and a Llama with a corpus and a length ladder.

The latter (``Setting``) is for the recipes about buckets, masking and steps. On the CPU every
length is a sixteenth of the paper's (on a GPU a quarter): buckets of 64 to 1,024 tokens stand for
1,024 to 16,384, and docstrings of up to 1,100 tokens for web documents. Steps are small, because a
small model learns more from many steps. Initial weights have the scale 1 / sqrt(width). With the
0.02 of wide models, a small model would stay for hundreds of steps in a phase in which seeds differ
but methods do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lengths import BUCKETS
from papers.corpus import Corpus
from papers.runs import Scale

from megapack.data import Batch

# Fields of ``data``: attention, labels and positions ignore document boundaries inside a sample.
WHOLE = {"attention": "sample", "label_boundary": "sample", "positions": "sample"}


def engine(scale: Scale) -> dict[str, Any]:
    """Return fields of ``engine``: float32 on a CPU, bfloat16 on a GPU."""
    return scale.pick(
        cpu={"precision": "fp32", "zero_stage": 0}, gpu={"precision": "bf16", "zero_stage": 1}
    )


def shifted(batch: Batch) -> Batch:
    """Return a batch with labels as in most trainers: the inputs of a sample, shifted by one.

    The label of a token is the next token of its sample; the last token has none. Only for micro
    batches that are a whole step, because ``num_step_label_tokens`` is counted here.
    """
    tokens, labels = batch["tokens"].flatten(), batch["labels"].flatten()
    changed = torch.where(labels >= 0, tokens.roll(-1).to(labels.dtype), labels)
    changed[batch["cu_seqlens"].long()[1:] - 1] = -100
    count = max(1, int((changed >= 0).sum()))
    return {**batch, "labels": changed.view_as(batch["labels"]), "num_step_label_tokens": count}


@dataclass(frozen=True)
class Setting:
    """Model, data and sizes at a scale."""

    scale: Scale

    @property
    def factor(self) -> int:
        """Return the paper's lengths divided by the lengths of this scale."""
        return self.scale.pick(cpu=16, gpu=4)

    @property
    def ladder(self) -> tuple[int, ...]:
        """Return the capacities that stand for 1,024, 2,048, 4,096, 8,192 and 16,384."""
        return tuple(n // self.factor for n in BUCKETS)

    @property
    def step_tokens(self) -> int:
        """Return the tokens of a step, which is one micro batch by default."""
        return self.scale.pick(cpu=2048, gpu=32768)

    @property
    def corpus(self) -> Corpus:
        """Return the corpus of short and long documents; its held-out documents are scored."""
        pick = self.scale.pick
        return Corpus(
            domain=pick(cpu="prose", gpu="code"),
            train_bytes=pick(cpu=2_850_000, quick=500_000, gpu=12_000_000),
            valid_bytes=pick(cpu=90_000, quick=12_000, gpu=300_000),
            min_bytes=pick(cpu=40, gpu=200),
            max_bytes=pick(cpu=2_600, gpu=120_000),
        )

    def config(self, *, steps: int, **data: Any) -> dict[str, Any]:
        """Return fields of a ``PretrainConfig``; ``data`` overrides the sizes of this setting."""
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 10_000.0}
        small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192, **heads}
        small["initializer_range"] = 0.125
        large, size = self.scale.name == "gpu", self.step_tokens
        model = {"preset": "llama_demo", "overrides": small}
        return {
            "num_steps": steps,
            "model": {"preset": "llama_350m"} if large else model,
            "data": {"tokens_per_step": size, "micro_batch_tokens": min(size, 32768), **data},
            "optimizer": {"lr": 6e-4 if large else 5e-3},
            "learning_rate": {"warmup_fraction": 0.1, "min_ratio": 0.0},
            "engine": engine(self.scale),
        }
