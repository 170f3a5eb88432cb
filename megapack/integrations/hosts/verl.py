"""verl: its batch balancing by ``plan_step``, and packed rows for its SFT trainer.

- ``get_seqlen_balanced_partitions``, ``rearrange_micro_batches``: verl deals a step twice, samples
  to ranks (``balance_batch``) and a rank's samples to micro batches under ``max_token_len_per_gpu``
  (``use_dynamic_bsz``). Both are replaced by ones of the same arguments and results:

    get_seqlen_balanced_partitions([9, 3, 7, 2, 5, 6], 2, equal_size=True)
    # -> [[0, 3, 4], [1, 2, 5]]
    rearrange_micro_batches(batch, max_token_len=10)[1]     # samples of 9, 3, 7, 2, 5 and 6 tokens
    # -> [[2], [3, 5], [0], [1, 4]]

- ``SFTRows``: what ``data.custom_cls`` of verl's SFT trainer names; an item is a row of documents.
- ``probe_worker``: whether its engine and its loss keep the documents of a row apart.
- ``install``: binds verl's functions of batch balancing to ours.

What calls them (``prepare_dynamic_batch``, the trainers, the workers' engines) stays verl's.
Run with verl 0.9.1; docs/guides/planned_steps.md, docs/guides/finetuning.md.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from megapack.attention.probe import probe
from megapack.data import check_token_ids
from megapack.errors import ConfigError
from megapack.integrations.dialects import VERL_SFT, emit, loss_terms
from megapack.integrations.host import Rebinding, check_options
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import open_data_path
from megapack.planning import StepPlan, plan_step

logger = logging.getLogger("megapack")

# ---- Batch balancing ------------------------------------------------------------------------

# verl's workload of n tokens is 24,576 n + n^2 (a 7B model).
LINEAR_COST_TOKENS = 24_576
_PROBED_STEPS = 4  # whose rows are looked through for one of many documents

_rebinding = Rebinding("verl")


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[Any] | Tensor, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """verl's: numbers of samples in parts of equal sums (`seqlen_list` holds costs of any unit).

    Returns:
        `k_partitions` lists, rising, none empty; of equal length with `equal_size`.

    Raises:
        ValueError: there are fewer samples than parts, or their number does not divide.
    """
    costs = np.array([float(cost) for cost in seqlen_list])
    if len(costs) < k_partitions or (equal_size and len(costs) % k_partitions):
        raise ValueError(
            f"{len(costs)} samples in {k_partitions} {'equal ' if equal_size else ''}parts: give "
            f"{'a multiple' if equal_size else 'at least as many'}"
        )
    # Every sample counts as one token, so that the cap on tokens is the size of a part.
    plan = plan_step(
        np.ones(len(costs), np.int64),
        num_ranks=k_partitions,
        max_tokens_per_rank=len(costs) // k_partitions if equal_size else len(costs),
        costs=costs,
        balance="step",
    )
    return [np.sort(np.concatenate(parts)).tolist() for parts in plan.index_lists()]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """verl's: a rank's samples in micro batches of at most `max_token_len` tokens and like work.

    Args:
        batch: TensorDict with ``input_ids``, nested or with ``attention_mask`` (samples, tokens).
        max_token_len: never exceeded.
        dp_group, same_micro_num_in_dp: all ranks of the group take as many as the one that needs
            most.
        num_batches_divided_by: their number is a multiple of it (virtual pipelines).
        min_num_micro_batch: at least as many.
        use_dynamic_bsz_balance: those of least work first and last, which shortens the bubbles of a
            pipeline; else as planned.
        force_group_size: so many consecutive samples stay together.

    Returns:
        The micro batches, and the samples of each by number.

    Raises:
        ValueError: on all ranks alike: samples that stay together are longer than `max_token_len`,
            or a rank has fewer of them than micro batches are needed.
    """
    ids = batch["input_ids"]
    of_sample = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths = of_sample.cpu().numpy().astype(np.int64)
    groups = np.arange(len(lengths)) // force_group_size
    longest = int(np.bincount(groups, weights=lengths).max())
    multiple = num_batches_divided_by or 1

    def planned(micro_batch_multiple: int) -> StepPlan:
        return plan_step(
            lengths,
            num_ranks=1,
            max_tokens_per_rank=max(max_token_len, longest),
            linear_cost_tokens=LINEAR_COST_TOKENS,
            groups=groups if force_group_size > 1 else None,
            balance="pipeline",
            micro_batch_multiple=micro_batch_multiple,
        )

    in_dp = same_micro_num_in_dp and dp_group is not None and dist.is_initialized()
    count, plan = min_num_micro_batch or 1, planned(multiple)
    while True:
        # What one rank must refuse all refuse, before any waits for it.
        said = [(plan.num_micro_batches, int(groups[-1]) + 1, longest)]
        if in_dp:
            said *= dist.get_world_size(dp_group)
            dist.all_gather_object(said, said[0], group=dp_group)
        needed, num_groups, longests = zip(*said, strict=True)
        count = -(-max(count, *needed) // multiple) * multiple
        if max(longests) > max_token_len or count > min(num_groups):
            raise ValueError(
                f"{max(longests)} tokens stay together, and max_token_len is {max_token_len}; "
                f"{count} micro batches are needed, and a rank has {min(num_groups)} samples or "
                "groups for them: raise max_token_len or the batch size"
            )
        if set(needed) == {count}:
            break
        plan = planned(count)
    lists = plan.of_rank(0)
    if use_dynamic_bsz_balance:
        rising = np.argsort(plan.cost(LINEAR_COST_TOKENS)[:, 0], kind="stable").tolist()
        lists = [lists[i] for i in rising[::2] + rising[1::2][::-1]]
    chosen = [numbers.tolist() for numbers in lists]
    select = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
    return [select(batch, numbers) for numbers in chosen], chosen


# ---- Packed rows for the SFT trainer ------------------------------------------------------------


class SFTRows(Dataset[dict[str, Tensor]]):
    """Packed documents as ``data.custom_cls`` of verl's SFT trainer: an item is a row.

    A row has ``data.max_length`` tokens of whole samples of one bucket; ``data.train_batch_size``
    rows are a step, all of one bucket. The trainer's sampler deals them in an order of its own
    (torch's DistributedSampler, shuffled by seed 0 and the epoch), which is undone here, so that
    the steps are those of the schedule on any number of ranks. The order of a second epoch would
    be another one: the rows of the whole run are one epoch.

    Args:
        parquet_files: of ``data.train_files`` or ``val_files``: instead of parquet a manifest, a
            shard manifest or the prefix of a dataset (``megapack.integrations.rows.open_rows``).
        tokenizer: verl's, whose ids must have those of the documents.
        config: verl's ``data``. ``+data.probe=False``: the engine is not tried on a row before its
            first step (``probe_worker``).
        processor: verl's; not used.
        max_samples: rows of the whole run (``data.train_max_samples``), rounded down to whole
            steps; -1: one epoch of documents.

    Raises:
        ConfigError: options of ``data`` that would pad or cut rows, or documents whose ids the
            tokenizer lacks.
    """

    def __init__(
        self,
        parquet_files: Any,
        tokenizer: Any = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,  # noqa: ARG002
        max_samples: int = -1,
    ) -> None:
        data = config or {}
        if not isinstance(parquet_files, str):
            raise ConfigError(
                f"data files are {parquet_files}; give one: several datasets are the sources of a "
                "manifest"
            )
        reason = "rows have their padding already"
        check_options({"data.pad_mode": (data.get("pad_mode"), "no_padding", reason)})
        self.shuffled = parquet_files == data.get("train_files")
        if self.shuffled and parquet_files == data.get("val_files"):
            raise ConfigError(
                f"data.train_files and data.val_files are both {parquet_files!r}; verl takes them "
                "in different orders, so give validation a manifest of its own"
            )
        options = RowOptions(
            sequence_length=data["max_length"], rows_per_block=data["train_batch_size"], seed=0
        )
        rows = -1 if max_samples < 0 else max_samples // options.rows_per_block
        if rows == 0:
            raise ConfigError(
                f"max_samples is {max_samples}, less than the {options.rows_per_block} rows of a "
                "step (data.train_batch_size)"
            )
        num_rows = None if rows < 0 else rows * options.rows_per_block
        self.rows = open_data_path(parquet_files, options, num_rows=num_rows)
        if tokenizer is not None:
            check_token_ids(self.rows.packed, len(tokenizer))
        # The place in the run of every number that the sampler asks for.
        self._places = torch.arange(len(self.rows))
        if self.shuffled:
            generator = torch.Generator().manual_seed(0)
            self._places = torch.randperm(len(self.rows), generator=generator).argsort()
        self._next: int | None = None
        if self.shuffled and data.get("probe", True):
            _probe_before_training(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """See ``__getitems__``."""
        return self.items([int(self._places[i])])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
        """The rows of one rank in one step.

        Returns:
            Of each input_ids, position_ids (0 where a document begins) int64 and loss_mask float32
            (of targets), all ``(max_length,)``; verl's collator makes nested tensors of them.

        Raises:
            ConfigError: these are not the rows of a rank in the next step.
        """
        places = self._places[list(numbers)].tolist()
        rows_per_step = self.rows.options.rows_per_block
        ranks = rows_per_step // len(places)
        step, first = divmod(places[0], rows_per_step)
        follows = step in (0, self._next) or self._next is None
        expected = range(places[0], places[0] + ranks * len(places), ranks)
        if not follows or first >= ranks or places != list(expected):
            raise ConfigError(
                f"verl asks for rows {places[:4]} of the run, which are not those of a rank in "
                f"step {step if self._next is None else self._next}: take trainer.total_epochs=1 "
                "(data.train_max_samples is how many rows there are in all) and a "
                "data.train_batch_size that the data-parallel size divides"
            )
        worker = get_worker_info()
        self._next = step + (1 if worker is None else worker.num_workers)
        return self.items(places)

    def items(self, places: Sequence[int]) -> list[dict[str, Tensor]]:
        """Rows by their place in the run; see ``__getitems__``."""
        return _unstacked(emit(self.rows.micro_batch(places), VERL_SFT))


def _unstacked(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def probe_worker(worker: Any, rows: SFTRows, settings: Mapping[str, Any]) -> float:
    """Refuse a worker of verl that trains packed rows wrongly; see ``megapack.integrations.probe``.

    What is looked at is what every log-probability contributes to the worker's own loss.

    Args:
        worker: verl's TrainingWorker, its engine initialized and its loss function set.
        rows: what it shall be trained on; of those of the first steps the one of most documents.
        settings: what verl's trainer says beside tensors in a batch (``use_remove_padding``, ...).

    Returns:
        Seconds.

    Raises:
        ConfigError: documents of a row see each other, or losses count for the wrong tokens.
    """
    tu = importlib.import_module("verl.utils.tensordict_utils")
    collate = importlib.import_module("verl.utils.dataset.dataset_utils").SFTTensorCollator
    told = {**settings, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    first = range(min(len(rows), _PROBED_STEPS * rows.rows.options.rows_per_block))
    chosen = max(first, key=lambda i: sum(len(parts) for _, parts in rows.rows.segments_of(i)))

    def longest_segment(i: int) -> int:
        lengths = (length for _, parts in rows.rows.segments_of(i) for *_, length in parts)
        return max(lengths, default=0)

    longest = max(first, key=longest_segment)

    def forward(asked: Mapping[str, Any]) -> Tensor:
        tensors = collate("no_padding")(_unstacked(emit(asked, VERL_SFT)))
        data = tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=told)
        found: list[Tensor] = []

        def loss_function(model_output: dict[str, Any], **arguments: Any) -> Any:
            log_probs = model_output["log_probs"]
            with torch.enable_grad():
                flat = log_probs.values().detach().requires_grad_()
                nested = torch.nested.nested_tensor_from_jagged(flat, log_probs.offsets())
                output = {**model_output, "log_probs": nested}
                loss, metrics = worker.loss_fn(model_output=output, **arguments)
                (weights,) = torch.autograd.grad(loss, flat)
            found.append(flat.detach() * weights)
            return loss.detach(), metrics

        with worker.engine.eval_mode():
            worker.engine.infer_batch(data, loss_function=loss_function)
        # verl divides by the number of label tokens, which changes with the tokens.
        num_labels: Tensor = tensors["loss_mask"].values().sum()
        return torch.cat(found) * num_labels

    return probe(
        forward,
        rows.rows.micro_batch([chosen]),
        outputs="losses",
        counted=lambda asked: loss_terms(asked, VERL_SFT).weights != 0,
        host="verl's SFT trainer",
        longest=rows.rows.micro_batch([longest]),
    )


def _probe_before_training(rows: SFTRows) -> None:
    """Have verl's TrainingWorker, which this process has not made yet, probed before it trains."""
    worker_class = importlib.import_module("verl.workers.engine_workers").TrainingWorker
    train_batch = worker_class.train_batch

    @functools.wraps(train_batch)
    def probed(worker: Any, data: Any) -> Any:
        _probing.undo()
        read = importlib.import_module("verl.utils.tensordict_utils").get
        settings = {key: read(data, key) for key in data.keys() if key not in tensors}  # noqa: SIM118
        seconds = probe_worker(worker, rows, settings)
        logger.info("documents of a row are kept apart: probed in %.1f s", seconds)
        return train_batch(worker, data)

    tensors = {VERL_SFT.tokens, VERL_SFT.positions, VERL_SFT.mask}
    _probing.undo()
    _probing.replace(worker_class, "train_batch", probed)


_probing = Rebinding("verl")


# ---- Installation ------------------------------------------------------------------------------


def install() -> None:
    """Bind verl's functions of these names to ours, in all of its modules; again does nothing.

    Ray starts further processes: ``VERL_USE_EXTERNAL_MODULES=megapack.integrations.hosts.verl``
    in their environment has verl import this module, which then installs itself.

    Raises:
        ConfigError: this release of verl has other names.
    """
    if _rebinding:
        return
    home = importlib.import_module("verl.utils.seqlen_balancing")
    for ours in (get_seqlen_balanced_partitions, rearrange_micro_batches):
        name = ours.__name__
        stock = getattr(home, name, None)
        _rebinding.replace(home, name, ours)
        for module in list(sys.modules.values()):
            known = vars(module).get(name) if module.__name__.startswith("verl.") else None
            if known is stock and stock is not None:
                _rebinding.replace(module, name, ours)


def uninstall() -> None:
    """Give verl its own functions back."""
    _rebinding.undo()


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install()
