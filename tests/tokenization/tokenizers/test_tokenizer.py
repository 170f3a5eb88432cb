"""Tokenizer files, and the tokens that begin and end documents."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import xxhash
from peers import peer
from tokenizers import Tokenizer, models

from megapack import IndexedDataset
from megapack.errors import ConfigError, DataError, FormatError
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.corpus.readers import plan_shards
from megapack.tokenization.corpus.streams import InputFile
from megapack.tokenization.tokenizers.encoders import BACKENDS, GuardedEncoder, open_encoder
from megapack.tokenization.tokenizers.probe import hard_texts, sample_blocks
from megapack.tokenization.tokenizers.tokenizer import (
    SpecialToken,
    TokenizerFiles,
    library_versions,
)
from megapack.tokenization.tokenizers.train import TrainResult, train_tokenizer

from ..helpers import Build, Silence, encoded, write_jsonl


@pytest.mark.parametrize("name", ["cl100k_base.tiktoken", "tokenizer.model"])
def test_tiktoken_vocabulary_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("IQ== 0\nIg== 1\n")
    for source in [tmp_path / name, *([tmp_path] if name.endswith(".model") else [])]:
        with pytest.raises(ConfigError, match=r"tiktoken's format.*TikTokenConverter"):
            TokenizerFiles.open(str(source))


def test_special_tokens_come_from_the_model(sp_model: Path) -> None:
    files = TokenizerFiles.open("bytes")
    specials = [files.special_token(name).id for name in ("eod", "bos")]
    assert (files.vocab_size, *specials) == (259, 256, 257), "behind the bytes"
    files = TokenizerFiles.open(str(sp_model))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sp_model))
    assert (files.kind, files.vocab_size) == ("sentencepiece", processor.vocab_size())
    assert files.special_token("bos").id == processor.bos_id()
    assert files.special_token("eod").id == processor.eos_id()


def test_tokenizer_json_is_found_by_file_or_directory(bpe_json: Path) -> None:
    reference = Tokenizer.from_file(str(bpe_json))
    for source in (bpe_json, bpe_json.parent):
        files = TokenizerFiles.open(str(source))
        assert (files.kind, files.vocab_size) == ("hf", reference.get_vocab_size())
        assert files.special_token("eod").id == reference.token_to_id("<|endoftext|>")
        assert files.special_token("bos").id == reference.token_to_id("<|begin_of_text|>")
        assert files.special_token("eod", "<|eot_id|>").id == reference.token_to_id("<|eot_id|>")


def test_tokenizer_config_names_the_special_tokens(tmp_path: Path, bpe_json: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe_json.read_bytes())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|eot_id|>"}}')
    assert TokenizerFiles.open(str(tmp_path)).special_token("eod").text == "<|eot_id|>"
    config = {"bos_token": {"content": "<|eot_id|>"}, "eos_token": "<|end_header_id|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = TokenizerFiles.open(str(tmp_path))
    assert files.special_token("bos").text == "<|eot_id|>"
    assert files.special_token("eod").text == "<|end_header_id|>"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer_config\.json is not valid JSON"):
        TokenizerFiles.open(str(tmp_path))


def test_end_token_is_never_guessed(tmp_path: Path, bpe_json: Path) -> None:
    tree = json.loads(bpe_json.read_bytes())
    for token, replacement in zip(tree["added_tokens"], ("</s>", "<eos>"), strict=False):
        tree["model"]["vocab"][replacement] = tree["model"]["vocab"].pop(token["content"])
        token["content"] = replacement
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tree))
    files = TokenizerFiles.open(str(path))
    for asked, message in (
        (("eod",), "could be </s> or <eos>; name it with --eod-token"),
        (("bos",), r"bos token of .* is not declared"),
        (("eod", "<none>"), "'<none>' is not a special token"),
    ):
        with pytest.raises(ConfigError, match=message):
            files.special_token(*asked)
    assert files.special_token("eod", "<eos>").text == "<eos>"
    tree["added_tokens"] = []
    path.write_text(json.dumps(tree))
    files = TokenizerFiles.open(str(path))
    with pytest.raises(ConfigError, match=r"no special tokens; give the id of .*, --eod-token ID"):
        files.special_token("eod")
    assert files.special_token("eod", 5).id == 5


def test_special_token_by_id(bpe_json: Path) -> None:
    files = TokenizerFiles.open(str(bpe_json))
    end = files.special["<|endoftext|>"]
    assert files.special_token("eod", end) == SpecialToken("<|endoftext|>", end)
    assert files.special_token("eod", 1999) == SpecialToken("1999", 1999)
    for outside in (2000, -1):
        with pytest.raises(ConfigError, match=rf"eod token is {outside}, .* is 1999"):
            files.special_token("eod", outside)


def test_invalid_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    for source, message in (
        (
            "some/model",
            r"nothing\); .* hf download some/model --local-dir model --include '\*\.json'",
        ),
        (tmp_path / "no.model", r"no tokenizer at .*downloads nothing\)$"),
        (tmp_path, r"contains no tokenizer: none of tokenizer\.json, "),
        (tmp_path / "x.txt", r"x\.txt: a tokenizer is"),
    ):
        with pytest.raises(ConfigError, match=message):
            TokenizerFiles.open(str(source))
    for name, content in (("x.json", "{}"), ("y.json", "["), ("x.model", "not a model")):
        (tmp_path / name).write_text(content)
        with pytest.raises(FormatError, match=f"{name} is not"):
            TokenizerFiles.open(str(tmp_path / name))


def test_identity_changes_with_every_file(tmp_path: Path, bpe_json: Path, sp_model: Path) -> None:
    """Builds are distinguished by it: a missing file would mix ids."""
    contents = {
        "tokenizer.json": bpe_json.read_text(encoding="utf-8"),
        "tokenizer_config.json": '{"eos_token": "<|endoftext|>"}',
        "special_tokens_map.json": '{"bos_token": "<|begin_of_text|>"}',
        "chat_template.jinja": "{{ messages }}",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    before = TokenizerFiles.open(str(tmp_path)).identity()
    assert json.loads(json.dumps(before)) == before, "it is stored as JSON"
    assert set(before["files"]) == set(contents)
    data = (tmp_path / "tokenizer.json").read_bytes()
    assert before["files"]["tokenizer.json"] == xxhash.xxh3_128_hexdigest(data)
    for name, content in contents.items():
        (tmp_path / name).write_text(content + " ", encoding="utf-8")
        changed = TokenizerFiles.open(str(tmp_path)).identity()["files"]
        assert [n for n in contents if changed[n] != before["files"][n]] == [name]
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "chat_template.jinja").unlink()
    assert "chat_template.jinja" not in TokenizerFiles.open(str(tmp_path)).identity()["files"]
    model = TokenizerFiles.open(str(sp_model)).identity()
    assert (model["kind"], list(model["files"])) == ("sentencepiece", [sp_model.name])
    assert TokenizerFiles.open("bytes").identity()["files"] == {}


def test_library_versions() -> None:
    version = sentencepiece.__version__
    assert library_versions("bytes") == {"megapack": "2"}
    assert library_versions("sentencepiece") == {"sentencepiece": version, "megapack": "2"}
    assert set(library_versions("gigatoken+tokenizers")) == {"gigatoken", "tokenizers", "megapack"}
    chats = library_versions("gigatoken", template=True)
    assert set(chats) == {"gigatoken", "tokenizers", "jinja2", "megapack"}


PADDING = {
    **{"strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None},
    **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
}


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_settings_that_cut_are_switched_off(tmp_path: Path, run_build: Build, model: str) -> None:
    """BPE's dropout gave another corpus in every run."""
    letters = {"a": 0, "b": 1, "ab": 2, "abab": 3}
    kinds = {
        "bpe": (models.BPE(letters, [("a", "b"), ("ab", "ab")]), {"dropout": 0.5}),
        "unigram": (models.Unigram([(t, -1.0 - i) for t, i in letters.items()], 0), {"alpha": 0.5}),
    }
    tree = json.loads(Tokenizer(kinds[model][0]).to_str())
    tree["model"] |= kinds[model][1]
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    tree["truncation"], tree["padding"] = cut, dict(PADDING)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tree))
    (tmp_path / "x.txt").write_text("abab" * 200)
    progress = Silence()
    tokens = []
    for name in ("one", "two"):
        run_build(tmp_path / "x.txt", tokenizer=path, output_prefix=name, progress=progress)
        tokens.append(IndexedDataset(tmp_path / name)[0].tolist())
    assert tokens == [[3] * 200] * 2 or (model == "unigram" and tokens[0] == tokens[1])
    assert 200 <= len(tokens[0]) < 999, "nothing is cut or padded"
    setting = next(iter(kinds[model][1]))
    pattern = rf"switched off: truncation \{{.*\}}, padding \{{.*\}}, {setting} 0.5"
    assert any(re.search(pattern, note) for note in progress.notes)
    plain = json.loads(TokenizerFiles.open(str(path)).definition())
    assert setting not in plain["model"] and not {"truncation", "padding"} & plain.keys()


