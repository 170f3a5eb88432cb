"""All formats give the same documents; faulty ones are reported by file and line."""

from __future__ import annotations

import gzip
import itertools
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megapack.errors import ConfigError, DataError
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.readers import plan_shards, read_blocks

from ..helpers import write_jsonl

TEXTS = [f"document {i} \u00e9\u4e2d\U0001f600 " * (1 + i % 7) for i in range(300)]


def read(
    *paths: Path, shard_bytes: int = 1000, on_error: Any = "fail", **options: Any
) -> tuple[list[str], Faults]:
    """Return all documents, read shard by shard as a build does."""
    read_options = ReadOptions(block_bytes=2048, **options)
    faults = Faults(on_error)
    texts: list[str] = []
    files = find_inputs([str(path) for path in paths])
    for shard in plan_shards(files, shard_bytes=shard_bytes, json_key=read_options.json_key):
        for block in read_blocks(shard.pieces, read_options, faults):
            texts += block.strings()
    return texts, faults


def compressed(path: Path) -> list[Path]:
    data = path.read_bytes()
    gz, zst = path.with_name("x.jsonl.gz"), path.with_name("x.json.zst")
    gz.write_bytes(gzip.compress(data))
    zst.write_bytes(zstandard.ZstdCompressor().compress(data))
    return [gz, zst]


def write_table(table: Any, path: Path, rows: int = 1000, **options: Any) -> Path:
    """Write columns, records or a table as Parquet, an Arrow file or (.arrows) an Arrow stream, in
    groups of ``rows``.
    """
    if isinstance(table, dict):
        table = pa.table(table)
    elif isinstance(table, list):
        table = pa.Table.from_pylist(table)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, **options)
        return path
    new = pa.ipc.new_stream if path.suffix == ".arrows" else pa.ipc.new_file
    arrow = path.with_suffix(".arrow")
    with new(str(arrow), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return arrow


def both(folder: Path, records: list[Any]) -> tuple[Path, Path]:
    """Write records as JSON Lines and as Parquet."""
    lines = write_jsonl(folder / "x.jsonl", records)
    return lines, write_table(records, folder / "x.parquet", 37)


each_table = pytest.mark.parametrize("name", ["x.parquet", "x.arrow", "x.arrows"])


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    plain = write_jsonl(tmp_path / "x.jsonl", [{"id": i, "text": t} for i, t in enumerate(TEXTS)])
    table = {"id": range(len(TEXTS)), "text": TEXTS}
    tables = [write_table(table, tmp_path / name, 37) for name in ("x.parquet", "x.arrow")]
    tables.append(write_table(table, tmp_path / "stream.arrows", 37))
    tables.append(write_table(table, tmp_path / "packed.arrow", 37, compression="zstd"))
    directory = tmp_path / "texts"
    directory.mkdir()
    for i, text in enumerate(TEXTS):
        (directory / f"{i:05d}.txt").write_text(text, encoding="utf-8")
    for path in (plain, *compressed(plain), *tables, directory):
        assert read(path)[0] == TEXTS, path


@pytest.mark.parametrize(
    "type",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
     pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)  # fmt: skip
@each_table
def test_every_column_type_of_text_is_read(tmp_path: Path, type: pa.DataType, name: str) -> None:
    binary = pa.types.is_binary(type) or pa.types.is_large_binary(type)
    values = [t.encode() for t in TEXTS] if binary else TEXTS
    table = {"n": range(300), "body": pa.array(values).cast(type), "m": range(300)}
    assert read(write_table(table, tmp_path / name, 100), json_key="body")[0] == TEXTS


@each_table
def test_missing_values_are_faults(tmp_path: Path, name: str) -> None:
    table = {"text": ["a", "b", None, "", "c"], "n": [1, 2, 3, 4, 5]}
    path = write_table(table, tmp_path / name, 2)
    with pytest.raises(DataError, match=r"x\..* row 2: missing value"):
        read(path)
    texts, faults = read(path, on_error="skip", shard_bytes=1)
    assert texts == ["a", "b", "c"]
    assert faults.counts == {"missing value": 1, "empty document": 1}
    assert [str(place) for place in faults.places["empty document"]] == [f"{path} row 3"]
    with pytest.raises(DataError, match=r"'body' is missing among: text, n; give --json-key text"):
        read(path, json_key="body")
    with pytest.raises(DataError, match=r"'n' has type int64; it must have strings"):
        read(path, json_key="n")
    path = write_table({"text": pa.nulls(2)}, path, 2)  # as pandas writes it
    assert read(path, on_error="skip")[1].counts == {"missing value": 2}
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"is not an? (parquet|Arrow) file"):
        read(path)


