"""The backends, and the choice of one: by name, or the first that can serve the model.

The choice is made once, at start, and says why; a step never asks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megapack.attention import eager, flex, sdpa
from megapack.attention.flash import Flash2, Flash3, TorchFlash
from megapack.attention.problem import AttentionNeeds
from megapack.errors import ConfigError

__all__ = ["BACKENDS", "KERNELS", "Choice", "Kernel", "choose_backend", "survey"]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The forward and backward of one backend, and which rules it can apply."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    refusal: Callable[[AttentionNeeds], str | None]
    softcap: bool
    alibi: bool


def _of(kernel: Flash2 | Flash3 | TorchFlash, *, softcap: bool, alibi: bool) -> Kernel:
    return Kernel(
        forward=kernel.forward,
        backward=kernel.backward,
        refusal=kernel.refusal,
        softcap=softcap,
        alibi=alibi,
    )


# Behind the opaque operator, fastest first.
KERNELS: dict[str, Kernel] = {
    "flash3": _of(Flash3(), softcap=True, alibi=False),
    "flash2": _of(Flash2(), softcap=True, alibi=True),
    "torch": _of(TorchFlash(), softcap=False, alibi=False),
    "sdpa": Kernel(
        forward=sdpa.forward,
        backward=sdpa.backward,
        refusal=sdpa.refusal,
        softcap=False,
        alibi=True,
    ),
    "eager": Kernel(
        forward=eager.forward,
        backward=eager.backward,
        refusal=eager.refusal,
        softcap=True,
        alibi=True,
    ),
}

# name -> one line; the order is the order of preference
BACKENDS: dict[str, str] = {
    "flash3": "flash-attn 3 (Hopper): window, soft cap",
    "flash2": "flash-attn 2: window, soft cap, ALiBi",
    "torch": "PyTorch's varlen attention (torch >= 2.10, CUDA): window",
    "flex": "FlexAttention (CUDA): window, soft cap, ALiBi; no wheel to install",
    "sdpa": "PyTorch's fused CPU attention per segment: window, ALiBi",
    "eager": "the formula per segment, any device: everything, slowly",
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend of a run and the reason, for the log and the run directory."""

    name: str
    reason: str


def survey(needs: AttentionNeeds) -> dict[str, str | None]:
    """For every backend, in order of preference: None when it can serve, else why it cannot."""
    refusals = {name: kernel.refusal for name, kernel in KERNELS.items()}
    refusals["flex"] = flex.refusal
    return {name: refusals[name](needs) for name in BACKENDS}


def choose_backend(needs: AttentionNeeds, requested: str = "auto") -> Choice:
    """The requested backend, or the first of ``BACKENDS`` that can serve ``needs``.

    Raises:
        ConfigError: the requested backend is unknown or cannot serve the model.
    """
    if requested != "auto" and requested not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ConfigError(f"attention backend {requested!r} is unknown; choose one of {known}")
    found = survey(needs)
    if requested != "auto":
        problem = found[requested]
        if problem is not None:
            able = ", ".join(name for name, reason in found.items() if reason is None)
            raise ConfigError(
                f"attention backend {requested!r} cannot serve {needs.describe()}: {problem}; "
                f"able here: {able}"
            )
        return Choice(name=requested, reason="asked for")
    name = next(name for name, reason in found.items() if reason is None)
    refused = [f"{other}: {reason}" for other, reason in found.items() if reason is not None]
    better = [r for r in refused if list(BACKENDS).index(r.split(":")[0]) < _rank(name)]
    why = f"first able for {needs.describe()}"
    return Choice(name=name, reason=why + (f" ({'; '.join(better)})" if better else ""))


def _rank(name: str) -> int:
    return list(BACKENDS).index(name)
