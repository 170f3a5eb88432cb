"""The ``.samples`` file: one format for every strategy.

All numbers little-endian::

    0   8 bytes   magic "MEGASAMP"
    8   uint32    version: 2; 3 for an index with groups of documents, which has one more array; 4
                  for prefix trees, which have three more; 5 for second sizes, one more
    12  uint32    0
    16  uint64    size of the header in bytes
    24  uint64    xxh3_64 of the header
    32  header    JSON, UTF-8: packing options, counts, metrics, and "arrays": name ->
                  {dtype, shape, offset, xxh64}; offsets count from the start of the file, xxh64
                  is 16 hexadecimal digits for every 64 KiB of the array
    ..  arrays    each at a multiple of 64 bytes, gaps zero

Opening a file maps it and checks the header and the two small arrays of the buckets. A block of
another array is compared with its checksum when it is first read
(``megapack.storage.index_file``); ``SampleIndex.verify`` compares all blocks.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Callable, Mapping
from itertools import pairwise
from operator import ge, gt
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from megapack import __version__
from megapack.errors import FormatError
from megapack.packing.groups import GROUP_COUNTS
from megapack.packing.metrics import COUNTS, LISTS, RATIOS
from megapack.records import parse_json
from megapack.storage.files import atomic_write, file_identity, open_regular
from megapack.storage.index_file import CheckedArray, map_file

# ---- Checks of the header ------------------------------------------------------------------------

Check = Callable[[Any], bool]


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0  # not bool


def are_counts(value: Any) -> bool:
    return isinstance(value, list) and {*map(type, value)} <= {int} and min(value, default=0) >= 0


def find_wrong(values: Any, checks: Mapping[str, Check]) -> str | None:
    """Return the first field that is missing or fails its check, as the end of a sentence."""
    is_mapping = isinstance(values, Mapping)
    for name, check in checks.items():
        if not is_mapping or name not in values:
            return f"has no {name}"
        if not check(values[name]):
            return f"says {name} is {values[name]!r:.80}"
    return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value.values()))


def _are_parameters(value: Any) -> bool:
    plain = (str, bool, int, float, type(None))
    if not isinstance(value, dict):
        return False
    others = [v for name, v in value.items() if name != "second_capacity"]
    if not all(isinstance(v, plain) for v in others) or not are_counts(
        value.get("second_capacity", [])
    ):
        return False
    aligned = is_count(value.get("alignment", 1)) and value.get("alignment", 1) > 0
    return aligned and is_count(value.get("fim_room", 0))


def _are_groups(value: Any) -> bool:
    checks = {"ids": is_text, **dict.fromkeys(GROUP_COUNTS, is_count)}
    return find_wrong(value, checks) is None


def _is_ratio(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


HEADER: dict[str, Check] = {
    "created_by": is_text,
    "strategy": is_text,
    "parameters": _are_parameters,
    "buckets": lambda value: are_counts(value) and min(value, default=0) > 0,
    "seed": is_count,
    "decisions": _are_texts,
    "num_documents": is_count,
    "dropped_tokens": is_count,
    "repeated_tokens": is_count,
    "source": lambda value: value is None or _are_texts(value),
    "metrics": lambda value: isinstance(value, dict),
    "lengths_fingerprint": is_text,
    "groups": lambda value: value is None or _are_groups(value),
    "second": lambda value: value is None or is_text(value),
}
METRICS: dict[str, Check] = {
    **dict.fromkeys(COUNTS, is_count),
    **dict.fromkeys(LISTS, are_counts),
    **dict.fromkeys(RATIOS, _is_ratio),
}
# Optional array -> metrics that only files with it have.
_MORE_METRICS: dict[str, dict[str, Check]] = {
    "segment_parent": {"shared_tokens": is_count},
    "segment_second": {"second_per_bucket": are_counts, "second_padding_ratio": _is_ratio},
}


def find_fault(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str | None:
    """Return the fault of a header (types, or counts that disagree with the arrays), or None."""
    checks = METRICS
    for name, more in _MORE_METRICS.items():
        checks = checks | more if name in arrays else checks
    wrong = find_wrong(header, HEADER) or find_wrong(header["metrics"], checks)
    if wrong is not None:
        return f"its header {wrong}"
    metrics = header["metrics"]
    samples = [end - begin for begin, end in pairwise(arrays["bucket_sample_offsets"].tolist())]
    num_buckets = len(samples)
    if "segment_second" in arrays:
        capacities = header["parameters"].get("second_capacity", [])
        if not len(capacities) == len(metrics["second_per_bucket"]) == num_buckets:
            return f"its header says second_capacity is {capacities} for {num_buckets} buckets"
    placed, shared = metrics["placed_tokens"], metrics.get("shared_tokens", 0)
    expected = {
        "num_samples": sum(samples),
        "num_segments": len(arrays["segment_length"]),
        "samples_per_bucket": samples,
        "tokens_per_bucket": (metrics["tokens_per_bucket"] + [0] * num_buckets)[:num_buckets],
        "placed_tokens": sum(metrics["tokens_per_bucket"]),
        "num_tokens": placed - metrics["repeated_tokens"] + metrics["dropped_tokens"] + shared,
        **{name: header[name] for name in ("num_documents", "dropped_tokens", "repeated_tokens")},
    }
    for name, value in expected.items():
        if metrics[name] != value:
            return f"its header says {name} is {metrics[name]}, its contents say {value}"
    return None


CREATED_BY = f"megapack {__version__}"
MAGIC = b"MEGASAMP"
VERSION = 2
VERSION_OF_GROUPS = 3
VERSION_OF_TREES = 4
VERSION_OF_SECOND = 5
ALIGNMENT = 64
_PREAMBLE = struct.Struct("<8sIIQQ")

# name -> dtypes that the array may have
ARRAYS: dict[str, tuple[str, ...]] = {
    "bucket_capacity": ("<i8",),
    "bucket_sample_offsets": ("<i8",),
    "sample_segment_offsets": ("<i8",),
    "segment_document": ("<i4", "<i8"),
    "segment_begin": ("<i4", "<i8"),
    "segment_length": ("<i4",),
}
ARRAYS_OF_GROUPS: dict[str, tuple[str, ...]] = {"segment_joined": ("|u1",)}  # of version 3
ARRAYS_OF_TREES: dict[str, tuple[str, ...]] = {  # of version 4
    "segment_parent": ("<i4",),
    "segment_end_offsets": ("<i8",),
    "end_document": ("<i4", "<i8"),
}
ARRAYS_OF_SECOND: dict[str, tuple[str, ...]] = {"segment_second": ("<i4", "<i8")}  # of version 5
OPTIONAL_ARRAYS = (*ARRAYS_OF_GROUPS, *ARRAYS_OF_TREES, *ARRAYS_OF_SECOND)
SMALL = ("bucket_capacity", "bucket_sample_offsets")  # read whenever a file is opened
_SEGMENT_ARRAYS = (*list(ARRAYS)[3:], "segment_joined", "segment_parent", "segment_second")
_LONGEST = (1 << 31) - 1  # tokens of a sample


def write(
    path: Path,
    header: Mapping[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    checksums: Mapping[str, str],
) -> None:
    """Write a file, without copying the arrays; ``checksums`` are their ``block_checksums``."""
    table = {
        name: {
            "dtype": array.dtype.newbyteorder("<").str,
            "shape": list(array.shape),
            "offset": 0,
            "xxh64": checksums[name],
        }
        for name, array in arrays.items()
    }
    content = {**header, "arrays": table}
    # The header contains the offsets, and they depend on its size: reserve 20 digits for each.
    header_size = len(json.dumps(content).encode()) + 20 * (len(table) + 1)
    end = _PREAMBLE.size + header_size
    for name, array in arrays.items():
        table[name]["offset"] = end = -(-end // ALIGNMENT) * ALIGNMENT
        end += array.nbytes
    content["file_size"] = end
    encoded = json.dumps(content).encode().ljust(header_size)
    with atomic_write(path) as file:
        digest = xxhash.xxh3_64_intdigest(encoded)
        version = VERSION_OF_GROUPS if "segment_joined" in arrays else VERSION
        version = VERSION_OF_TREES if "segment_parent" in arrays else version
        version = VERSION_OF_SECOND if "segment_second" in arrays else version
        file.write(_PREAMBLE.pack(MAGIC, version, 0, len(encoded), digest))
        file.write(encoded)
        for name, array in arrays.items():
            file.write(bytes(int(table[name]["offset"]) - file.tell()))
            file.write(np.ascontiguousarray(array).data)


def read(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return the header and the arrays: small ones checked, large ones as ``CheckedArray``. Raises
    FormatError if it is not a ``.samples`` file, damaged, or of another version, and OSError if it
    cannot be read."""
    name = str(path)
    try:
        opened = open_regular(name)
    except FileNotFoundError as error:
        error.strerror = f"{error.strerror} (megapack-build pack writes .samples files)"
        raise
    except (FormatError, OSError):  # opening a socket is an OSError
        if path.exists() and not path.is_file():
            message = f"{path} is not a regular file, so it is not a .samples file"
            raise FormatError(message) from None
        raise
    with io.BufferedReader(opened) as file:
        size = file_identity(opened).num_bytes
        header = _read_header(name, file, size)
        # Map the open file: another file may have taken its name meanwhile.
        mapped = map_file(file)
    table = header.pop("arrays", None)
    expected = ARRAYS
    if header.pop("version") == VERSION_OF_TREES:
        expected = {**ARRAYS, **ARRAYS_OF_TREES}
    elif header["second"] is not None:
        expected = {**ARRAYS, **ARRAYS_OF_SECOND}
    elif header["groups"] is not None:
        expected = {**ARRAYS, **ARRAYS_OF_GROUPS}
    arrays = _map(name, mapped, header.pop("end"), table, expected)
    header["checksums"] = {name: table[name]["xxh64"] for name in arrays}
    for small in SMALL:
        arrays[small] = np.asarray(arrays[small])
    _check_small(name, arrays)
    fault = find_fault(header, arrays)
    if fault is not None:
        raise FormatError(f"{path} is damaged: {fault}; pack the dataset again")
    return header, arrays


