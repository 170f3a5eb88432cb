"""Attention over tokens of which every rank of a group holds a slice (DeepSpeed-Ulysses).

Two all-to-alls around attention: before it every rank gets all tokens of some of the heads, after
it all heads of its own tokens (Jacobs et al. 2023; DeepSpeed's implementation). The segments are
those of the whole stream, so nothing else changes. Everything else in a model must treat tokens one
by one, and ``check_sequence_parallel`` tries whether it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.attention.model_check import apart
from megapack.attention.tiny_model import (
    HEADS,
    LENGTHS,
    VOCABULARY,
    Row,
    randomize,
    tiny_configuration,
)
from megapack.attention.transformers_interface import Attention, register
from megapack.errors import ConfigError

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


def over_ranks(configuration: Any, group: Any) -> Callable[[Attention], Attention]:
    """Decorator that turns an attention function into one for slices.

    The result exchanges where the model's forward was given ``sequence_parallel_size`` above 1;
    all ranks of the group call it together then.

    Args:
        configuration: of the transformers model.
        group: process group of the ranks that share tokens.

    Raises:
        ConfigError: heads cannot be divided among the ranks.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # noqa: PLC0415

    text = configuration.get_text_config(decoder=True)
    heads = text.num_attention_heads

    def shared(attend: Attention) -> Attention:
        try:
            ulysses = UlyssesSPAttentionHF(
                attn=attend,
                batch_size=1,
                attn_head_count=heads,
                attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
                kv_head_count=getattr(text, "num_key_value_heads", None) or heads,
                num_hidden_layers=text.num_hidden_layers,
                process_group=group,
                seq_length_is_variable=True,
            )
        except ValueError as error:
            raise ConfigError(
                f"sequence_parallel_size {dist.get_world_size(group)}: {error}; choose a divisor "
                "of the number of heads"
            ) from error

        def exchange(
            *tensors: Any,
            sequence_parallel_size: int = 1,
            position_ids: Tensor | None = None,
            **rest: Any,
        ) -> tuple[Tensor, None]:
            if sequence_parallel_size == 1:
                return attend(*tensors, position_ids=position_ids, **rest)
            # It gathers position_ids in every layer; ours tells segments by cu_seqlens.
            nothing = torch.zeros(1, 1, dtype=torch.int64, device=tensors[1].device)
            out: tuple[Tensor, None] = ulysses(*tensors, position_ids=nothing, **rest)
            return out

        return exchange

    return shared


def check_sequence_parallel(
    configuration: Any,
    *,
    backend: str,
    group: Any,
    build: Callable[[Any], Any],
    loss: Callable[[Any, Row, int], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Refuse a model that does not learn from slices what it learns from the whole; collective.

    A tiny model of the architecture, the same on all ranks, gets a row of documents whole, and then
    in slices; loss and gradient must agree.

    Args:
        configuration: of the transformers model.
        backend: of the attention.
        group: process group of the ranks that share tokens.
        build: makes a model in float32 from a configuration; it uses the registered attention.
        loss: the summed loss of a row, or of a slice of one in a group of so many ranks.
        device, dtype: of the run.

    Raises:
        ConfigError: on all ranks of the group, with the difference.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    over_ranks(configuration, group)  # names the model's own heads where they do not divide
    subject = f"architecture {configuration.model_type!r} with sequence_parallel_size {size}"
    remedy = "set engine.sequence_parallel_size to 1"
    with apart(device):
        try:
            tiny = tiny_configuration(configuration, heads=max(HEADS, size))
            register(backend, over_ranks(tiny, group))
            model = build(tiny).to(device, dtype).train()
            randomize(model)
            # Three documents, together a multiple of ``size``.
            total = -(-(sum(LENGTHS) + 2) // size) * size
            draw = torch.randint(0, VOCABULARY - 8, (total,)).to(device)
            row = Row.of(torch.split(draw, [*LENGTHS, total - sum(LENGTHS)]))
            whole = _learned(model, loss(model, row, 1))
            slices = _learned(model, loss(model, _slice(row, rank, size), size))
        except (ConfigError, dist.DistBackendError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{subject} fails on a row of documents: {type(error).__name__}: {error}; {remedy}"
            ) from error
    dist.all_reduce(slices, group=group)
    apart_by = float((slices - whole).norm() / whole.norm())
    if not apart_by <= _TOLERANCE[dtype]:
        raise ConfigError(
            f"{subject}: loss and gradient of a row in slices differ from those of the whole row "
            f"by {apart_by:.1e} of it: a layer other than attention looks beyond its own token; "
            f"{remedy}"
        )


def _slice(row: Row, rank: int, size: int) -> Row:
    length = row.tokens.shape[1] // size
    part = slice(rank * length, (rank + 1) * length)
    tokens, labels, position_ids = (x[:, part] for x in row[:3])
    return row._replace(tokens=tokens, labels=labels, position_ids=position_ids)


def _learned(model: Any, loss: Tensor) -> Tensor:
    """The loss and the gradient of all parameters, one flat float32 vector."""
    used = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, used, allow_unused=True)
    parts = [(torch.zeros_like(p) if g is None else g) for p, g in zip(used, found, strict=True)]
    return torch.cat([loss.detach().reshape(1), *(part.flatten() for part in parts)]).float()
