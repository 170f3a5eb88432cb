"""Labels that somebody chose: a second dataset, token by token beside the documents."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeAlias

from megapack.errors import ConfigError, IndexMismatchError
from megapack.storage.dataset import IndexedDataset

__all__ = ["LabelDocuments", "label_list", "open_labels"]

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


def label_list(labels: Any, num_datasets: int) -> list[LabelDocuments]:
    """One per dataset; "auto" and None stand for all of them. Raises ConfigError: too few."""
    if isinstance(labels, (list, tuple)):
        listed = list(labels)
    else:
        listed = [labels] * (num_datasets if labels in ("auto", None) else 1)
    if len(listed) != num_datasets:
        raise ConfigError(
            f"{len(listed)} label datasets for {num_datasets} datasets; give a list with one for "
            "each, 'auto' or None among them"
        )
    return listed
