"""Is a .samples file whole, and does it fit the dataset that it was packed from?

``verify_samples`` answers for one file, ``verify_shard`` for one shard of a manifest::

    verify_samples("corpus.samples")
    # -> [], or findings: an array that differs from its checksums, documents of other lengths, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from megapack.errors import ConfigError, FormatError, IndexMismatchError
from megapack.packing.sample_index import SampleIndex
from megapack.packing.shard_packing import describe_shard
from megapack.packing.sharded import PackedShard, ShardedIndex
from megapack.storage import IndexedDataset
from megapack.storage.address import is_remote
from megapack.storage.verify import Finding, has_errors, leftovers, verify

_REMEDY = "pack the dataset again"


def verify_samples(path: str, prefix: str | None = None) -> list[Finding]:
    """All checksums and, where its dataset is, that every segment lies inside its document.

    Args:
        path: of the file, or its address.
        prefix: of its dataset; None: as the file says.

    Raises:
        OSError: it cannot be read.
    """
    found = [] if is_remote(path) else list(leftovers(Path(path)))
    try:
        index = SampleIndex.load(path, verify=True)
        try:
            dataset = IndexedDataset(prefix or prefix_of_samples(path, index))
        except ConfigError as error:
            text = f"segments were not compared with documents: {error}"
            return [*found, Finding("note", "no-dataset", text)]
        index.check_source(dataset)
        index.verify(dataset.document_lengths)
    except FormatError as error:
        found.append(Finding("error", "samples", str(error), _REMEDY))
    except IndexMismatchError as error:
        found.append(Finding("error", "samples-source", str(error), _REMEDY))
    except FileNotFoundError:
        found.append(Finding("error", "missing", f"{path} does not exist", _REMEDY))
    return found


def verify_shard(
    index: ShardedIndex,
    number: int,
    *,
    tokens: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, list[Finding]]:
    """Everything about one shard: its documents, their labels and weights, its samples and, where
    these are sound, what the manifest says of them.

    Args:
        index: of the manifest.
        number: of the shard.
        tokens, progress: of ``megapack.storage.verify``.

    Returns:
        Prefix or path -> what was found.

    Raises:
        OSError: a file exists but cannot be read.
    """
    shard = index.shards[number]
    streams = [shard.prefix + end for end in shard.ends]
    findings = {s: verify(s, tokens=tokens, progress=progress) for s in streams}
    if not has_errors(findings[shard.prefix]):
        findings[shard.samples] = verify_samples(shard.samples, shard.prefix)
    if not any(map(has_errors, findings.values())):
        findings[shard.prefix] += _differences(index, shard)
    return findings


def _differences(index: ShardedIndex, shard: PackedShard) -> Iterator[Finding]:
    """Statements of a manifest about a shard that its files contradict."""
    remedy = "restore the files, or pack all datasets again with --overwrite"
    try:
        samples = SampleIndex.load(shard.samples)
        now = describe_shard(IndexedDataset(shard.prefix), shard.samples, samples)
    except IndexMismatchError as error:  # of labels that nobody knew when it was packed
        yield Finding("error", "manifest", str(error), remedy)
        return
    # Arranged documents end where samples do; their manifest keeps the token for the record.
    known = {"prefix", "samples", *(["document_end_token"] if index.arranged else [])}
    for name in (field.name for field in fields(PackedShard) if field.name not in known):
        said, found = getattr(shard, name), getattr(now, name)
        if said != found:
            text = f"{index.path} says {name} {said!r} of {shard.prefix}; its files say {found!r}"
            yield Finding("error", "manifest", text, remedy)


def prefix_of_samples(path: str, index: SampleIndex) -> str:
    """Where the dataset of a .samples file lies: where it was packed, or beside the file.

    Raises:
        ConfigError: the file does not say, or it is in neither place.
    """
    prefix = (index.source or {}).get("prefix")
    if prefix is None:
        raise ConfigError(f"{path} does not say which dataset it is of; give --data-prefix")
    # A dataset and its index often travel together.
    places = (str(prefix), path.removesuffix(Path(path).name) + Path(prefix).name)
    for place in filter(IndexedDataset.exists, places):
        return place
    where = " nor at ".join(places)
    raise ConfigError(f"{path}: no dataset at {where}: put it there (inspect takes --data-prefix)")
