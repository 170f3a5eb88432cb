"""What a tokenizer is, and which tokens begin and end its documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer

from megapack.errors import ConfigError, FormatError
from megapack.tokenization.tokenizer import TokenizerFiles


def test_the_byte_tokenizer_has_its_specials_behind_the_bytes() -> None:
    files = TokenizerFiles.open("bytes")
    assert files.vocab_size == 259
    assert files.special_token("eod").id == 256
    assert files.special_token("bos").id == 257


def test_a_sentencepiece_model_says_its_own_specials(sp_model: Path) -> None:
    files = TokenizerFiles.open(str(sp_model))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sp_model))
    assert (files.kind, files.vocab_size) == ("sentencepiece", processor.vocab_size())
    assert files.special_token("bos").id == processor.bos_id()
    assert files.special_token("eod").id == processor.eos_id()


def test_a_tokenizer_json_is_found_alone_or_in_its_directory(bpe_json: Path) -> None:
    reference = Tokenizer.from_file(str(bpe_json))
    for source in (bpe_json, bpe_json.parent):
        files = TokenizerFiles.open(str(source))
        assert (files.kind, files.vocab_size) == ("hf", reference.get_vocab_size())
        assert files.special_token("eod").id == reference.token_to_id("<|endoftext|>")
        assert files.special_token("bos").id == reference.token_to_id("<|begin_of_text|>")
        assert files.special_token("eod", "<|eot_id|>").id == reference.token_to_id("<|eot_id|>")


def test_the_configuration_beside_a_tokenizer_decides(tmp_path: Path, bpe_json: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe_json.read_bytes())
    config = {"bos_token": {"content": "<|eot_id|>"}, "eos_token": "<|end_header_id|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = TokenizerFiles.open(str(tmp_path))
    assert files.special_token("bos").text == "<|eot_id|>"
    assert files.special_token("eod").text == "<|end_header_id|>"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json is not valid JSON"):
        TokenizerFiles.open(str(tmp_path))


def test_an_end_token_is_never_guessed(tmp_path: Path, bpe_json: Path) -> None:
    tree = json.loads(bpe_json.read_bytes())
    for token, replacement in zip(tree["added_tokens"], ("</s>", "<eos>"), strict=False):
        tree["model"]["vocab"][replacement] = tree["model"]["vocab"].pop(token["content"])
        token["content"] = replacement
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tree))
    files = TokenizerFiles.open(str(path))
    with pytest.raises(ConfigError, match="could be </s> or <eos>; name it with --eod-token"):
        files.special_token("eod")
    with pytest.raises(ConfigError, match=r"bos token of .* is not declared"):
        files.special_token("bos")
    with pytest.raises(ConfigError, match="'<none>' is not a special token"):
        files.special_token("eod", "<none>")
    assert files.special_token("eod", "<eos>").text == "<eos>"


def test_what_is_no_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer at some/model; .*nothing is downloaded"):
        TokenizerFiles.open("some/model")
    with pytest.raises(ConfigError, match=r"holds neither tokenizer\.json"):
        TokenizerFiles.open(str(tmp_path))
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"x\.txt: a tokenizer is"):
        TokenizerFiles.open(str(tmp_path / "x.txt"))
    for name, content in (("x.json", "{}"), ("y.json", "["), ("x.model", "not a model")):
        (tmp_path / name).write_text(content)
        with pytest.raises(FormatError, match=f"{name} is not"):
            TokenizerFiles.open(str(tmp_path / name))
