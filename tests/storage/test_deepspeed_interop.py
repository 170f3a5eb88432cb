"""DeepSpeed's token files, in both of its formats, become datasets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peers import peer

from megapack.errors import FormatError
from megapack.storage.importing import import_dataset
from megapack.storage.verify import verify
from storage.strategies import files, write
from storage.test_importing import DOCUMENTS, check, same_file

torch = peer("torch")
deepspeed = peer("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset")


@pytest.mark.parametrize(
    ("raw", "dtype"), [(np.uint16, np.uint16), (np.uint32, np.int32), (np.int32, np.int32)]
)
def test_deepspeed_datasets_are_linked_not_copied(tmp_path: Path, raw: type, dtype: type) -> None:
    builder = deepspeed.MMapIndexedDatasetBuilder(f"{tmp_path}/theirs.bin", raw)
    for document in DOCUMENTS:
        builder.add_item_numpy(np.array(document, raw))
        builder.end_document()
    builder.finalize(f"{tmp_path}/theirs.idx")
    said = import_dataset(tmp_path / "theirs", tmp_path / "ours")
    assert "3 documents, 9" in said and "(mmididx, .bin hard link)" in said
    check(tmp_path / "ours", dtype=dtype)
    assert same_file(tmp_path / "ours.bin", tmp_path / "theirs.bin")


def test_the_format_before_mmididx_is_converted(tmp_path: Path) -> None:
    builder = deepspeed.IndexedDatasetBuilder(f"{tmp_path}/old.bin", np.int32)
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document[:1]))
        builder.add_item(torch.tensor(document[1:]))
        builder.end_document()
    builder.finalize(f"{tmp_path}/old.idx")
    assert [f.code for f in verify(tmp_path / "old")] == ["legacy"]
    import_dataset(tmp_path / "old", tmp_path / "new")
    write(tmp_path / "expected", [[d[:1], d[1:]] for d in DOCUMENTS], np.int32)
    assert files(tmp_path / "new") == files(tmp_path / "expected")
    index = (tmp_path / "old.idx").read_bytes()
    (tmp_path / "old.idx").write_bytes(index[:-1])
    with pytest.raises(FormatError, match="truncated"):
        import_dataset(tmp_path / "old", tmp_path / "no")
