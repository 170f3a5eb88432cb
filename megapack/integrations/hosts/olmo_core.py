"""OLMo-core: a ``DataLoaderBase`` of packed rows and their document lengths.

    loader = PackedOlmoLoader("corpus.json", sequence_length=4096, global_batch_size=4 << 20,
                              work_dir="/tmp/work", dp_process_group=train_module.dp_process_group)
    config = trainer_config.with_callback("packed", PackedOlmoCallback())
    config.build(train_module, loader).fit()

OLMo-core takes a rank's whole step and cuts it into micro batches; ``doc_lens`` and
``max_doc_lens`` become the boundaries of its flash-attention. Its loss is a mean over the labels of
each rank, and its gradient a mean over ranks. Packed rows have a different number of labels per
rank, so ``PackedOlmoCallback`` divides by the mean label count of all ranks: for losses 3 and 1,

    labels                          100      300       sum of losses 600 over 400 labels
    OLMo-core                       300/100  300/300   mean over ranks 2
    with ``PackedOlmoCallback``     300/200  300/200   mean over labels 1.5

docs/guides/olmo_core.md lists the limitations.
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
    """Loader of a rank's steps. Raises ConfigError like ``open_rows``, and if sizes do not fit.

    Args:
        data_path: a .bin/.idx prefix, a manifest file, or JSON text.
        sequence_length: tokens of a row.
        global_batch_size: tokens of all ranks in a step; every rank must get whole rows.
        work_dir: see ``DataLoaderBase``; megapack writes nothing there.
        dp_process_group: ``train_module.dp_process_group``; None: one rank.
        seed: seed of the order of samples.
        split: part of every source's documents, as fractions.
        num_workers: worker processes that prefetch.
        cache_directory: directory of packed indices; None: in the folder of the first source.
        finite: every document once, for ``PackedOlmoEvaluator``.

    Attributes:
        ranks: the ``RankRows`` of this rank.
        has_callback: whether the trainer has a ``PackedOlmoCallback``.
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
        self.sequence_length, self.num_workers = sequence_length, num_workers
        self.has_callback = False
        options = RowOptions(
            sequence_length=sequence_length, rows_per_block=self._rows_per_step(), seed=seed
        )
        self.rows = open_data_path(
            data_path, options, split=split, cache_directory=cache_directory, finite=finite
        )
        self.ranks = self._ranks()

    def _rows_per_step(self) -> int:
        rows, remainder = divmod(self.global_batch_size, self.sequence_length)
        if remainder or rows % self.dp_world_size or not rows:
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
        """Set the step size for OLMo-core's ``BatchSizeScheduler``. The manifest's
        ``rows_per_block`` must be a multiple of all sizes in rows."""
        DataLoaderBase.global_batch_size.fset(self, new)
        self.ranks = self._ranks()

    @property
    def total_batches(self) -> int:
        return self.rows.rows_per_epoch // self._rows_per_step()

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        """Set the epoch. Each epoch has its own order; a finite set has one epoch."""
        following = (self._epoch or 0) + 1 if epoch is None else epoch
        self._epoch = 1 if self.rows.finite else following

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        """Yield input_ids, labels int64 ``(rows, sequence_length)``, doc_lens int32 ``(rows,
        most)`` and max_doc_lens, a list of ints. A finite set has label_mask instead of labels:
        bool, one entry per predicted token."""
        first_batch: int | None = None
        while first_batch != self.batches_processed:
            first_batch, ranks = self.batches_processed, self.ranks
            self.rows.num_rows = self.epoch * self.rows.rows_per_epoch
            ranks.consumed_rows = (self.epoch - 1) * self.rows.rows_per_epoch
            ranks.consumed_rows += first_batch * self._rows_per_step()
            for batch in ranks:
                yield batch
                if ranks is not self.ranks:  # the scheduler has changed the step size
                    break

    def state_dict(self) -> dict[str, Any]:
        return {**self.ranks.state_dict(), "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, on any number of ranks, micro batches and workers."""
        self.ranks.load_state_dict(state_dict)
        self._epoch = state_dict["epoch"] or 1
        rows_of_epoch = self.ranks.consumed_rows - (self.epoch - 1) * self.rows.rows_per_epoch
        self.batches_processed = rows_of_epoch // self._rows_per_step()

    def get_mock_batch(self) -> dict[str, Any]:
        """Return the first step, for the dry run of the trainer before training. Raises ConfigError
        if the trainer has no ``PackedOlmoCallback``."""
        if not self.has_callback:
            raise ConfigError(
                "OLMo-core divides a rank's loss by its own labels, and ranks with packed rows "
                "have different numbers of them: add PackedOlmoCallback of "
                "megapack.integrations.hosts.olmo_core to the trainer's callbacks"
            )
        return emit(self.ranks.micro_batch(0), OLMO_CORE)

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """Return the number of tokens of all ranks, padding included, as OLMo-core counts them."""
        del batch
        return int(self.global_batch_size)


class PackedOlmoEvaluator(Evaluator):  # type: ignore[misc]
    """Evaluator of the mean loss over all labels of a data path, every document once, for
    ``EvaluatorCallback(evaluators=[...])``.

    Rows without labels fill the last batches, so all ranks have the same number. OLMo-core's
    evaluation derives labels from the tokens of a row, so a document that is cut loses the label at
    the cut. ``loader``: arguments of ``PackedOlmoLoader``; a rank runs a batch in one forward pass.
    """

    def __init__(self, data_path: str, *, name: str, **loader: Any) -> None:
        batches = PackedOlmoLoader(data_path, finite=True, **loader)
        super().__init__(name=name, batches=batches)
        self.loss = MeanMetric()

    def update_metrics(
        self, batch: dict[str, Any], ce_loss: Tensor | None, logits: Tensor | None
    ) -> None:
        """Add ``ce_loss`` ``(rows, sequence_length)`` of tokens with a label."""
        del logits
        counts = pad(batch["label_mask"][:, 1:], (0, 1))
        if ce_loss is not None:
            self.loss.update(ce_loss[counts])

    def compute_metrics(self) -> dict[str, Tensor]:
        loss = self.loss.compute()
        return {"CE loss": loss, "PPL": loss.exp()}

    def reset_metrics(self) -> None:
        self.loss.reset()


@dataclass
class PackedOlmoCallback(Callback):  # type: ignore[misc]
    """Callback that makes the loss of a step a mean over the labels of all ranks.

    ``probe`` also probes the model on the first step (``megapack.probe.rows``): seven
    forward passes, whose duration is logged. The probe does not run with tensor or context
    parallelism, where a rank has only part of the outputs.
    """

    probe: bool = True

    def post_attach(self) -> None:
        """Refuse a train module or a loader that the callback does not support."""
        module, loader = self.trainer.train_module, self.trainer.data_loader
        if not (isinstance(module, TransformerTrainModule) and hasattr(loader, "has_callback")):
            raise ConfigError(
                f"PackedOlmoCallback got a {type(module).__name__} and a {type(loader).__name__}: "
                "it needs a TransformerTrainModule (no pipeline) and a PackedOlmoLoader"
            )
        loader.has_callback = True
        self._labels: Tensor | None = None  # mean number of labels per rank in this step
        stock = module.model_forward

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            if self._labels is not None and "loss_div_factor" in kwargs:
                kwargs["loss_div_factor"] = self._labels
            return stock(*args, **kwargs)

        module.model_forward = model_forward

    def pre_step(self, batch: dict[str, Any]) -> None:
        """Count the step's labels; probe the model at the first step."""
        module, loader = self.trainer.train_module, self.trainer.data_loader
        labels = (batch["labels"] != IGNORED).sum().float().to(self.trainer.device)
        if loader.dp_world_size > 1:
            dist.all_reduce(labels, group=self.trainer.dp_process_group)
        self._labels = labels.clamp(min=1) / loader.dp_world_size
        if self.probe and not (module.tp_enabled or module.cp_enabled):
            loader.ranks.probe(self._losses, batch, module=module.model)
        self.probe = False

    def _losses(self, batch: dict[str, Any]) -> Tensor:
        """Return the loss of every token from the module's forward, in the dtype of its logits."""
        module, losses = self.trainer.train_module, []
        rows = module.rank_microbatch_size // batch["input_ids"].shape[1]
        for part in split_batch(batch, max(1, rows)):
            counts = part["labels"].to(module.device) != IGNORED
            out = module.eval_batch(part)
            loss = seen_losses(out.ce_loss, counts)
            losses.append(loss if out.logits is None else loss.to(out.logits.dtype))
        return torch.cat(losses)