@pytest.mark.parametrize("name", ["x.arrow", "x.arrows"])
def test_truncated_arrow_file_is_an_error(tmp_path: Path, name: str) -> None:
    path = write_table({"text": TEXTS}, tmp_path / name, 37)
    data = path.read_bytes()
    for end in range(len(data) - 1, 100, -101):
        path.write_bytes(data[:end])
        with pytest.raises(DataError, match=r"x\.arrow is (not an Arrow file|damaged)"):
            read(path)


def test_hive_partition_is_not_a_column(tmp_path: Path) -> None:
    """Spark and others omit a column whose values are the names of folders."""
    (tmp_path / "year=2020").mkdir()
    write_table({"text": ["a"], "id": [1]}, tmp_path / "year=2020" / "x.parquet")
    assert read(tmp_path)[0] == ["a"]
    message = (
        r"x\.parquet: 'year' is a folder of the path \(year=2020\), not a column of the file; "
    )
    with pytest.raises(DataError, match=f"{message}give --json-key one of: text, id"):
        read(tmp_path, json_key="year")
    with pytest.raises(DataError, match=f"{message}give --split-key one of"):
        read(tmp_path, split_key="year")


DEEP = b'{"text": "a", "x": ' + b"[" * 910 + b"]" * 910 + b"}"
BAD_LINES = [
    (b'{"text": "x"', "malformed JSON", "delimiter"),
    (b'["text"]', "not a JSON object", "is a list"),
    (b'{"texts": "x"}', "missing key", "'text' is missing among: texts"),
    (b'{"text": 5}', "wrong type", "'text' is a number, not a string"),
    (b'{"text": null}', "wrong type", "'text' is null, not a string"),
    (b'{"text": "\xff"}', "invalid UTF-8", "can't decode byte 0xff"),
    (b'{"text": "\\ud800"}', "invalid UTF-8", "half a surrogate pair"),
    (DEEP, "malformed JSON", "over 900 nested values"),
]


@pytest.mark.parametrize(("line", "kind", "detail"), BAD_LINES, ids=range(len(BAD_LINES)))
@pytest.mark.parametrize("suffix", ["jsonl", "gz", "zst"])
def test_bad_line_stops(tmp_path: Path, line: bytes, kind: str, detail: str, suffix: str) -> None:
    path = tmp_path / "x.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 500 + line + b"\n" + good * 3)
    if suffix != "jsonl":
        path = compressed(path)[suffix == "zst"]
    with pytest.raises(DataError, match=rf"{path.name}:501: {kind} \(.*{detail}.*--on-error skip"):
        read(path)


