"""torchtitan: a ``BaseDataLoader`` of packed rows; positions mark the documents.

    # packed_llama3.py; launch with: torchrun ... -m torchtitan.train --module packed_llama3
    from torchtitan.models.llama3.config_registry import llama3_8b
    from megapack.integrations.hosts.torchtitan import packed

    def packed_8b():                                    # --config packed_8b
        return packed(llama3_8b(), "corpus.json")

torchtitan starts a document at every position 0 and derives its FlexAttention mask or its varlen
boundaries from that. Its trainer counts label tokens over all ranks of a step, so the loss is a
mean over them. docs/guides/torchtitan.md lists the limitations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.trainer import Trainer

from megapack.errors import ConfigError
from megapack.integrations.dialects import TORCHTITAN, TORCHTITAN_ROWS
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import open_data_path
from megapack.integrations.rows.rank_rows import RankRows, seen_losses

if importlib.util.find_spec("torchtitan.components.dataloader"):  # up to 0.3
    from torchtitan.components.dataloader import BaseDataLoader
else:
    from torchtitan.components.data.loader import BaseDataLoader

__all__ = ["PackedDataLoader", "PackedTitanTrainer", "packed"]


class PackedDataLoader(BaseDataLoader):  # type: ignore[misc]  # not installed where types are checked
    """Loader of a rank's micro batches. Raises ConfigError like ``RankRows`` and ``open_rows``."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Options; ``--dataloader.data_path`` etc. change them."""

        data_path: str = ""
        """A .bin/.idx prefix, or a manifest."""
        split: tuple[float, float] = (0.0, 1.0)
        """Part of every source's documents, as fractions."""
        cache_directory: str | None = None
        """Directory of packed indices; None: in the folder of the first source."""
        seed: int = 1234
        """Seed of the order of samples."""
        num_workers: int = 0
        """Worker processes that prefetch."""
        rows_per_step: int = 0
        """Rows of all ranks in a step; ``PackedTitanTrainer`` sets it. 0 means one micro batch per
        rank and is allowed only if ``repeat`` is False."""
        num_steps: int | None = None
        """None: one epoch."""
        repeat: bool = True
        """False (set by torchtitan's Validator): every document once; rows without labels fill the
        last micro batches."""
        infinite: bool = True
        """``repeat`` in torchtitan 0.3."""

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: Any, **sizes: Any
    ) -> None:
        del tokenizer
        flat = "num_tokens_per_batch" in sizes  # up to 0.3 local_batch_size rows of seq_len
        length = sizes["max_context_length" if flat else "seq_len"]
        tokens = sizes["num_tokens_per_batch"] if flat else sizes["local_batch_size"] * length
        if tokens % length:
            raise ConfigError(
                f"training.num_tokens_per_microbatch_per_dp_rank is {tokens}; it must be a multiple"
                f" of training.max_context_length ({length}), the length of a row"
            )
        finite = not (config.repeat and config.infinite)
        step = config.rows_per_step or finite * dp_world_size * (tokens // length)
        if step < 1:
            raise ConfigError(
                f"dataloader.rows_per_step is {step}: pass torchtitan the configuration that "
                "`packed` returns, whose trainer sets it, or set it to all ranks' rows in a step"
            )
        options = RowOptions(sequence_length=length, rows_per_block=step, seed=config.seed)
        rows = open_data_path(
            config.data_path,
            options,
            split=config.split,
            num_rows=None if finite or config.num_steps is None else config.num_steps * step,
            finite=finite,
            cache_directory=config.cache_directory,
        )
        self.ranks = RankRows(
            rows,
            TORCHTITAN if flat else TORCHTITAN_ROWS,
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_world_size,
            micro_batch_rows=tokens // length,
            num_workers=config.num_workers,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield inputs and labels: ``(rows, seq_len)`` up to 0.3, flat ``(tokens,)`` since then."""
        self.first_row = self.ranks.consumed_rows
        for inputs in self.ranks:
            labels = inputs.pop("labels")
            yield inputs, labels

    def state_dict(self) -> dict[str, Any]:
        return self.ranks.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state; do nothing if it is empty (the checkpoint has none)."""
        if state_dict:
            self.ranks.load_state_dict(state_dict)


class PackedTitanTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's trainer; sets the rows of a step and probes the model before the first step."""

    ntokens_seen: int

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """Configuration that ``packed`` returns."""

        probe: bool = True
        """Probe the model on its first micro batch (``megapack.probe.rows``): seven forward
        passes, whose duration is logged. The probe does not run with pipeline, tensor or context
        parallelism, where a rank has only parts of the outputs."""

    def __init__(self, config: Config) -> None:
        rows = _rows_per_step(config.training)
        config.dataloader = replace(
            config.dataloader, rows_per_step=rows, num_steps=config.training.steps
        )
        if config.validator.enable and hasattr(config.validator.dataloader, "rows_per_step"):
            full = config.validator.steps != -1 or config.parallelism.pipeline_parallel_degree > 1
            validator = replace(config.validator.dataloader, rows_per_step=rows if full else 0)
            config.validator = replace(config.validator, dataloader=validator)
        super().__init__(config)
        parallel = self.parallel_dims
        complete = not (parallel.pp_enabled or parallel.tp_enabled or parallel.cp_enabled)
        self._to_probe = config.probe and complete

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor
    ) -> Tensor:
        """Run torchtitan's step; before the first one, probe the model."""
        if self._to_probe:
            self._to_probe = False
            self.dataloader.ranks.probe(
                self._losses,
                {**input_dict, "labels": labels},
                consumed_rows=self.dataloader.first_row,
                module=self.model_parts[0],
            )
        loss: Tensor = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        return loss

    def _losses(self, batch: dict[str, Any]) -> Tensor:
        """Return the loss of every token, from the model and the loss function of training."""
        ntokens_seen = self.ntokens_seen
        batch = {name: value.to(self.device) for name, value in batch.items()}
        labels = batch.pop("labels")
        inputs, labels, options = self.post_dataloading_process(batch, labels)
        self.ntokens_seen = ntokens_seen
        with self.train_context(), _every_loss(self.loss_fn) as losses:
            self.loss_fn(
                self.model_parts[0](inputs, **options), labels, positions=options["positions"]
            )
        return torch.cat(losses, dim=-1)


@contextmanager
def _every_loss(loss_fn: Any) -> Iterator[list[Tensor]]:
    """Collect the losses that a loss function sums, in the dtype of the logits, from which the
    probe chooses its tolerance. A chunked loss gives one tensor per chunk."""
    leaf = getattr(loss_fn, "loss_fn", loss_fn)
    losses: list[Tensor] = []

    def fn(pred: Tensor, labels: Tensor, **_: Any) -> Tensor:
        logits = pred.float().movedim(-1, 1)
        loss = cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE_INDEX)
        losses.append(seen_losses(loss, labels != IGNORE_INDEX).to(pred.dtype))
        return loss.sum()

    stock, leaf.fn = leaf.fn, fn
    try:
        yield losses
    finally:
        leaf.fn = stock


