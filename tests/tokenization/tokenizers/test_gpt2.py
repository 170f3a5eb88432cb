"""GPT-2's vocab.json and merges.txt give the ids of the libraries that define them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from peers import peer
from tokenizers import Tokenizer

from megapack.errors import ConfigError, FormatError
from megapack.tokenization.tokenizers.encoders import BACKENDS, GuardedEncoder, open_encoder
from megapack.tokenization.tokenizers.probe import hard_texts
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

from ..helpers import Build, encoded

END = "<|endoftext|>"


@pytest.fixture
def pair(tmp_path: Path, bpe_json: Path) -> Path:
    """A directory as openai-community/gpt2 had it at first: a vocabulary, its merges, no more.

    The merges were learned behind another split; GPT-2's own is what the files leave unsaid.
    """
    model = json.loads(bpe_json.read_bytes())["model"]
    directory = tmp_path / "gpt2"
    directory.mkdir()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"]), ""]
    (directory / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return directory


def test_ids_are_those_of_transformers(pair: Path, bpe_json: Path, source_texts: list[str]) -> None:
    host = peer("transformers").GPT2Tokenizer.from_pretrained(str(pair))
    files = TokenizerFiles.open(str(pair))
    texts = [*source_texts, *hard_texts(files), "a<|endoftext|>b <|endoftext|>", " lead", "trail "]
    expected = [host.encode(text, add_special_tokens=False) for text in texts]
    for backend in BACKENDS["hf"]:
        if backend == "gigatoken":
            assert encoded(GuardedEncoder(files), texts) == expected
        else:
            assert encoded(open_encoder(files, backend), texts) == expected
    other = Tokenizer.from_file(str(bpe_json))
    assert [other.encode(text).ids for text in texts] != expected, "the split makes a difference"
    assert files.vocab_size == len(host) == 2000
    assert files.special_token("eod").id == files.special_token("bos").id == host.eos_token_id


def test_the_two_files_may_be_named_apart_as_megatron_names_them(
    tmp_path: Path, pair: Path, run_build: Build, source_texts: list[str]
) -> None:
    vocab, merges = tmp_path / "gpt2-vocab.json", tmp_path / "gpt2-merges.txt"
    vocab.write_bytes((pair / "vocab.json").read_bytes())
    merges.write_bytes((pair / "merges.txt").read_bytes())
    apart = TokenizerFiles.open(f"{vocab},{merges}")
    together = TokenizerFiles.open(str(pair))
    assert apart.definition() == together.definition()
    assert apart.digest == together.digest
    assert list(apart.identity()["files"]) == ["gpt2-merges.txt", "gpt2-vocab.json"]
    text = tmp_path / "x.txt"
    text.write_text(source_texts[0], encoding="utf-8")
    result = run_build(text, tokenizer=f"{vocab},{merges}", append_eod=True, workers=2)
    assert result.totals.num_tokens == len(encoded(open_encoder(together, "tokenizers"),
                                                  [source_texts[0]])[0]) + 1  # fmt: skip


def test_files_of_another_tokenizer_are_refused(pair: Path) -> None:
    """Qwen2, RoBERTa and CLIP have files of the same names, and split text otherwise."""
    (pair / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2TokenizerFast"}')
    assert TokenizerFiles.open(str(pair)).vocab_size == 2000
    (pair / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ConfigError, match=r"belong to Qwen2Tokenizer, .*give its tokenizer\.json"):
        TokenizerFiles.open(str(pair))
    (pair / "tokenizer_config.json").unlink()
    vocab = json.loads((pair / "vocab.json").read_text())
    vocab["<s>"] = vocab.pop(END)
    (pair / "vocab.json").write_text(json.dumps(vocab))
    with pytest.raises(ConfigError, match="belong to another tokenizer"):
        TokenizerFiles.open(str(pair))


def test_tokens_beyond_the_vocabulary_are_refused(pair: Path) -> None:
    (pair / "added_tokens.json").write_text('{"<|im_end|>": 2000}')
    with pytest.raises(ConfigError, match=r"add '<\|im_end\|>' to the vocabulary; .*save_pre"):
        TokenizerFiles.open(str(pair))


def test_damaged_files_are_named(pair: Path) -> None:
    (pair / "merges.txt").write_text("#version: 0.2\none two three\n")
    with pytest.raises(FormatError, match=r"vocab\.json with merges\.txt are no vocabulary"):
        TokenizerFiles.open(str(pair))
    (pair / "vocab.json").write_text("[")
    with pytest.raises(FormatError, match=r"vocab\.json with merges\.txt are no vocabulary"):
        TokenizerFiles.open(str(pair))
