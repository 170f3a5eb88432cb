"""Labels that somebody chose: a second dataset, token by token beside the documents."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from megapack.errors import IndexMismatchError
from megapack.storage.dataset import IndexedDataset

__all__ = ["LabelDocuments", "open_labels"]

LabelDocuments: TypeAlias = IndexedDataset | str | os.PathLike[str] | Literal["auto"] | None


def open_labels(
    documents: IndexedDataset, labels: LabelDocuments = "auto"
) -> IndexedDataset | None:
    """The labels of these documents, not shifted, negative where a token carries no loss.

    Args:
        labels: the dataset or its prefix; ``auto`` takes ``<prefix>.labels`` when it is there.

    Returns:
        None where there are none: every token is then the label of the one before it.

    Raises:
        IndexMismatchError: the labels were written for other documents.
        FormatError, OSError: a file is damaged or missing.
    """
    if labels == "auto":
        labels = f"{documents.prefix}.labels"
        if not IndexedDataset.exists(labels):
            return None
    if labels is None:
        return None
    if not isinstance(labels, IndexedDataset):
        labels = IndexedDataset(labels)
    for name in ("num_documents", "num_tokens"):
        theirs, ours = getattr(labels, name), getattr(documents, name)
        if theirs != ours:
            raise IndexMismatchError(
                f"labels {labels.prefix} and documents {documents.prefix} do not belong together: "
                f"{name} is {theirs} and {ours}; write both in one run"
            )
    return labels
