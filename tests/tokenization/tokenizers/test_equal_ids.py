"""The default backend gives the reference's token ids, for every tokenizer and every text.

Random tokenizers are compared on texts built from their own tokens. The gate runs a few of them,
`make test-all` the full count.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from megapack.errors import ConfigError, FormatError, is_foreign
from megapack.tokenization.corpus.documents import TextBlock
from megapack.tokenization.tokenizers.encoders import (
    Encoder,
    GuardedEncoder,
    documents_with,
    open_reference,
)
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles
from megapack.tokenization.tokenizers.verified import _guarded_contents

from ..helpers import encoded
from ..random_tokenizers import (
    contents_of,
    random_text,
    random_tokenizer,
    train_sentencepiece,
)

FULL = pytest.mark.pages


def accepted(encoder: Encoder, texts: list[str]) -> list[str]:
    """Return the texts on which the reference does not fail (overlapping added tokens make it
    panic).
    """
    result = []
    for text in texts:
        try:
            encoded(encoder, [text])
        except BaseException as error:
            assert is_foreign(error)
        else:
            result.append(text)
    return result


def compare(path: Path, contents: list[str], rng: random.Random, num_texts: int) -> bool:
    """Compare on random texts; return whether the fast encoder ran at all."""
    try:
        files = TokenizerFiles.open(str(path))
        reference = open_reference(files)
    except FormatError:
        return False
    try:
        guarded = GuardedEncoder(files)
    except ConfigError:
        return False
    texts = [random_text(rng, contents) for _ in range(num_texts)]
    texts = accepted(reference, texts)
    expected = encoded(reference, texts)
    for text, ours, theirs in zip(texts, encoded(guarded, texts), expected, strict=True):
        assert ours == theirs, (path.read_bytes()[:3000], text)
    return True


@pytest.mark.parametrize(
    ("number", "num_texts"), [(60, 60), pytest.param(3000, 300, marks=FULL)], ids=["some", "all"]
)
def test_random_tokenizers_equal_the_reference(tmp_path: Path, number: int, num_texts: int) -> None:
    path, compared = tmp_path / "tokenizer.json", 0
    for seed in range(number):
        rng = random.Random(seed)
        tree = random_tokenizer(rng, usual=seed % 3 > 0)
        path.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")
        compared += compare(path, contents_of(tree, rng), rng, num_texts)
    assert compared > number // 10, "almost all tokenizers take the slow path"


@pytest.mark.parametrize(
    ("number", "num_texts"), [(8, 100), pytest.param(300, 300, marks=FULL)], ids=["some", "all"]
)
def test_random_sentencepiece_models_equal_the_reference(
    tmp_path: Path, number: int, num_texts: int
) -> None:
    path, compared = tmp_path / "tokenizer.model", 0
    for seed in range(number):
        rng = random.Random(seed)
        definition, symbols = train_sentencepiece(rng)
        path.write_bytes(definition)
        compared += compare(path, symbols, rng, num_texts)
    assert compared > 0, "all models take the slow path"


def test_guarded_text_is_found_at_any_position() -> None:
    texts = ["", "a<x>", "plain", "", "<x", ">y", "<x>", "zz<y>"]
    block = TextBlock.of_texts(texts)
    has_guarded = documents_with(block, (b"<x>", b"<y>"))
    expected = np.array(["<x>" in text or "<y>" in text for text in texts])
    assert (has_guarded | ~expected).all(), "a document with one is not found"
    assert not has_guarded[[2, 3]].any()
    many = tuple(f"<x{i}>".encode() for i in range(40))
    assert documents_with(TextBlock.of_texts(["<x39>", "a", "b<x7>"]), many).tolist() == [1, 0, 1]


def test_added_tokens_that_can_overlap_are_guarded() -> None:
    """The order of the search decides which of two overlapping tokens matches."""

    def guarded(*contents: str) -> set[bytes]:
        tokens = [{"id": i, "content": content} for i, content in enumerate(contents)]
        return {*_guarded_contents(tokens, {}, normalizes=False, plain_allowed=True)}

    assert guarded("<a>", "<b>") == set()
    assert guarded("<a", "a>", "<b>") == {b"<a", b"a>"}
    assert guarded("aba", "<b>") == {b"aba"}, "it overlaps a copy of itself"
    assert guarded("<a>", "x<a>y") == {b"<a>"}, "a search for the inner one finds both"


def test_special_tokens_as_text_equal_split_special_tokens(tmp_path: Path, bpe_json: Path) -> None:
    tree = json.loads(bpe_json.read_bytes())
    contents = [token["content"] for token in tree["added_tokens"]]
    theirs = Tokenizer.from_file(str(bpe_json))
    theirs.encode_special_tokens = True
    files = TokenizerFiles.open(str(bpe_json))
    assert files.controls == {token["content"]: token["id"] for token in tree["added_tokens"]}
    as_text = dataclasses.replace(files, special_as_text=True)
    rng = random.Random(0)
    texts = [random_text(rng, contents) for _ in range(200)]
    expected = [row.ids for row in theirs.encode_batch(texts, add_special_tokens=False)]
    assert encoded(GuardedEncoder(as_text), texts) == expected
    assert encoded(open_reference(as_text), texts) == expected
    assert encoded(GuardedEncoder(files), texts) != expected
