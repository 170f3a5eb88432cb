"""Merge datasets into one, in memory that does not depend on their size.

Tokens are concatenated (the kernel copies them if the dtype does not change), and the index is
computed block by block from the inputs' indices, so the result equals the output of one builder.

    merge(["a", "b", "b"], "ab")    # a: [7, 8, 0], [9, 0]; b: [5, 0]
    # -> ab: [7, 8, 0], [9, 0], [5, 0], [5, 0]; an input named twice is copied twice
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike

from megapack.errors import ConfigError, DataError
from megapack.storage.address import is_remote
from megapack.storage.columns import INTERPRETED, LABELS, ColumnSpec, ColumnWriter, fill_facts
from megapack.storage.dataset import check_converted
from megapack.storage.index_file import path_of, pick_dtype, prefix_of
from megapack.storage.index_writer import (
    DatasetContent,
    check_prefix,
    dataset_files,
    publish_dataset,
)
from megapack.storage.locks import WriterLock
from megapack.storage.metadata import (
    TokenFacts,
    check_metadata,
    common_metadata,
    differing_tokens,
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
    missing_columns: Literal["fill", "drop"] | None = None,
    metadata: Mapping[str, Any] | None = None,
    remove_inputs: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Concatenate datasets, documents in the order of ``prefixes``; prefixes may repeat.

    Accepts datasets of megapack, megatron-core, Megatron-DeepSpeed and GPT-NeoX. If an input has no
    document indices (a merge of GPT-NeoX loses them), each of its sequences becomes a document.

    Args:
        prefixes: at least one dataset. Remote ones are fetched whole into the cache first.
        output: prefix of the result; a remote one is uploaded when it is complete.
        dtype: the result's dtype; required if the inputs' dtypes differ. All ids must fit into it.
        multimodal: the sequences of the inputs have modes (Megatron's multimodal format).
        allow_mixed_tokenizers: accept different or missing tokenizers and begin or end tokens (BOS,
            EOD) in the inputs' meta files.
        missing_columns: what to do with a column that only some inputs have: ``fill`` gives the
            tokens of the others its fill value (not of labels and weights), ``drop`` leaves it out;
            None is an error.
        metadata: entries of the result's meta file, in addition to those on which all inputs agree.
        remove_inputs: delete the inputs after the result is renamed.
        overwrite: replace a different dataset at ``output``.
        progress: called with (tokens done, all tokens) after every input.

    Returns:
        False if nothing was done, because the meta files prove that the result exists already.

    Raises:
        ConfigError: ``output`` is an existing, different dataset, an input, or not writable;
            ``remove_inputs`` with remote datasets, or after some inputs were removed already; or an
            input with labels or loss weights of an earlier version (``check_converted``).
        LockedError: another process writes ``output``.
        DataError: dtypes, columns, tokenizers or begin or end tokens differ, or an id does not fit.
        FormatError, OSError: an input is damaged, or a file cannot be read or written; no output is
            left behind.
    """
    if not prefixes:
        raise ConfigError("merge needs at least one dataset")
    if remove_inputs and any(map(is_remote, [*prefixes, output])):
        raise ConfigError(
            "--remove-inputs needs local inputs and a local output; leave it out, or copy them"
        )
    if remove_inputs:
        _check_removal([prefix_of(prefix) for prefix in prefixes], prefix_of(output))
    with ExitStack() as stack:
        target = stack.enter_context(local_output(output, overwrite=overwrite))
        copies = {p: stack.enter_context(local_copy(p)) for p in dict.fromkeys(prefixes)}
        inputs = [InputDataset(copies[prefix], multimodal) for prefix in prefixes]
        for prefix, dataset in zip(prefixes, inputs, strict=True):
            check_converted(prefix_of(prefix), dataset.columns)
        bin_path = path_of(target, ".bin")
        if any(bin_path.exists() and bin_path.samefile(each.bin_path) for each in inputs):
            raise ConfigError(f"the output {target} is also an input; choose another output")
        result_dtype = _common_dtype(inputs) if dtype is None else pick_dtype(dtype)
        if not allow_mixed_tokenizers:
            _check_tokenizers(inputs)
            _check_document_tokens(inputs)
        specs = _common_columns(inputs, missing_columns)
        limits = TokenLimits(result_dtype, _common_vocab_size(inputs), result_dtype.kind == "i")
        facts = {**common_metadata(dataset.meta for dataset in inputs), **(metadata or {})}
        check_metadata(facts)

        def content(tokens: TokenFacts, columns: Mapping[str, Any]) -> DatasetContent:
            return DatasetContent(
                dtype=result_dtype,
                layouts=[dataset.layout for dataset in inputs],
                tokens=tokens,
                vocab_size=limits.vocab_size,
                metadata=facts,
                multimodal=multimodal,
                columns=columns,
            )

        def difference() -> str | None:
            tokens = _recorded_facts(inputs, result_dtype)
            if isinstance(tokens, str):
                return tokens
            return content(tokens, _recorded_columns(inputs, specs)).difference_from(target)

        with WriterLock(target, what="merge"):
            is_new = check_prefix(target, overwrite=overwrite, difference=difference, columns=specs)
            if is_new:
                tokens = TokenWriter(bin_path, limits)
                _write(target, inputs, tokens, specs, content, progress=progress)
        if remove_inputs:
            for dataset in inputs:
                for path in dataset_files(dataset.prefix):
                    path.unlink(missing_ok=True)  # an input may be named twice
    return is_new


