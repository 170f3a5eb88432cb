"""Which bytes every token is, of every kind of tokenizer; documents cut between characters.

MEGAPACK_FIM_MEGABYTES=16 turns every document of the demo's corpus round, not only some.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers import peer
from programs import ended

from megapack.data.steps import StepView
from megapack.errors import ConfigError
from megapack.packing import pack
from megapack.storage import IndexedDatasetBuilder
from megapack.tokenization.corpus.documents import Faults, ReadOptions
from megapack.tokenization.corpus.inputs import find_inputs
from megapack.tokenization.tokenizers.encoders import open_reference
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles
from megapack.tokenization.tokenizers.train import train_tokenizer
from megapack.tokenization.tokenizers.vocabulary import token_bytes, token_of
from tests.tokenization.helpers import encoded

MEGABYTES = os.environ.get("MEGAPACK_FIM_MEGABYTES", "0.4")
SENTINELS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_end|>")
ADDED = ["   ", "\t\t", " caf\u00e9"]  # not special
ODD = [
    "naïve café, 漢字かな, 🙂🏽 emoji",
    "tabs\t\tand   spaces\r\n\n  end",
    "\u2581 itself",
    "€" * 9,
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the demo's corpus, and train both kinds of tokenizers on it."""
    folder = tmp_path_factory.mktemp("demo")
    script = Path(__file__).parents[3] / "launch" / "demo_corpus.py"
    ended(sys.executable, script, "--output-dir", folder, "--max-megabytes", MEGABYTES)
    files = find_inputs([str(folder / "train.jsonl")])
    how = {"read": ReadOptions(json_key="text"), "faults": Faults(), "vocab_size": 1200}
    for name, kind in (("t.model", "sentencepiece"), ("t.json", "bpe-json")):
        output = str(folder / name)
        train_tokenizer(files, output, type=kind, special_tokens=SENTINELS, **how)
    tokenizer = peer("tokenizers").Tokenizer.from_file(str(folder / "t.json"))
    tokenizer.add_tokens(ADDED)
    tokenizer.save(str(folder / "added.json"))
    return folder


def texts_of(demo: Path) -> list[str]:
    lines = chain.from_iterable((demo / f"{n}.jsonl").open() for n in ("train", "valid"))
    return [*(json.loads(line)["text"] for line in lines), *ODD]


@pytest.mark.parametrize("name", ["t.model", "t.json", "added.json", "bytes"])
def test_bytes_of_tokens_equal_the_text(demo: Path, name: str) -> None:
    files = TokenizerFiles.open(name if name == "bytes" else str(demo / name))
    known = token_bytes(files)
    texts = texts_of(demo)[-40:]
    for text, ids in zip(texts, encoded(open_reference(files), texts), strict=True):
        joined = b"".join(known[token] or b"" for token in ids)
        assert joined.decode("utf-8") == (text if name != "t.model" else text.replace("▁", " "))
    assert all(known[token] is None for text, token in files.special.items() if text not in ADDED)
    if name != "bytes":
        assert [known[token_of(files, text, "fim")] for text in SENTINELS] in (
            [None] * 4,
            [text.encode() for text in SENTINELS],  # sentencepiece: tokens like others
        )
    with pytest.raises(ConfigError, match=r"fim is '<none>', which is not one token of"):
        token_of(files, "<none>", "fim")


def test_tokenizer_that_changes_text_is_refused(tmp_path: Path) -> None:
    tokenizers = peer("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(tmp_path / "w.json"))
    with pytest.raises(ConfigError, match=r"decoder \(WordPiece\): only .* cuts: token"):
        token_bytes(TokenizerFiles.open(str(tmp_path / "w.json")))


@pytest.mark.parametrize("cuts", ["token", "character"])
@pytest.mark.parametrize("name", ["t.model", "t.json", "added.json", "bytes"])
def test_inverse_restores_every_document_of_the_demo(demo: Path, name: str, cuts: str) -> None:
    """In two passes; no sentinel is split, and cuts may be inside tokens if allowed."""
    peer("torch")
    from megapack.data import PackedDataset  # noqa: PLC0415
    from megapack.data.fim import FimConfig, Sentinels, open_fim  # noqa: PLC0415

    path = name if name == "bytes" else str(demo / name)
    files = TokenizerFiles.open(path)
    encoder, eod = open_reference(files), files.special_token("eod").id
    given: dict[str, Any] = dict(zip(("prefix", "suffix", "middle", "end"), SENTINELS, strict=True))
    if name == "bytes":  # it has no other token
        given = {"prefix": "<bos>", "suffix": "<pad>", "middle": 0}
    config = FimConfig(sentinels=Sentinels(**given), tokenizer=path, cuts=cuts)
    texts = texts_of(demo)
    documents = [[*ids, eod] for ids in encoded(encoder, texts)]
    with IndexedDatasetBuilder(demo / f"{name}-{cuts}", np.uint16) as builder:
        for document in documents:
            builder.add_document(np.array(document, np.uint16))
    room = open_fim(config, []).room
    lengths = [len(document) for document in documents]
    index = pack(lengths, "bucket", buckets=[1 << 14], fim_room=room)
    data = PackedDataset(demo / f"{name}-{cuts}", index, fim=config)
    fim = data.samples.fim
    turned, inside = 0, 0
    for epoch in (0, 7):
        for sample in range(index.num_samples):
            view = StepView(epochs=np.array([epoch]), fim_rates=np.ones(1), seed=5)
            batch = data.micro_batch([sample], view=view)
            tokens, bounds = batch["tokens"][0].numpy(), batch["cu_seqlens"].tolist()
            for number, (document, _, length) in enumerate(index.sample(sample)[1]):
                rearranged = tokens[bounds[number] : bounds[number + 1]]
                assert length == lengths[document], "all are whole"
                assert sorted(rearranged[np.isin(rearranged, fim.sentinels)]) == sorted(
                    fim.sentinels
                )
                assert rearranged[0] == fim.prefix and rearranged[-1] == eod
                restored = fim.restore(rearranged).tolist()
                turned, inside = turned + 1, inside + (restored != documents[document])
                assert restored[-1] == eod
                if restored != documents[document]:
                    original = encoder.decode(documents[document][:-1])
                    assert encoder.decode(restored[:-1]) == original
    assert turned == 2 * len(documents) > 100
    assert inside > turned / 2 if cuts == "character" and name != "bytes" else inside == 0
