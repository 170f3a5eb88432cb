"""Two capacities per bucket: tokens and a second size of documents, such as images."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import build, printed
from hypothesis import given
from hypothesis import strategies as st
from packing_inputs import ADVERSARIAL, as_packing, header_of, same_arrays, with_header
from reference.second import bucket_second

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from two_capacities import lower_bound, text_and_images

from megapack.errors import ConfigError, DataError, FormatError
from megapack.packing import STRATEGIES, SampleIndex, pack
from megapack.packing.second import second_per_sample
from megapack.packing.sharded import load_shards
from megapack.packing.verify import verify_samples
from megapack.storage import ColumnSpec, IndexedDatasetBuilder

# ---- The definition and the laws


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    buckets = sorted(draw(st.sets(st.integers(1, 35), min_size=1, max_size=3)))
    limits = sorted(
        draw(st.lists(st.integers(1, 12), min_size=len(buckets), max_size=len(buckets)))
    )
    sizes = st.integers(0, limits[-1])
    documents = draw(st.lists(st.tuples(st.integers(0, 40), sizes), max_size=40))
    options = {
        "buckets": buckets,
        "second_capacity": limits,
        "seed": draw(st.integers(0, 9)),
        "pool_size": draw(st.sampled_from([1, 5, 17, 1000])),
        "max_segments": draw(st.sampled_from([None, 1, 2, 8])),
        "promote": draw(st.sampled_from(["auto", "on", "off"])),
        "padding_threshold": draw(st.sampled_from([0.0, 0.1, 0.5])),
    }
    return {"lengths": [d[0] for d in documents], "second": [d[1] for d in documents], **options}


@given(inputs())
def test_core_equals_definition(drawn: dict[str, Any]) -> None:
    defined = bucket_second(**drawn)
    for threads in (1, 3):
        index = pack(threads=threads, **drawn)
        assert as_packing(index) == defined


@pytest.mark.parametrize("documents", ADVERSARIAL.values(), ids=ADVERSARIAL.keys())
def test_core_equals_definition_on_adversarial_lengths(documents: list[int]) -> None:
    second = [n % 5 for n in documents]
    buckets, limits = [4, 8, 16], [2, 3, 4]
    defined = bucket_second(documents, second, buckets, limits, 1)
    index = pack(documents, buckets=buckets, second=second, second_capacity=limits, seed=1)
    assert as_packing(index) == defined


def test_no_sample_exceeds_a_capacity_and_every_token_is_in_one() -> None:
    lengths, images = text_and_images(30_000)
    lengths[::100] *= 3  # longer than the largest bucket
    buckets, limits = [2048, 8192], [6, 10]
    index = pack(lengths, buckets=buckets, second=images, second_capacity=limits, pool_size=7000)
    index.verify(lengths)
    metrics = index.metrics()
    held: list[list[int]] = [[], []]
    for i in range(index.num_samples):
        bucket, segments = index.sample(i)
        held[bucket].append(sum(int(images[document]) for document, _, _ in segments))
    assert max(held[0]) <= 6 and max(held[1]) <= 10
    assert second_per_sample(index).tolist() == held[0] + held[1]
    assert metrics["second_per_bucket"] == [sum(held[0]), sum(held[1])]
    room = 6 * len(held[0]) + 10 * len(held[1])
    assert metrics["second_padding_ratio"] == pytest.approx(1 - sum(map(sum, held)) / room)
    assert metrics["dropped_tokens"] == metrics["repeated_tokens"] == 0
    assert index.segment_second.tolist() == images[index.segment_document].tolist()


@pytest.mark.parametrize("limit", [8, 10, 12, 16])
def test_samples_are_at_most_2_percent_above_a_lower_bound(limit: int) -> None:
    lengths, images = text_and_images(20_000)
    index = pack(lengths, buckets=8192, second=images, second_capacity=limit)
    sums = max(-(-int(lengths.sum()) // 8192), -(-int(images.sum()) // limit))
    bound = max(sums, lower_bound(lengths, images, 8192, limit, 256))
    assert bound <= index.num_samples <= 1.02 * bound
    if limit == 12:  # both capacities are needed: without the second one, many samples exceed it
        plain = pack(lengths, buckets=8192)
        held = np.add.reduceat(images[plain.segment_document], plain.sample_segment_offsets[:-1])
        assert (held > limit).mean() > 0.2


def test_without_second_sizes_the_samples_are_those_of_one_capacity() -> None:
    lengths, _ = text_and_images(20_000)
    options: dict[str, Any] = {"buckets": [1024, 4096], "seed": 3, "pool_size": 6000}
    for promote in ("off", "on"):
        options["promote"] = promote
        zero = pack(lengths, second=np.zeros_like(lengths), second_capacity=1, **options)
        plain = pack(lengths, **options)
        assert zero.num_samples == plain.num_samples
        for i in range(plain.num_samples):  # promoted samples have another order of segments
            (bucket, segments), (other, others) = zero.sample(i), plain.sample(i)
            assert (bucket, sorted(segments)) == (other, sorted(others)), promote


def test_promote_auto_takes_the_better_choice() -> None:
    lengths, images = text_and_images(20_000)
    short = lengths < 2500
    no_short = (lengths[~short], images[~short])  # hardly two fit into a bucket of 4,096
    options: dict[str, Any] = {"buckets": [4096, 8192], "second_capacity": [8, 16]}
    for better, (tokens, second) in (("off", (lengths, images)), ("on", no_short)):
        made = {
            how: pack(tokens, second=second, promote=how, **options)
            for how in ("on", "off", "auto")
        }
        assert same_arrays(made["auto"], made[better]), better
        assert better == "off" or made["auto"].decisions["promote"].startswith("on: padding is")
        made["on"].verify(tokens)


def test_alignment_and_fim_room_keep_the_second_capacity() -> None:
    lengths, images = text_and_images(3000)
    options: dict[str, Any] = {"second": images, "second_capacity": 9, "buckets": [4096, 8192]}
    index = pack(lengths, alignment=64, fim_room=5, **options)
    index.verify(lengths)
    rounded = -(-index.segment_length // 64) * 64
    assert np.add.reduceat(rounded, index.sample_segment_offsets[:-1]).max() <= 8192
    assert second_per_sample(index).max() == 9


# ---- Refusals


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_strategies_without_two_capacities_refuse(name: str) -> None:
    options = {"second": [1, 1], "second_capacity": 2, "buckets": 8}
    if STRATEGIES[name].two_capacities:
        assert pack([3, 4], name, **options).num_samples == 1
    else:
        with pytest.raises(ConfigError, match=f"{name!r} has no second capacity; choose bucket$"):
            pack([3, 4], name, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"second": [1, 9, 7]}, "document 1 has the second size 9, .* holds 6; 2 of 3 .* to 9, or"),
        ({"second": [1, -2, 0]}, "document 1 has the second size -2"),
        ({"second": [1, 2]}, r"shape \(2,\); give 3 integers"),
        ({"second": [0.5, 1, 1]}, "dtype float64"),
        ({"second_capacity": [4, 5, 6]}, r"\[4, 5, 6\]; give one number for all .* each: 2"),
        ({"second_capacity": [6, 4]}, "must not decrease"),
        ({"second_capacity": 0}, "second_capacity is 0"),
        ({"second_capacity": None}, "second_capacity is missing"),
        ({"second": None}, "second is missing"),
        ({"groups": [1, 1, 2]}, "groups does not work with a second capacity"),
        ({"refine": True}, "refine does not work with"),
        ({"promote": "lookahead"}, "promote='lookahead' does not work with"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"second": [1, 2, 3], "second_capacity": 6, "buckets": [4, 8], **options}
    with pytest.raises((ConfigError, DataError), match=message):
        pack([3, 4, 5], **given)


def test_the_second_size_of_an_empty_document_does_not_count() -> None:
    index = pack([3, 0, 5], buckets=8, second=[2, 99, 2], second_capacity=4)
    assert index.num_samples == 1 and index.segment_second.tolist() == [2, 2]


def test_sizes_of_2_gib_and_more_are_exact(tmp_path: Path) -> None:
    """For example bytes of videos."""
    sizes = [(1 << 31) - 1, 1 << 31, (1 << 33) + 5]
    for second, dtype in ((sizes[:1] * 3, np.int32), (sizes, np.int64)):
        index = pack([3, 4, 5], buckets=16, second=second, second_capacity=1 << 34)
        assert index.segment_second is not None and index.segment_second.dtype == dtype
        held = dict(zip(index.segment_document.tolist(), index.segment_second, strict=True))
        assert [held[i] for i in range(3)] == second
        index.save(tmp_path / f"{dtype.__name__}.samples")
        loaded = SampleIndex.load(tmp_path / f"{dtype.__name__}.samples", verify=True)
        assert second_per_sample(loaded).tolist() == [sum(second)]


# ---- Files and commands


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Return a dataset whose column images has a 1 at the first token of every image."""
    spec = ColumnSpec(dtype="int8")
    with IndexedDatasetBuilder(tmp_path / "a", np.uint16, columns={"images": spec}) as builder:
        for length, images in zip(LENGTHS, IMAGES, strict=True):
            rows = np.r_[np.ones(images, np.int8), np.zeros(length - images, np.int8)]
            builder.add_document(np.arange(length, dtype=np.uint16), columns={"images": rows})
    return tmp_path / "a"


