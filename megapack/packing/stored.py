"""Whether an index and what stands on disk already belong together, as sentences."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megapack.errors import FormatError, IndexMismatchError
from megapack.packing import format as samples_format
from megapack.packing.checksums import lengths_fingerprint
from megapack.packing.metrics import DocumentTotals

__all__ = ["IDX_CHECKSUMS", "check_dataset", "describe_source", "how_it_differs"]

IDX_CHECKSUMS = "idx_xxh64"


def describe_source(dataset: Any, prefix: str) -> dict[str, str]:
    """What a ``.samples`` file says of its documents: fingerprint, prefix, and the checksums of all
    blocks of the .idx (``idx_xxh64``), which is read for that.

    Args:
        dataset: an IndexedDataset or an IndexFile.
        prefix: where to say that it lies.
    """
    sums = dataset.idx_checksums
    return {"fingerprint": dataset.fingerprint, "prefix": str(prefix), IDX_CHECKSUMS: sums}


def check_dataset(
    index: str, documents: DocumentTotals, source: Mapping[str, Any], dataset: Any
) -> None:
    """Refuse a dataset other than the one an index was packed from.

    Args:
        index: what to call it.
        documents: totals of the documents it was packed from.
        source: ``describe_source`` of their dataset; may be empty.
        dataset: an IndexedDataset; what is read of its .idx from then on is compared with the
            checksums that the source tells.

    Raises:
        IndexMismatchError: says what differs.
    """
    apart = f"{index} and {dataset.prefix} do not belong together"
    if dataset.num_documents != documents.num_documents:
        raise IndexMismatchError(
            f"{apart}: the index was packed from {documents.num_documents:,} documents, the "
            f"dataset has {dataset.num_documents:,}; pack it again"
        )
    recorded = source.get("fingerprint")
    if recorded is not None:
        if recorded != dataset.fingerprint:
            raise IndexMismatchError(
                f"{apart}: the index was packed from a dataset with fingerprint {recorded} "
                f"({source.get('prefix')}), this one has {dataset.fingerprint}; pack it again"
            )
    elif documents.lengths_fingerprint != lengths_fingerprint(dataset.document_lengths):
        raise IndexMismatchError(
            f"{apart}: as many documents, but of other lengths; pack the dataset again"
        )
    if IDX_CHECKSUMS in source:
        dataset.hold_to(source[IDX_CHECKSUMS])


def how_it_differs(
    path: str | os.PathLike[str],
    *,
    strategy: str,
    parameters: Mapping[str, Any],
    buckets: list[int],
    seed: int,
    dataset: str | None,
    checksums: Mapping[str, str] | None = None,
    chosen: str | None = None,
) -> str | None:
    """What the index in a file was packed from or with instead of this, as a sentence.

    Args:
        dataset: fingerprint of the documents, or None.
        checksums: of the arrays it should have; None: whatever follows from the rest.
        chosen: checksum of the numbers of the documents that are packed; None: all.

    Returns:
        None: it is what ``pack`` makes of all that, by this release, and it is whole.
    """
    try:
        found, arrays = samples_format.read(Path(path))
        for array in arrays.values():
            np.asarray(array)  # compares all of it
    except FormatError as error:
        return str(error)
    release = found["created_by"]
    pairs = {
        "another dataset": ((found["source"] or {}).get("fingerprint"), dataset),
        "other documents of it": ((found["source"] or {}).get("documents"), chosen),
        "another strategy": (found["strategy"], strategy),
        "other parameters": (found["parameters"], parameters),
        "other buckets": (found["buckets"], buckets),
        "another seed": (found["seed"], seed),
        f"another release ({release})": (release, samples_format.CREATED_BY),
    }
    different = [what for what, (there, wanted) in pairs.items() if there != wanted]
    if different:
        return f"it was packed with {' and '.join(different)}"
    if checksums is not None and found["checksums"] != checksums:
        return "it holds other samples"
    return None
