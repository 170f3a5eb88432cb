"""Verify a .samples file (``verify_samples``) or one shard of a manifest (``verify_shard``)::

verify_samples("corpus.samples")
# -> [], or findings: an array that differs from its checksums, documents of other lengths, ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from megapack.errors import ConfigError, FormatError, IndexMismatchError
from megapack.packing.metrics import array_checksum
from megapack.packing.sample_index import SampleIndex
from megapack.packing.second import read_second, second_checksum
from megapack.packing.shard_packing import describe_shard
from megapack.packing.sharded import PackedShard, ShardedIndex
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.metadata import BOUNDARY_TOKENS
from megapack.storage.verify import Finding, has_errors, leftovers, verify

_REMEDY = "pack the dataset again"
_FIND = "check the path, or pack the dataset"


def verify_samples(path: str, prefix: str | None = None, *, tokens: bool = True) -> list[Finding]:
    """Compare all checksums of a file or address and, if the dataset is found, segments with
    documents; with ``tokens``, also the tokens of a local dataset that strategy ``tree`` compared.
    ``prefix`` None means the recorded dataset. Raises OSError."""
    findings = [] if is_remote(path) else list(leftovers(Path(path)))
    try:
        index = SampleIndex.load(path, verify=True)
        try:
            dataset = IndexedDataset(prefix or prefix_of_samples(path, index))
        except ConfigError as error:
            text = f"segments were not compared with documents: {error}"
            return [*findings, Finding("note", "no-dataset", text)]
        index.check_source(dataset)
        index.verify(dataset.document_lengths)
        recorded = (index.source or {}).get("tokens")
        compared = tokens and recorded is not None and not is_remote(dataset.prefix)
        if compared and recorded != array_checksum(dataset.tokens):
            text = f"{path} has prefix trees of other tokens than {dataset.prefix} has now"
            findings.append(Finding("error", "samples-source", text, _REMEDY))
        second = (index.source or {}).get("second", "")
        compared = tokens and second in dataset.columns and not is_remote(dataset.prefix)
        if compared and index.second != second_checksum(read_second(second, dataset.prefix)):
            text = f"{path} was packed with other values of column {second} than it has now"
            findings.append(Finding("error", "samples-source", text, _REMEDY))
    except FormatError as error:
        findings.append(Finding("error", "samples", str(error), _REMEDY))
    except IndexMismatchError as error:
        findings.append(Finding("error", "samples-source", str(error), _REMEDY))
    except FileNotFoundError:
        findings.append(Finding("error", "missing", f"{path} does not exist", _FIND))
    return findings


def verify_shard(
    index: ShardedIndex, number: int, *, tokens: bool = True
) -> dict[str, list[Finding]]:
    """Verify the dataset and the samples of one shard, then its row in the manifest; return
    findings by prefix or path. ``tokens`` as in ``megapack.storage.verify``. Raises OSError if a
    file exists but cannot be read."""
    shard = index.shards[number]
    findings = {shard.prefix: verify(shard.prefix, tokens=tokens)}
    if not has_errors(findings[shard.prefix]):
        findings[shard.samples] = verify_samples(shard.samples, shard.prefix, tokens=tokens)
    if not any(map(has_errors, findings.values())):
        findings[shard.prefix] += _differences(index, shard)
    return findings


def _differences(index: ShardedIndex, shard: PackedShard) -> Iterator[Finding]:
    """Yield the fields of a manifest's row that differ from the shard's files."""
    remedy = "restore the files, or pack all datasets again with --overwrite"
    try:
        samples = SampleIndex.load(shard.samples)
        actual = describe_shard(IndexedDataset(shard.prefix), shard.samples, samples)
    except ConfigError as error:  # labels of an earlier version
        yield Finding("error", "manifest", str(error), remedy)
        return
    # Arranged documents end with their sample, so the manifest's token is not in their meta file.
    skipped = {"prefix", "samples", *(BOUNDARY_TOKENS if index.arranged else ())}
    for name in (field.name for field in fields(PackedShard) if field.name not in skipped):
        recorded, value = getattr(shard, name), getattr(actual, name)
        if recorded != value:
            text = (
                f"{index.path} records {name} {recorded!r} for {shard.prefix}; its files have "
                f"{value!r}"
            )
            yield Finding("error", "manifest", text, remedy)


def prefix_of_samples(path: str, index: SampleIndex) -> str:
    """Return the prefix of a .samples file's dataset: as recorded, or in the file's folder. Raises
    ConfigError if no prefix is recorded, or the dataset is in neither place."""
    prefix = (index.source or {}).get("prefix")
    if prefix is None:
        raise ConfigError(f"{path} does not record its dataset; give --data-prefix")
    # Datasets are often moved together with their index.
    places = (str(prefix), path.removesuffix(Path(path).name) + Path(prefix).name)
    for place in filter(IndexedDataset.exists, places):
        return place
    where = " nor at ".join(places)
    raise ConfigError(f"{path}: no dataset at {where}: put it there (inspect takes --data-prefix)")