def test_ids_of_added_tokens_are_those_that_the_library_gives(tmp_path: Path) -> None:
    """A file may name other ids: after a gap, twice, or in a vocabulary with holes."""
    path, outcomes = tmp_path / "tokenizer.json", []
    for seed in range(200):
        rng = random.Random(seed)
        ids = rng.sample(range(6), 4) if seed % 2 else range(4)
        tree = json.loads(Tokenizer(models.BPE({}, [])).to_str())
        tree["model"]["vocab"] = dict(zip("abcd", ids, strict=True))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        first, gap = rng.choice([4, max(ids) + 1]), rng.choice([1, 1, 1, 2])
        contents = [f"<{i}>" for i in range(3)]
        if rng.random() < 0.3:
            contents[rng.randrange(3)] = rng.choice("abcd")
        if rng.random() < 0.1:
            contents[2] = contents[0]
        tree["added_tokens"] = [
            {"id": first + i * gap, "content": content, "special": rng.random() < 0.5, **flags}
            for i, content in enumerate(contents)
        ]
        path.write_text(json.dumps(tree))
        theirs = Tokenizer.from_file(str(path))
        wrong = [t for t in tree["added_tokens"] if theirs.token_to_id(t["content"]) != t["id"]]
        outcomes.append(bool(wrong))
        if wrong:
            with pytest.raises(FormatError, match=r"the id \d, but `tokenizers` gives it \d"):
                TokenizerFiles.open(str(path))
        else:
            special = TokenizerFiles.open(str(path)).special
            assert special == {content: theirs.token_to_id(content) for content in contents}
    assert 20 < sum(outcomes) < 180


