"""Targets of multi-token prediction stay inside their document, for all options of a batch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megapack.data import BatchLayout, PackedDataset
from megapack.data.steps import StepView
from megapack.errors import ConfigError
from tests.data.corpora import packed_as, small_loader
from tests.data.test_gather import _choose, _weigh, corpora, samples_of, write_case
from tests.reference.gather import NO_LABEL, gather

SETTINGS = {"suppress_health_check": [HealthCheck.too_slow]}


def definition(case: dict[str, Any], depth: int) -> tuple[list[list[int]], list[list[float]]]:
    """Targets by following predictions: position q = p + 1 continues p if it has the same attention
    segment and holds the very token that p predicts. The target of p at depth d is the label of the
    d-th position that continues it.

    Tokens are told apart by a copy of the document for every segment.
    """
    copies, samples = [], []
    for sample in case["samples"]:
        samples.append([])
        for document, begin, length in sample:
            samples[-1].append((len(copies), begin, length))
            first = 1 + 1000 * len(copies)
            copies.append([first + t for t in range(len(case["documents"][document]))])
    layout: dict[str, Any] = {
        **{"num_rows": case["rows"], "row_tokens": case["row_tokens"], "window": case["window"]},
        **{"capacity": case["capacity"], "joined": case["joined"], **case["options"]},
    }
    names = gather(copies, samples, **{**layout, "pad_token": 0})
    documents = case["documents"]
    real = gather(
        documents,
        case["samples"],
        chosen=_choose(documents) if case["chosen"] else None,
        weights=_weigh(documents) if case["weighed"] else None,
        loss=case["loss"],
        **layout,
    )
    segment = np.repeat(np.arange(len(names.rooms)), names.rooms).tolist()
    labels, weights = [], []
    for p in range(len(names.tokens)):
        labels.append([NO_LABEL] * depth)
        weights.append([0.0] * depth)
        q = p
        for d in range(depth):
            continued = q + 1 < len(segment) and segment[q + 1] == segment[q]
            if not continued or names.labels[q] != names.tokens[q + 1]:
                break
            q += 1
            labels[p][d], weights[p][d] = real.labels[q], real.loss_mask[q]
    return labels, weights


def opened(folder: Path, case: dict[str, Any], **options: Any) -> PackedDataset:
    dataset = write_case(folder, case)
    return PackedDataset(
        dataset, samples_of(case), loss=case["loss"], **{**case["options"], **options}
    )


def batch_of(data: PackedDataset, case: dict[str, Any], kind: str = "stream") -> dict[str, Any]:
    layout = BatchLayout(
        micro_batch_tokens=case["rows"] * case["row_tokens"],
        kind="stream" if kind == "stream" else "rows",
        row_tokens=case["row_tokens"],
        cu_seqlens="padded" if kind == "padded" else "exact",
        cu_seqlens_per_row=kind in ("per row", "padded"),
    )
    view = StepView(window=case["window"])
    return data.micro_batch(
        range(len(case["samples"])), layout=layout, capacity=case["capacity"], view=view
    )


def refuses(options: dict[str, Any]) -> bool:
    """Whether labels cross segments, or nothing shows where documents of a segment end."""
    return options["attention"] == "group" or (
        options["attention"] == "sample"
        and (options["label_boundary"], options["positions"]) != ("document", "segment")
    )


@settings(max_examples=3 * settings().max_examples, **SETTINGS)
@given(
    case=corpora(),
    depth=st.integers(1, 5),
    kind=st.sampled_from(["stream", "rows", "per row", "padded"]),
)
def test_targets_are_as_defined(case: dict[str, Any], depth: int, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if refuses(case["options"]):
            with pytest.raises(ConfigError, match="do not show the ends of all documents"):
                opened(Path(folder), case, num_mtp_targets=depth)
            return
        data = opened(Path(folder), case, num_mtp_targets=depth)
        batch = batch_of(data, case, kind)
        labels, weights = definition(case, depth)
        shape = (*batch["labels"].shape, depth)
        assert batch["mtp_labels"].dtype == torch.int64 and batch["mtp_labels"].shape == shape
        assert batch["mtp_loss_mask"].dtype == torch.float32
        assert batch["mtp_labels"].flatten(0, 1).tolist() == labels
        assert batch["mtp_loss_mask"].flatten(0, 1).tolist() == weights


@settings(**SETTINGS)
@given(case=corpora(), data=st.data())
def test_a_changed_document_changes_no_target_of_another(
    case: dict[str, Any], data: st.DataObject
) -> None:
    case["options"]["label_boundary"] = "document"
    case["chosen"] = False
    if refuses(case["options"]):
        return
    chosen = data.draw(st.integers(0, len(case["documents"]) - 1))
    documents = [list(document) for document in case["documents"]]
    documents[chosen] = [127 - token for token in documents[chosen]]
    targets = []
    for changed in (case, {**case, "documents": documents}):
        with tempfile.TemporaryDirectory() as folder:
            packed = opened(Path(folder), changed, num_mtp_targets=3)
            targets.append(batch_of(packed, case)["mtp_labels"].flatten(0, 1))
    owners = gather(
        [[d + 1] * len(document) for d, document in enumerate(documents)],
        case["samples"],
        **{"num_rows": case["rows"], "row_tokens": case["row_tokens"]},
        **{"capacity": case["capacity"], **case["options"], "pad_token": 0},
    ).tokens
    others = torch.tensor(owners) != chosen + 1
    assert torch.equal(targets[0][others], targets[1][others])
    has_target = (targets[0] >= 0)[~others].any()
    assert not has_target or not torch.equal(targets[0][~others], targets[1][~others])


def test_example_of_the_module(tmp_path: Path) -> None:
    documents = [[5, 6, 7, 8, 9, 10], [1, 2]]
    data = packed_as(tmp_path, documents, {6: [[(0, 0, 4), (1, 0, 2)]]}, num_mtp_targets=2)
    sample = data[0]
    assert sample["mtp_labels"].T.tolist() == [
        [7, 8, 9, -100, -100, -100],
        [8, 9, -100, -100, -100, -100],
    ]
    assert sample["mtp_loss_mask"].T.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_slices_for_sequence_parallelism_have_the_targets_of_the_whole(tmp_path: Path) -> None:
    """The last positions of a slice need labels of the next one."""
    documents = [list(range(1, 65)) for _ in range(8)]
    samples = [[(d, 0, 64)] for d in range(8)]
    data = packed_as(tmp_path, documents, {64: samples}, num_mtp_targets=2)
    whole = next(iter(small_loader(data, 0, 1, micro=64)))
    shared = {"micro": 32, "sequence_parallel_size": 2}
    slices = [next(iter(small_loader(data, rank, 2, **shared))) for rank in range(2)]
    for name in ("mtp_labels", "mtp_loss_mask"):
        assert slices[0][name].shape == (1, 32, 2)
        assert torch.equal(torch.cat([part[name] for part in slices], dim=1), whole[name])


def test_megatron_rolls_our_labels_to_the_same_targets(tmp_path: Path) -> None:
    """Megatron-core makes its targets itself, from labels, loss mask and boundaries."""
    multi_token = pytest.importorskip("megatron.core.transformer.multi_token_prediction")
    from megapack.integrations.hosts.megatron import to_packed_seq_params  # noqa: PLC0415

    documents = [list(range(10 * d, 10 * d + n)) for d, n in enumerate((7, 3, 9, 1, 2))]
    samples = [[(0, 0, 5), (1, 0, 3), (3, 0, 1)], [(2, 2, 6), (4, 0, 2)]]
    data = packed_as(tmp_path, documents, {10: samples}, num_mtp_targets=3)
    batch = data.micro_batch([0, 1])
    params = to_packed_seq_params(batch["cu_seqlens"], batch["max_seqlen"])
    labels, mask = batch["labels"].clamp(min=0), batch["loss_mask"]
    for depth in range(3):
        labels, _ = multi_token.roll_tensor(labels, packed_seq_params=params)
        mask, _ = multi_token.roll_tensor(mask, packed_seq_params=params)
        assert torch.equal(mask, batch["mtp_loss_mask"][..., depth])
        wanted = batch["mtp_labels"][..., depth]
        assert torch.equal(torch.where(mask > 0, labels, -100), wanted)
    assert (batch["mtp_labels"] >= 0).any(), "some depth has targets"


def test_windows_and_documents_of_one_attention_segment_end_targets(tmp_path: Path) -> None:
    """With attention ``sample``, documents begin where positions restart."""
    documents, samples = [[5, 6, 7, 8, 9], [1, 2, 3]], [[(0, 0, 5), (1, 0, 3)]]
    data = packed_as(tmp_path, documents, {8: samples}, attention="sample", num_mtp_targets=1)
    for window, wanted in ((None, [7, 8, 9, -100, -100]), (4, [7, 8, 9, -100, -100])):
        batch = data.micro_batch([0], view=StepView(window=window))
        assert batch["mtp_labels"].flatten().tolist() == [*wanted, 3, -100, -100]
    batch = data.micro_batch([0], view=StepView(window=3))
    assert batch["cu_seqlens"].tolist() == [0, 3, 6, 8]
    assert batch["mtp_labels"].flatten().tolist() == [7, 8, -100, -100, -100, -100, -100, -100]