def _write(
    target: str,
    inputs: list[InputDataset],
    tokens: TokenWriter,
    specs: Mapping[str, ColumnSpec],
    content: Callable[[TokenFacts, Mapping[str, Any]], DatasetContent],
    *,
    progress: Progress | None,
) -> None:
    """Copy tokens and columns of all inputs; publish the result."""
    num_tokens = sum(dataset.num_tokens for dataset in inputs)
    with ExitStack() as unpublished:
        unpublished.callback(tokens.target.discard)
        columns = []
        for name, spec in specs.items():
            columns.append(ColumnWriter(target, name, spec))
            unpublished.callback(columns[-1].target.discard)
        for dataset in inputs:
            tokens.append_dataset(dataset)
            for writer in columns:
                if writer.name in dataset.columns:
                    dataset.copy_column(writer)
                else:
                    writer.append_fill(dataset.num_tokens)
            if progress is not None:
                progress(tokens.num_tokens, num_tokens)
        complete = content(tokens.finish(), {writer.name: writer.finish() for writer in columns})
        files = [writer.target for writer in columns]
        publish_dataset(target, complete, tokens.target, columns=files)


def _common_columns(
    inputs: list[InputDataset], missing: Literal["fill", "drop"] | None
) -> dict[str, ColumnSpec]:
    """Return the columns of the result; if inputs have different ones, ``missing`` decides."""
    first_with: dict[str, InputDataset] = {}
    for dataset in inputs:
        for name, entry in dataset.columns.items():
            other = first_with.setdefault(name, dataset)
            spec, expected = entry.spec, other.columns[name].spec
            if spec != expected:
                raise DataError(
                    f"column {name} has different types: {expected} in {other.prefix}, {spec} in "
                    f"{dataset.prefix}; write it again in one of them (`megapack-build column add "
                    "--overwrite`)"
                )
    specs = {name: first_with[name].columns[name].spec for name in sorted(first_with)}
    for name in list(specs):
        lacking = next((each for each in inputs if name not in each.columns), None)
        may_fill = name not in INTERPRETED  # these fill values take tokens out of the loss
        if lacking is None or (missing == "fill" and may_fill):
            continue
        if missing != "drop":
            how = "'fill' or 'drop'" if may_fill else "'drop', which counts all tokens in the loss"
            itself = f" {lacking.prefix} {name} {lacking.prefix}" if name == LABELS else ""
            raise DataError(
                f"{lacking.prefix} has no column {name}, which {first_with[name].prefix} has: add "
                f"it (`megapack-build column add{itself}`), or give missing_columns={how} "
                "(--missing-columns)"
            )
        del specs[name]
    return specs


def _recorded_columns(
    inputs: list[InputDataset], specs: Mapping[str, ColumnSpec]
) -> dict[str, dict[str, Any]]:
    """Return the entries that the result's columns would have."""
    entries = {}
    for name, spec in specs.items():
        facts = [
            (entry.checksums, entry.limits) if entry else fill_facts(spec, dataset.num_tokens)
            for dataset in inputs
            for entry in [dataset.columns.get(name)]
        ]
        checksums = [*chain(*(checksums for checksums, _ in facts))]
        entries[name] = spec.entry(checksums, joined_range(limits for _, limits in facts))
    return entries


