"""`--backend auto`: find the fastest backend that gives the reference's token ids, by running it.

- choose_backend: guarded gigatoken if it agrees with the reference on ``hard_texts`` and on
  ``sample_blocks`` of the corpus, else the reference
- require_runnable: check in a child process that a tokenizer runs
- first_difference: the first token in which two encoders differ
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Sequence

import numpy as np

from megapack.errors import ConfigError, FormatError, MegapackError, first_line, is_foreign, require
from megapack.tokenization.corpus.documents import Faults, ReadOptions, TextBlock
from megapack.tokenization.corpus.readers import Shard, read_blocks
from megapack.tokenization.tokenizers.encoders import (
    BACKENDS,
    Encoder,
    GuardedEncoder,
    Limits,
    open_reference,
    require_backend,
)
from megapack.tokenization.tokenizers.limited import LimitError, run_limited
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

_SAMPLE_BYTES = 1 << 19
_SAMPLE_SHARDS = 4


def choose_backend(
    files: TokenizerFiles,
    backend: str,
    shards: Sequence[Shard],
    read: ReadOptions,
    note: Callable[[str], None],
    *,
    limits: Limits = Limits(),  # noqa: B008
) -> tuple[str, Encoder | None]:
    """Return the backend to use, and its encoder if it was loaded with ``limits``.

    ``auto`` is gigatoken if it is installed and gives equal ids.

    gigatoken and the reference are compared on ``hard_texts`` and on half a megabyte of this
    corpus. Documents on which gigatoken is known to differ always go to the reference
    (``GuardedEncoder``). ``note`` is called with the reason if gigatoken is not used. Raises
    ConfigError if the backend does not run this kind of tokenizer.
    """
    if backend != "auto":
        require_backend(files, backend)
        return backend, None
    reference, *others = BACKENDS[files.kind]
    if "gigatoken" not in others:
        return reference, None
    try:
        guarded = GuardedEncoder(files, limits)
    except ConfigError as error:
        note(f"{error}; {reference} is used instead")
        return reference, None
    except MegapackError as error:
        note(f"{reference} is used; gigatoken would be many times faster ({error})")
        return reference, None
    expected = guarded.reference
    for block in (TextBlock.of_texts(hard_texts(files)), *sample_blocks(shards, read)):
        try:
            difference = first_difference(block, expected, guarded)
        except BaseException as error:  # one encoder fails on a document
            if not is_foreign(error):
                raise
            difference = first_line(error)
        if difference is not None:
            note(f"gigatoken differs from {reference}, which is used instead: {difference}")
            return reference, expected
    return guarded.backend, guarded


# ---- Trial of a tokenizer in a child process ----------------------------------------------------
# Some damaged or hostile files make a library abort the process, or run out of memory.

_TRIAL_SECONDS = 20  # CPU time
_TRIAL_BYTES = 8 << 30


def require_runnable(files: TokenizerFiles, modules: Sequence[str] = ()) -> None:
    """Load a tokenizer and encode some texts in a child process with limits. Raises FormatError if
    the library refuses the files, or the child was killed or exceeded a limit, and MegapackError if
    a package is missing. While the child works, this
    process imports ``modules`` that are installed, because the backends need them next."""
    if files.kind == "bytes":
        return
    require("sentencepiece" if files.kind == "sentencepiece" else "tokenizers", files.name)
    try:
        (problem,) = run_limited(
            _trial,
            [files],
            seconds=_TRIAL_SECONDS,
            num_bytes=_TRIAL_BYTES,
            meanwhile=functools.partial(_import_all, modules),
        )
    except LimitError as error:
        problem = str(error)
    if problem is not None:
        raise FormatError(
            f"tokenizer {files.name} cannot be used: {problem}. Fetch its files again, or choose "
            "another tokenizer"
        )


def _import_all(modules: Sequence[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):  # reported by ``choose_backend``
            importlib.import_module(module)


def _trial(files: TokenizerFiles) -> str | None:
    """Return None if the reference loads, else the error in one line."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process has no threads
    try:
        encoder = open_reference(files)
    except BaseException as error:
        return first_line(error)
    # Ignore errors: a build reports them per document. Only an endless loop is a failure here.
    with contextlib.suppress(BaseException):
        encoder.encode(TextBlock.of_texts(hard_texts(files)))
    return None


