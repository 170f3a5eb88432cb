"""OLMo-core: packed rows behind a ``DataLoaderBase``, documents told by their lengths.

    loader = PackedOlmoLoader("corpus.json", sequence_length=4096, global_batch_size=4 << 20,
                              work_dir="/tmp/work", dp_process_group=train_module.dp_process_group)
    config = trainer_config.with_callback("packed", PackedOlmoCallback())
    config.build(train_module, loader).fit()

OLMo-core takes a rank's whole step at once and cuts it into micro batches itself; ``doc_lens`` and
``max_doc_lens`` become the boundaries of its flash-attention, ``labels`` are taken as they are.

Its loss is a mean over the labels of each rank, and its gradient a mean over ranks. Packed rows
have fewer labels than tokens, and ranks not equally many: where two ranks have losses 3 and 1,

    labels                  100      300       sum of losses 600 over 400 labels
    OLMo-core               300/100  300/300   mean over ranks 2
    with ``PackedOlmoCallback``     300/200  300/200   mean over labels 1.5

so ``PackedOlmoCallback`` divides by the mean of all ranks. docs/guides/olmo_core.md has the limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from olmo_core.data import DataLoaderBase
from olmo_core.data.utils import split_batch
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.eval import Evaluator
from olmo_core.eval.metrics import MeanMetric
from olmo_core.train.callbacks import Callback
from olmo_core.train.train_module import TransformerTrainModule
from torch import Tensor
from torch.nn.functional import pad

from megapack.errors import ConfigError
from megapack.integrations.dialects import IGNORED, OLMO_CORE, OLMO_CORE_EVALUATION, emit
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import open_data_path
from megapack.integrations.rows.rank_rows import RankRows, seen_losses

__all__ = ["PackedOlmoCallback", "PackedOlmoEvaluator", "PackedOlmoLoader"]


class PackedOlmoLoader(DataLoaderBase):  # type: ignore[misc]  # not installed where types are checked
    """A rank's steps.

    Args:
        data_path: a .bin/.idx prefix, a manifest file, or JSON text.
        sequence_length: tokens of a row.
        global_batch_size: of a step of all ranks, tokens: whole rows for every rank.
        work_dir: see ``DataLoaderBase``; nothing is written there.
        dp_process_group: ``train_module.dp_process_group``; None: one rank.
        seed: of the order of samples.
        split: part of every source's documents, as fractions.
        num_workers: processes that read ahead.
        cache_directory: of packed indices; None: beside the first source.
        finite: every document once, for ``PackedOlmoEvaluator``.

    Attributes:
        ranks: the ``RankRows`` that it iterates over.
        watched: by ``PackedOlmoCallback``.

    Raises:
        ConfigError: sizes that exclude each other; what ``open_rows`` refuses.
    """

    batches_processed: int
    _epoch: int | None

    def __init__(
        self,
        data_path: str,
        *,
        sequence_length: int,
        global_batch_size: int,
        work_dir: str | Path,
        dp_process_group: dist.ProcessGroup | None = None,
        seed: int = 1234,
        split: tuple[float, float] = (0.0, 1.0),
        num_workers: int = 0,
        cache_directory: str | None = None,
        finite: bool = False,
    ) -> None:
        super().__init__(
            work_dir=work_dir,
            global_batch_size=global_batch_size,
            dp_world_size=get_world_size(dp_process_group),
            dp_rank=get_rank(dp_process_group),
        )
        self.sequence_length, self.num_workers, self.watched = sequence_length, num_workers, False
        options = RowOptions(
            sequence_length=sequence_length, rows_per_block=self._rows_per_step(), seed=seed
        )
        self.rows = open_data_path(
            data_path, options, split=split, cache_directory=cache_directory, finite=finite
        )
        self.ranks = self._ranks()

    def _rows_per_step(self) -> int:
        rows, rest = divmod(self.global_batch_size, self.sequence_length)
        if rest or rows % self.dp_world_size or not rows:
            raise ConfigError(
                f"global_batch_size is {self.global_batch_size} tokens; it must be whole rows of "
                f"sequence_length ({self.sequence_length}) for each of {self.dp_world_size} ranks"
            )
        return int(rows)

    def _ranks(self) -> RankRows:
        return RankRows(
            self.rows,
            OLMO_CORE_EVALUATION if self.rows.finite else OLMO_CORE,
            data_parallel_rank=self.dp_rank,
            data_parallel_size=self.dp_world_size,
            micro_batch_rows=self._rows_per_step() // self.dp_world_size,
            num_workers=self.num_workers,
        )

    @DataLoaderBase.global_batch_size.setter  # type: ignore[untyped-decorator]
    def global_batch_size(self, new: int) -> None:
        """As OLMo-core's ``BatchSizeScheduler`` sets it: ``rows_per_block`` of a manifest is a
        multiple of all sizes in rows, or a larger one is refused."""
        DataLoaderBase.global_batch_size.fset(self, new)
        self.ranks = self._ranks()

    @property
    def total_batches(self) -> int:
        """Steps of an epoch."""
        return self.rows.rows_per_epoch // self._rows_per_step()

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        """Set the epoch: each has an order of its own, and a finite set has one epoch."""
        following = (self._epoch or 0) + 1 if epoch is None else epoch
        self._epoch = 1 if self.rows.finite else following

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        """input_ids, labels int64 ``(rows, sequence_length)``, doc_lens int32 ``(rows, most)`` and
        max_doc_lens, a list of ints. A finite set has label_mask instead of labels, bool, of the
        token that is predicted."""
        began: int | None = None
        while began != self.batches_processed:
            began, ranks = self.batches_processed, self.ranks
            self.rows.num_rows = self.epoch * self.rows.rows_per_epoch
            ranks.consumed_rows = (self.epoch - 1) * self.rows.rows_per_epoch
            ranks.consumed_rows += began * self._rows_per_step()
            for told in ranks:
                yield told
                if ranks is not self.ranks:  # a step has another size from now on
                    break

    def state_dict(self) -> dict[str, Any]:
        """See ``RankRows``: the same on all ranks, for any number of them; and the epoch."""
        return {**self.ranks.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state, with any number of ranks, micro batches and workers."""
        self.ranks.load_state_dict(state_dict)
        self._epoch = state_dict["epoch"] or 1
        behind = self.ranks.consumed_rows - (self.epoch - 1) * self.rows.rows_per_epoch
        self.batches_processed = behind // self._rows_per_step()

    def get_mock_batch(self) -> dict[str, Any]:
        """The first step of all, for the trainer's dry run, which asks for it before it trains.

        Raises:
            ConfigError: the trainer has no ``PackedOlmoCallback``.
        """
        if not self.watched:
            raise ConfigError(
                "OLMo-core divides a rank's loss by its own labels, of which packed rows have "
                "unequally many: add PackedOlmoCallback of "
                "megapack.integrations.hosts.olmo_core to the trainer's callbacks, which makes it "
                "a mean over all labels"
            )
        return emit(self.ranks.micro_batch(0), OLMO_CORE)

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """Of all ranks, padding too, as OLMo-core counts."""
        del batch
        return int(self.global_batch_size)


