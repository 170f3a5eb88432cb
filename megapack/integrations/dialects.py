"""One batch, every dialect: how hosts are told tokens, labels, masks and where documents end.

- ``Dialect``: what differs between hosts; ``DIALECTS``: a row for each.
- ``emit``: a micro batch of megapack under a host's names and conventions; ``join_ends``: its
  boundaries for hosts that attend over all rows at once.
- ``loss_terms``: what of a batch's losses a host can be told at all. Tests read every row of the
  table back by its host's own rule.

Hosts differ in whose loss a mask names. A row of two documents, a cut one (its next token, 7, is
known) and a whole one:

    tokens        5  6 | 8  9         position 1 predicts 7, which is not in the row
    labels        6  7   9  -         megapack: of every position, -100 where there is none
    predictor     1  1   1  0         Megatron: the mask of the position that predicts
    target        0  1   0  1         verl: of the token that is predicted; 7 cannot be told
    text          5  6   8  9  0      GPT-NeoX: one token more, labels by shifting: mask 1 0 1 0
    positions     0  1   0  1         torchtitan: a document begins where they are 0
    lengths       2  2                OLMo-core
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megapack.attention.probe import SegmentPlaces
from megapack.attention.transformers_interface import ENDS, LONGEST
from megapack.errors import ConfigError

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """The conventions of a host. R is the length of a row; keys that are None are not given.

    Attributes:
        name: of the host, in errors.
        tokens: key of the tokens, int64 (rows, R).
        one_more: rows have R + 1 tokens, and the host shifts them.
        labels: key of what every position predicts, int64 (rows, R).
        target_labels: key of the same, each at the token that it names (the host shifts).
        ignored: stands where there is no label.
        mask: key of the weights of losses, (rows, R); without one a label counts once or not.
        mask_of_target: the mask names the token that is predicted, not the one that predicts.
        mask_dtype: float32 takes any weight, others 0 and 1.
        positions: key of the position ids, int64 (rows, R).
        restart: a document begins where they are 0; other positions than from its begin on, and
            attention windows, cannot be told.
        ends: keys of cu_seqlens, listed as the batch has them.
        padded_ends: keys of cu_seqlens with the room of aligned segments, where there is such.
        ends_dtype: of both.
        longest: keys of the longest segment, an int or int32 (rows,), as the batch has it.
        lengths: key of document lengths, int32 (rows, most), the rest 0; and of their maxima, a
            list of one int per row.
        flat: rows stand one behind the other, (rows * R,) instead of (rows, R).
    """

    name: str
    tokens: str = "tokens"
    one_more: bool = False
    labels: str | None = None
    target_labels: str | None = None
    ignored: int = IGNORED
    mask: str | None = None
    mask_of_target: bool = False
    mask_dtype: torch.dtype = torch.float32
    positions: str | None = None
    restart: bool = False
    ends: tuple[str, ...] = ()
    padded_ends: tuple[str, ...] = ()
    ends_dtype: torch.dtype = torch.int32
    longest: tuple[str, ...] = ()
    lengths: tuple[str, str] | None = None
    flat: bool = False

    @property
    def of_text(self) -> bool:
        """Whether the host takes labels from the tokens, so that others cannot be told."""
        return self.labels is None and self.target_labels is None


TRANSFORMERS = Dialect(
    name="transformers",
    tokens="input_ids",
    labels="shift_labels",
    target_labels="labels",
    positions="position_ids",
    ends=ENDS,
    longest=LONGEST,
)
# Megatron looks every label up in the vocabulary and then multiplies by the mask.
MEGATRON = Dialect(
    name="Megatron-LM",
    labels="labels",
    ignored=0,
    mask="loss_mask",
    positions="position_ids",
    ends=("cu_seqlens",),
    padded_ends=("cu_seqlens_padded",),
    longest=("max_seqlen",),
)
# Its older key, cu_seqlens, is cut at a tail of -1, and to nothing where there is none.
MEGATRON_BRIDGE = replace(
    MEGATRON,
    name="Megatron-Bridge",
    ends=("cu_seqlens_q", "cu_seqlens_kv"),
    padded_ends=("cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    longest=("max_seqlen_q", "max_seqlen_kv"),
)
# Beside the text what megapack's own wraps of its functions read (``text_rows``), all of the one
# dtype that broadcast_data takes.
BOUNDARIES, POSITIONS, MASK = "megapack_cu_seqlens", "megapack_position_ids", "megapack_loss_mask"
GPT_NEOX = Dialect(
    name="GPT-NeoX",
    tokens="text",
    one_more=True,
    mask=MASK,
    mask_dtype=torch.int64,
    positions=POSITIONS,
    ends=(BOUNDARIES,),
    ends_dtype=torch.int64,
)
GPT_NEOX_LABELS = replace(GPT_NEOX, target_labels="label")
MEGATRON_DEEPSPEED = replace(GPT_NEOX, name="Megatron-DeepSpeed")
TORCHTITAN_ROWS = Dialect(  # up to 0.3
    name="torchtitan", tokens="input", labels="labels", positions="positions", restart=True
)
TORCHTITAN = replace(TORCHTITAN_ROWS, flat=True)
OLMO_CORE = Dialect(
    name="OLMo-core",
    tokens="input_ids",
    labels="labels",
    lengths=("doc_lens", "max_doc_lens"),
)
# Its evaluation takes labels from the text.
OLMO_CORE_EVALUATION = replace(
    OLMO_CORE, labels=None, mask="label_mask", mask_of_target=True, mask_dtype=torch.bool
)
# Its loss looks every label up, and multiplies by the mask.
NANOTRON = Dialect(
    name="nanotron",
    tokens="input_ids",
    labels="label_ids",
    ignored=0,
    mask="label_mask",
    mask_dtype=torch.bool,
    positions="position_ids",
    restart=True,
)
VERL_SFT = Dialect(
    name="verl's SFT trainer",
    tokens="input_ids",
    mask="loss_mask",
    mask_of_target=True,
    positions="position_ids",
    restart=True,
)
DIALECTS = {
    "transformers": TRANSFORMERS,
    "megatron": MEGATRON,
    "megatron_bridge": MEGATRON_BRIDGE,
    "gpt_neox": GPT_NEOX,
    "gpt_neox_labels": GPT_NEOX_LABELS,
    "megatron_deepspeed": MEGATRON_DEEPSPEED,
    "torchtitan": TORCHTITAN,
    "torchtitan_rows": TORCHTITAN_ROWS,
    "olmo_core": OLMO_CORE,
    "olmo_core_evaluation": OLMO_CORE_EVALUATION,
    "nanotron": NANOTRON,
    "verl_sft": VERL_SFT,
}


# ---- What a batch says


class LossTerms(NamedTuple):
    """Of every position what it predicts and what its loss is multiplied with; 0: no loss."""

    targets: Tensor
    """int64 (rows, R)."""
    weights: Tensor
    """float32 (rows, R)."""


def loss_terms(batch: Mapping[str, Any], dialect: Dialect) -> LossTerms:
    """The losses of a batch that can be told in a dialect.

    A host that shifts text predicts what stands next in the row: a label that is another (the next
    token of a document that is cut there) is left out. One that shifts rows of R has no place for
    the label of the last position.
    """
    tokens, labels, weights = batch["tokens"], batch["labels"], batch["loss_mask"]
    if dialect.of_text:
        following = pad(tokens[:, 1:], (0, 1), value=IGNORED)
        if dialect.one_more:
            following[:, -1] = labels[:, -1]
        weights = weights * (labels == following)
    elif dialect.labels is None and not dialect.one_more:
        weights = pad(weights[:, :-1], (0, 1))
    return LossTerms(labels, weights)


def emit(batch: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """A micro batch of megapack as a host takes it.

    Args:
        batch: of ``PackedDataset.micro_batch``, a loader, or rows; on the CPU. It stays as it is.
        dialect: a value of ``DIALECTS``.

    Returns:
        The keys of the dialect, shapes and dtypes as ``Dialect`` has them.

    Raises:
        ConfigError: the batch says what the dialect cannot: loss weights without a float mask,
            positions or attention windows where only restarts are told, aligned segments.
    """
    targets, weights = loss_terms(batch, dialect)
    told: dict[str, Any] = {dialect.tokens: _text(batch) if dialect.one_more else batch["tokens"]}
    if dialect.mask_dtype != torch.float32 or dialect.mask is None:
        _check_weights(weights, dialect)
    labels = targets
    if dialect.mask is None:
        labels = labels.masked_fill(weights == 0, IGNORED)
    if dialect.ignored != IGNORED:
        labels = labels.clamp(min=dialect.ignored)
    if dialect.labels is not None:
        told[dialect.labels] = labels
    if dialect.target_labels is not None:
        behind = labels if dialect.one_more else labels[:, :-1]
        told[dialect.target_labels] = pad(behind, (1, 0), value=dialect.ignored)
    if dialect.mask is not None:
        mask = pad(weights[:, :-1], (1, 0)) if dialect.mask_of_target else weights
        told[dialect.mask] = mask.to(dialect.mask_dtype)
    if dialect.positions is not None:
        told[dialect.positions] = batch["position_ids"]
    _tell_ends(batch, dialect, told)
    return {key: value.flatten() for key, value in told.items()} if dialect.flat else told


def join_ends(ends: Tensor) -> Tensor:
    """Boundaries ``(rows, n)``, each row's from 0 on and its tail perhaps repeated -> int32 1-D, of
    all rows one behind the other."""
    lengths = ends.diff(dim=-1).flatten()
    return pad(lengths[lengths > 0].cumsum(0), (1, 0)).to(torch.int32)


def _text(batch: Mapping[str, Any]) -> Tensor:
    """R + 1 tokens: the last label comes from behind the row; without one any id will do."""
    return torch.cat([batch["tokens"], batch["labels"][:, -1:].clamp(min=0)], dim=1)


def _check_weights(weights: Tensor, dialect: Dialect) -> None:
    if not ((weights == 0) | (weights == 1)).all():
        raise ConfigError(
            f"sources have loss weights, and {dialect.name} is told only which tokens count: leave "
            "loss_weight out, or take weights of 0 and 1"
        )


def _tell_ends(batch: Mapping[str, Any], dialect: Dialect, told: dict[str, Any]) -> None:
    """Where documents end, in every way of the dialect."""
    aligned = batch.get("cu_seqlens_padded")
    if aligned is not None and not dialect.padded_ends:
        raise ConfigError(
            f"segments are aligned (context parallelism), and {dialect.name} cannot be told the "
            "room between them: leave align out"
        )
    told |= {key: batch["cu_seqlens"].to(dialect.ends_dtype) for key in dialect.ends}
    if aligned is not None:
        told |= {key: aligned.to(dialect.ends_dtype) for key in dialect.padded_ends}
    told |= {key: batch["max_seqlen"] for key in dialect.longest}
    if not (dialect.restart or dialect.lengths):
        return
    segments = SegmentPlaces.of(batch)
    rows, row = batch["tokens"].shape
    if dialect.restart and not torch.equal(segments.positions(), batch["position_ids"].flatten()):
        raise ConfigError(
            f"{dialect.name} takes a position 0 for the begin of a document, so attention windows "
            "and positions that go on over samples cannot be told: leave attention_window out and "
            "take positions: segment, attention: document"
        )
    if dialect.lengths is not None:
        of_row = segments.begins // row
        lengths = [segments.lengths[of_row == i].to(torch.int32) for i in range(rows)]
        key, longest = dialect.lengths
        told[key] = torch.nn.utils.rnn.pad_sequence(lengths, batch_first=True)
        told[longest] = [int(values.max()) for values in lengths]
