"""Accelerators by driver name; arithmetic checked by hand."""

from __future__ import annotations

import pytest

from megapack.devices import FLOPS_PER_WEIGHT, PEAK_FLOPS, attention_flops, peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165),
        ("Tesla V100-SXM2-32GB", 125),
        ("AMD Instinct MI300X", 1307),
        ("a800", 312),
    ],
)
def test_device_is_the_longest_name_inside_the_drivers(name: str, teraflops: float) -> None:
    assert peak_flops(name) == teraflops * 1e12


def test_device_that_is_not_listed_has_no_peak() -> None:
    assert peak_flops("Intel Xeon") is None and peak_flops("NVIDIA RTX A1000 6GB") is None
    assert peak_flops("h100x") is None and peak_flops("NVIDIA A10G") is None
    assert all(peak_flops(key) == peak for key, peak in PEAK_FLOPS.items())


def test_flops_of_a_document_are_those_of_its_matrix_products() -> None:
    tokens, layers, width = 10, 2, 64
    pairs = tokens * tokens / 2  # causal
    forward = layers * 2 * (2 * width) * pairs  # scores and values
    assert attention_flops(layers, width) * tokens**2 == 3 * forward
    again = layers * (2 * width) * pairs  # the scores, in the backward
    assert attention_flops(layers, width, recomputed=True) * tokens**2 == 3 * forward + again
    assert FLOPS_PER_WEIGHT == 2 * 3
