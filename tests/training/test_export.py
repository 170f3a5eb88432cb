"""What a run exports is whole: weights, tokenizer, and the token at which generation stops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage import IndexedDataset, IndexedDatasetBuilder
from megapack.training.engine.export import end_token, open_tokenizer

from .processes import PRETRAIN, Zygote

LETTERS, END = 20, 20


def _write(folder: Path, *, metadata: dict[str, int] | None = None) -> IndexedDataset:
    """Documents that count up from anywhere to the last letter and end there."""
    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(
        folder / "text", np.uint16, vocab_size=END + 1, metadata=metadata
    ) as builder:
        for first in random.integers(0, LETTERS - 1, 600):
            builder.add_document(np.array([*range(first, LETTERS), END], np.uint16))
    return IndexedDataset(folder / "text")


def _tokenizer(folder: Path) -> Path:
    words = {**{chr(ord("a") + i): i for i in range(LETTERS)}, "<|end|>": END}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_exported_model_generates_to_the_end(zygote: Zygote, tmp_path: Path) -> None:
    dataset = _write(tmp_path, metadata={"document_end_token": END})
    samples = tmp_path / "text.samples"
    pack(dataset.document_lengths, "bucket", buckets=[32]).save(samples, source=dataset)
    config = {
        "run_dir": str(tmp_path / "run"),
        "num_steps": 60,
        "model": {"preset": "llama_tiny", "tokenizer": str(_tokenizer(tmp_path))},
        "data": {
            "prefix": str(tmp_path / "text"),
            "index": str(samples),
            "tokens_per_step": 1024,
            "micro_batch_tokens": 1024,
        },
        "optimizer": {"lr": 0.01},
        "logging": {"tensorboard": False},
        "engine": {"precision": "fp32", "zero_stage": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    argv = [str(PRETRAIN), "--config", str(tmp_path / "run.yaml")]
    zygote.start(argv, 1, tmp_path / "log", {0: {"env": {}}}).succeed()

    exported = tmp_path / "run" / "model"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    prompt = tokenizer("p q", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(prompt, max_new_tokens=40, do_sample=False)[0])
    assert text.split() == ["p", "q", "r", "s", "t", "<|end|>"]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == END
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == END
    written = json.loads((exported / "config.json").read_text())
    assert written["eos_token_id"] == END
    assert written["pad_token_id"] is None, "an embedding would never train the row of the end"


def test_document_end_is_what_datasets_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    ends = _write(tmp_path / "a", metadata={"document_end_token": END})
    other = _write(tmp_path / "b", metadata={"document_end_token": 3})
    silent = _write(tmp_path / "c")
    assert end_token([ends, ends]) == END
    assert end_token([ends, other]) is None
    assert end_token([ends, silent]) is None
    assert end_token([silent]) is None


def test_a_tokenizer_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer .*nowhere.* cannot be loaded"):
        open_tokenizer(str(tmp_path / "nowhere"), required=True)
    assert open_tokenizer(str(tmp_path / "nowhere"), required=False) is None


def _sentencepiece_model(path: Path, *, add_dummy_prefix: bool) -> str:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter([f"a line of {i} words, (with) signs" for i in range(300)]),
        model_prefix=str(path),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        minloglevel=2,
    )
    return f"{path}.model"


def test_a_sentencepiece_model_goes_along_with_its_own_ids_or_not_at_all(tmp_path: Path) -> None:
    """transformers puts a space before a text unless it is told; our documents have none."""
    path = _sentencepiece_model(tmp_path / "own", add_dummy_prefix=False)
    model = sentencepiece.SentencePieceProcessor(model_file=path)
    open_tokenizer(path, required=True).save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in ("a line", " of\n\n  12 words\t(x)", "na\u00efve \u4e2d"):
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == model.encode(text)
        assert len(model.encode(text)) > 1
    # Before a text that begins with a space transformers adds none, sentencepiece does.
    other = _sentencepiece_model(tmp_path / "other", add_dummy_prefix=True)
    with pytest.raises(ConfigError, match="gives other ids than sentencepiece"):
        open_tokenizer(other, required=True)
