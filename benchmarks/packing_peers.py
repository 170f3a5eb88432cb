"""Other people's packers, as installed: each gives the number of samples it makes, or None."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

__all__ = ["PEERS", "TRL_PLAN", "TRL_WHOLE"]

Lengths = NDArray[np.int32]
SEED = 1234  # Megatron's default
TRL_PLAN, TRL_WHOLE = "trl bfd_split, planning alone", "trl pack_dataset bfd_split"


# Whatever Megatron would like to have beside it: the sample index needs none of it.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")


class _PlannedError(Exception):
    """Raised where TRL would begin to move tokens."""


def trl_plan(lengths: Lengths, capacity: int) -> Callable[[], None]:
    """TRL's best-fit decreasing over all documents at once, up to where it moves the tokens.

    Its own function runs on lists of nulls. What it does to tokens before it plans (it filters out
    empty documents; there are none) is skipped, and it is stopped when the plan is made.
    """
    import pyarrow as pa  # noqa: PLC0415
    from trl import data_utils  # noqa: PLC0415

    assert lengths.min() > 0
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    column = pa.LargeListArray.from_arrays(offsets, pa.nulls(int(offsets[-1])))
    table = pa.table({"input_ids": column})

    take = data_utils.pc.take

    def stop(values: object, *arguments: object) -> object:
        if isinstance(values, pa.Table):
            raise _PlannedError
        return take(values, *arguments)

    def plan() -> None:
        with (
            patch.object(data_utils.pc, "filter", lambda values, _: values),
            patch.object(data_utils.pc, "take", stop),
        ):
            try:
                data_utils._pack_bfd(table, capacity, "split")
            except _PlannedError:
                return
            raise RuntimeError("trl packs in another way now; this benchmark must follow")

    return plan


def trl_pack_dataset(lengths: Lengths, capacity: int) -> Callable[[], int]:
    """TRL as its users call it: `pack_dataset`, with int32 tokens, in its batches of 1000."""
    import datasets  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415
    from trl import pack_dataset  # noqa: PLC0415

    datasets.disable_progress_bars()
    datasets.disable_caching()
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    tokens = pa.array(np.zeros(int(offsets[-1]), np.int32))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    dataset = datasets.Dataset(table)
    return lambda: len(pack_dataset(dataset, capacity, strategy="bfd_split"))


def megatron_index(lengths: Lengths, capacity: int, *, shuffle: bool) -> Callable[[], int]:
    """Megatron-core's GPTDataset: document index (shuffled with numpy), sample index."""
    from megatron.core.datasets import helpers  # noqa: PLC0415

    num_tokens = int(lengths.sum(dtype=np.int64))

    def build() -> int:
        documents = np.arange(len(lengths), dtype=np.int32)
        if shuffle:
            np.random.RandomState(SEED).shuffle(documents)
        return len(
            helpers.build_sample_idx(lengths, documents, capacity, 1, num_tokens, False, False)
        )

    return build


PEERS: dict[str, Callable[[Lengths, int], Callable[[], int | None]]] = {
    "megatron index, file order": lambda x, n: megatron_index(x, n, shuffle=False),
    "megatron shuffle + index": lambda x, n: megatron_index(x, n, shuffle=True),
    TRL_PLAN: trl_plan,
    TRL_WHOLE: trl_pack_dataset,
}
