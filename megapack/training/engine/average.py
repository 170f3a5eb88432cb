"""Exponential average of a run's weights: updated, evaluated, saved and exported.

After every update ``average = decay * average + (1 - decay) * weights``, in float32, from the
initial weights on. A rank averages only the float32 master weights that it owns (all of them
without ZeRO), so updates need no communication. ``in_model`` puts the average in place of the
weights. Files record which part of a parameter they contain, so any number of ranks can read them.

    decay 0.9, a weight of 1.0 that becomes 2.0 and stays  # -> 1.1, 1.19, 1.271
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.training.model.flops import whole_shape

logger = logging.getLogger("megapack")

Pieces: TypeAlias = dict[str, tuple[int, Tensor]]
"""Parameter -> offset of this rank's part, and its flat values."""

_FILES = "average_rank_*.pt"


def master_pieces(engine: Any) -> Pieces:
    """Return the float32 weights that this rank updates, as views or copies."""
    from deepspeed.utils import safe_get_local_fp32_param  # noqa: PLC0415

    stage, pieces = engine.zero_optimization_stage(), {}
    for name, parameter in engine.module.named_parameters():
        if stage == 0:
            pieces[name] = 0, parameter.detach().flatten()
        elif stage == 3:
            share = safe_get_local_fp32_param(parameter).detach().flatten()
            begin = dist.get_rank() * parameter.ds_tensor.ds_numel
            real = max(0, min(share.numel(), parameter.ds_numel - begin))  # without padding
            pieces[name] = begin, share[:real]
        elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            begin = mapping.lp_fragment_address.start
            pieces[name] = begin, mapping.hp_fragment.detach().flatten()
    return pieces


class WeightAverage:
    """Average of one engine's weights. All methods but ``update`` are collective.

    Args:
        engine: engine of ``deepspeed.initialize``.
        decay: weight of the former average at an update.
    """

    def __init__(self, engine: Any, decay: float) -> None:
        self.decay, self._engine = decay, engine
        self._stage = engine.zero_optimization_stage()
        self.begin()

    def begin(self) -> None:
        """Start the average from the current weights."""
        pieces = master_pieces(self._engine)
        self._average = {name: (begin, piece.clone()) for name, (begin, piece) in pieces.items()}

    def update(self) -> None:
        """Update the average after a step."""
        weights = [piece for _, piece in master_pieces(self._engine).values()]
        torch._foreach_lerp_(
            [piece for _, piece in self._average.values()], weights, 1 - self.decay
        )

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Put the average in place of the model's weights, which are restored afterwards."""
        weights = master_pieces(self._engine)
        if self._stage == 0:  # these are views of the model's weights: copy them
            weights = {name: (begin, piece.clone()) for name, (begin, piece) in weights.items()}
        self._put(self._average)
        try:
            yield
        finally:
            self._put(weights)

    @torch.no_grad()
    def _put(self, pieces: Pieces) -> None:
        import deepspeed  # noqa: PLC0415

        for name, parameter in self._engine.module.named_parameters():
            shape = whole_shape(parameter)
            begin, piece = pieces.get(name, (0, torch.empty(0)))
            whole = torch.zeros(shape, device=parameter.device).flatten()
            whole[begin : begin + piece.numel()] = piece
            if self._stage:
                dist.all_reduce(whole)  # every value has one owner
            divided = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
            with divided if self._stage == 3 else nullcontext():
                parameter.data.copy_(whole.view(shape))

    def save(self, save: Callable[[Any, str], None], directory: Path) -> None:
        """Call ``save`` with this rank's part and its path in a checkpoint's directory."""
        rank = dist.get_rank()
        if self._stage or rank == 0:
            tree = {
                name: {"begin": b, "values": piece} for name, (b, piece) in self._average.items()
            }
            save(tree, str(directory / _FILES.replace("*", f"{rank:05d}")))

    def load(self, directory: Path) -> None:
        """Load the average from a checkpoint; without one, start from the loaded weights."""
        self.begin()
        paths = sorted(directory.glob(_FILES))
        if not paths:
            logger.warning("%s has no average of weights: it starts from the weights", directory)
        for path in paths:
            for name, piece in torch.load(path, map_location="cpu", mmap=True).items():
                begin, average = self._average.get(name, (0, torch.empty(0)))
                saved_begin, values = piece["begin"], piece["values"]
                first = max(begin, saved_begin)
                last = min(begin + average.numel(), saved_begin + values.numel())
                if first < last:
                    saved = values[first - saved_begin : last - saved_begin]
                    average[first - begin : last - begin] = saved
