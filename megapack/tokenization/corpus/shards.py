"""Input files -> shards: what one worker reads from start to end and writes as one dataset.

Bounds depend on the files and on ``shard_bytes``, never on the number of workers or machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megapack.errors import ConfigError
from megapack.tokenization.corpus.pieces import TABLES, InputFile, Piece
from megapack.tokenization.corpus.readers import open_table

__all__ = ["MIN_SHARD_BYTES", "Shard", "default_shard_bytes", "plan_shards"]

# Text grows by about this much when it is decompressed; only the balance of shards rests on it.
_EXPANSION = {"": 1, "gz": 3, "zst": 3}

MIN_SHARD_BYTES = 1 << 20
_MAX_SHARD_BYTES = 256 << 20
_WANTED_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive pieces of the corpus, of about ``num_bytes`` of text."""

    pieces: tuple[Piece, ...]
    num_bytes: int


def default_shard_bytes(files: Sequence[InputFile]) -> int:
    """A power of two that gives about 64 shards, between 1 MiB and 256 MiB."""
    total = sum(file.size * _EXPANSION[file.compression] for file in files)
    wanted = 1 << max(0, (total // _WANTED_SHARDS)).bit_length()
    return min(max(wanted, MIN_SHARD_BYTES), _MAX_SHARD_BYTES)


def plan_shards(files: Sequence[InputFile], *, shard_bytes: int, json_key: str) -> list[Shard]:
    """Share out ``files``, in order, into shards of about ``shard_bytes``.

    Plain JSON Lines are cut at any byte (readers go on to the next line), parquet between row
    groups, Arrow between record batches; other files are not cut, so a shard may be larger than
    asked for.

    Raises:
        ConfigError: ``shard_bytes`` is not positive.
        DataError: a parquet or Arrow file is damaged.
    """
    if shard_bytes < 1:
        raise ConfigError(f"shard size {shard_bytes} must be at least 1 byte")
    shards: list[Shard] = []
    pieces: list[Piece] = []
    filled = 0

    def close() -> None:
        nonlocal pieces, filled
        if pieces:
            shards.append(Shard(tuple(pieces), filled))
        pieces, filled = [], 0

    for file in files:
        if file.format == "jsonl" and not file.compression:
            begin = 0
            while begin < file.size:
                end = min(file.size, begin + shard_bytes - filled)
                pieces.append(Piece(file, begin, end))
                filled += end - begin
                begin = end
                if filled >= shard_bytes:
                    close()
            continue
        for piece, weight in _indivisible(file, json_key):
            _append(pieces, piece)
            filled += weight
            if filled >= shard_bytes:
                close()
    close()
    return shards


def _indivisible(file: InputFile, json_key: str) -> Iterator[tuple[Piece, int]]:
    if file.format not in TABLES:
        weight = file.size * _EXPANSION[file.compression]
        yield Piece(file, 0, file.size), weight
        return
    with open_table(file) as table:
        for i, weight in enumerate(table.group_bytes(json_key)):
            yield Piece(file, i, i + 1), weight


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Groups of rows of one file that follow each other are one piece."""
    last = pieces[-1] if pieces and piece.file.format in TABLES else None
    if last is not None and (last.file, last.end) == (piece.file, piece.begin):
        pieces[-1] = last._replace(end=piece.end)
    else:
        pieces.append(piece)
