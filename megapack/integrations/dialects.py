"""Dialects of hosts: names, shapes and conventions of tokens, labels, masks and boundaries.

- ``Dialect``: what differs between hosts; ``DIALECTS``: one row per host.
- ``emit``: a micro batch of megapack in the dialect of a host; ``join_ends``: its boundaries, for
  hosts that attend over all rows at once.
- ``loss_terms``: the losses of a batch that a host can represent. For every dialect, tests decode
  an emitted batch by the host's rule and compare the losses.

A mask entry refers to the position that predicts a token, or to the predicted token. Example: a row
of two documents; the first is cut, and its next token is 7:

    tokens        5  6 | 8  9         position 1 predicts 7, which is not in the row
    labels        6  7   9  -         megapack: one per position, -100 for none
    predictor     1  1   1  0         Megatron: mask of the predicting position
    target        0  1   0  1         verl: mask of the predicted token; 7 has no place
    text          5  6   8  9  0      GPT-NeoX: one more token, labels by shifting: mask 1 0 1 0
    positions     0  1   0  1         torchtitan: a document begins at each 0
    lengths       2  2                OLMo-core
    segmentation  1  1   2  2         MaxText, grain: of the tokens, 0 in padding
                  1  1   2  0         and of the labels: 0 is their mask

Batches of numpy arrays give numpy arrays, and torch is not imported for them. Tensors on a device
are converted on the CPU and copied back, which waits for the device: convert first, then copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.data.batch import MTP_TARGETS, column_names, within_groups, wrapper
from megapack.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Conventions of a host. R is the length of a row; ``emit`` leaves out keys that are None.

    Attributes:
        name: name of the host for errors.
        tokens: key of the tokens, int64 (rows, R).
        one_more: rows have R + 1 tokens, and the host shifts them.
        labels: key of the label that each position predicts, int64 (rows, R).
        target_labels: key of the same labels, each at its token's own position (the host shifts).
        ignored: value for "no label".
        mask: key of the loss weights, (rows, R); without it, labels have weight 0 or 1.
        mask_of_target: the mask refers to the predicted token, not to the predicting position.
        mask_dtype: float32 holds any weight, other dtypes 0 and 1.
        positions: key of the position ids, int64 (rows, R).
        target_positions: key of the position of the token that predicts each label: the same.
        segmentation: keys of the number of every token's segment, (rows, R), counted from 1 in each
            row, 0 in padding; and of the same number where the position has a label, else 0.
        integers: dtype of tokens, labels, positions and segmentation.
        restart: the host starts a document at each position 0, so it supports no other positions
            and no attention windows.
        ends: keys of cu_seqlens, in the form of the batch.
        padded_ends: keys of cu_seqlens with alignment padding, if segments are aligned.
        ends_dtype: dtype of ends and padded_ends.
        longest: keys of max_seqlen, an int or int32 (rows,), in the form of the batch.
        lengths: two keys: one of the document lengths, int32 (rows, most documents of a row),
            padded with 0; one of the longest length in each row, a list of ints.
        flat: all rows are joined: (rows * R,) instead of (rows, R).
        columns: the host's batch can contain columns of the data, under their names.
    """

    name: str
    tokens: str = "tokens"
    one_more: bool = False
    labels: str | None = None
    target_labels: str | None = None
    ignored: int = IGNORED
    mask: str | None = None
    mask_of_target: bool = False
    mask_dtype: str = "float32"
    positions: str | None = None
    target_positions: str | None = None
    segmentation: tuple[str, str] | None = None
    integers: str = "int64"
    restart: bool = False
    ends: tuple[str, ...] = ()
    padded_ends: tuple[str, ...] = ()
    ends_dtype: str = "int32"
    longest: tuple[str, ...] = ()
    lengths: tuple[str, str] | None = None
    flat: bool = False
    columns: bool = False