LENGTHS, IMAGES = [5, 0, 7, 3, 2, 8], [3, 0, 1, 0, 2, 4]


def test_file_records_second_sizes_and_verifies_them(tmp_path: Path) -> None:
    index = pack(LENGTHS, buckets=8, second=IMAGES, second_capacity=4)
    path = tmp_path / "x.samples"
    assert index.save(path) and not index.save(path)
    loaded = SampleIndex.load(path, verify=True)
    assert loaded.second == index.second and loaded.metrics() == index.metrics()
    assert np.asarray(loaded.segment_second).tolist() == index.segment_second.tolist()
    other = pack(LENGTHS, buckets=8, second=[3, 0, 1, 0, 2, 3], second_capacity=4)
    with pytest.raises(ConfigError, match="it was packed with other second sizes"):
        other.save(path)
    changed = np.array(index.segment_second)
    changed[0] += 4
    damaged = dataclasses.replace(index, segment_second=changed)
    with pytest.raises(FormatError, match=r"a second size of .* capacity is 4: pack again"):
        damaged.verify()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["parameters"].pop("second_capacity"), "second_capacity is [] for 2 buckets"),
        (lambda h: h["parameters"].update(second_capacity=[4]), "[4] for 2 buckets"),
        (lambda h: h["parameters"].update(second_capacity=["a", 4]), "says parameters is"),
        (lambda h: h["parameters"].update(second_capacity=[1, 1]), "its second capacity is 1"),
        (lambda h: h.update(second=None), "second sizes do not match its version, 5"),
        (lambda h: h["metrics"].pop("second_per_bucket"), "has no second_per_bucket"),
        (lambda h: h["arrays"].pop("segment_second"), "no array segment_second"),
    ],
)
def test_a_contradicting_header_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.samples"
    pack(LENGTHS, buckets=[4, 8], second=IMAGES, second_capacity=[3, 4]).save(path)
    header = header_of(path.read_bytes())
    change(header)
    data = bytearray(with_header(path.read_bytes(), header))
    data[8] = 5
    path.write_bytes(data)
    with pytest.raises(FormatError, match=re.escape(message)):
        SampleIndex.load(path, verify=True)