def _check_removal(prefixes: Sequence[str], output: str) -> None:
    """Raise ConfigError if an earlier merge seems to have been stopped while it removed its inputs.

    The output may then contain the only copy of some documents. Signs: the output exists, and
    either an input is missing, or the output has more tokens and ends with theirs."""
    if not all(path.exists() for path in dataset_files(output)):
        return
    remaining = [prefix for prefix in prefixes if path_of(prefix, ".idx").exists()]
    metas = [read_meta(prefix) for prefix in (*remaining, output)]
    *input_sums, output_sums = (meta["bin"]["xxh3_128"] if meta else [None] for meta in metas)
    sums = [*chain(*input_sums)]
    if len(remaining) < len(prefixes) or (
        sums and sums != output_sums and sums == output_sums[-len(sums) :]
    ):
        names = [os.fspath(path) for p in prefixes for path in dataset_files(p) if path.exists()]
        raise ConfigError(
            f"{output} exists, and some of its inputs are missing: a merge may have been stopped "
            "while it removed inputs. "
            "If the output contains all documents, remove the remaining inputs "
            f"({', '.join(names[:9]) or 'none'}{', ...' if names[9:] else ''}); otherwise leave "
            "out --remove-inputs to merge only these"
        )


def _recorded_facts(inputs: list[InputDataset], dtype: np.dtype[Any]) -> TokenFacts | str:
    """Return the facts of all tokens from the meta files, or the reason why they are unknown."""
    for dataset in inputs:
        if dataset.facts is None or dataset.dtype != dtype:
            return f"{dataset.prefix} has no checksums as {dtype.name} to compare"
    facts = [dataset.facts for dataset in inputs if dataset.facts is not None]
    return TokenFacts(
        sum(each.num_tokens for each in facts),
        [*chain(*(each.checksums for each in facts))],
        joined_range(each.token_range for each in facts),
    )


def _common_dtype(inputs: list[InputDataset]) -> np.dtype[Any]:
    dtypes = {dataset.dtype.name: dataset for dataset in inputs}
    if len(dtypes) > 1:
        examples = ", ".join(f"{name} ({dataset.prefix})" for name, dataset in dtypes.items())
        raise DataError(f"the inputs differ in dtype: {examples}; pass dtype= (--dtype int32)")
    return inputs[0].dtype


def _check_tokenizers(inputs: list[InputDataset]) -> None:
    """Raise DataError if the inputs name different tokenizers; all or none must name one."""
    first, named = inputs[0], [*map(_tokenizer, inputs)]
    for dataset, tokenizer in zip(inputs, named, strict=True):
        if tokenizer != named[0]:
            raise DataError(
                f"{first.prefix} and {dataset.prefix} name different tokenizers "
                f"({named[0] or 'none'} and {tokenizer or 'none'}); pass "
                "allow_mixed_tokenizers=True (--allow-mixed-tokenizers) if their ids mean the same"
            )


def _check_document_tokens(inputs: list[InputDataset]) -> None:
    """Raise DataError if the meta files name different begin or end tokens of documents."""
    described = [(dataset.prefix, dataset.meta) for dataset in inputs if dataset.meta is not None]
    for difference in differing_tokens(lambda fact: ((p, meta.get(fact)) for p, meta in described)):
        raise DataError(
            f"{difference}. Build one of them again (--prepend-bos, --append-eod), or pass "
            "allow_mixed_tokenizers=True (--allow-mixed-tokenizers)"
        )


def _tokenizer(dataset: InputDataset) -> Any:
    """Return the digest of the tokenizer's model or, without one, its description."""
    described = None if dataset.meta is None else dataset.meta.get("tokenizer")
    return described.get("digest", described) if isinstance(described, dict) else described


def _common_vocab_size(inputs: list[InputDataset]) -> int | None:
    """Return the largest vocabulary size; None if an input does not record one."""
    sizes = [None if dataset.meta is None else dataset.meta["vocab_size"] for dataset in inputs]
    return None if None in sizes else max(size for size in sizes if size is not None)