def test_sample_is_half_a_megabyte_of_any_text(tmp_path: Path) -> None:
    """A first line of 104 MB cost 5.4 GB; cut, it is still UTF-8."""
    corpus = write_jsonl(tmp_path / "x.jsonl", [{"text": "x" + "\u4e2d" * 1_000_000}])
    shards = plan_shards(find_inputs([str(corpus)]), shard_bytes=1 << 20, json_key="text")
    [block] = [block for block in sample_blocks(shards, ReadOptions()) if len(block)]
    assert len(block.text) <= 1 << 19 and len(block) == 1
    assert block.strings()[0].startswith("x\u4e2d")


# ---- GPT-2's vocab.json and merges.txt give the ids of the libraries that define them


END = "<|endoftext|>"


@pytest.fixture
def pair(tmp_path: Path, bpe_json: Path) -> Path:
    """Make a directory with only vocab.json and merges.txt, as openai-community/gpt2 had."""
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
        guarded = backend == "gigatoken"
        encoder = GuardedEncoder(files) if guarded else open_encoder(files, backend)
        assert encoded(encoder, texts) == expected
    other = Tokenizer.from_file(str(bpe_json))
    assert [other.encode(text).ids for text in texts] != expected, "the split makes a difference"
    assert files.vocab_size == len(host) == 2000
    assert files.special_token("eod").id == files.special_token("bos").id == host.eos_token_id


def test_vocab_and_merges_may_be_two_paths(pair: Path) -> None:
    vocab = shutil.copy(pair / "vocab.json", pair.with_name("gpt2-vocab.json"))
    merges = shutil.copy(pair / "merges.txt", pair.with_name("gpt2-merges.txt"))
    apart, together = TokenizerFiles.open(f"{vocab},{merges}"), TokenizerFiles.open(str(pair))
    assert apart.definition() == together.definition()
    assert apart.digest == together.digest
    assert list(apart.identity()["files"]) == ["gpt2-merges.txt", "gpt2-vocab.json"]


def test_files_of_another_tokenizer_are_refused(pair: Path) -> None:
    """Qwen2, RoBERTa and CLIP have files of the same names but split text differently."""
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


def test_added_tokens_outside_the_vocabulary_are_refused(pair: Path) -> None:
    (pair / "added_tokens.json").write_text('{"<|im_end|>": 2000}')
    with pytest.raises(ConfigError, match=r"add '<\|im_end\|>' to the vocabulary; .*save_pre"):
        TokenizerFiles.open(str(pair))


