"""verl: batch balancing by ``plan_step``, and packed rows for its SFT trainer.

- ``get_seqlen_balanced_partitions``, ``rearrange_micro_batches``: replace verl's functions that
  assign samples to ranks (``balance_batch``) and a rank's samples to micro batches under
  ``max_token_len_per_gpu`` (``use_dynamic_bsz``); same arguments and results:

    get_seqlen_balanced_partitions([9, 3, 7, 2, 5, 6], 2, equal_size=True)
    # -> [[0, 3, 4], [1, 2, 5]]
    rearrange_micro_batches(batch, max_token_len=10)[1]     # samples of 9, 3, 7, 2, 5 and 6 tokens
    # -> [[2], [3, 5], [0], [1, 4]]

- ``SFTRows``: the class for ``data.custom_cls`` of verl's SFT trainer; an item is a packed row.
- ``probe_worker``: checks that the worker's engine and loss keep the documents of a row apart.
- ``install``: replaces verl's batch balancing.

verl's callers of these functions (``prepare_dynamic_batch``, trainers, engines) are unchanged.
Tested with verl 0.9.1; see docs/guides/planned_steps.md and docs/guides/finetuning.md.
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
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from megapack.data import check_token_ids
from megapack.errors import ConfigError
from megapack.integrations.dialects import VERL_SFT, check_columns, emit, loss_terms
from megapack.integrations.host import Rebinding, check_options
from megapack.integrations.rows.dataset import RowOptions
from megapack.integrations.rows.open_rows import open_data_path
from megapack.planning import StepPlan, TreePlan, plan_step, plan_trees
from megapack.probe import check_rows

logger = logging.getLogger("megapack")

# ---- Batch balancing

LINEAR_COST_TOKENS = 24_576  # verl's workload of n tokens is 24,576 n + n^2 (a 7B model)
_PROBED_STEPS = 4  # the probe uses the row with the most documents among these first steps

_rebinding = Rebinding("verl")


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[Any] | Tensor, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split samples into `k_partitions` parts of nearly equal cost (`seqlen_list`, any unit).
    Return their sample numbers: ascending lists, not empty, of equal length with `equal_size`.
    Raises ValueError if there are fewer samples than parts, or if equal parts are impossible."""
    costs = np.array([float(cost) for cost in seqlen_list])
    if len(costs) < k_partitions or (equal_size and len(costs) % k_partitions):
        raise ValueError(
            f"{len(costs)} samples in {k_partitions} {'equal ' if equal_size else ''}parts: give "
            f"{'a multiple' if equal_size else 'at least as many'}"
        )
    # Count each sample as one token: then the cap on tokens is the size of a part.
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
    """Split a rank's samples into micro batches of at most `max_token_len` tokens and equal work;
    return them, and the sample numbers of each.

    Raises ValueError, on all ranks, if samples that stay together exceed `max_token_len`, or a rank
    has fewer samples or groups than micro batches.

    Args:
        batch: TensorDict with ``input_ids``, nested or with ``attention_mask`` (samples, tokens).
        dp_group, same_micro_num_in_dp: make the number the same on all ranks of the group.
        num_batches_divided_by: make the number a multiple of this (virtual pipelines).
        min_num_micro_batch: minimum number of micro batches.
        use_dynamic_bsz_balance: put the micro batches with the least work first and last, which
            shortens the bubbles of a pipeline; else keep the planned order.
        force_group_size: keep each group of this many consecutive samples together.
    """
    ids = batch["input_ids"]
    sample_lengths = ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(dim=1)
    lengths = sample_lengths.cpu().numpy().astype(np.int64)
    groups = np.arange(len(lengths)) // force_group_size
    longest = int(np.bincount(groups, weights=lengths).max())
    multiple = num_batches_divided_by or 1

    def make_plan(micro_batch_multiple: int) -> StepPlan | TreePlan:
        options: dict[str, Any] = {
            "num_ranks": 1,
            "max_tokens_per_rank": max(max_token_len, longest),
            "linear_cost_tokens": LINEAR_COST_TOKENS,
            "groups": groups if force_group_size > 1 else None,
            "balance": "pipeline",
            "micro_batch_multiple": micro_batch_multiple,
        }
        if not _trees:
            return plan_step(lengths, **options)
        masks = None if ids.is_nested else batch["attention_mask"].bool()
        rows = ids.unbind() if masks is None else [r[m] for r, m in zip(ids, masks, strict=True)]
        return plan_trees([row.cpu().numpy() for row in rows], **options)

    exchange = same_micro_num_in_dp and dp_group is not None and dist.is_initialized()
    count, plan = min_num_micro_batch or 1, make_plan(multiple)
    while True:
        # If one rank must raise, all ranks must: the others would wait for it.
        states = [(plan.num_micro_batches, int(groups[-1]) + 1, longest)]
        if exchange:
            states *= dist.get_world_size(dp_group)
            dist.all_gather_object(states, states[0], group=dp_group)
        needed, num_groups, longests = zip(*states, strict=True)
        count = -(-max(count, *needed) // multiple) * multiple
        if max(longests) > max_token_len or count > min(num_groups):
            raise ValueError(
                f"{max(longests)} tokens stay together, and max_token_len is {max_token_len}; "
                f"{count} micro batches are needed, and a rank has {min(num_groups)} samples or "
                "groups for them: raise max_token_len or the batch size"
            )
        if set(needed) == {count}:
            break
        plan = make_plan(count)
    if isinstance(plan, TreePlan):
        lists = _without_empty([tree.sequences for tree in plan.of_rank(0)], groups)
    else:
        lists = plan.of_rank(0)
    if use_dynamic_bsz_balance:
        ascending = np.argsort(plan.cost(LINEAR_COST_TOKENS)[:, 0], kind="stable").tolist()
        lists = [lists[i] for i in ascending[::2] + ascending[1::2][::-1]]
    chosen = [numbers.tolist() for numbers in lists]
    select = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
    return [select(batch, numbers) for numbers in chosen], chosen


def _without_empty(
    lists: list[NDArray[np.int64]], groups: NDArray[np.int64]
) -> list[NDArray[np.int64]]:
    """Move a group from the fullest micro batch to each empty one, which verl does not accept."""
    while not all(map(len, lists)):
        empty = next(i for i, numbers in enumerate(lists) if not len(numbers))
        fullest = max(range(len(lists)), key=lambda i: len(np.unique(groups[lists[i]])))
        moved = groups[lists[fullest]] == groups[lists[fullest][-1]]
        lists[empty], lists[fullest] = lists[fullest][moved], lists[fullest][~moved]
    return lists


# ---- Packed rows for the SFT trainer


class SFTRows(Dataset[dict[str, Tensor]]):
    """Packed documents for ``data.custom_cls`` of verl's SFT trainer: an item is a row.

    A row has ``data.max_length`` tokens: whole samples of one bucket. A step has
    ``data.train_batch_size`` rows of one bucket. The trainer shuffles rows with torch's
    DistributedSampler (seed 0 and the epoch); this class inverts the shuffle, so that steps are
    those of the schedule on any number of ranks. A second epoch would be shuffled differently, so
    one epoch must be the whole run.

    Raises ConfigError if options of ``data`` would pad or cut rows, or if the tokenizer lacks ids.

    Args:
        parquet_files: ``data.train_files`` or ``val_files``: instead of parquet a manifest, a shard
            manifest or the prefix of a dataset (``megapack.integrations.rows.open_rows``).
        config: verl's ``data``. ``+data.probe=False`` switches ``probe_worker`` off.
        max_samples: rows of the run (``data.train_max_samples``), in whole steps; -1: one epoch.
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
                f"data files are {parquet_files}; give one, perhaps a manifest of several sources"
            )
        reason = "rows have their padding already"
        check_options({"data.pad_mode": (data.get("pad_mode"), "no_padding", reason)})
        self.shuffled = parquet_files == data.get("train_files")
        if self.shuffled and parquet_files == data.get("val_files"):
            raise ConfigError(
                f"data.train_files and data.val_files are both {parquet_files!r}; verl reads them "
                "in different orders, so give validation another manifest"
            )
        options = RowOptions(
            sequence_length=data["max_length"], rows_per_block=data["train_batch_size"], seed=0
        )
        steps = -1 if max_samples < 0 else max_samples // options.rows_per_block
        if steps == 0:
            raise ConfigError(
                f"max_samples is {max_samples}, less than the {options.rows_per_block} rows of a "
                "step (data.train_batch_size)"
            )
        num_rows = None if steps < 0 else steps * options.rows_per_block
        self.rows = open_data_path(parquet_files, options, num_rows=num_rows)
        check_columns(self.rows.packed.columns, VERL_SFT)
        if tokenizer is not None:
            check_token_ids(self.rows.packed, len(tokenizer))
        # Map the sampler's numbers to places in the run.
        self._places = torch.arange(len(self.rows))
        if self.shuffled:
            generator = torch.Generator().manual_seed(0)
            self._places = torch.randperm(len(self.rows), generator=generator).argsort()
        self._next_step: int | None = None
        if self.shuffled and data.get("probe", True):
            _probe_before_training(self)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.items([int(self._places[i])])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return the rows of one rank in one step: input_ids, position_ids (0 where a document
        begins) int64 and loss_mask float32 (by target), all ``(max_length,)``; verl's collator
        makes nested tensors of them. Raises ConfigError for rows of another step."""
        places = self._places[list(numbers)].tolist()
        rows_per_step = self.rows.options.rows_per_block
        ranks = rows_per_step // len(places)
        step, first = divmod(places[0], rows_per_step)
        in_order = step in (0, self._next_step) or self._next_step is None
        expected = range(places[0], places[0] + ranks * len(places), ranks)
        if not in_order or first >= ranks or places != list(expected):
            raise ConfigError(
                f"verl reads rows {places[:4]} of the run, which are not those of a rank in step "
                f"{step if self._next_step is None else self._next_step}: set "
                "trainer.total_epochs=1 (data.train_max_samples is the number of rows of the whole "
                "run) and a data.train_batch_size that the data-parallel size divides"
            )
        worker = get_worker_info()
        self._next_step = step + (1 if worker is None else worker.num_workers)
        return self.items(places)

    def items(self, places: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return rows by their places in the run; see ``__getitems__``."""
        return _unstack(emit(self.rows.micro_batch(places), VERL_SFT))


def _unstack(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def probe_worker(worker: Any, rows: SFTRows, settings: Mapping[str, Any]) -> float:
    """Raise ConfigError if a worker of verl trains packed rows wrongly: documents of a row depend
    on each other, or losses count for the wrong tokens. Return the seconds taken.

    The probe compares the contributions of single log-probabilities to the worker's own loss.

    Args:
        worker: verl's TrainingWorker, with an initialized engine and a loss function.
        rows: the training rows; the probe uses the one of the first steps with most documents.
        settings: settings in the trainer's batches (``use_remove_padding``, ...).
    """
    tu = importlib.import_module("verl.utils.tensordict_utils")
    collate = importlib.import_module("verl.utils.dataset.dataset_utils").SFTTensorCollator
    settings = {**settings, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    first = range(min(len(rows), _PROBED_STEPS * rows.rows.options.rows_per_block))
    chosen = max(first, key=lambda i: sum(len(parts) for _, parts in rows.rows.segments_of(i)))

    def longest_segment(i: int) -> int:
        lengths = (length for _, parts in rows.rows.segments_of(i) for *_, length in parts)
        return max(lengths, default=0)

    longest = max(first, key=longest_segment)

    def forward(batch: Mapping[str, Any]) -> Tensor:
        tensors = collate("no_padding")(_unstack(emit(batch, VERL_SFT)))
        data = tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)
        contributions: list[Tensor] = []

        def loss_function(model_output: dict[str, Any], **arguments: Any) -> Any:
            log_probs = model_output["log_probs"]
            with torch.enable_grad():
                flat = log_probs.values().detach().requires_grad_()
                nested = torch.nested.nested_tensor_from_jagged(flat, log_probs.offsets())
                output = {**model_output, "log_probs": nested}
                loss, metrics = worker.loss_fn(model_output=output, **arguments)
                (weights,) = torch.autograd.grad(loss, flat)
            contributions.append(flat.detach() * weights)
            return loss.detach(), metrics

        with worker.engine.eval_mode():
            worker.engine.infer_batch(data, loss_function=loss_function)
        # verl divides the loss by the number of label tokens, which changes with the tokens.
        num_labels: Tensor = tensors["loss_mask"].values().sum()
        return torch.cat(contributions) * num_labels

    return check_rows(
        forward,
        rows.rows.micro_batch([chosen]),
        counted=lambda batch: loss_terms(batch, VERL_SFT).weights != 0,
        host="verl's SFT trainer",
        longest=rows.rows.micro_batch([longest]),
    )


def _probe_before_training(rows: SFTRows) -> None:
    """Make verl's TrainingWorker (not yet created) probe its model before it trains."""
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


# ---- Installation


_trees = False  # plan trees (``megapack.integrations.hosts.verl_trees``)


def install(*, trees: bool = False) -> None:
    """Replace verl's functions in all of its modules; a second call changes nothing. With `trees`,
    micro batches are packed prefix trees, and only their unique tokens count.

    Ray starts further processes: set ``VERL_USE_EXTERNAL_MODULES=megapack.integrations.hosts.verl``
    in their environment, and verl imports this module, which then installs itself. Raises
    ConfigError if this release of verl lacks one of the functions.
    """
    global _trees  # noqa: PLW0603  # verl calls functions, not methods
    if _rebinding:
        return
    _trees = trees
    home = importlib.import_module("verl.utils.seqlen_balancing")
    for ours in (get_seqlen_balanced_partitions, rearrange_micro_batches):
        name = ours.__name__
        stock = getattr(home, name, None)
        _rebinding.replace(home, name, ours)
        for module in list(sys.modules.values()):
            bound = vars(module).get(name) if module.__name__.startswith("verl.") else None
            if bound is stock and stock is not None:
                _rebinding.replace(module, name, ours)


def uninstall() -> None:
    """Restore verl's functions."""
    _rebinding.undo()


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install()