def test_first_bad_line_stops_the_build(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for (first, kind, _), (second, _, _) in itertools.permutations(BAD_LINES, 2):
        path.write_bytes(b"\n" + b'{"text": ""}\n' + first + b"\n" + second + b"\n")
        with pytest.raises(DataError, match=rf"x\.jsonl:3: {kind}"):
            read(path)


def test_skipped_lines_are_counted_by_kind_with_places(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [b'{"text": "good"}']
    for line, _, _ in BAD_LINES:
        lines += [line, b"", b'{"text": ""}', b'{"text": "good"}'] * 2
    path.write_bytes(b"\n".join(lines) + b"\n")
    texts, faults = read(path, on_error="skip", shard_bytes=50)
    assert texts == ["good"] * 17
    assert faults.counts == {
        "malformed JSON": 4,
        "not a JSON object": 2,
        "missing key": 2,
        "wrong type": 4,
        "invalid UTF-8": 4,
        "blank line": 16,
        "empty document": 16,
    }
    places = [str(place) for place in faults.places["malformed JSON"]]
    assert places == [f"{path}:{line}" for line in (2, 6, 58)]
    assert len(faults.places["blank line"]) == 3, "examples are few"


def test_binary_text_file_is_refused(tmp_path: Path) -> None:
    """UTF-16 of English without a byte order mark is valid UTF-8, twice as long."""
    (tmp_path / "good.txt").write_bytes(b"\xef\xbb\xbfgood")
    (tmp_path / "none.txt").write_bytes(b"")
    for name, data, reason in (
        ("latin.txt", b"caf\xe9", "invalid UTF-8"),
        ("wide.txt", "plain English".encode("utf-16-le"), "NUL bytes .*UTF-16: .*iconv"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=f"{name}: {reason}"):
            read(tmp_path / name)
    texts, faults = read(tmp_path, on_error="skip")
    assert texts == ["good"], "a byte order mark is not text"
    assert faults.counts == {"invalid UTF-8": 1, "NUL bytes": 1, "empty document": 1}


def test_document_above_the_limit_is_refused_or_skipped(tmp_path: Path) -> None:
    path, parquet = both(tmp_path, [{"text": "a" * n} for n in (10, 5000, 20)])
    with pytest.raises(DataError, match=r"x\.jsonl:2: too long .*--max-document-bytes"):
        read(path, max_document_bytes=3000)
    for source in (path, *compressed(path), parquet):
        texts, faults = read(source, max_document_bytes=3000, on_error="skip")
        assert [len(text) for text in texts] == [10, 20]
        place = f"{source} row 1" if source == parquet else f"{source}:2"
        assert [str(place) for place in faults.places["too long"]] == [place]
    big = tmp_path / "big.txt"
    big.write_bytes(b"x" * 4000)
    with pytest.raises(DataError, match=r"big\.txt: too long"):
        read(big, max_document_bytes=3000)
    assert ReadOptions(max_document_bytes=3000).block_bytes == 3000
    with pytest.raises(ConfigError, match="block_bytes is 5; it must be at least 1024"):
        ReadOptions(block_bytes=5)


def test_split_key_hash_stays_with_its_document(tmp_path: Path) -> None:
    records = [{"id": i % 10, "text": t} for i, t in enumerate(TEXTS)]
    plain, parquet = both(tmp_path, records)

    def hashes(path: Path) -> list[int]:
        [shard] = plan_shards(find_inputs([str(path)]), shard_bytes=1 << 30, json_key="text")
        blocks = list(read_blocks(shard.pieces, ReadOptions(split_key="id"), Faults()))
        assert all(block.hashes is not None for block in blocks)
        return [int(h) for block in blocks for h in block.hashes]  # type: ignore[union-attr]

    plain_hashes = hashes(plain)
    assert plain_hashes == hashes(parquet)
    assert len(set(plain_hashes)) == 10
    assert plain_hashes[3] == plain_hashes[13]
    # A string of a writer that does not say UTF-8 is the same string.
    for values, column in (([True, False], [True, False]), (["a", "\u00fc"], [b"a", b"\xc3\xbc"])):
        write_jsonl(plain, [{"text": "x", "id": value} for value in values])
        write_table({"id": column, "text": ["x", "x"]}, parquet)
        assert hashes(plain) == hashes(parquet)
    for record in ({"text": "x"}, {"text": "x", "id": None}):
        write_jsonl(plain, [record])
        with pytest.raises(DataError, match=r"x\.jsonl:1: no split key"):
            hashes(plain)


def test_dotted_key_is_read_equally_from_all_formats(tmp_path: Path) -> None:
    records = [{"data": {"text": t, "id": i, "deep": {"n": "x"}}} for i, t in enumerate(TEXTS)]
    plain, parquet = both(tmp_path, records)
    for path in (plain, *compressed(plain), parquet):
        assert read(path, json_key="data.text", split_key="data.id")[0] == TEXTS, path
    message = r"'data\.body' is missing among: .*data\.deep\.n.*; see --json-key"
    for path in (plain, parquet):
        with pytest.raises(DataError, match=message):
            read(path, json_key="data.body")
    for path in both(tmp_path, [{"data": {"text": "nested"}, "data.text": "whole"}]):
        assert read(path, json_key="data.text")[0] == ["whole"], "the whole key comes first"


def test_parquet_structs_without_a_value_are_faults(tmp_path: Path) -> None:
    rows = [{"text": "a"}, None, {"text": None}, {"text": "b"}]
    path = write_table({"data": rows}, tmp_path / "x.parquet")
    texts, faults = read(path, json_key="data.text", on_error="skip")
    assert texts == ["a", "b"]
    assert faults.counts == {"missing value": 2}


def test_parquet_column_is_selected_by_exact_name(tmp_path: Path) -> None:
    """pyarrow selects columns by prefix, and two may have the same name."""
    path = write_table({"text.lang": ["en"], "text": ["hello"]}, tmp_path / "x.parquet")
    assert read(path)[0] == ["hello"]
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    write_table(twice, path)
    with pytest.raises(DataError, match=r"x\.parquet: there are several columns 'text'"):
        read(path)


def test_damaged_parquet_page_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    checked = {"compression": "none", "write_page_checksum": True}
    for options in ({"compression": "snappy"}, checked):
        write_table({"text": TEXTS}, path, use_dictionary=False, **options)
        data = bytearray(path.read_bytes())
        for at in range(400, 800):
            data[at] ^= 0x55
        path.write_bytes(bytes(data))
        with pytest.raises(DataError, match=r"x\.parquet is damaged .*; download it again"):
            read(path)


def test_columns_of_messages_are_lists(tmp_path: Path) -> None:
    """Rows may have values without a JSON type, such as the time of a message."""
    path = write_table({"chat": ['[{"role": "user", "content": "a"}]']}, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"'chat' has type string, not lists of messages"):
        read(path, json_key="chat", values="lists")
    message = {"role": "user", "content": "a", "at": datetime(2024, 5, 6, tzinfo=timezone.utc)}
    write_table({"chat": [[{**message, "role": b"user"}]]}, path)
    [text] = read(path, json_key="chat", values="lists")[0]
    assert json.loads(text) == [{**message, "at": str(message["at"])}], "binary is a string as well"


def test_chats_read_as_text_name_the_option(tmp_path: Path) -> None:
    """Skipping them would drop the whole corpus."""
    path = tmp_path / "x.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_jsonl(path, [{"id": 1, "chat": chat}])
    for key in ("text", "chat"):
        with pytest.raises(DataError, match=r"x\.jsonl:1: 'chat' is .*--messages-key chat$"):
            read(path, json_key=key)
    assert len(read(path, json_key="chat", values="lists")[0]) == 1
    assert read(path, on_error="skip")[0] == []
    write_jsonl(path, [{"id": 1, "notes": [{"page": 1}]}])
    with pytest.raises(DataError, match=r"'text' is missing among: .*--on-error skip"):
        read(path)


def test_missing_key_names_the_option(tmp_path: Path) -> None:
    for path in both(tmp_path, [{"chats": [1], "url": "u"}]):
        with pytest.raises(DataError, match=r"'messages' is missing among: .*--messages-key"):
            read(path, json_key="messages", values="lists")
        with pytest.raises(DataError, match=r"'id' is missing among: chats, url; see --split-key"):
            read(path, json_key="url", split_key="id")


@pytest.mark.parametrize("suffix", ["txt.gz", "rst.gz", "py.zst", "txt.zstd"])
def test_compressed_text_files_are_documents(tmp_path: Path, suffix: str) -> None:
    compress = gzip.compress if suffix.endswith("gz") else zstandard.ZstdCompressor().compress
    for i, text in enumerate(TEXTS[:20]):
        (tmp_path / f"{i:02d}.{suffix}").write_bytes(compress(b"\xef\xbb\xbf" + text.encode()))
    paths = sorted(tmp_path.iterdir())
    assert read(*paths)[0] == TEXTS[:20]
    data = paths[3].read_bytes()
    paths[3].write_bytes(data[:-5])
    with pytest.raises(DataError, match=rf"03\.{suffix} is truncated"):
        read(*paths)


ODD_LINES: list[tuple[bytes, list[str]]] = [
    (b'{"text": "a"}\r\n{"text": "b\\r\\n"}\r\n', ["a", "b\r\n"]),
    (b'\xef\xbb\xbf{"text": "a"}\n{"text": "no line end"}', ["a", "no line end"]),
    (b'{"text": "first", "text": "last"}\n', ["last"]),
    (b'{"text": "nul \\u0000 stays"}\n', ["nul \x00 stays"]),
    (b'{"text": "' + b"x" * 100_000 + b'"}\n{"text": "b"}\n', ["x" * 100_000, "b"]),
    (
        b'{"text": "\xe2\x80\xa8 is no line end, nor \xc2\x85"}\n',
        ["\u2028 is no line end, nor \x85"],
    ),
]


@pytest.mark.parametrize(("data", "texts"), ODD_LINES, ids=range(len(ODD_LINES)))
def test_unusual_lines_are_read_as_python_does(
    tmp_path: Path, data: bytes, texts: list[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    for shard_bytes in (len(data) // 30 + 1, len(data) // 3, 1 << 20):
        assert read(path, shard_bytes=shard_bytes)[0] == texts
    for packed in compressed(path):
        assert read(packed)[0] == texts
    lines = data.removeprefix(b"\xef\xbb\xbf").decode().rstrip("\r\n").split("\n")
    assert [json.loads(line)["text"] for line in lines] == texts, "the definition"


def test_json_array_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for data in ('[\n {"text": "a"},\n {"text": "b"}\n]\n', '[{"text": "a"}, {"text": "b"}]'):
        path.write_text(data)
        with pytest.raises(DataError, match=r"x\.json:1: .*each line must be an object.*jq -c"):
            read(path)
    path.write_text('{\n "text": "a"\n}\n')
    with pytest.raises(DataError, match=r"x\.json:1: malformed JSON .*each line must be an object"):
        read(path)
