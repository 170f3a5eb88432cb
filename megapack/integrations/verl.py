"""verl's batch balancing and dynamic micro batches by ``plan_step``.

    from megapack.integrations import verl
    verl.install()      # or, for the processes that Ray starts, in their environment:
                        # VERL_USE_EXTERNAL_MODULES=megapack.integrations.verl

verl deals a step twice: the controller gives every rank as many samples (``balance_batch``), then
each rank cuts its own into micro batches under ``max_token_len_per_gpu`` (``use_dynamic_bsz``).
Both functions are replaced by ones of the same arguments and results:

    get_seqlen_balanced_partitions([9, 3, 7, 2, 5, 6], 2, equal_size=True)
    # -> [[0, 3, 4], [1, 2, 5]]
    rearrange_micro_batches(batch, max_token_len=10)[1]     # samples of 9, 3, 7, 2, 5 and 6 tokens
    # -> [[2], [3, 5], [0], [1, 4]]

What calls them (``prepare_dynamic_batch``, the trainers, the workers' engines) stays verl's.
Run with verl 0.9.1; docs/guides/planned_steps.md.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megapack.integrations.rebinding import Rebinding
from megapack.planning import StepPlan, plan_step

# verl's workload of n tokens is 24,576 n + n^2 (a 7B model).
LINEAR_LENGTH = 24_576

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
            linear_length=LINEAR_LENGTH,
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
        rising = np.argsort(plan.cost(LINEAR_LENGTH)[:, 0], kind="stable").tolist()
        lists = [lists[i] for i in rising[::2] + rising[1::2][::-1]]
    chosen = [numbers.tolist() for numbers in lists]
    select = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
    return [select(batch, numbers) for numbers in chosen], chosen


def install() -> None:
    """Bind verl's functions of these names to ours, in all of its modules; again does nothing.

    Ray starts processes of its own: ``VERL_USE_EXTERNAL_MODULES=megapack.integrations.verl`` in
    their environment has verl import this module, which then installs itself.

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
