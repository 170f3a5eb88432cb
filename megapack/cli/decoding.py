"""Token ids to text, by the tokenizer that made a dataset and no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megapack.cli.report import note
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset

__all__ = ["decoder"]


def decoder(
    name: str, dataset: IndexedDataset, token_ids: Sequence[int]
) -> Callable[[Sequence[int]], str]:
    """Ids to text. Raises ConfigError if this cannot be the tokenizer that made the dataset."""
    from megapack.tokenization.tokenizers.encoders import open_reference  # noqa: PLC0415
    from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles  # noqa: PLC0415

    files = TokenizerFiles.open(name)
    named = (dataset.meta or {}).get("tokenizer") or {}
    told = f"; its metadata names {named['name']}" if "name" in named else ""
    if named.get("vocab_size", files.vocab_size) != files.vocab_size:
        raise ConfigError(
            f"{dataset.prefix} was not made by {name} ({files.vocab_size:,} ids): its metadata "
            f"names {named.get('name')} ({named['vocab_size']:,} ids); give that as --tokenizer"
        )
    if max(token_ids, default=0) >= files.vocab_size:
        raise ConfigError(
            f"{dataset.prefix} was not made by {name}: token id {max(token_ids)} is not one of "
            f"its {files.vocab_size:,} ids{told}; give the tokenizer that made it"
        )
    if named.get("digest", files.digest) != files.digest:
        note(f"{name} is not the file that made {dataset.prefix}{told}")
    return open_reference(files).decode
