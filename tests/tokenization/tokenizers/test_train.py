"""Trained tokenizers: the same file from the same input, and no byte of text lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from megapack.errors import ConfigError, DataError
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import InputFile, find_inputs
from megapack.tokenization.tokenizers.train import TrainResult, train_tokenizer

HARD = "if x:\n\treturn  3.14  # \u00e9\u4e2d\u6587 \U0001f600\x00\r\n    end"


def train(
    files: list[InputFile], output: Path, *, overwrite: bool = False, **options: object
) -> TrainResult:
    return train_tokenizer(
        files,
        str(output),
        read=ReadOptions(),
        faults=Faults("skip"),
        overwrite=overwrite,
        **{"vocab_size": 600, "sample_bytes": 1 << 18, **options},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("type", ["sentencepiece", "bpe-json"])
def test_equal_input_gives_one_file(
    tmp_path: Path, source_files: list[InputFile], type: str
) -> None:
    first = train(source_files, tmp_path / "a", type=type)
    second = train(source_files, tmp_path / "b", type=type)
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.vocab_size == second.vocab_size == 600


def test_a_sentencepiece_model_gives_every_text_back(sp_model: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sp_model))
    assert processor.decode(processor.encode(HARD)) == HARD
    digits = [processor.id_to_piece(i) for i in processor.encode("31415")]
    assert digits[-5:] == list("31415"), "digits are split"


def test_a_bpe_json_gives_every_text_back_and_has_its_special_tokens(bpe_json: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bpe_json))
    assert tokenizer.decode(tokenizer.encode(HARD).ids, skip_special_tokens=False) == HARD
    assert tokenizer.encode("<|eot_id|>").ids == [tokenizer.token_to_id("<|eot_id|>")]


def test_special_tokens_are_never_split(tmp_path: Path, source_files: list[InputFile]) -> None:
    result = train(source_files, tmp_path / "m.model", special_tokens=("<|eot_id|>",))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(result.path))
    assert processor.piece_to_id("<|eot_id|>") in processor.encode("a<|eot_id|>b")


def test_sample_is_bounded_and_of_all_the_corpus(tmp_path: Path, source_texts: list[str]) -> None:
    for i in range(8):
        text = "".join(source_texts).replace("self", f"only{i}only")
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    files = find_inputs([str(tmp_path)])
    result = train(files, tmp_path / "m.json", sample_bytes=3 << 20, type="bpe-json")
    assert 3 << 20 <= result.num_text_bytes <= 5 << 20, "the sample, and no more than a slice"
    vocabulary = Tokenizer.from_file(str(result.path)).get_vocab()
    assert any("only" in piece for piece in vocabulary)


def test_what_cannot_be_trained_is_said(tmp_path: Path, source_files: list[InputFile]) -> None:
    with pytest.raises(ConfigError, match="299 is below 300"):
        train(source_files, tmp_path / "x.model", vocab_size=299)
    (tmp_path / "small.txt").write_text("tiny corpus")
    with pytest.raises(ConfigError, match=r"sentencepiece cannot train.*--vocab-size"):
        train(find_inputs([str(tmp_path / "small.txt")]), tmp_path / "x.model", vocab_size=5000)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="no documents to train"):
        train(find_inputs([str(tmp_path / "empty.txt")]), tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


def test_tokenizer_is_replaced_when_asked(tmp_path: Path, source_files: list[InputFile]) -> None:
    path = tmp_path / "m.json"
    small: dict[str, object] = {"type": "bpe-json", "sample_bytes": 1 << 16}
    assert train(source_files, path, **small).written
    before = path.read_bytes()
    again = train(source_files, path, **small)
    assert (again.written, again.vocab_size) == (False, 600)
    with pytest.raises(ConfigError, match=r"m\.json is there already: .* --overwrite"):
        train(source_files, path, vocab_size=500, **small)
    assert path.read_bytes() == before
    assert train(source_files, path, vocab_size=500, overwrite=True, **small).written
    assert path.read_bytes() != before


def test_a_name_that_is_no_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    nothing: list[InputFile] = []
    for output, message in ((tmp_path, "is a directory"), (tmp_path / ("x" * 250), "250 bytes")):
        with pytest.raises(ConfigError, match=message):
            train(nothing, output, overwrite=True)
