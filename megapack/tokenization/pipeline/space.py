"""Does the disk hold what a build will write? Asked before hours of work, from a small sample."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megapack.errors import MegapackError
from megapack.tokenization.corpus.documents import Faults, TextBlock
from megapack.tokenization.pipeline.plan import Plan
from megapack.tokenization.tokenizers.coding import Coder
from megapack.tokenization.tokenizers.probe import sample_blocks
from megapack.units import size

__all__ = ["Estimate", "check_space", "directory_bytes", "estimate", "free_bytes"]

_INDEX_BYTES = 20  # of a document in .idx
_LABEL_BYTES = 4
# A sample may mislead by this much; refuse only what is hopeless.
_SURE = 0.8


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What all shards of a plan will hold, about."""

    num_tokens: int
    num_bytes: int  # on disk, .bin and .idx


def estimate(plan: Plan, coder: Coder) -> Estimate:
    """From the beginnings of a few shards."""
    read = documents = tokens = 0
    for block in sample_blocks(plan.shards, plan.read):
        coded = coder.code(block, Faults("skip"))
        read += _bytes_read(block)
        documents += len(coded.offsets) - 1
        tokens += len(coded.tokens)
    whole = plan.num_bytes(range(len(plan.shards))) / max(1, read)
    token_bytes = np.dtype(plan.dtype).itemsize + (_LABEL_BYTES if plan.has_labels else 0)
    num_bytes = tokens * token_bytes + documents * _INDEX_BYTES
    return Estimate(num_tokens=round(tokens * whole), num_bytes=math.ceil(num_bytes * whole))


def _bytes_read(block: TextBlock) -> int:
    """What a sample counts for among the bytes by which shards are measured: those of the file in
    plain JSON Lines, else those of the text.
    """
    text = len(block.text)
    if block.place(0).unit != "byte" or len(block) == 1:
        return text
    span = int(block.positions[-1] - block.positions[0])
    return round(text * span / max(1, int(block.offsets[-2])))


def check_space(directory: Path, needed: int, *, to_join: int, note: Callable[[str], None]) -> None:
    """Refuse a build that cannot fit; say how it will go where there is no room for two copies.

    Args:
        directory: of the result.
        needed: bytes of shards still to be written, about.
        to_join: bytes of the result, about; 0 where nothing is joined.

    Raises:
        MegapackError: the disk cannot even hold one copy.
    """
    free = free_bytes(directory)
    if needed * _SURE > free:
        raise MegapackError(
            f"{directory} has {size(free)} free, and the build needs about {size(needed)}: make "
            "room, or choose an --output-prefix on a larger disk"
        )
    if needed + to_join > free:
        note(
            f"{directory} has {size(free)} free, enough for the shards (about {size(needed)}) and "
            f"not for the result beside them (about {size(to_join)}): each is removed once it is "
            "joined, and a run that is stopped while it joins has to build those again"
        )


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def directory_bytes(directory: Path) -> int:
    """Of the files in it; some may go while they are counted."""
    total = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
