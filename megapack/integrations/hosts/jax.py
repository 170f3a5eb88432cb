"""JAX: packed rows as steps of numpy arrays, in the dialect of MaxText or grain, without torch.

    dataset = PackedDataset("text", "text.samples", framework="numpy")
    schedule = Schedule(dataset, tokens_per_step=65_536, row_tokens=2048)
    steps = PackedSteps(dataset, schedule)
    next(steps)["inputs"].shape    # -> (32, 2048), int32; 32 / data_parallel_size rows per process
    steps.get_state()              # JSON: {"step": 1, ...}; set_state continues there

Rows of all buckets have ``row_tokens`` tokens, so XLA compiles one program.
A loss that is ``sum(losses * (targets_segmentation != 0)) / sum(targets_segmentation != 0)`` over
the global batch is the mean over all labels of the step, as in MaxText. See docs/guides/jax.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from megapack.calls import checked_call
from megapack.data import PackedDataset, Schedule, build_loader
from megapack.data.batch import Batch
from megapack.data.loader import LoaderState
from megapack.errors import ConfigError
from megapack.integrations.dialects import MAXTEXT, Dialect, check_columns, emit


class PackedSteps(Iterator[dict[str, NDArray[Any]]]):
    """Iterator over one process's rows of each step; saves and restores its state like grain's.

    Raises ConfigError for a dataset of tensors, and for a schedule without rows of a fixed length,
    with several buckets per step or with several step sizes. ``step``: number of the next step.

    Args:
        dataset: opened with ``framework="numpy"``.
        schedule: the same in all processes, with ``row_tokens``.
        dialect: names of the arrays, ``MAXTEXT`` or ``GRAIN`` (``megapack.integrations.dialects``).
        data_parallel_rank, data_parallel_size: place of this process among those that read
            different rows: ``jax.process_index()`` and ``jax.process_count()``.
        num_steps: steps from the beginning of the run; None: to the end of the first epoch.
        prefetch: steps that a thread prepares in advance.
    """

    @checked_call
    def __init__(
        self,
        dataset: PackedDataset,
        schedule: Schedule,
        *,
        dialect: Dialect = MAXTEXT,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        num_steps: int | None = None,
        prefetch: int = 2,
    ) -> None:
        if dataset.framework != "numpy":
            raise ConfigError("the dataset has framework='torch': open it with framework='numpy'")
        if schedule.config.row_tokens is None:
            raise ConfigError(
                "the schedule has no row_tokens, so XLA would compile one program per bucket: "
                f"add row_tokens={schedule.capacities[-1]}, or a multiple of it"
            )
        stages = [stage.config for stage in schedule.stages]
        sizes = {size for s in stages for size in (s.tokens_per_step, s.draw_tokens)}
        if len(sizes) > 1:
            raise ConfigError(
                f"steps and draws have {sorted(sizes)} tokens, but JAX compiles one shape: use the "
                "same tokens_per_step in all stages, and mix: step"
            )
        check_columns(dataset.columns, dialect)
        row_tokens = schedule.config.row_tokens
        rows, size = sizes.pop() // row_tokens, data_parallel_size
        if size < 1 or rows % size:
            fitting = [n for n in range(1, rows + 1) if rows % n == 0]
            raise ConfigError(
                f"data_parallel_size is {size}, and a step has {rows} rows of {row_tokens} tokens: "
                f"set data_parallel_size to one of {fitting}, or tokens_per_step to a multiple of "
                f"{max(1, size) * row_tokens}"
            )
        self.schedule, self.dialect, self.step = schedule, dialect, 0
        self._dataset, self._num_steps = dataset, num_steps
        self._state = LoaderState(schedule, dataset)
        self._options: dict[str, Any] = {
            "data_parallel_rank": data_parallel_rank,
            "data_parallel_size": data_parallel_size,
            "micro_batch_tokens": rows // size * row_tokens,
            "prefetch": prefetch,
        }
        self._batches = self._open()

    def _open(self) -> Iterator[Batch]:
        last = self.schedule.num_steps() if self._num_steps is None else self._num_steps
        remaining = {"start_step": self.step, "num_steps": max(0, last - self.step)}
        options = {**self._options, **remaining}
        return iter(build_loader(self._dataset, self.schedule, layout="rows", **options))

    def __next__(self) -> dict[str, NDArray[Any]]:
        """Return the rows of this process, int32 ``(rows, row_tokens)`` under every name."""
        batch = emit(next(self._batches), self.dialect)
        self.step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the number of the next step, the program of the schedule and digests of the data,
        ready for JSON."""
        return self._state.save(self.step)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; the number of processes may differ. Raises ResumeError if the
        schedule orders samples differently, or if the bytes of the data differ."""
        step = self._state.resume_step(state)
        self.close()
        self.step = step
        self._batches = self._open()

    def close(self) -> None:
        """Stop the thread that prefetches."""
        self._batches.close()  # type: ignore[attr-defined]
