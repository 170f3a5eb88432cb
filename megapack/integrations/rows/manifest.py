"""What stands behind a host's data path: the manifest of a blend, and how its sources are packed.

A host's --data-path may be a plain prefix (everything default), a shard manifest (many datasets,
packed by `megapack-build pack`), the name of a manifest file, or a manifest itself (JSON text, what
a folded blend becomes):

    {"sources": [{"prefix": "web_text_document", "weight": 0.7},
                 {"prefix": "code_text_document", "weight": 0.3}],
     "strategy": "bucket", "buckets": [1024, 2048, 4096, 8192], "cache_directory": "/scratch/idx"}

A source that names its index is not packed again (``megapack.data.blend``). Stages count blocks of
``rows_per_block`` rows, which are the host's steps where a block is its global batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megapack.config import from_dict, load_config, to_dict
from megapack.data.blend import BlendConfig, HostOptions, Source
from megapack.errors import ConfigError
from megapack.packing.sharded import is_shard_manifest
from megapack.records import parse_json

__all__ = ["MANIFEST_SUFFIXES", "Manifest", "Source", "default_buckets", "is_manifest"]

MANIFEST_SUFFIXES = (".json", ".yaml", ".yml")
SMALLEST_DEFAULT_BUCKET = 256
MOST_DEFAULT_BUCKETS = 5
# Of a stage, what may change in a host's rows: how long they are, and how many make a step and a
# micro step, is the host's.
STAGE_FIELDS = frozenset(
    {"from_step", "from_tokens", "weights", "order", "num_cycles", "skip_steps", "exclude", "ramp"}
    | {"attention_window", "window_steps", "fim_rates"}
)


@dataclass(frozen=True, kw_only=True)
class Manifest(HostOptions, BlendConfig):
    """Sources and what is for hosts; every field but ``sources`` has a default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for source in self.sources:
            if source.loss_weight != 1:
                raise ConfigError(
                    f"source {source.title!r} has loss_weight {source.loss_weight} "
                    "and a host takes the plain mean of its labels, counted in whole numbers: "
                    "leave loss_weight out, or train with megapack-pretrain"
                )
        for name in ("rows_per_block", "align"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more")
        for stage in self.stages:
            given = [field.name for field in fields(stage) if getattr(stage, field.name)]
            refused = [name for name in given if name not in STAGE_FIELDS]
            if refused:
                raise ConfigError(
                    f"{stage} has {', '.join(refused)}, which is the host's to say: a stage of a "
                    f"host's rows may have {', '.join(sorted(STAGE_FIELDS))}; leave out the rest, "
                    "or train with launch/pretrain.py"
                )

    @classmethod
    def read(cls, data_path: str) -> Manifest:
        """What a host's data path means: JSON text, a manifest file, or one source.

        Raises:
            ConfigError: the manifest is not valid; the message names the key.
            OSError: the manifest file cannot be read.
        """
        if data_path.lstrip().startswith("{"):
            remedy = 'give one object, as in {"sources": [...]}, or the path of a manifest'
            tree = parse_json(data_path, "data path", remedy=remedy, error=ConfigError)
            return from_dict(cls, tree, where="data path")
        if data_path.endswith(MANIFEST_SUFFIXES) and not is_shard_manifest(data_path):
            path = Path(data_path)
            return load_config(cls, path).relative_to(path.parent)
        return cls(sources=(_source(data_path),))

    @classmethod
    def of_blend(cls, prefixes: Sequence[str], weights: Sequence[float] | None) -> Manifest:
        """A weighted list of prefixes, all other options at their defaults.

        Raises:
            ConfigError: one of the prefixes is itself a manifest.
        """
        for prefix in prefixes:
            if is_manifest(prefix):
                raise ConfigError(
                    f"{prefix!r} is a manifest inside a blend; put all sources and their weights "
                    "into one manifest and give that as the only data path"
                )
        given = [None] * len(prefixes) if weights is None else list(weights)
        pairs = zip(prefixes, given, strict=True)
        # Megatron accepts a weight of 0 for "not now".
        return cls(sources=tuple(_source(prefix, w) for prefix, w in pairs if w != 0))

    def to_json(self) -> str:
        """One line that ``read`` turns into an equal manifest."""
        return json.dumps(to_dict(self))

    def relative_to(self, folder: Path) -> Manifest:
        """The manifest with paths relative to its folder."""
        cache = None if self.cache_directory is None else str(folder / self.cache_directory)
        moved = super().relative_to(folder)
        return replace(self, sources=moved.sources, stages=moved.stages, cache_directory=cache)


def is_manifest(data_path: str) -> bool:
    """Whether a data path is a manifest (file or JSON text) and not one source."""
    if is_shard_manifest(data_path):
        return False
    return data_path.endswith(MANIFEST_SUFFIXES) or data_path.lstrip().startswith("{")


def _source(data_path: str, weight: float | None = None) -> Source:
    """Of a prefix, or of the shard manifest of a source of many."""
    if is_shard_manifest(data_path):
        return Source(index=data_path, weight=weight)
    return Source(prefix=data_path, weight=weight)


def default_buckets(sequence_length: int, align: int = 1) -> tuple[int, ...]:
    """The sequence length and its halves, down to a sixteenth or 256 tokens, ascending.

    Args:
        sequence_length: tokens of a row.
        align: every capacity must be a multiple of this.
    """
    buckets = [sequence_length]
    while len(buckets) < MOST_DEFAULT_BUCKETS:
        half, rest = divmod(buckets[-1], 2)
        if rest or half < SMALLEST_DEFAULT_BUCKET or half % align:
            break
        buckets.append(half)
    return tuple(reversed(buckets))