def test_command_packs_by_a_column_or_a_file(prefix: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "sizes.npy", IMAGES)
    options = ("--buckets", "4,8", "--second-capacity", "2,4")
    shown = printed("pack", prefix, "--second", "images", *options)
    assert "second padding ratio" in shown and "second padding" in shown.splitlines()[0]
    by_file = tmp_path / "b.samples"
    printed("pack", prefix, "--second", tmp_path / "sizes.npy", *options, "--output", by_file)
    index = SampleIndex.load(f"{prefix}.samples")
    assert same_arrays(index, SampleIndex.load(by_file))
    assert same_arrays(index, pack(LENGTHS, buckets=[4, 8], second=IMAGES, second_capacity=[2, 4]))
    assert (
        index.metrics().items()
        <= json.loads(printed("inspect", f"{prefix}.samples", "--json"))["metrics"].items()
    )
    assert "second padding ratio" in printed("inspect", f"{prefix}.samples")
    shown = printed("inspect", f"{prefix}.samples", "--sample", index.num_samples - 1)
    held = int(second_per_sample(index)[-1])
    assert f"second size {held} of 4, {4 - held} padding" in shown
    assert not verify_samples(f"{prefix}.samples")
    assert "exists already" in build("pack", prefix, "--second", "images", *options).stderr
    refused = printed("pack", prefix, "--second", "image", *options, status=2)
    assert "no column 'image'; did you mean 'images'?" in refused
    refused = printed("pack", prefix, "--second", "images", "--buckets", "8", status=2)
    assert "--second images needs --second-capacity" in refused
    refused = printed("pack", prefix, "--second-capacity", "4,8", "--buckets", "8", status=2)
    assert "--second-capacity 4,8 needs --second" in refused
    short = tmp_path / "short.npy"
    np.save(short, IMAGES[:-1])
    refused = printed("pack", prefix, "--second", short, *options, "--overwrite", status=1)
    assert "second sizes have dtype int64 and shape (5,); give 6 integers" in refused