def sample_blocks(shards: Sequence[Shard], read: ReadOptions) -> list[TextBlock]:
    """Return the first documents of a few shards across the corpus, half a megabyte in all. Texts
    are cut to this size; conversations are not, because a part of their JSON is invalid."""
    chosen = shards[:: max(1, len(shards) // _SAMPLE_SHARDS)][:_SAMPLE_SHARDS]
    blocks = []
    for shard in chosen:
        for block in read_blocks(shard.pieces, read, Faults("skip")):
            share = _SAMPLE_BYTES // len(chosen)
            end = int(np.searchsorted(block.offsets, share, "right"))
            rows = np.arange(len(block)) < max(1, end)
            if len(block):
                sample = block.select(rows)
                blocks.append(sample if read.values == "lists" else _cut(sample, share))
                break
    return blocks


def _cut(block: TextBlock, num_bytes: int) -> TextBlock:
    """Cut the block to ``num_bytes``, between two characters."""
    if len(block.text) <= num_bytes:
        return block
    while block.text[num_bytes] & 0xC0 == 0x80:  # in the middle of a character
        num_bytes -= 1
    offsets = np.minimum(block.offsets, num_bytes)
    return dataclasses.replace(block, text=block.text[:num_bytes].copy(), offsets=offsets)


def first_difference(block: TextBlock, reference: Encoder, other: Encoder) -> str | None:
    """Return where (document, token, text) ``other`` first differs from ``reference``, or None."""
    expected_ids, expected_offsets = reference.encode(block)
    ids, offsets = other.encode(block)
    for i in range(len(block)):
        a = expected_ids[expected_offsets[i] : expected_offsets[i + 1]].astype(np.int64)
        b = ids[offsets[i] : offsets[i + 1]].astype(np.int64)
        if np.array_equal(a, b):
            continue
        common = min(len(a), len(b))
        unequal = np.flatnonzero(a[:common] != b[:common])
        at = int(unequal[0]) if len(unequal) else common
        begin = max(0, len(reference.decode(a[:at].tolist())) - 16)
        text = block.strings()[i][begin : begin + 48]
        return (
            f"{block.place(i)}, token {at}, near {text!r}: the reference gives "
            f"{a[at : at + 6].tolist()} ..., gigatoken {b[at : at + 6].tolist()} ..."
        )
    return None


def hard_texts(files: TokenizerFiles) -> list[str]:
    """Return texts in which implementations of one tokenizer are most likely to differ."""
    special = list(files.special)
    spaces = " \t\n\r\x0b\x0c\x1c\x85\xa0\u2003\u2028\u3000"
    return [
        *special,
        "".join(special),
        " a ".join(special),
        "".join(f"{space}a{space}{space}b" for space in spaces),
        "\n\n\n    \t\t  x\r\n\r\n  \n y   ",
        "don't DON'T we'll WE'LL I'm 'tis o'clock '\u017ft it\u2019s '' 's",
        "e\u0301 n\u0303 \u0301 \ufb01 \u1e9e \u0130 \u0131 \u01c5 \ufffd \ufeff x\u200bx\u200dx",
        "\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002\u3072\u3089\u304c\u306a\u30ab\u30ca\ud55c\uad6d",
        "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31",
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea\U0001f3fd",
        "1 12 123 1234 12345678901234567890 3.14e-10 \u0663\u0664 \u00b2\u00bd \u2167 0x1F",
        "".join(map(chr, range(1, 160))),
        "a\u088f 1\U00011de1 \U00010940b\n\U000323b0\n",  # letters and a digit of Unicode 17
        "a" * 3000,
        "=" * 3000,
        " " * 3000 + "x",
        "ab1_" * 1000,
        "\u4e00" * 1000,
    ]
