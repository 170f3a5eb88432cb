"""torchtitan: packed rows behind a ``BaseDataLoader``, documents told by positions.

    # packed_llama3.py; launch with: torchrun ... -m torchtitan.train --module packed_llama3
    from torchtitan.models.llama3.config_registry import llama3_8b
    from megapack.integrations.hosts.torchtitan import packed

    def packed_8b():                                    # --config packed_8b
        return packed(llama3_8b(), "corpus.json")

torchtitan finds where a document begins by positions that are 0, and makes its FlexAttention mask
or its varlen boundaries of them. Its trainer counts label tokens over all ranks of a step, so the
loss is a mean over them. docs/guides/torchtitan.md has the limits.
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
    """A rank's micro batches; ``PackedTitanTrainer`` says how many rows a step has.

    Raises:
        ConfigError: sizes that exclude each other; what ``open_rows`` refuses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """See the attributes; ``--dataloader.data_path`` and so on change them."""

        data_path: str = ""
        """A .bin/.idx prefix, or a manifest."""
        split: tuple[float, float] = (0.0, 1.0)
        """Part of every source's documents, as fractions."""
        cache_directory: str | None = None
        """Of packed indices; None: beside the first source."""
        seed: int = 1234
        """Of the order of samples."""
        num_workers: int = 0
        """Processes that read ahead."""
        rows_per_step: int = 0
        """Of all ranks together; ``PackedTitanTrainer`` sets it. 0: where documents come once, a
        micro batch of each."""
        num_steps: int | None = None
        """None: one epoch."""
        repeat: bool = True
        """torchtitan's Validator sets it; without it every document comes once, and what is missing
        to the last micro batches is rows without labels."""
        infinite: bool = True
        """The same in torchtitan 0.3."""

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
                f"dataloader.rows_per_step is {step}: give torchtitan what `packed` makes of its "
                "configuration, whose trainer sets it, or the rows of a step of all ranks"
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
        """Inputs and labels; up to 0.3 ``(rows, seq_len)``, since then one row after the other."""
        self.began = self.ranks.consumed_rows
        for told in self.ranks:
            labels = told.pop("labels")
            yield told, labels

    def state_dict(self) -> dict[str, Any]:
        """See ``RankRows``: the same on all ranks, for any number of them."""
        return self.ranks.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state; torchtitan gives an empty one where a checkpoint has none."""
        if state_dict:
            self.ranks.load_state_dict(state_dict)


class PackedTitanTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's trainer, which says how many rows a step has and tries its model at first."""

    ntokens_seen: int

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """Of ``packed``."""

        probe: bool = True
        """Whether the model is tried on its first micro batch (``megapack.integrations.probe``):
        seven forwards, and the log says their seconds. Not in pipelines nor with tensor or context
        parallelism, where a rank has only parts of the outputs."""

    def __init__(self, config: Config) -> None:
        rows = _rows_per_step(config.training)
        config.dataloader = replace(
            config.dataloader, rows_per_step=rows, num_steps=config.training.steps
        )
        if config.validator.enable and hasattr(config.validator.dataloader, "rows_per_step"):
            whole = config.validator.steps != -1 or config.parallelism.pipeline_parallel_degree > 1
            validator = replace(config.validator.dataloader, rows_per_step=rows if whole else 0)
            config.validator = replace(config.validator, dataloader=validator)
        super().__init__(config)
        parallel = self.parallel_dims
        whole = not (parallel.pp_enabled or parallel.tp_enabled or parallel.cp_enabled)
        self._to_probe = config.probe and whole

    def forward_backward_step(
        self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor
    ) -> Tensor:
        """torchtitan's, behind the probe the first time."""
        if self._to_probe:
            self._to_probe = False
            self.dataloader.ranks.probe(
                self._losses,
                {**input_dict, "labels": labels},
                consumed_rows=self.dataloader.began,
                module=self.model_parts[0],
            )
        loss: Tensor = super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )
        return loss

    def _losses(self, told: dict[str, Any]) -> Tensor:
        """The loss of every token, by the model and the loss function that train."""
        seen = self.ntokens_seen
        told = {name: value.to(self.device) for name, value in told.items()}
        labels = told.pop("labels")
        inputs, labels, options = self.post_dataloading_process(told, labels)
        self.ntokens_seen = seen
        with self.train_context(), _every_loss(self.loss_fn) as losses:
            self.loss_fn(
                self.model_parts[0](inputs, **options), labels, positions=options["positions"]
            )
        return torch.cat(losses, dim=-1)


@contextmanager
def _every_loss(loss_fn: Any) -> Iterator[list[Tensor]]:
    """What a loss function sums, of every label; of a chunked one part by part of the rows.

    In the dtype of the logits, by which the probe judges what is rounding.
    """
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
    """A configuration of torchtitan's on packed rows.

    Args:
        config: a ``Trainer.Config``, of torchtitan's registries or your own. The length of a row is
            ``training.max_context_length`` (up to 0.3 seq_len), a step has
            ``training.num_tokens_per_train_step`` tokens (global_batch_size rows), which must be
            set: what a step holds must not depend on the number of ranks.
        data_path: a .bin/.idx prefix, a manifest file, or JSON text.
        train_fraction: of every source's documents; the others are the validator's.

    Returns:
        The same with our trainer and loaders; command-line options work on it as before.
    """
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    loader = PackedDataLoader.Config(data_path=data_path, split=(0.0, train_fraction))
    values["dataloader"] = loader
    if train_fraction < 1:
        behind = replace(loader, split=(train_fraction, 1.0))
        values["validator"] = replace(config.validator, dataloader=behind)
    return PackedTitanTrainer.Config(**values)


def _rows_per_step(training: Any) -> int:
    if hasattr(training, "global_batch_size"):  # up to 0.3
        name, rows, rest = "global_batch_size", training.global_batch_size, 0
    else:
        name = "num_tokens_per_train_step"
        rows, rest = divmod(training.num_tokens_per_train_step, training.max_context_length)
    if rows < 1 or rest:
        raise ConfigError(
            f"training.{name} is {getattr(training, name)}; it must be set, to whole rows of "
            "training.max_context_length tokens: what a step holds must not depend on the number "
            "of ranks"
        )
    return int(rows)