def packed(
    config: Any, data_path: str, *, train_fraction: float = 1.0
) -> PackedTitanTrainer.Config:
    """Return a torchtitan configuration with megapack's trainer and loaders.

    Args:
        config: a ``Trainer.Config``, from torchtitan's registries or your own. A row has
            ``training.max_context_length`` tokens (up to 0.3 seq_len), a step
            ``training.num_tokens_per_train_step`` tokens (global_batch_size rows). Set the latter:
            the content of a step must not depend on the number of ranks.
        data_path: a .bin/.idx prefix, a manifest file, or JSON text.
        train_fraction: part of every source's documents; the validator gets the rest.
    """
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    loader = PackedDataLoader.Config(data_path=data_path, split=(0.0, train_fraction))
    values["dataloader"] = loader
    if train_fraction < 1:
        held_out = replace(loader, split=(train_fraction, 1.0))
        values["validator"] = replace(config.validator, dataloader=held_out)
    return PackedTitanTrainer.Config(**values)


def _rows_per_step(training: Any) -> int:
    if hasattr(training, "global_batch_size"):  # up to 0.3
        name, rows, remainder = "global_batch_size", training.global_batch_size, 0
    else:
        name = "num_tokens_per_train_step"
        rows, remainder = divmod(training.num_tokens_per_train_step, training.max_context_length)
    if rows < 1 or remainder:
        raise ConfigError(
            f"training.{name} is {getattr(training, name)}; set it to one or more whole rows, "
            "because the content of a step must not depend on the number of ranks"
        )
    return int(rows)
