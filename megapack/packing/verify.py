"""Is a .samples file whole, and does it fit the dataset that it was packed from?"""

from __future__ import annotations

from pathlib import Path

from megapack.errors import ConfigError, FormatError, IndexMismatchError
from megapack.packing.index import SampleIndex
from megapack.storage import IndexedDataset
from megapack.storage.findings import Finding

__all__ = ["prefix_of_samples", "verify_samples"]

_REMEDY = "pack the dataset again"


def verify_samples(path: str) -> list[Finding]:
    """All checksums and, where its dataset is, that every segment lies inside its document.

    Raises:
        ConfigError: the file does not say which dataset it is of.
        OSError: it cannot be read.
    """
    try:
        index = SampleIndex.load(path)
        index.verify()
        prefix = prefix_of_samples(path, index) if index.source else None
        if prefix is None or not IndexedDataset.exists(prefix):
            text = f"{prefix or 'its dataset'} is not there: segments were not compared with it"
            return [Finding("note", "no-dataset", text)]
        dataset = IndexedDataset(prefix)
        index.check_source(dataset)
        index.verify(dataset.document_lengths)
    except FormatError as error:
        return [Finding("error", "samples", str(error), _REMEDY)]
    except IndexMismatchError as error:
        return [Finding("error", "samples-source", str(error), _REMEDY)]
    return []


def prefix_of_samples(path: str, index: SampleIndex) -> str:
    """Where the dataset of a .samples file lies: where it was packed, or beside the file.

    Raises:
        ConfigError: the file does not say.
    """
    prefix = (index.source or {}).get("prefix")
    if prefix is None:
        raise ConfigError(f"{path} does not say which dataset it is of; give --data-prefix")
    # A dataset and its index often travel together.
    return prefix if IndexedDataset.exists(prefix) else str(Path(path).with_name(Path(prefix).name))
