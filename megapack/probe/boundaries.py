"""Documents of a batch, read from any form of boundaries.

cu_seqlens              [0, 3, 5]
positions that restart  0 1 2 0 1
ids                     7 7 7 8 8
lengths                 [3, 2]
mask (T, T)             token 3 does not see token 2
documents of tokens     0 0 0 1 1       -1 is padding
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from megapack.probe.report import LeakError

TOKENS = ("input_ids", "tokens", "input", "inputs", "idx", "x", "inputs_embeds")
# Name in a batch -> form. The first tensor that is found is used.
FORMS = {
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "cu_doc_lens"), "cu_seqlens"),
    **dict.fromkeys(("position_ids", "positions", "pos_ids"), "positions"),
    **dict.fromkeys(
        ("seq_idx", "segment_ids", "document_ids", "doc_ids", "sequence_ids", "segments"), "ids"
    ),
    **dict.fromkeys(
        ("seqlens", "doc_lens", "document_lengths", "sequence_lengths", "seq_lengths"), "lengths"
    ),
    "attention_mask": "mask",
}
# More names; their values must agree even if the batch has one document.
LIKE_CU_SEQLENS = {"cu_seq_lens_k", "cu_seqlens_kv", "cu_seqlens_k"} | {
    name for name, form in FORMS.items() if form == "cu_seqlens"
}
LIKE_MAX = ("max_seqlen", "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_kv")


class SegmentPlaces(NamedTuple):
    """Segments of a batch, including padding; int64 tensors with one entry per segment."""

    begins: Tensor  # first token, counted over all rows
    lengths: Tensor
    padded_lengths: Tensor  # tokens from one begin to the next: length plus alignment padding

    @staticmethod
    def of(batch: Mapping[str, Any]) -> SegmentPlaces:
        """Read ``cu_seqlens``, 1-D or one list per row, whose last value may repeat; or the nodes
        of trees, ``cu_seqlens_q``."""
        ends = batch["cu_seqlens_q" if "kv_index" in batch else "cu_seqlens"]
        return SegmentPlaces.between(
            ends, batch.get("cu_seqlens_padded", ends), batch["tokens"].shape[1]
        )

    @staticmethod
    def between(ends: Tensor, padded: Tensor, row: int) -> SegmentPlaces:
        """Return the segments whose lengths follow from ``ends`` and whose places follow from the
        ``padded`` ends."""
        ends, padded = ends.long().cpu(), padded.long().cpu()
        if ends.dim() == 1:
            ends, padded = ends[None], padded[None]
        shift = torch.arange(len(ends)).view(-1, 1) * row
        padded_lengths = padded.diff()
        begins = padded[:, :-1] + shift
        not_empty = padded_lengths > 0
        return SegmentPlaces(begins[not_empty], ends.diff()[not_empty], padded_lengths[not_empty])

    def positions(self) -> Tensor:
        """Return the position of every token in its segment, int64 (tokens,)."""
        first = self.begins.repeat_interleave(self.padded_lengths)
        return torch.arange(len(first)) - first

    def of_token(self, num_tokens: int) -> Tensor:
        """Return the segment of every token, int64 (tokens,); -1 in alignment padding."""
        of_token = torch.full((num_tokens,), -1)
        inside = torch.cat([torch.arange(n) for n in self.lengths.tolist()])
        numbers = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
        of_token[self.begins.repeat_interleave(self.lengths) + inside] = numbers
        return of_token


@dataclass(frozen=True)
class Documents:
    """Documents of a batch of ``rows`` rows of ``row`` tokens."""

    of_token: Tensor
    """Document of every token, int64 (tokens,) on the CPU; -1: padding."""
    rows: int
    row: int

    def places(self, document: int) -> Tensor:
        """Return the tokens of a document, ascending."""
        return (self.of_token == document).nonzero()[:, 0]

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the documents, ascending."""
        return sorted({*self.of_token.tolist()} - {-1})