def _read_header(path: str, file: IO[bytes], size: int) -> dict[str, Any]:
    preamble = file.read(_PREAMBLE.size)
    if preamble[: len(MAGIC)] != MAGIC:
        raise FormatError(f"{path} does not begin with {MAGIC.decode()}: it is not a .samples file")
    if len(preamble) < _PREAMBLE.size:
        raise FormatError(f"{path} is truncated: it has {size} bytes, less than a header")
    _, version, reserved, header_size, digest = _PREAMBLE.unpack(preamble)
    if not VERSION <= version <= VERSION_OF_SECOND:
        remedy = "install a newer megapack, or pack the dataset again"
        if version < VERSION:
            remedy = f"pack again: megapack-build pack PREFIX --output {path} --overwrite"
        raise FormatError(
            f"{path} has format version {version}; megapack {__version__} reads versions "
            f"{VERSION} to {VERSION_OF_SECOND}: {remedy}"
        )
    if _PREAMBLE.size + header_size > size:
        raise FormatError(
            f"{path} is truncated: its header of {header_size} bytes does not fit in {size}"
        )
    encoded = file.read(header_size)
    if xxhash.xxh3_64_intdigest(encoded) != digest or reserved != 0:
        raise FormatError(f"{path} is damaged: its header does not match the header's checksum")
    header: dict[str, Any] = parse_json(
        encoded, f"{path}: the header", remedy="pack the dataset again"
    )
    expected_size = header.get("file_size") if isinstance(header, dict) else None
    if type(expected_size) is not int:
        raise FormatError(f"{path} is damaged: its header has no file_size")
    if expected_size != size:
        kind = "truncated" if size < expected_size else "damaged"
        raise FormatError(f"{path} is {kind}: it has {size} bytes instead of {expected_size}")
    has_groups = header.setdefault("groups", None) is not None
    if version != VERSION_OF_TREES and has_groups != (version == VERSION_OF_GROUPS):
        raise FormatError(f"{path} is damaged: groups do not match its version, {version}")
    if (header.setdefault("second", None) is not None) != (version == VERSION_OF_SECOND):
        raise FormatError(f"{path} is damaged: second sizes do not match its version, {version}")
    return {**header, "version": version, "end": _PREAMBLE.size + header_size}


