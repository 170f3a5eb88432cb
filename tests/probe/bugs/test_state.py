"""Public bugs in recurrent states and convolutions, rebuilt as tiny hybrid models.

Attention of these models is right. So a check of the attention mask alone finds none of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .corpus import Bug, check
from .parts import WIDTH, Decoder, GatedDelta, packed_batch

Ends = tuple[Tensor | None, Tensor | None]


class StateWithoutEnds(GatedDelta):
    """slime#1686: ``cu_seqlens`` is given to the convolution and not to the delta rule."""

    def ends(self, *, cu_seqlens: Tensor, **given: Any) -> Ends:
        return cu_seqlens, None


class ConvolutionWithoutEnds(GatedDelta):
    """Automodel#2147: the kernel of the convolution runs without ``seq_idx``.

    The last three tokens of a document reach the first three of the next one, through four taps.
    """

    def ends(self, *, cu_seqlens: Tensor, **given: Any) -> Ends:
        return None, cu_seqlens


class NeitherFromPositions(GatedDelta):
    """transformers#46093: trainers give restarting positions, these layers read cu_seq_lens_q.

    Attention layers understand both, so the same batch is right in one layer of four.
    """

    def ends(self, *, cu_seq_lens_q: Tensor | None = None, **given: Any) -> Ends:
        return cu_seq_lens_q, cu_seq_lens_q


class BothFromPositions(GatedDelta):
    def ends(self, *, position_ids: Tensor, **given: Any) -> Ends:
        begins = (position_ids[0] == 0).nonzero()[:, 0]
        ends = torch.cat([begins, torch.tensor([position_ids.shape[1]])])
        return ends, ends


class MaskOverwritesEnds(nn.Module):
    """flash-linear-attention#838: a mask of ones replaces the ``cu_seqlens`` of the caller.

    The layer unpads by the mask and recomputes the ends from it: [0, T], one sequence per row. It
    is a linear attention without convolution.
    """

    name = "linear_attn"
    overwrites = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, x: Tensor, *, cu_seqlens: Tensor, attention_mask: Tensor | None = None, **given: Any
    ) -> Tensor:
        if self.overwrites and attention_mask is not None:
            cu_seqlens = F.pad(attention_mask.sum(1).cumsum(0), (1, 0))
        pieces = self.qkv(x[0]).split(cu_seqlens.diff().tolist())
        return self.out(torch.cat([self.attend(piece) for piece in pieces]))[None]

    def attend(self, piece: Tensor) -> Tensor:
        q, k, v = piece.chunk(3, dim=-1)
        states = (F.softplus(k)[:, :, None] * v[:, None]).cumsum(0)
        return torch.einsum("tk,tkv->tv", F.softplus(q), states) / WIDTH


class EndsOfCaller(MaskOverwritesEnds):
    overwrites = False


class NaiveWithoutEnds(EndsOfCaller):
    """flash-linear-attention#1184: only the mode ``chunk`` forwards ``cu_seqlens``."""

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        row = torch.tensor([0, x.shape[1]])
        return super().forward(x, cu_seqlens=row if mode_of(given) == "naive" else cu_seqlens)


def mode_of(given: dict[str, Any]) -> str:
    return str(given.get("mode", "naive"))


class SelectiveScan(nn.Module):
    """SkyRL#2056: ``seq_idx`` is made only if ``total_tokens`` is set, and nobody sets it.

    The scan of a Mamba layer then runs through the row. ``cu_seqlens`` is there all the time.
    """

    name = "mixer"
    resets = False

    def __init__(self) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.step = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor, **given: Any) -> Tensor:
        values, gates = self.input(x[0]).chunk(2, dim=-1)
        decay = torch.exp(-0.1 * F.softplus(self.step(x[0])))
        begins = set(cu_seqlens.tolist()) if self.resets else {0}
        state, states = torch.zeros(WIDTH), []
        for t in range(len(values)):
            state = values[t] + (decay[t] * state if t not in begins else 0)
            states.append(state)
        return self.output(torch.stack(states) * F.silu(gates))[None]


class ScanWithResets(SelectiveScan):
    resets = True


def with_ones(model: nn.Module) -> Any:
    def forward(batch: dict[str, Tensor]) -> Tensor:
        return model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))

    return forward


ENDS = packed_batch("cu_seqlens")
BOTH = packed_batch("cu_seqlens", "position_ids")
STATE, CONVOLUTION, LAYER = "recurrent_state", "convolution", "layers.1.linear_attn"
BUGS = [
    Bug("THUDM/slime#1686", lambda: Decoder(StateWithoutEnds), lambda: Decoder(GatedDelta),
        ENDS, STATE, LAYER),
    Bug("NVIDIA-NeMo/Automodel#2147", lambda: Decoder(ConvolutionWithoutEnds),
        lambda: Decoder(GatedDelta), ENDS, CONVOLUTION, f"{LAYER}.conv", pairs={(0, 1), (1, 2)}),
    Bug("huggingface/transformers#46093", lambda: Decoder(NeitherFromPositions),
        lambda: Decoder(BothFromPositions), BOTH, CONVOLUTION, f"{LAYER}.conv",
        options={"boundaries": "position_ids"}),
    Bug("fla-org/flash-linear-attention#838", lambda: with_ones(Decoder(MaskOverwritesEnds)),
        lambda: with_ones(Decoder(EndsOfCaller)), ENDS, STATE, f"Decoder.{LAYER}"),
    Bug("fla-org/flash-linear-attention#1184", lambda: Decoder(NaiveWithoutEnds),
        lambda: Decoder(EndsOfCaller), ENDS, STATE, LAYER),
    Bug("NovaSky-AI/SkyRL#2056", lambda: Decoder(SelectiveScan),
        lambda: Decoder(ScanWithResets), ENDS, STATE, "layers.1.mixer"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_of_a_state_is_found(bug: Bug) -> None:
    check(bug)