def tokens_of(batch: Mapping[str, Any]) -> str:
    """Return the name of the batch's tokens. Raises LeakError if the batch has no tokens."""
    for name in TOKENS:
        if isinstance(batch.get(name), Tensor) and batch[name].dim() > 0:
            return name
    raise LeakError(
        f"the batch has no tensor of tokens: none of {', '.join(TOKENS)} in {sorted(batch)}; name "
        "it input_ids, and pass call= with a function that gives it to the model"
    )


def read_documents(batch: Mapping[str, Any], boundaries: Any = None) -> Documents:
    """Return the documents of a batch.

    Raises LeakError if the boundaries are missing, ambiguous or do not fit the tokens.

    Args:
        boundaries: a name in the batch, or a value; None: the known names of the batch.
    """
    tokens = batch[name := tokens_of(batch)]
    if batch.get("decoder_input_ids") is not None:
        raise LeakError(
            "the batch has decoder_input_ids: the probe checks one sequence of documents; probe "
            "two functions: the encoder alone, and the decoder with constant encoder outputs"
        )
    shape = tokens.shape[:-1] if name == "inputs_embeds" else tokens.shape
    rows, row = (1, shape[0]) if len(shape) == 1 else (int(shape[0]), int(shape[1]))
    if isinstance(boundaries, str):
        if boundaries not in batch:
            raise LeakError(f"the batch has no {boundaries!r}; it has {sorted(batch)}")
        of_token = _read(batch[boundaries], FORMS.get(boundaries), rows, row, batch)
    elif boundaries is not None:
        of_token = _read(boundaries, None, rows, row, batch)
    else:
        of_token = _inferred(batch, rows, row)
    attention = batch.get("attention_mask")
    if isinstance(attention, Tensor) and attention.shape == (rows, row):
        of_token = of_token.masked_fill(attention.flatten().cpu() == 0, -1)
    return Documents(of_token, rows, row)


