"""Attention when each rank of a group has a slice of the tokens (DeepSpeed-Ulysses).

An all-to-all before attention gives every rank all tokens of some heads; another one after it gives
back all heads of the rank's slice (Jacobs et al. 2023; DeepSpeed's implementation). Segments are
those of the whole stream. All other layers must process each token independently, which
``check_sequence_parallel`` checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapack.attention.model_check import isolated
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
    """Return a decorator that makes an attention function work on slices of tokens.

    The decorated function exchanges tokens between ranks if the model's ``forward`` gets a
    ``sequence_parallel_size`` above 1; then all ranks of the group must call it. Raises ConfigError
    if the number of heads is not a multiple of the number of ranks.
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
            **options: Any,
        ) -> tuple[Tensor, None]:
            if sequence_parallel_size == 1:
                return attend(*tensors, position_ids=position_ids, **options)
            # Ulysses gathers position_ids in every layer, and our attention ignores them.
            unused = torch.zeros(1, 1, dtype=torch.int64, device=tensors[1].device)
            out: tuple[Tensor, None] = ulysses(*tensors, position_ids=unused, **options)
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
    """Raise ConfigError if loss or gradients of a model differ between slices and the whole row.

    Runs a tiny model of the architecture, equal on all ranks, on a row of documents. All ranks of
    the group must call it; all of them raise the same error, which gives the difference.

    Args:
        build: builds a float32 model, with the registered attention, from a configuration.
        loss: returns the summed loss of a row, or of a slice in a group of the given size.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    over_ranks(configuration, group)  # raises for the real model's number of heads
    subject = f"architecture {configuration.model_type!r} with sequence_parallel_size {size}"
    remedy = "set engine.sequence_parallel_size to 1"
    with isolated(device):
        try:
            tiny = tiny_configuration(configuration, heads=max(HEADS, size))
            register(backend, over_ranks(tiny, group))
            model = build(tiny).to(device, dtype).train()
            randomize(model)
            # Three documents whose total length is a multiple of ``size``.
            total = -(-(sum(LENGTHS) + 2) // size) * size
            draw = torch.randint(0, VOCABULARY - 8, (total,)).to(device)
            row = Row.of(torch.split(draw, [*LENGTHS, total - sum(LENGTHS)]))
            whole = _loss_and_gradient(model, loss(model, row, 1))
            slices = _loss_and_gradient(model, loss(model, _slice(row, rank, size), size))
        except (ConfigError, dist.DistBackendError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{subject} fails on a row of documents: {type(error).__name__}: {error}; {remedy}"
            ) from error
    dist.all_reduce(slices, group=group)
    relative = float((slices - whole).norm() / whole.norm())
    if not relative <= _TOLERANCE[dtype]:
        raise ConfigError(
            f"{subject}: loss and gradient of a row in slices differ from those of the whole row "
            f"by {relative:.1e} of their norm: a layer other than attention mixes tokens; "
            f"{remedy}"
        )


def _slice(row: Row, rank: int, size: int) -> Row:
    length = row.tokens.shape[1] // size
    part = slice(rank * length, (rank + 1) * length)
    tokens, labels, position_ids = (x[:, part] for x in row[:3])
    return row._replace(tokens=tokens, labels=labels, position_ids=position_ids)


def _loss_and_gradient(model: Any, loss: Tensor) -> Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, trained, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(trained, grads, strict=True)]
    return torch.cat([loss.detach().reshape(1), *(part.flatten() for part in parts)]).float()