def test_verify_compares_second_sizes_with_the_column(prefix: Path) -> None:
    printed("pack", prefix, "--second", "images", "--buckets", "8", "--second-capacity", "4")
    printed("column", "remove", prefix, "images")
    assert not verify_samples(f"{prefix}.samples"), "nothing to compare with"
    rows = [[0] * length for length in LENGTHS]
    np.save(prefix.with_name("rows.npy"), np.concatenate(rows).astype(np.int8))
    printed("column", "add", prefix, "images", prefix.with_name("rows.npy"))
    (finding,) = verify_samples(f"{prefix}.samples")
    assert finding.severity == "error" and "other values of column images" in finding.message


def test_shards_are_packed_by_their_column(prefix: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "all.shards.json"
    options = ("--buckets", "8", "--second-capacity", "4", "--output", manifest)
    printed("pack", prefix, "--second", "images", *options)
    index = load_shards(manifest)
    index.verify()
    assert index.parameters["second_capacity"] == [4]
    assert same_arrays(index.open(0), pack(LENGTHS, buckets=8, second=IMAGES, second_capacity=4))
    refused = printed("pack", prefix, "--second", "sizes.npy", *options, status=2)
    assert "give the name of a column" in refused
    with IndexedDatasetBuilder(
        tmp_path / "b", np.uint16, columns={"bytes": ColumnSpec(dtype="int8")}
    ) as builder:
        builder.add_document([1, 2], columns={"bytes": [1, 1]})
    more = (prefix, tmp_path / "b", "--second", "bytes")
    refused = printed("pack", *more, *options, status=2)
    assert "--second is bytes, and the samples of" in refused


def test_arranged_samples_keep_their_second_sizes(tmp_path: Path) -> None:
    """In the order of a run, in several shards, also where a document is cut."""
    lengths, images = text_and_images(400, seed=3)
    options: dict[str, Any] = {"buckets": [512, 1024], "second_capacity": [8, 16]}
    prefixes = [tmp_path / "a", tmp_path / "b"]
    for prefix, part in zip(prefixes, (slice(0, 150), slice(150, 400)), strict=True):
        with IndexedDatasetBuilder(
            prefix, np.uint16, columns={"images": ColumnSpec(dtype="int8")}
        ) as builder:
            for number, (length, held) in enumerate(zip(lengths[part], images[part], strict=True)):
                rows = np.zeros(length, np.int8)
                rows[:held] = 1
                builder.add_document(np.full(length, number), columns={"images": rows})
    source, arranged = tmp_path / "all.shards.json", tmp_path / "new.shards.json"
    capacities = ("--buckets", "512,1024", "--second-capacity", "8,16")
    printed("pack", *prefixes, "--second", "images", *capacities, "--output", source)
    printed("arrange", source, "--output", arranged, "--seed", 1, "--bytes-per-shard", "100K")
    before, after = load_shards(source), load_shards(arranged)
    assert len(after.shards) > 1 and after.parameters["second_capacity"] == [8, 16]
    after.verify()
    assert not [finding for shard in after.shards for finding in verify_samples(shard.samples)]

    def held(index: Any) -> list[list[tuple[int, ...]]]:
        """Return tokens and second sizes of the segments of every sample, by bucket."""
        result: list[list[tuple[int, ...]]] = [[] for _ in options["buckets"]]
        for number in range(len(index.shards)):
            shard = index.open(number)
            pairs = np.stack([shard.segment_length, shard.segment_second], axis=1)
            samples = np.split(pairs, np.asarray(shard.sample_segment_offsets)[1:-1])
            bounds = np.asarray(shard.bucket_sample_offsets).tolist()
            for bucket, (begin, end) in enumerate(pairwise(bounds)):
                result[bucket] += [tuple(s.flatten().tolist()) for s in samples[begin:end]]
        return [sorted(of_bucket) for of_bucket in result]

    assert held(after) == held(before)
    assert max(lengths) > 1024, "some documents are cut"