TRANSFORMERS = Dialect(
    name="transformers",
    tokens="input_ids",
    labels="shift_labels",
    target_labels="labels",
    positions="position_ids",
    ends=("cu_seq_lens_q", "cu_seq_lens_k"),
    longest=("max_length_q", "max_length_k"),
    columns=True,
)
# Ignored labels are 0: Megatron indexes logits with every label before it multiplies by the mask.
MEGATRON = Dialect(
    name="Megatron-LM",
    labels="labels",
    ignored=0,
    mask="loss_mask",
    positions="position_ids",
    ends=("cu_seqlens",),
    padded_ends=("cu_seqlens_padded",),
    longest=("max_seqlen",),
    columns=True,
)
# Not Bridge's older key cu_seqlens: unless its values end with -1, Bridge drops all boundaries.
MEGATRON_BRIDGE = replace(
    MEGATRON,
    name="Megatron-Bridge",
    ends=("cu_seqlens_q", "cu_seqlens_kv"),
    padded_ends=("cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    longest=("max_seqlen_q", "max_seqlen_kv"),
)
# megapack's replacements of host functions (``text_rows``) read these keys next to the text; all
# int64, because broadcast_data takes one dtype.
BOUNDARIES, POSITIONS, MASK = "megapack_cu_seqlens", "megapack_position_ids", "megapack_loss_mask"
GPT_NEOX = Dialect(
    name="GPT-NeoX",
    tokens="text",
    one_more=True,
    mask=MASK,
    mask_dtype="int64",
    positions=POSITIONS,
    ends=(BOUNDARIES,),
    ends_dtype="int64",
)
GPT_NEOX_LABELS = replace(GPT_NEOX, target_labels="label")
MEGATRON_DEEPSPEED = replace(GPT_NEOX, name="Megatron-DeepSpeed")
TORCHTITAN_ROWS = Dialect(  # up to 0.3
    name="torchtitan", tokens="input", labels="labels", positions="positions", restart=True
)
TORCHTITAN = replace(TORCHTITAN_ROWS, flat=True)
OLMO_CORE = Dialect(
    name="OLMo-core", tokens="input_ids", labels="labels", lengths=("doc_lens", "max_doc_lens")
)
# OLMo-core's evaluation derives labels from the tokens.
OLMO_CORE_EVALUATION = replace(
    OLMO_CORE, labels=None, mask="label_mask", mask_of_target=True, mask_dtype="bool"
)
# Ignored labels are 0: nanotron's loss indexes with every label before it multiplies by the mask.
NANOTRON = Dialect(
    name="nanotron",
    tokens="input_ids",
    labels="label_ids",
    ignored=0,
    mask="label_mask",
    mask_dtype="bool",
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
# Their losses multiply by ``targets_segmentation != 0``; every label must be a valid index.
MAXTEXT = Dialect(
    name="MaxText",
    tokens="inputs",
    labels="targets",
    ignored=0,
    positions="inputs_position",
    target_positions="targets_position",
    segmentation=("inputs_segmentation", "targets_segmentation"),
    integers="int32",
)
GRAIN = replace(
    MAXTEXT,
    name="grain",
    positions="inputs_positions",
    target_positions="targets_positions",
    segmentation=("inputs_segment_ids", "targets_segment_ids"),
)
DIALECTS = {
    name.lower(): value for name, value in dict(globals()).items() if isinstance(value, Dialect)
}
"""Dialects by the lowercase name of their variables: ``DIALECTS["gpt_neox"] is GPT_NEOX``."""


# ---- A batch in a dialect


class LossTerms(NamedTuple):
    """Target and loss weight of every position; weight 0: no loss. Tensors, or numpy arrays."""

    targets: Any  # int64 (rows, R)
    weights: Any  # float32 (rows, R)


def loss_terms(batch: Mapping[str, Any], dialect: Dialect) -> LossTerms:
    """Return the losses of a batch that the dialect can represent. A host that shifts text predicts
    the next token of the row, so a different label (the next token of a document that is cut there)
    is dropped. One that shifts rows of R tokens loses the label of the last position."""
    on_cpu, wrap = _on_cpu(batch)
    return LossTerms(*map(wrap, _loss_terms(on_cpu, dialect)))


_READ = (
    *("tokens", "labels", "loss_mask", "position_ids", "dataset_ids"),
    *("cu_seqlens", "cu_seqlens_padded", "max_seqlen"),
)


def _on_cpu(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return what dialects read of a batch, on the CPU, and the function that turns arrays into
    those of the batch: arrays, or tensors on its device. It returns the batch's own tensors."""
    read = {name: batch[name] for name in _READ if name in batch}
    if isinstance(batch["tokens"], np.ndarray):
        return read, wrapper("numpy")
    from_numpy, device = wrapper("torch"), batch["tokens"].device
    if device.type != "cpu":
        read = {name: _array(v.cpu()) if hasattr(v, "cpu") else v for name, v in read.items()}

    def wrap(value: Any) -> Any:
        return from_numpy(value).to(device) if isinstance(value, np.ndarray) else value

    return read, wrap


# Small conversions add up to a third of the time of a micro batch of one row. So entries that a
# dialect does not change stay tensors, and Tensor.numpy() replaces the slower np.asarray(tensor).
def _array(value: Any) -> NDArray[Any]:
    """Return a tensor or an array as an array."""
    return value if isinstance(value, np.ndarray) else value.numpy()


def _as_dtype(value: Any, dtype: str) -> Any:
    """Return a tensor or an array that has this dtype, itself if possible."""
    if str(value.dtype).removeprefix("torch.") == dtype:
        return value
    return _array(value).astype(dtype, copy=False)


def _loss_terms(batch: Mapping[str, Any], dialect: Dialect) -> tuple[Any, Any]:
    labels, weights = batch["labels"], batch["loss_mask"]
    if dialect.labels is None and dialect.target_labels is None:  # the host takes them from text
        labels = _array(labels)
        following = _shift(_array(batch["tokens"]), -1, IGNORED)
        if dialect.one_more:
            following[:, -1] = labels[:, -1]
        weights = _array(weights) * (labels == following)
    elif dialect.labels is None and not dialect.one_more:
        weights = _array(weights).copy()
        weights[:, -1] = 0
    return labels, weights


def _shift(values: NDArray[Any], by: int, fill: int) -> NDArray[Any]:
    """Return rows whose values are moved right (1) or left (-1), with ``fill`` where none is."""
    moved = np.roll(values, by, axis=1)
    moved[:, 0 if by > 0 else -1] = fill
    return moved


def check_columns(names: Iterable[str], dialect: Dialect) -> None:
    """Raise ConfigError if the host's batch cannot contain columns of these names."""
    for name in names:
        if not dialect.columns:
            raise ConfigError(
                f"{dialect.name} passes only its own keys to the model, and column {name} would be "
                "lost: leave columns out of the manifest, or train with megapack-pretrain, "
                "PackedTrainer or sft_trainer"
            )
        keys = (dialect.tokens, *dialect.ends, *dialect.padded_ends, *dialect.longest)
        if name in (*keys, dialect.labels, dialect.target_labels, dialect.mask, dialect.positions):
            raise ConfigError(
                f"column {name} has a name of {dialect.name}'s own batches; choose another name"
            )


def emit(batch: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return a micro batch of megapack in the dialect of a host. Raises ConfigError if the dialect
    cannot represent it: loss weights without a float mask, positions or attention windows with
    ``restart``, aligned segments, or columns."""
    names = [*column_names(batch), *(name for name in MTP_TARGETS if name in batch)]
    check_columns(names, dialect)
    carried = {name: batch[name] for name in names}
    if (renamed := _renamed(batch, dialect)) is not None:
        return renamed | carried
    batch, wrap = _on_cpu(batch)
    if "cu_seqlens_padded" in batch and not dialect.padded_ends:
        raise ConfigError(
            f"segments are aligned (context parallelism), but a batch of {dialect.name} cannot "
            "describe the padding between them: leave align out"
        )
    labels, weights = _loss_terms(batch, dialect)
    tokens = batch["tokens"]
    if dialect.one_more:  # append the last label, or any id if there is none
        following = np.maximum(_array(labels)[:, -1:], 0)
        tokens = np.concatenate([_array(tokens), following], axis=1)
    out: dict[str, Any] = {dialect.tokens: tokens}
    any_weight = dialect.mask is not None and dialect.mask_dtype == "float32"
    if not any_weight and not ((_array(weights) == 0) | (_array(weights) == 1)).all():
        raise ConfigError(
            f"sources have loss weights other than 0 and 1, but {dialect.name} supports only 0 and "
            "1: leave loss_weight out, or use weights of 0 and 1"
        )
    if dialect.mask is None:
        labels = np.where(_array(weights) == 0, IGNORED, _array(labels))
    if dialect.ignored != IGNORED:
        labels = np.maximum(_array(labels), dialect.ignored)
    if dialect.labels is not None:
        out[dialect.labels] = labels
    if dialect.target_labels is not None:
        labels = _array(labels)
        last = labels[:, -1:] if dialect.one_more else labels[:, :0]
        out[dialect.target_labels] = np.hstack([_shift(labels, 1, dialect.ignored), last])
    if dialect.mask is not None:
        mask = _shift(_array(weights), 1, 0) if dialect.mask_of_target else weights
        out[dialect.mask] = _as_dtype(mask, dialect.mask_dtype)
    positions = _as_dtype(batch["position_ids"], dialect.integers)
    out |= dict.fromkeys(filter(None, (dialect.positions, dialect.target_positions)), positions)
    if dialect.segmentation is not None:
        numbers = _segmentation(batch)
        labeled = numbers * (_array(weights) != 0)
        out |= zip(dialect.segmentation, (numbers, labeled), strict=True)
    if dialect.integers != "int64":
        for key, value in out.items():
            array = _array(value)
            out[key] = array.astype(dialect.integers) if array.dtype == np.int64 else array
    _add_boundaries(batch, dialect, out)
    # Names of one array get one tensor, so that a copy to a device copies it once.
    wrapped = {id(v): wrap(v) for v in out.values() if isinstance(v, np.ndarray)}
    out = {key: wrapped.get(id(value), value) for key, value in out.items()} | carried
    return {key: value.flatten() for key, value in out.items()} if dialect.flat else out


@cache
def _new_names(dialect: Dialect) -> dict[str, str] | None:
    """Return the entry of a batch that each key of a dialect has, if the dialect changes nothing
    but names and the labels of positions without a loss; else None."""
    if dialect.labels is None or dialect.mask is None or dialect.positions is None:
        return None
    names = {
        dialect.tokens: "tokens",
        dialect.labels: "labels",
        dialect.mask: "loss_mask",
        dialect.positions: "position_ids",
        **dict.fromkeys(dialect.ends, "cu_seqlens"),
        **dict.fromkeys(dialect.padded_ends, "cu_seqlens_padded"),
        **dict.fromkeys(dialect.longest, "max_seqlen"),
    }
    may_differ = (
        *("name", "tokens", "labels", "ignored", "mask", "positions"),
        *("ends", "padded_ends", "longest", "columns"),
    )
    usual = Dialect(**{field: getattr(dialect, field) for field in may_differ})
    return names if dialect == usual else None


def _renamed(batch: Mapping[str, Any], dialect: Dialect) -> dict[str, Any] | None:
    """Return a batch of tensors on the CPU in a dialect that only renames; None: the batch needs
    conversions. Looking for conversions takes a sixth of the time of a micro batch of one row."""
    names, labels = _new_names(dialect), batch["labels"]
    if names is None or isinstance(labels, np.ndarray) or labels.device.type != "cpu":
        return None
    if "cu_seqlens_padded" in batch and not dialect.padded_ends:
        return None
    out = {key: batch[name] for key, name in names.items() if name in batch}
    if dialect.ignored != IGNORED:
        assert dialect.labels is not None, "such a dialect has labels"
        out[dialect.labels] = wrapper("torch")(np.maximum(labels.numpy(), dialect.ignored))
    return out


def refuse_windows(windows: list[int], reason: str, *, remedy: str = "") -> None:
    """Raise ConfigError if a run has attention windows, which a host ignores for a ``reason``;
    ``remedy``: what makes it use them."""
    if windows:
        otherwise = f"{remedy}, or " if remedy else ""
        raise ConfigError(
            f"the run has attention windows {windows}, and {reason}: {otherwise}leave "
            "attention_window out"
        )


def join_ends(ends: Tensor) -> Tensor:
    """Join boundaries of rows, ``(rows, n)``, perhaps with repeated tails, into int32 1-D."""
    lengths = ends.diff(dim=-1).flatten()
    joined = ends.new_zeros(int((lengths > 0).sum()) + 1)
    joined[1:] = lengths[lengths > 0].cumsum(0)
    return joined.int()


def _segments(batch: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row and the length of every segment, without empty ones."""
    row_tokens = batch["tokens"].shape[1]
    ends = np.atleast_2d(np.asarray(batch["cu_seqlens"], np.int64))
    begins = ends[:, :-1] + row_tokens * np.arange(len(ends))[:, None]
    lengths = np.diff(ends)
    return begins[lengths > 0] // row_tokens, lengths[lengths > 0]


def _segmentation(batch: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the number of every token's segment in its row, from 1; 0 in padding, if the batch
    has ``dataset_ids``."""
    rows, lengths = _segments(batch)
    numbers = within_groups(np.bincount(rows)) + 1
    if "dataset_ids" in batch:
        numbers = numbers * (np.asarray(batch["dataset_ids"]) >= 0)
    return numbers.repeat(lengths).reshape(-1, batch["tokens"].shape[1])


def _add_boundaries(batch: Mapping[str, Any], dialect: Dialect, out: dict[str, Any]) -> None:
    """Add the boundaries of documents to ``out``, in every form of the dialect."""
    aligned = batch.get("cu_seqlens_padded")
    out |= dict.fromkeys(dialect.ends, _as_dtype(batch["cu_seqlens"], dialect.ends_dtype))
    if aligned is not None:
        out |= dict.fromkeys(dialect.padded_ends, _as_dtype(aligned, dialect.ends_dtype))
    out |= {key: batch["max_seqlen"] for key in dialect.longest}
    if not (dialect.restart or dialect.lengths):
        return
    row_of_segment, lengths = _segments(batch)
    positions = within_groups(lengths)
    if dialect.restart and not np.array_equal(positions, np.ravel(batch["position_ids"])):
        raise ConfigError(
            f"{dialect.name} starts a document at every position 0, so it supports neither "
            "attention windows nor positions that continue across samples: leave "
            "attention_window out and use positions: segment, attention: document"
        )
    if dialect.lengths is not None:
        of_rows = [lengths[row_of_segment == i] for i in range(len(batch["tokens"]))]
        key, longest = dialect.lengths
        out[key] = np.zeros((len(of_rows), max(map(len, of_rows))), np.int32)
        for row, of_row in zip(out[key], of_rows, strict=True):
            row[: len(of_row)] = of_row
        out[longest] = [int(values.max()) for values in of_rows]