def _inferred(batch: Mapping[str, Any], rows: int, row: int) -> Tensor:
    found = {}
    for name, form in FORMS.items():
        value = batch.get(name)
        is_plain = name == "attention_mask" and isinstance(value, Tensor) and _is_plain(value)
        if value is not None and not is_plain:
            found[name] = _read(value, form, rows, row, batch)
    counts = {name: len({*of_token.tolist()}) for name, of_token in found.items()}
    # Positions that never restart say nothing about documents.
    several = {name: found[name] for name, count in counts.items() if count > rows} or found
    if not several:
        raise LeakError(
            f"the batch has no boundaries: none of {', '.join(FORMS)} in {sorted(batch)}; "
            "pass boundaries="
        )
    first, *others = several.values()
    if any(not _same(first, other) for other in others):
        candidates = ", ".join(f"{name} ({counts[name]} documents)" for name in several)
        raise LeakError(f"boundaries differ: {candidates}; pass boundaries= with one of the names")
    return first


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether documents are the same wherever both forms have one (padding may differ)."""
    both = (a[1:] >= 0) & (b[1:] >= 0) & (a[:-1] >= 0) & (b[:-1] >= 0)
    return bool(((a.diff() != 0) == (b.diff() != 0))[both].all())


def _is_plain(mask: Tensor) -> bool:
    """Return whether a mask only marks padding."""
    return mask.dim() == 2 and (mask.dtype == torch.bool or int(mask.max()) <= 1)


def _read(value: Any, form: str | None, rows: int, row: int, batch: Mapping[str, Any]) -> Tensor:
    """Return the document of every token."""
    if isinstance(value, Sequence) and value and hasattr(value[0], "__len__"):
        parts = [torch.as_tensor(part).flatten() for part in value]  # lengths of every row
        value, form = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), form or "lengths"
    value = torch.as_tensor(value).detach().cpu()
    form = form if form and form != "mask" else _form_of(value, rows, row)
    if form == "positions":
        value = value[0] if value.dim() == 3 else value
        return _of_positions(value.long().reshape(-1, row).expand(rows, row).flatten(), row)
    if form == "ids" and value.numel() == rows * row:
        return _of_ids(value.long().reshape(rows, row))
    if form == "mask":
        return _of_mask(value, rows, row)
    ends = value.long()
    if form == "lengths":
        ends = ends.cumsum(-1)
    if form == "lengths" or int(ends.flatten()[0]) > 0:  # ends without the first 0
        ends = pad(ends, (1, 0))
    padded = batch.get("cu_seqlens_padded", batch.get("cu_seqlens_q_padded", ends))
    segments = SegmentPlaces.between(ends, padded if form == "cu_seqlens" else ends, row)
    if not len(segments.begins) or int((segments.begins + segments.lengths).max()) > rows * row:
        raise LeakError(
            f"boundaries {value.tolist()} do not fit {rows} x {row} tokens; pass boundaries= "
            "with cu_seqlens, position ids, document ids, lengths or a mask"
        )
    return segments.of_token(rows * row)


def _form_of(value: Tensor, rows: int, row: int) -> str:
    """Return the form of boundaries without a name."""
    if value.dim() > 2 or value.is_floating_point() or value.shape == (row, row) != (rows, row):
        return "mask"
    flat = value.flatten()
    rises = value.dim() == 1 and len(flat) > 1 and int(flat[0]) == 0 and not (flat.diff() < 0).any()
    if rises and int(flat[-1]) == rows * row:
        return "cu_seqlens"
    if value.numel() == rows * row and value.dtype != torch.bool:
        steps = value.reshape(rows, row).diff()
        return "positions" if (steps == 1).sum() > (steps == 0).sum() else "ids"
    return "lengths" if not rises and int(flat.sum()) <= rows * row else "cu_seqlens"


def _of_positions(positions: Tensor, row: int) -> Tensor:
    """Return the documents of positions: one begins where a position is not one more than the
    previous; repeated zeros are padding."""
    begins = torch.ones(len(positions), dtype=torch.bool)
    begins[1:] = positions.diff() != 1
    begins[::row] = True
    before = pad(positions[:-1], (1, 0), value=-1)
    after = pad(positions[1:], (0, 1), value=0)
    repeats = (positions == 0) & ((before == 0) | (after == 0)) & (after != 1)
    repeats[-1:] &= before[-1:] == 0
    return (begins.long().cumsum(0) - 1).masked_fill(repeats, -1)


def _of_ids(ids: Tensor) -> Tensor:
    """Return the documents of ids. Ranks that share documents get equal numbers; the row is in the
    upper bits."""
    padding = ids < 0
    if bool((ids[:, 0] != 0).all()):
        padding |= ids == 0  # ids from 1; 0 is padding
    numbered = ids + (torch.arange(len(ids)) << 40).view(-1, 1)
    return numbered.masked_fill(padding, -1).flatten()


def _of_mask(mask: Tensor, rows: int, row: int) -> Tensor:
    """Return the documents of a mask: one begins where a token does not see the previous one."""
    seen = mask.reshape(-1, row, row)
    seen = seen if seen.dtype == torch.bool else seen == 0 if seen.min() < 0 else seen != 0
    seen = seen[:: max(1, len(seen) // rows)].expand(rows, row, row)
    begins = torch.ones(rows, row, dtype=torch.bool)
    begins[:, 1:] = ~seen.diagonal(-1, 1, 2)
    padding = ~seen.diagonal(0, 1, 2)
    return (begins.flatten().long().cumsum(0) - 1).masked_fill(padding.flatten(), -1)


def alone(batch: Mapping[str, Any], documents: Documents, places: Tensor) -> dict[str, Any]:
    """Return a batch of one row with the tokens of a document, which begins at position 0 (or at
    the lowest position of the batch). Entries without tokens stay the same objects."""
    return {name: _cut(batch, name, documents, places) for name in batch}


def _cut(batch: Mapping[str, Any], name: str, documents: Documents, places: Tensor) -> Any:
    """Return an entry of ``alone`` in the type that the batch's entry has."""
    rows, row, size, given = documents.rows, documents.row, len(places), batch[name]
    flat = batch[tokens_of(batch)].dim() == 1
    if name in LIKE_MAX and not isinstance(given, Tensor):
        return size
    if isinstance(given, Sequence) and given and hasattr(given[0], "__len__"):
        return [[size]] if _form_in(batch, name, documents) == "lengths" else given
    try:
        value = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        return given
    form, index = _form_in(batch, name, documents), places.to(value.device)
    if name in LIKE_MAX:
        return value.new_tensor(size).expand(value.shape[:1] and (1,))
    if form == "cu_seqlens":
        first = value.flatten()[:1].clamp(max=0)
        made = torch.cat([first, first + size])[int(value.flatten()[0] > 0) :]
        made = made if value.dim() == 1 else made[None]
    elif form == "lengths":
        made = torch.full_like(value.flatten()[:1], size)
    elif form == "positions":
        every = value.expand(*value.shape[:-2], rows, row).flatten(-2)
        lowest = every[..., (documents.of_token >= 0).to(value.device)].min()
        made = every[..., index] - every[..., index[:1]] + lowest
        made = made if value.dim() == 1 else made.unsqueeze(-2)
    elif value.shape[-2:] == (row, row) and (value.dim() > 2 or rows != row):
        begin, number = int(places[0]) % row, int(places[0]) // row
        made = value[number : number + 1] if value.shape[0] == rows else value
        made = made[..., begin : begin + size, begin : begin + size]
    elif value.shape[:2] == (rows, row):
        made = value.flatten(0, 1)[index][None]
    elif value.shape[:1] == (rows * row,) and (value.dim() == 1 or flat):
        made = value[index]
    else:
        return given
    if isinstance(given, Tensor):
        return made
    return made.tolist() if isinstance(given, Sequence) else made.numpy().astype(given.dtype)


