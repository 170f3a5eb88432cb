"""Every backend gives the reference's ids; `auto` notices if one does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from megapack.errors import ConfigError, DataError, MegapackError
from megapack.tokenization.corpus.documents import ReadOptions, TextBlock
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.readers import plan_shards
from megapack.tokenization.corpus.streams import InputFile
from megapack.tokenization.corpus.token_values import LossWeights
from megapack.tokenization.tokenizers.encoders import (
    BACKENDS,
    Encoder,
    GuardedEncoder,
    Limits,
    open_encoder,
    open_reference,
    resident_bytes,
)
from megapack.tokenization.tokenizers.probe import choose_backend, first_difference
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

from ..helpers import encoded


def test_bytes_are_their_own_ids() -> None:
    encoder = open_encoder(TokenizerFiles.open("bytes"), "bytes")
    assert encoded(encoder, ["a", "", "\u00e9"]) == [[97], [], [0xC3, 0xA9]]


def test_sentencepiece_backend_equals_the_library(sp_model: Path, source_texts: list[str]) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sp_model))
    encoder = open_encoder(TokenizerFiles.open(str(sp_model)), "sentencepiece")
    texts = ["", *source_texts[:20], "\u65e5\u672c\u8a9e \x00 \U0001f600"]
    assert encoded(encoder, texts) == processor.encode(texts)
    assert encoded(encoder, []) == []


def test_threads_do_not_change_the_ids(bpe_json: Path, source_texts: list[str]) -> None:
    files = TokenizerFiles.open(str(bpe_json))
    alone = encoded(open_encoder(files, "gigatoken"), source_texts)
    assert encoded(open_encoder(files, "gigatoken", Limits(threads=2)), source_texts) == alone


@pytest.fixture(scope="module")
def pair(bpe_json: Path) -> tuple[Encoder, Encoder]:
    files = TokenizerFiles.open(str(bpe_json))
    return GuardedEncoder(files), open_encoder(files, "tokenizers")


@given(texts=st.lists(st.text(max_size=60), max_size=5))
def test_gigatoken_and_tokenizers_agree(pair: tuple[Encoder, Encoder], texts: list[str]) -> None:
    assert encoded(pair[0], texts) == encoded(pair[1], texts)


@pytest.fixture
def letter_bpe(tmp_path: Path, bpe_json: Path) -> TokenizerFiles:
    """A BPE whose only merge, ``a`` + 0xE0, shows whether a split runs before U+088F."""
    tree = json.loads(bpe_json.read_bytes())
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tree["model"]["vocab"] = {**alphabet, "a\u00e0": len(alphabet)}
    tree["model"]["merges"] = [["a", "\u00e0"]]
    tree["added_tokens"] = []
    path = tmp_path / "letters.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return TokenizerFiles.open(str(path))


NEW_LETTER = "a\u088fb"  # U+088F came with Unicode 17


def test_letters_of_unicode_17_go_to_the_reference(letter_bpe: TokenizerFiles) -> None:
    reference = open_encoder(letter_bpe, "tokenizers")
    texts = ["plain", NEW_LETTER, "", "more"]
    assert encoded(open_encoder(letter_bpe, "gigatoken"), texts) != encoded(reference, texts), (
        "the libraries agree now: the GuardedEncoder can go"
    )
    assert encoded(GuardedEncoder(letter_bpe), texts) == encoded(reference, texts)


def test_control_symbols_in_a_text_go_to_sentencepiece(sp_model: Path) -> None:
    files = TokenizerFiles.open(str(sp_model))
    texts = ["plain", "a <s> b", "</s", "s>", "</s></s>", "end"]
    reference = encoded(open_encoder(files, "sentencepiece"), texts)
    assert encoded(open_encoder(files, "gigatoken"), texts) != reference
    assert encoded(GuardedEncoder(files), texts) == reference


def test_auto_chooses_gigatoken(
    bpe_json: Path, sp_model: Path, source_files: list[InputFile]
) -> None:
    shards = plan_shards(source_files, shard_bytes=1 << 18, json_key="text")
    notes: list[str] = []
    for path, library in ((bpe_json, "tokenizers"), (sp_model, "sentencepiece")):
        files, expected = TokenizerFiles.open(str(path)), f"gigatoken+{library}"
        assert choose_backend(files, "auto", shards, ReadOptions(), notes.append)[0] == expected
        assert open_encoder(files, expected).backend == expected
    assert notes == []


def test_auto_falls_back(tmp_path: Path, bpe_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "x.txt"
    text.write_text("def function(argument):\n    return argument\n")
    original = gigatoken.Tokenizer.encode_batch

    def wrong_in_one_token(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows = original(self, *args, **kwargs).to_list()
        return type(original(self, ["a"]))([[*row[:3], 5, *row[4:]] for row in rows])

    monkeypatch.setattr(gigatoken.Tokenizer, "encode_batch", wrong_in_one_token)
    notes: list[str] = []
    files = TokenizerFiles.open(str(bpe_json))
    shards = plan_shards(find_inputs([str(text)]), shard_bytes=1000, json_key="text")
    assert choose_backend(files, "auto", shards, ReadOptions(), notes.append)[0] == "tokenizers"
    [note] = notes
    assert note.startswith("gigatoken differs from tokenizers, which is used instead: ")


def test_auto_falls_back_if_gigatoken_cannot_run(tmp_path: Path, bpe_json: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bpe_json))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
    )
    path = tmp_path / "odd.json"
    tokenizer.save(str(path))
    files = TokenizerFiles.open(str(path))
    notes: list[str] = []
    assert choose_backend(files, "auto", [], ReadOptions(), notes.append)[0] == "tokenizers"
    assert "gigatoken is not verified for" in notes[0]
    with pytest.raises(ConfigError, match="gigatoken cannot run"):
        open_encoder(files, "gigatoken")


def test_difference_names_document_token_and_text(letter_bpe: TokenizerFiles) -> None:
    block = TextBlock.of_texts(["same", f"a longer text with {NEW_LETTER} in it"])
    reference = open_encoder(letter_bpe, "tokenizers")
    difference = first_difference(block, reference, open_encoder(letter_bpe, "gigatoken"))
    assert (
        difference is not None
        and difference.startswith("text 1, token ")
        and r"a\u088fb" in difference
    )
    expected, other = re.findall(r"\[.*?\]", difference)
    assert expected != other
    assert first_difference(block, reference, reference) is None


def test_wrong_or_missing_backend_is_refused(
    sp_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = TokenizerFiles.open(str(sp_model))
    with pytest.raises(ConfigError, match=r"'tokenizers' does not run .*choose from sentencepiece"):
        open_encoder(files, "tokenizers")
    monkeypatch.setitem(__import__("sys").modules, "gigatoken", None)
    with pytest.raises(MegapackError, match=r"pip install gigatoken"):
        open_encoder(files, "gigatoken")
    notes: list[str] = []
    assert choose_backend(files, "auto", [], ReadOptions(), notes.append)[0] == "sentencepiece"
    assert "many times faster" in notes[0]


def test_word_cache_is_bounded(bpe_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = np.random.default_rng(0).integers(97, 123, (600_000, 9), np.uint8)
    letters[:, 0] = ord(" ")
    parts = [chunk.tobytes().decode() for chunk in np.array_split(letters, 12)]
    files = TokenizerFiles.open(str(bpe_json))
    before = resident_bytes()
    encoder = open_encoder(files, "gigatoken")
    expected = [encoded(encoder, [part]) for part in parts]
    grown = resident_bytes() - before
    assert grown > 20 << 20, "gigatoken's cache is small now: Limits.memory_bytes can go"
    loads: list[str] = []
    load = gigatoken.Tokenizer.__init__

    def counted(self: Any, source: Any) -> None:
        loads.append(str(type(source)))
        load(self, source)

    monkeypatch.setattr(gigatoken.Tokenizer, "__init__", counted)
    encoder = open_encoder(files, "gigatoken", Limits(memory_bytes=grown // 8))
    assert [encoded(encoder, [part]) for part in parts] == expected
    assert len(loads) > 1, "the cache was never dropped"


def test_hashes_depend_on_the_text(source_texts: list[str]) -> None:
    block = TextBlock.of_texts(source_texts)
    hashes = block.text_hashes()
    assert hashes.dtype == np.uint64
    assert len(set(hashes.tolist())) == len(set(source_texts))
    kept = block.select(np.arange(len(block)) % 3 == 1)
    assert kept.strings() == source_texts[1::3]
    assert kept.text_hashes().tolist() == hashes[1::3].tolist()


TEXT = "if x:\n    return 'caf\u00e9 \u4e2d\U0001f600'"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe_json", "sp_model"])
def test_backends_decode_what_they_encode(tokenizer: str, request: pytest.FixtureRequest) -> None:
    source = tokenizer if tokenizer == "bytes" else str(request.getfixturevalue(tokenizer))
    files = TokenizerFiles.open(source)
    end = files.special_token("eod")
    for backend in (*BACKENDS[files.kind], "guarded"):
        guarded = backend == "guarded"
        if guarded and files.kind == "bytes":
            continue
        encoder = GuardedEncoder(files) if guarded else open_encoder(files, backend)
        [ids] = encoded(encoder, [TEXT])
        assert encoder.decode(ids) == TEXT, backend
        assert encoder.decode([*ids, end.id, end.id]) == TEXT + end.text * 2, backend


def test_id_outside_the_vocabulary_is_refused(sp_model: Path) -> None:
    """Data of another tokenizer gave "bytes must be in range(0, 256)"."""
    for source, wrong in (("bytes", 259), (str(sp_model), 2000), ("bytes", -1)):
        encoder = open_reference(TokenizerFiles.open(source))
        with pytest.raises(DataError, match=rf"token id {wrong} is outside the .* ids of {source}"):
            encoder.decode([1, wrong, 5])


def test_tokenizer_changed_after_opening_is_refused(tmp_path: Path, bpe_json: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(bpe_json.read_bytes())
    files = TokenizerFiles.open(str(path))
    path.write_bytes(bpe_json.read_bytes() + b" ")
    for backend in BACKENDS["hf"]:
        with pytest.raises(DataError, match=r"tokenizer\.json of tokenizer .* was changed"):
            open_encoder(files, backend)


# ---- Loss weights: characters of tokens, weights of documents


@pytest.mark.parametrize("kind", ["bytes", "sp_model", "bpe_json"])
def test_spans_contain_the_characters_of_tokens(
    kind: str, request: pytest.FixtureRequest, source_texts: list[str]
) -> None:
    name = kind if kind == "bytes" else str(request.getfixturevalue(kind))
    encoder = open_reference(TokenizerFiles.open(name))
    for text in ["a  b\u00e9\n", "\u65e5\u672c \U0001f600!", *source_texts[:8]]:
        [ids] = encoded(encoder, [text])
        spans = encoder.spans(text)
        assert spans.shape == (len(ids), 2)
        assert (np.diff(spans[:, 0]) >= 0).all() and spans.max() <= len(text)
        for token, (begin, end) in zip(ids, spans.tolist(), strict=True):
            shown = encoder.decode([token]).strip()
            assert shown in text[begin:end] or "\ufffd" in shown, (shown, text[begin:end])
        covered = {at for begin, end in spans.tolist() for at in range(begin, end)}
        assert covered >= {at for at, c in enumerate(text) if not c.isspace()}


def test_weights_of_a_document_are_read_from_spans_lists_and_files(tmp_path: Path) -> None:
    def spans(text: str) -> np.ndarray:
        assert text == "ab cd ef"
        return np.array([[0, 2], [2, 5], [5, 6], [6, 8]])

    np.save(tmp_path / "w.npy", np.arange(4))
    np.save(tmp_path / "complex.npy", np.ones(4, complex))
    (tmp_path / "empty.npy").touch()
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04")
    for value, expected in (
        ("", [1, 1, 1, 1]),
        ("null", [1, 1, 1, 1]),
        ("[]", [1, 1, 1, 1]),
        ("[[2, 5, 0.5]]", [1, 0.5, 1, 1]),
        ("[[1, 3, 0], [2, 6, 3]]", [0, 3, 3, 1]),
        ("[1, 2, 0, 0.25]", [1, 2, 0, 0.25]),
        (json.dumps(str(tmp_path / "w.npy")), [0, 1, 2, 3]),
    ):
        assert LossWeights().read(value, 4, "ab cd ef", spans).tolist() == expected
    for value, message in (
        ("[1, 2]", "2 rows, but the document has 4 tokens"),
        ("[[2, 2, 1]]", "span .2, 2., which is empty or outside"),
        ("[[8, 9, 1]]", "span .8, 9., which is empty or outside the 8 characters of the text"),
        ("[[0, 2, -1]]", "loss weight 0 is -1"),
        ("[1, 1, 1, 1e9]", "column value 1000000000.0 is outside float16"),
        ('["1", "1", "1", "1"]', "give numbers"),
        (f"[1, 1, 1, {10**400}]", "a column value is outside float16"),
        (f"[1, 1, 1, {'1' * 5000}]", "not numbers"),
        *((json.dumps(str(path)), "not numbers") for path in tmp_path.glob("[cez]*.npy")),
        ("true", "they are true; give a list"),
        ('"nowhere.npy"', "nowhere.npy"),
    ):
        with pytest.raises(DataError, match=message):
            LossWeights().read(value, 4, "ab cd ef", spans)
