"""Seamless Packing 4.7: invented facts that a cut at 32 tokens splits into subject and value.

The paper injects one invented event and checks five completions. This module has 12 invented facts,
"the A B value is C D", each in 16 documents of 56 tokens that have nothing else in common. After 28
tokens of filler, the cut after 32 tokens is between "value" and "is": the next sample contains C D
without A B. Windows of Seamless Packing start at 0 and 24, and the second one contains the whole
fact. The loss of C D after "the A B value is" shows whether the fact was learned.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import sentencepiece
import torch
from papers.corpus import tokenizer_file
from papers.run import Run

from megapack.training.config import EngineConfig
from megapack.training.engine.world import World
from megapack.training.model.training_model import TrainingModel

CAPACITY = 32
NUM_FACTS = 12
NUM_COPIES = 16
NUM_WORDS = 60
DOCUMENT_TOKENS = 56  # with the end-of-document token: two windows that overlap by 8
TORN = 28  # tokens in front of "the A B value | is C D"


@dataclass(frozen=True)
class Fact:
    """Fact "the A B value is C D"; every word is one token with the blank before it."""

    about: tuple[str, str]
    value: tuple[str, str]

    @property
    def prompt(self) -> str:
        return f" the {' '.join(self.about)} value is"

    @property
    def answer(self) -> str:
        return f" {' '.join(self.value)}"


@functools.cache
def vocabulary() -> Any:
    """Return the tokenizer of all corpora."""
    return sentencepiece.SentencePieceProcessor(model_file=str(tokenizer_file()))


def _words() -> list[str]:
    """Return words that are one token, in the order of the vocabulary."""
    ours = vocabulary()
    pieces = [ours.id_to_piece(i)[1:] for i in range(ours.get_piece_size())]
    words = [w for w in pieces if len(w) >= 3 and w.isalpha() and w.islower() and w != "value"]
    single = [w for w in dict.fromkeys(words) if len(ours.encode(f" {w}")) == 1]
    if len(single) < NUM_WORDS:
        raise SystemExit(f"the vocabulary has only {len(single)} words for invented facts")
    return single[:NUM_WORDS]


def facts() -> list[Fact]:
    """Return the facts, the same on every call; subjects and values share no word."""
    words, generator = _words(), random.Random(0)
    generator.shuffle(words)
    about, value = words[: 2 * NUM_FACTS], words[2 * NUM_FACTS : 3 * NUM_FACTS]
    return [
        Fact((about[2 * i], about[2 * i + 1]), (generator.choice(value), generator.choice(value)))
        for i in range(NUM_FACTS)
    ]


def documents() -> tuple[str, ...]:
    """Return ``NUM_COPIES`` documents with every fact."""
    words, generator, result = _words(), random.Random(1), []
    for fact in facts():
        filler = [w for w in words if w not in (*fact.about, *fact.value)]
        for _ in range(NUM_COPIES):
            before = " ".join(["The", *generator.choices(filler, k=TORN - 1)])
            after = generator.choices(filler, k=DOCUMENT_TOKENS - 1 - TORN - 7)
            text = f"{before}{fact.prompt}{fact.answer} {' '.join(after)}"
            count = len(vocabulary().encode(text))
            if count != DOCUMENT_TOKENS - 1:
                raise SystemExit(f"an invented fact has {count} tokens: {text}")
            result.append(text)
    return tuple(result)


def measure(model: TrainingModel, here: World, config: EngineConfig, run: Run) -> dict[str, Any]:
    """Measure the facts that a model knows: a probe of a run.

    Returns:
        loss: nats per fact, over both words of its value; right: share of facts for which both
        words are the model's first choice.
    """
    del config, run
    encode = vocabulary().encode
    pairs = [(encode(fact.prompt), encode(fact.answer)) for fact in facts()]
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    device, dtype = here.device, next(model.parameters()).dtype
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    tokens = torch.tensor([t for pair in pairs for part in pair for t in part], device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = model.hidden_states(tokens[None], positions[None], ends, max(lengths))
        head = model.model.get_output_embeddings().weight  # type: ignore[operator]
        scores = (hidden.to(head.dtype) @ head.T).float().log_softmax(-1)
    loss, right = 0.0, 0
    for (_, answer), end in zip(pairs, ends[1:].tolist(), strict=True):
        places = torch.arange(end - len(answer), end, device=device)
        before = scores[places - 1]  # the scores of a token are those of the position before it
        loss -= float(before.gather(1, tokens[places, None]).sum())
        right += bool((before.argmax(1) == tokens[places]).all())
    return {"loss": loss / len(pairs), "right": right / len(pairs)}
