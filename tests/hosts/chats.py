"""Conversations for fine-tuning hosts, built with the commands of the guide (chat template, labels,
packed samples), and a tiny Llama on disk, so that no hub is needed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megapack.cli.main import main as megapack_build
from megapack.integrations.rows.dataset import RowDataset, RowOptions
from megapack.integrations.rows.open_rows import Manifest, open_documents, open_rows

BUCKETS = (64, 128, 256)
ROWS_PER_STEP, ROW, STEPS = 8, 256, 3  # of every run
TOLERANCE = 2e-5  # of losses of 5 or 6, in float32, with different attention and shapes
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<eos>' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Chats:
    """``chats`` with its labels, ``chats.samples``, the manifest ``chats.json`` and ``model``."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def rows(self, seed: int, num_rows: int | None = None) -> RowDataset:
        """Rows of a run of either host, read without it."""
        options = RowOptions(sequence_length=ROW, rows_per_block=ROWS_PER_STEP, seed=seed)
        manifest = Manifest.read(self.path("chats.json"))
        return open_rows(manifest, open_documents(manifest), options, num_rows=num_rows)


def write_chats(folder: Path) -> Chats:
    """Write 150 conversations of about 30 to 500 tokens, one token per letter; samples cut some."""
    write_model(folder / "model")
    rng = np.random.default_rng(3)
    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(150):
            lengths = np.clip(rng.lognormal(2.2, 0.9, rng.integers(1, 4)), 2, 120).astype(int)
            turns = [
                {"role": role, "content": "".join(rng.choice(list("abcdefgh "), length))}
                for length in lengths
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    chats = Chats(folder)
    tokenize = ["tokenize", "--input", chats.path("chats.jsonl"), "--messages-key", "messages"]
    tokenize += ["--chat-format", "template", "--tokenizer", chats.path("model")]
    tokenize += ["--workers", "1", "--output-prefix", chats.path("chats")]
    assert megapack_build(tokenize) == 0
    pack = ["pack", chats.path("chats"), "--buckets", ",".join(map(str, BUCKETS))]
    assert megapack_build([*pack, "--output", chats.path("chats.samples")]) == 0
    sources = [{"prefix": "chats", "index": "chats.samples"}]
    (folder / "chats.json").write_text(json.dumps({"sources": sources}))
    return chats


def write_model(folder: Path) -> None:
    """Save a Llama of two layers and a tokenizer of bytes in the format of transformers."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    letters = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = {"eos_token": "<eos>", "pad_token": "<pad>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **ends)
    made.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"vocab_size": len(letters), "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(initializer_range=0.2, **sizes, **ids))
    model.save_pretrained(folder)


@torch.no_grad()
def losses_one_by_one(folder: Path, tokens: Any, begins: Any, counts: Any) -> torch.Tensor:
    """Return the loss of every label in a stream of documents, with a forward pass for each.

    Args:
        folder: folder of the model.
        tokens: ids of the documents, concatenated, int64 (tokens,).
        begins: positions of the first tokens of documents, ascending from 0.
        counts: which tokens are targets, bool (tokens,); never the first of a document.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    losses = []
    for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        document = tokens[begin:end]
        wanted = counts[begin:end]
        assert not wanted[0]
        logits = model(document[None]).logits[0].log_softmax(-1)
        of_token = -logits[:-1].gather(1, document[1:, None])[:, 0]
        losses.append(of_token[wanted[1:]])
    return torch.cat(losses)
