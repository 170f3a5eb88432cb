"""Many datasets -> one, in memory that does not depend on their size.

Tokens are concatenated (inside the kernel where nothing has to be converted) and the index is
computed block by block from the inputs' own, so the result is what one builder would have written.

    merge(["a", "b", "b"], "ab")    # a: [7, 8, 0], [9, 0]; b: [5, 0]
    # -> ab: [7, 8, 0], [9, 0], [5, 0], [5, 0]; an input counts as often as it is named
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from megapack.errors import ConfigError, DataError
from megapack.storage.address import is_remote
from megapack.storage.index_file import path_of, pick_dtype, prefix_of
from megapack.storage.index_writer import DatasetContent, check_prefix, publish_dataset
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import (
    PROMISES,
    TokenFacts,
    check_metadata,
    common_metadata,
    joined_range,
    read_meta,
)
from megapack.storage.remote.copies import local_copy, local_output
from megapack.storage.tokens import InputDataset, TokenLimits, TokenWriter

Progress = Callable[[int, int], None]


def merge(
    prefixes: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    multimodal: bool = False,
    allow_mixed_tokenizers: bool = False,
    metadata: Mapping[str, Any] | None = None,
    remove_inputs: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Concatenate datasets, documents in the order of ``prefixes``; one that is named twice comes
    twice.

    Takes datasets of megapack, megatron-core, Megatron-DeepSpeed and GPT-NeoX (also those whose
    document indices were lost in a merge: there every sequence is a document).

    Args:
        prefixes: of the datasets, at least one; the output must not be among them. Those at
            addresses are fetched whole first, into the cache.
        output: prefix of the result; at an address it is uploaded when it is complete.
        dtype: of the result; needed when the inputs differ. Ids that do not fit are refused.
        multimodal: the inputs have modes.
        allow_mixed_tokenizers: accept inputs whose meta files name different tokenizers, or of
            which only some name one; also inputs with different
            begin or end tokens (BOS, EOD).
        metadata: for the result's meta file, over what the inputs' meta files agree upon.
        remove_inputs: delete the inputs when the result has its name.
        overwrite: replace another dataset that stands at ``output``.
        progress: called with (tokens done, tokens in all) after every input.

    Returns:
        False when the result stood there already, and nothing was done (known from the meta files:
        where an input has none or is converted, nothing tells).

    Raises:
        ConfigError: another dataset stands at ``output``, or its files cannot be written there;
            inputs are to be removed and not all of this is local, or some are gone already.
        LockedError: another process writes ``output``.
        DataError: dtypes, tokenizers or tokens around documents differ, or an id does not fit.
        FormatError: an input is damaged.
        OSError: a file cannot be read or written; nothing has the output's name then.
    """
    if not prefixes:
        raise ConfigError("merge needs at least one dataset")
    if remove_inputs and any(map(is_remote, [*prefixes, output])):
        raise ConfigError(
            "inputs are removed where they and the result are local (--remove-inputs)"
        )
    if remove_inputs:
        _check_removal([prefix_of(prefix) for prefix in prefixes], prefix_of(output))
    with ExitStack() as stack:
        target = stack.enter_context(local_output(output, overwrite=overwrite))
        copies = {p: stack.enter_context(local_copy(p)) for p in dict.fromkeys(prefixes)}
        inputs = [InputDataset(copies[prefix], multimodal) for prefix in prefixes]
        bin_path = path_of(target, ".bin")
        if any(bin_path.exists() and bin_path.samefile(each.bin_path) for each in inputs):
            raise ConfigError(f"the output {target} is also an input; merge writes a new dataset")
        result_dtype = _common_dtype(inputs) if dtype is None else pick_dtype(dtype)
        if not allow_mixed_tokenizers:
            _check_tokenizers(inputs)
            _check_document_tokens(inputs)
        _check_kinds(inputs, result_dtype)
        limits = TokenLimits(result_dtype, _common_vocab_size(inputs), result_dtype.kind == "i")
        facts = {**common_metadata(dataset.meta for dataset in inputs), **(metadata or {})}
        check_metadata(facts)

        def content(tokens: TokenFacts) -> DatasetContent:
            return DatasetContent(
                dtype=result_dtype,
                layouts=[dataset.layout for dataset in inputs],
                tokens=tokens,
                vocab_size=limits.vocab_size,
                metadata=facts,
                multimodal=multimodal,
            )

        def difference() -> str | None:
            tokens = _vouched(inputs, result_dtype)
            return tokens if isinstance(tokens, str) else content(tokens).difference_from(target)

        with WriterLock(target, what="merge"):
            is_new = check_prefix(target, overwrite=overwrite, difference=difference)
            if is_new:
                tokens = TokenWriter(bin_path, limits)
                try:
                    _concatenate(inputs, tokens, progress)
                    publish_dataset(target, content(tokens.finish()), tokens.target)
                finally:
                    tokens.target.discard()
        if remove_inputs:
            for dataset in inputs:
                for path in _files(dataset.prefix):
                    path.unlink(missing_ok=True)  # of one named twice
    return is_new