def _map(
    path: str,
    mapped: NDArray[np.uint8],
    previous_end: int,
    table: Any,
    expected: Mapping[str, tuple[str, ...]],
) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    content = mapped.data
    for name, dtypes in expected.items():
        match table.get(name) if isinstance(table, dict) else None:
            case {
                "dtype": str(kind),
                "shape": [int(count)],
                "offset": int(begin),
                "xxh64": str(sums),
            }:
                pass
            case _:
                kind, count, begin, sums = "", 0, 0, ""
        if kind not in dtypes:
            raise FormatError(f"{path} has no array {name} of dtype {' or '.join(dtypes)}")
        dtype = np.dtype(kind)
        end = begin + count * dtype.itemsize
        # Arrays are in this order; bytes between them have no checksum, so they must be 0.
        is_placed = count >= 0 and previous_end <= begin and end <= len(mapped)
        if not is_placed or begin % ALIGNMENT or bytes(content[previous_end:begin]).strip(b"\0"):
            raise FormatError(
                f"{path} is damaged: array {name} has bytes {begin} to {end}, outside the file, "
                f"unaligned, overlapping another array, or after bytes that are not 0; pack the "
                "dataset again"
            )
        arrays[name] = CheckedArray.of(
            mapped[begin:end].view(dtype),
            sums,
            name=f"{path}: array {name}",
            remedy="pack the dataset again",
        )
        previous_end = end
    return arrays


