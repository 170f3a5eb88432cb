"""Manifests of a host's data path."""

from __future__ import annotations

from pathlib import Path

import pytest

from megapack.errors import ConfigError
from megapack.integrations.rows.open_rows import Manifest, Source, default_buckets


def test_manifest_of_a_prefix_has_defaults() -> None:
    manifest = Manifest.read("data/web_text_document")
    assert manifest == Manifest(sources=(Source(prefix="data/web_text_document"),))


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_manifest_file_resolves_relative_prefixes(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mix.{suffix}"
    path.write_text(
        '{"sources": [{"prefix": "a", "weight": 3}, {"prefix": "/b", "weight": 1,'
        ' "labels": "none"}], "buckets": [512, 1024], "cache_directory": "cache"}'
    )
    manifest = Manifest.read(str(path))
    assert [s.prefix for s in manifest.sources] == [str(tmp_path / "a"), "/b"]
    assert manifest.sources[1].labels == "none"
    assert manifest.buckets == (512, 1024)
    assert manifest.cache_directory == str(tmp_path / "cache")


def test_manifest_as_text_makes_the_round_trip() -> None:
    manifest = Manifest.of_blend(["a", "b", "off"], [0.7, 0.3, 0.0])
    assert [source.prefix for source in manifest.sources] == ["a", "b"]
    assert Manifest.read(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"sources": []}', "at least one source"),
        ('{"sources": [{"prefix": "a", "loss_weight": 2}]}', "a host takes the plain mean"),
        ('{"sources": [{"prefix": "a", "weight": 1}, {"prefix": "b"}]}', "'b' has no weight"),
        ('{"sources": [{"prefix": "a", "weight": -1}]}', "weight is -1.0"),
        ('{"sources": [{"prefix": "a"}], "bucket": [1]}', "did you mean 'buckets'"),
        ('{"sources": [{"prefix": "a"}], "align": 0}', "align is 0"),
        ('{"sources": ', "not valid JSON"),
    ],
)
def test_invalid_manifest_names_its_fault(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Manifest.read(text)


def test_manifest_inside_a_blend_is_refused() -> None:
    with pytest.raises(ConfigError, match="manifest inside a blend"):
        Manifest.of_blend(["a", "mix.json"], [0.5, 0.5])


@pytest.mark.parametrize(
    ("sequence_length", "align", "buckets"),
    [
        (8192, 1, (512, 1024, 2048, 4096, 8192)),
        (1024, 1, (256, 512, 1024)),
        (768, 1, (384, 768)),
        (4100, 4, (4100,)),
        (100, 1, (100,)),
    ],
)
def test_default_buckets_divide_the_row(
    sequence_length: int, align: int, buckets: tuple[int, ...]
) -> None:
    assert default_buckets(sequence_length, align) == buckets
    assert all(sequence_length % b == 0 and b % align == 0 for b in buckets)
