"""The four attributes that megatron-core's datasets read of a tokenizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Tokenizer:
    vocab_size: int
    eod: int
    pad: int = -1

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "Tokenizer", **asdict(self)}