def _check_small(path: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Check what later code does not check again: order of offsets and lengths of arrays."""
    segments = arrays["sample_segment_offsets"]
    capacities, samples = (arrays[name].tolist() for name in SMALL)
    fits = (
        len(samples) == len(capacities) + 1 > 1
        and len(segments) > 0
        and samples[-1] == len(segments) - 1
        and {len(arrays[name]) for name in arrays if name in _SEGMENT_ARRAYS} == {int(segments[-1])}
    )
    if not fits:
        sizes = ", ".join(f"{name} {len(array)}" for name, array in arrays.items())
        raise FormatError(f"{path} is damaged: the sizes of its arrays do not match ({sizes})")
    if capacities[0] < 1 or any(map(ge, capacities, capacities[1:])) or capacities[-1] > _LONGEST:
        raise FormatError(
            f"{path}: bucket_capacity is {_listed(capacities)}; capacities must ascend from 1"
        )
    if samples[0] != 0 or any(map(gt, samples, samples[1:])):
        raise FormatError(
            f"{path}: bucket_sample_offsets is {_listed(samples)}; offsets start at 0 and must "
            "not decrease"
        )
    ends = arrays.get("segment_end_offsets")
    if ends is not None and len(ends) != int(segments[-1]) + 1:
        raise FormatError(f"{path} is damaged: segment_end_offsets has {len(ends)} numbers")
    if segments[0] != 0:
        raise FormatError(f"{path}: sample_segment_offsets starts with {segments[0]}, not 0")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