def _form_in(batch: Mapping[str, Any], name: str, documents: Documents) -> str | None:
    """Return the form of the boundaries in an entry. An entry with an unknown name counts if it
    describes the documents of the batch; None for other entries."""
    if name in LIKE_CU_SEQLENS or name.endswith("_padded"):
        return "cu_seqlens"
    rows, row = documents.rows, documents.row
    try:
        value = torch.as_tensor(batch[name])
        if name in FORMS or value.is_floating_point() or value.numel() in (0, 1, rows * row):
            return FORMS.get(name)
        form = _form_of(value, rows, row)
    except (TypeError, ValueError, RuntimeError):  # rows of unequal length are lengths
        form = "lengths"
    try:
        of_token = _read(batch[name], form, rows, row, batch)
    except Exception:
        return None
    fits = len({*of_token.tolist()} - {-1}) == len(documents.numbers)
    return form if fits and _same(of_token, documents.of_token) else None


# ---- Sets of documents

SETS = 6  # backward passes that look for leaks without a change of outputs
CODES = math.comb(SETS, SETS // 2)  # documents of which these sets separate every pair


def groups(count: int) -> list[Tensor]:
    """Return at most SETS sets of documents, bool (documents,).

    Each of two documents is in a set without the other (Sperner's theorem) if their numbers differ
    by less than CODES and have no multiple of CODES between them, or differ by an even number below
    CODES. The passes with odd and even documents separate all odd distances.
    """
    size = next(n for n in range(2, SETS + 1) if math.comb(n, n // 2) >= min(count, CODES))
    sets = list(itertools.combinations(range(size), size // 2))
    # The square shifts each run of CODES by an odd number, so that documents at even distances get
    # different sets. Each shift differs, so that documents at one distance below 10 x CODES do not
    # always get equal sets.
    codes = [sets[(n + (n // CODES) ** 2) % len(sets)] for n in range(count)]
    return [torch.tensor([number in code for code in codes]) for number in range(size)]
