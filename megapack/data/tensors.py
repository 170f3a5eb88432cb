"""Functions that only batches of tensors need: masks, copies to a GPU, a check of ranks.

- ``segment_ids``, ``block_diagonal_mask``, ``flex_block_mask``: for models that take masks.
- ``check_device``, ``to_device``: copies batches to a GPU, one batch ahead.
- ``RankChecker``: stops the run if the ranks disagree on the content of a step.

    segment_ids(torch.tensor([0, 2, 5]), num_tokens=5)             # -> 0 0 1 1 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from megapack.data.batch import Batch
from megapack.data.resume import OPTIONAL
from megapack.data.sampler import BucketBatchSampler
from megapack.errors import ConfigError, RankMismatchError


def segment_ids(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the number of the segment of every token.

    Args:
        cu_seqlens: int32 (entries,), or (rows, entries) with positions in each row; repeated
            last values are ignored.
        num_tokens: tokens of the stream, or of a row.

    Returns:
        int32 (num_tokens,) or (rows, num_tokens), numbered from 0 in every row.
    """
    positions = torch.arange(num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    ends = cu_seqlens[..., 1:].contiguous()
    positions = positions.expand(*ends.shape[:-1], num_tokens).contiguous()
    return torch.searchsorted(ends, positions, right=True, out_int32=True)


def block_diagonal_mask(segments: torch.Tensor, *, causal: bool = True) -> torch.Tensor:
    """Return a dense mask that limits attention to segments.

    Args:
        segments: result of ``segment_ids``, (tokens,) or (rows, tokens).
        causal: limit attention to the token itself and earlier ones.

    Returns:
        bool (rows, 1, tokens, tokens), True where attention is allowed (the convention of torch's
        scaled_dot_product_attention; Megatron's masks are the inverse). Quadratic in memory: for
        short rows and for checking other backends.
    """
    rows = segments if segments.dim() == 2 else segments[None]
    mask = rows[:, :, None] == rows[:, None, :]
    if causal:
        mask = mask.tril()
    return mask[:, None]


def flex_block_mask(segments: torch.Tensor, *, causal: bool = True, **options: Any) -> Any:
    """Return the mask of ``block_diagonal_mask`` as a BlockMask of torch's flex_attention.

    Args:
        segments, causal: see ``block_diagonal_mask``.
        **options: options of ``create_block_mask``, such as ``BLOCK_SIZE``.
    """
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415 (torch >= 2.5)

    rows = segments if segments.dim() == 2 else segments[None]

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:  # noqa: ARG001
        same = rows[b, q] == rows[b, k]
        return same & (q >= k) if causal else same

    tokens = rows.shape[1]
    return create_block_mask(
        visible, rows.shape[0], None, tokens, tokens, device=str(rows.device), **options
    )


def check_device(device: torch.device | str) -> None:
    """Raise ConfigError if torch does not know a device, or does not find this CUDA GPU."""
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(
            f"device is {device!r}, which torch does not know; give 'cuda' or 'cpu'"
        ) from None
    if chosen.type == "cuda" and (chosen.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(
            f"device is {str(device)!r}, and torch finds {count} CUDA GPUs; "
            + ("set device to 'cuda'" if count else "leave out device")
        )


def to_device(batches: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """Yield batches with their tensors on ``device``, copied one batch ahead on a separate stream.
    On the CPU, batches are unchanged. Without pinned memory the copies are synchronous."""
    device = torch.device(device)
    if device.type != "cuda":
        yield from batches
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = _copy(batch, device), stream.record_event()
        if ahead is not None:
            yield _wait_for_copy(*ahead, device)
        ahead = copied
    if ahead is not None:
        yield _wait_for_copy(*ahead, device)


def _copy(batch: Batch, device: torch.device) -> Batch:
    return {
        name: value.to(device, non_blocking=True)
        if isinstance(value, torch.Tensor) and name not in ("sample_ids", "source")
        else value
        for name, value in batch.items()
    }


def _wait_for_copy(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """Let the trainer's stream wait for the copies and keep their memory while it uses them."""
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for value in batch.values():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(current)
    return batch


class RankChecker:
    """Comparison of the ranks of the default process group: every ``every`` steps, and before the
    first, they exchange a few integers that describe their next step. A rank with another seed,
    file or step would silently train on other batches."""

    def __init__(self, sampler: BucketBatchSampler, *, every: int = 100) -> None:
        self._sampler, self._every = sampler, every
        self._calls = 0
        self._fixed: dict[str, Any] = {
            "check_ranks_every": every,
            **sampler.launch,
            "last_step": sampler.start_step + sampler.num_steps,
            **dict.fromkeys(OPTIONAL),  # every rank must send the same number of fields
            **sampler.schedule.identity(),
        }

    def check(self, step: int) -> None:
        """Compare the ranks before ``step``; all ranks call it equally often. Raises
        RankMismatchError on every rank, naming the ranks and the fields that differ."""
        # Count calls, not steps: ranks at different steps must still exchange at the same call.
        is_due = self._calls % self._every == 0
        self._calls += 1
        if not is_due:
            return
        content = self._sampler.schedule.step(step)
        fields = {
            "step": step,
            **self._fixed,
            "num_micro_steps": self._sampler.num_micro_steps(step),
            "bucket": content.bucket,
            "sample_ids": xxhash.xxh3_64_intdigest(content.sample_ids.tobytes()),
        }
        table = _gather([_code(value) for value in fields.values()])
        problems = [
            _describe(name, [row[i] for row in table])
            for i, name in enumerate(fields)
            if len({row[i] for row in table}) > 1
        ]
        if problems:
            raise RankMismatchError(
                f"ranks disagree at step {step}: {'; '.join(problems)}. Start all ranks with the "
                "same files and configuration"
            )


def _code(value: Any) -> int:
    """Return a small integer unchanged, everything else as a 62-bit hash."""
    if isinstance(value, int) and 0 <= value < 1 << 40:
        return value
    return xxhash.xxh3_64_intdigest(repr(value).encode()) >> 2 | 1 << 61


def _gather(codes: list[int]) -> list[list[int]]:
    on_gpu = dist.get_backend() == "nccl"
    of_rank = torch.tensor(codes, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
    table = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(table, of_rank)
    return [row.tolist() for row in table]


def _describe(name: str, codes: list[int]) -> str:
    """Return text such as ``seed is 8 on rank 2 and 7 on the other 3``."""
    common, num_common = Counter(codes).most_common(1)[0]
    differing = [
        f"{_format(code)} on rank {rank}" for rank, code in enumerate(codes) if code != common
    ]
    ranks = ", ".join(differing[:8])
    return f"{name} is {ranks} and {_format(common)} on the other {num_common}"


def _format(code: int) -> str:
    return str(code) if code < 1 << 40 else f"#{code & 0xFFFFFFFF:08x}"