def _files(prefix: str) -> list[Path]:
    return [path_of(prefix, end) for end in (".idx", ".bin", ".meta.json")]


def _check_removal(prefixes: Sequence[str], output: str) -> None:
    """ConfigError where the output stands and not all inputs do, or where it holds more than they
    and ends with them: a merge was stopped while it removed its inputs, and the output is all that
    is left of some."""
    if not all(path.exists() for path in _files(output)):
        return
    left = [prefix for prefix in prefixes if path_of(prefix, ".idx").exists()]
    metas = [read_meta(prefix) for prefix in (*left, output)]
    *ours, there = (meta["bin"]["xxh3_128"] if meta else [None] for meta in metas)
    sums = [*chain(*ours)]
    if len(left) < len(prefixes) or (sums and sums != there and sums == there[-len(sums) :]):
        names = [os.fspath(path) for p in prefixes for path in _files(p) if path.exists()]
        raise ConfigError(
            f"{output} is there, and some of its inputs are gone, as after a merge that was "
            "stopped while it removed them: if it holds them all, it is done. Remove what is left "
            f"({', '.join(names[:9]) or 'nothing'}{', ...' if names[9:] else ''}), or leave out "
            "--remove-inputs to merge these alone"
        )


def _concatenate(
    inputs: list[InputDataset], tokens: TokenWriter, progress: Progress | None
) -> None:
    num_tokens = sum(dataset.num_tokens for dataset in inputs)
    for dataset in inputs:
        tokens.append_dataset(dataset)
        if progress is not None:
            progress(tokens.num_tokens, num_tokens)


def _vouched(inputs: list[InputDataset], dtype: np.dtype[Any]) -> TokenFacts | str:
    """Facts of all tokens from the meta files, or a sentence why they do not tell."""
    known: list[TokenFacts] = []
    for dataset in inputs:
        if dataset.facts is None or dataset.dtype != dtype:
            return f"{dataset.prefix} has no checksums as {dtype.name} to compare it with"
        known.append(dataset.facts)
    return TokenFacts(
        sum(facts.num_tokens for facts in known),
        [checksum for facts in known for checksum in facts.checksums],
        joined_range(facts.token_range for facts in known),
    )


def _common_dtype(inputs: list[InputDataset]) -> np.dtype[Any]:
    dtypes = {dataset.dtype.name: dataset for dataset in inputs}
    if len(dtypes) > 1:
        examples = ", ".join(f"{name} ({dataset.prefix})" for name, dataset in dtypes.items())
        raise DataError(
            f"the inputs have different dtypes: {examples}; pass dtype= (--dtype int32)"
        )
    return inputs[0].dtype


def _check_tokenizers(inputs: list[InputDataset]) -> None:
    """Only inputs of which none names its tokenizer pass unseen."""
    first = inputs[0]
    for dataset in inputs[1:]:
        if _tokenizer(dataset) != _tokenizer(first):
            raise DataError(
                f"{first.prefix} and {dataset.prefix} name different tokenizers "
                f"({_tokenizer(first) or 'none'} and {_tokenizer(dataset) or 'none'}); pass "
                "allow_mixed_tokenizers=True (--allow-mixed-tokenizers) if their ids mean the same"
            )


def _check_document_tokens(inputs: list[InputDataset]) -> None:
    """DataError if the meta files name different tokens that begin or end documents."""
    known = [dataset for dataset in inputs if dataset.meta is not None]
    for fact, where in zip(PROMISES, ("begin", "end"), strict=True):
        tokens = [(dataset.meta or {}).get(fact) for dataset in known]
        for dataset, token in zip(known, tokens, strict=True):
            if token != tokens[0]:
                first, second = ("no token" if t is None else t for t in (tokens[0], token))
                raise DataError(
                    f"documents of {known[0].prefix} {where} with {first}, those of "
                    f"{dataset.prefix} with {second}. Build one of them again (--prepend-bos, "
                    "--append-eod), or pass allow_mixed_tokenizers=True (--allow-mixed-tokenizers)"
                )


def _check_kinds(inputs: list[InputDataset], dtype: np.dtype[Any]) -> None:
    """Loss weights are bits of float16: with tokens, or as another type, they would be nothing."""
    kinds = {dataset.holds_weights: dataset.prefix for dataset in inputs}
    if len(kinds) > 1:
        raise DataError(
            f"{kinds[True]} holds loss weights and {kinds[False]} tokens (or weights whose "
            ".meta.json is gone); merge each with its like"
        )
    if True in kinds and dtype != np.uint16:
        raise DataError(f"{kinds[True]} holds loss weights, which stay as they are: no dtype")


def _tokenizer(dataset: InputDataset) -> Any:
    """Identity of a tokenizer: the digest of its model where there is one; None: not named."""
    described = None if dataset.meta is None else dataset.meta.get("tokenizer")
    return described.get("digest", described) if isinstance(described, dict) else described


def _common_vocab_size(inputs: list[InputDataset]) -> int | None:
    """The largest, when all inputs know theirs."""
    sizes = [None if dataset.meta is None else dataset.meta["vocab_size"] for dataset in inputs]
    return None if None in sizes else max(size for size in sizes if size is not None)