class PackedOlmoEvaluator(Evaluator):  # type: ignore[misc]
    """The mean loss over all labels of a data path, every document once.

    For ``EvaluatorCallback(evaluators=[...])``. All ranks end together: what is missing to their
    last batches is rows without labels. OLMo-core takes labels from the text here, so a document
    that is cut has none at its cut.

    Args:
        data_path: a .bin/.idx prefix, a manifest file, or JSON text.
        name: of the metrics.
        loader: other arguments of ``PackedOlmoLoader``; a batch is one forward of a rank.
    """

    def __init__(self, data_path: str, *, name: str, **loader: Any) -> None:
        batches = PackedOlmoLoader(data_path, finite=True, **loader)
        super().__init__(name=name, batches=batches)
        self.loss = MeanMetric()

    def update_metrics(
        self, batch: dict[str, Any], ce_loss: Tensor | None, logits: Tensor | None
    ) -> None:
        """Count ``ce_loss`` ``(rows, sequence_length)`` where a label is told."""
        del logits
        counts = pad(batch["label_mask"][:, 1:], (0, 1))
        if ce_loss is not None:
            self.loss.update(ce_loss[counts])

    def compute_metrics(self) -> dict[str, Tensor]:
        """Of all ranks."""
        loss = self.loss.compute()
        return {"CE loss": loss, "PPL": loss.exp()}

    def reset_metrics(self) -> None:
        """Before an evaluation."""
        self.loss.reset()


@dataclass
class PackedOlmoCallback(Callback):  # type: ignore[misc]
    """Makes the loss of a step a mean over the labels of all ranks, and tries the model at first.

    Attributes:
        probe: whether it is tried on the first step (``megapack.integrations.probe``): four
            forwards of it, and the log says their seconds. Not with tensor or context parallelism,
            where a rank has parts of the outputs.
    """

    probe: bool = True

    def post_attach(self) -> None:
        """Refuse a train module whose loss is out of reach."""
        module, loader = self.trainer.train_module, self.trainer.data_loader
        if not (isinstance(module, TransformerTrainModule) and hasattr(loader, "watched")):
            raise ConfigError(
                f"PackedOlmoCallback was given a {type(module).__name__} and a "
                f"{type(loader).__name__}: it takes a TransformerTrainModule (no pipeline) and a "
                "PackedOlmoLoader"
            )
        loader.watched = True
        self._labels: Tensor | None = None  # per rank, of the step that is trained
        stock = module.model_forward

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            if self._labels is not None and "loss_div_factor" in kwargs:
                kwargs["loss_div_factor"] = self._labels
            return stock(*args, **kwargs)

        module.model_forward = model_forward

    def pre_step(self, batch: dict[str, Any]) -> None:
        """Count the step's labels, and probe the first."""
        module, loader = self.trainer.train_module, self.trainer.data_loader
        labels = (batch["labels"] != IGNORED).sum().float().to(self.trainer.device)
        if loader.dp_world_size > 1:
            dist.all_reduce(labels, group=self.trainer.dp_process_group)
        self._labels = labels.clamp(min=1) / loader.dp_world_size
        if self.probe and not (module.tp_enabled or module.cp_enabled):
            loader.ranks.probe(self._losses, batch, module=module.model)
        self.probe = False

    def _losses(self, told: dict[str, Any]) -> Tensor:
        """The loss of every token by the module's own forward, in the dtype of its logits."""
        module, losses = self.trainer.train_module, []
        rows = module.rank_microbatch_size // told["input_ids"].shape[1]
        for part in split_batch(told, max(1, rows)):
            counts = part["labels"].to(module.device) != IGNORED
            out = module.eval_batch(part)
            loss = seen_losses(out.ce_loss, counts)
            losses.append(loss if out.logits is None else loss.to(out.logits.dtype))
        return torch.cat(losses)