def test_damaged_files_are_refused(pair: Path) -> None:
    for name, text in (("merges.txt", "#version: 0.2\none two three\n"), ("vocab.json", "[")):
        (pair / name).write_text(text)
        with pytest.raises(FormatError, match=r"vocab\.json with merges\.txt are not a vocabulary"):
            TokenizerFiles.open(str(pair))


# ---- Trained tokenizers are deterministic and lossless


HARD = "if x:\n\treturn  3.14  # \u00e9\u4e2d\u6587 \U0001f600\x00\r\n    end"


def train(files: list[InputFile], output: Path, **options: Any) -> TrainResult:
    options = {"vocab_size": 600, "sample_bytes": 1 << 18, **options}
    read, faults = ReadOptions(), Faults("skip")
    return train_tokenizer(files, str(output), read=read, faults=faults, **options)


def test_equal_input_gives_one_file(tmp_path: Path, source_files: list[InputFile]) -> None:
    first, second = (train(source_files, tmp_path / name) for name in ("a", "b"))
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.vocab_size == second.vocab_size == 600
    with pytest.raises(ConfigError, match="is an input and would be replaced"):
        train(source_files, Path(source_files[0].path), overwrite=True)


def test_sentencepiece_model_is_lossless(sp_model: Path) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(sp_model))
    assert processor.decode(processor.encode(HARD)) == HARD
    digits = [processor.id_to_piece(i) for i in processor.encode("31415")]
    assert digits[-5:] == list("31415"), "digits are split"


def test_bpe_json_is_lossless_and_has_special_tokens(bpe_json: Path) -> None:
    tokenizer = Tokenizer.from_file(str(bpe_json))
    assert tokenizer.decode(tokenizer.encode(HARD).ids, skip_special_tokens=False) == HARD
    assert tokenizer.encode("<|eot_id|>").ids == [tokenizer.token_to_id("<|eot_id|>")]


def test_special_tokens_are_never_split(tmp_path: Path, source_files: list[InputFile]) -> None:
    result = train(source_files, tmp_path / "m.model", special_tokens=("<|eot_id|>",))
    processor = sentencepiece.SentencePieceProcessor(model_file=str(result.path))
    assert processor.piece_to_id("<|eot_id|>") in processor.encode("a<|eot_id|>b")


def test_sample_is_bounded_and_covers_the_corpus(tmp_path: Path, source_texts: list[str]) -> None:
    for i in range(8):
        text = "".join(source_texts).replace("self", f"only{i}only")
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    files = find_inputs([str(tmp_path)])
    result = train(files, tmp_path / "m.json", sample_bytes=2 << 20, type="bpe-json")
    assert 2 << 20 <= result.num_text_bytes <= 4 << 20, "the sample, and no more than a slice"
    vocabulary = Tokenizer.from_file(str(result.path)).get_vocab()
    assert any("only" in piece for piece in vocabulary)


def test_untrainable_options_are_refused(tmp_path: Path, source_files: list[InputFile]) -> None:
    with pytest.raises(ConfigError, match="299 is below 300"):
        train(source_files, tmp_path / "x.model", vocab_size=299)
    with pytest.raises(ConfigError, match="a special token is ''"):
        train(source_files, tmp_path / "x.model", special_tokens=("a", ""))
    (tmp_path / "small.txt").write_text("tiny corpus")
    with pytest.raises(ConfigError, match=r"size 5,000 is .* only 290 pieces; give more text$"):
        train(find_inputs([str(tmp_path / "small.txt")]), tmp_path / "x.model", vocab_size=5000)
    with pytest.raises(ConfigError, match=r"give --vocab-size (\d+) or less") as error:
        train(source_files[:2], tmp_path / "x.model", vocab_size=2_000_000)
    most = int(re.findall(r"--vocab-size (\d+)", str(error.value))[0])
    train(source_files[:2], tmp_path / "most.model", vocab_size=most)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="no documents to train"):
        train(find_inputs([str(tmp_path / "empty.txt")]), tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


def test_invalid_output_name_is_refused_before_reading(tmp_path: Path) -> None:
    nothing: list[InputFile] = []
    for output, message in ((tmp_path, "is a directory"), (tmp_path / ("x" * 250), "250 bytes")):
        with pytest.raises(ConfigError, match=message):
            train(nothing, output, overwrite=True)
