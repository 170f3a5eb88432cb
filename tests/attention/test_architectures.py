"""The table of docs/guides/transformers.md is what the model check finds, row by row.

python -m tests.attention.test_architectures    # prints the table
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megapack.attention import check_architecture, register
from megapack.errors import ConfigError

GUIDE = Path(__file__).parents[2] / "docs/guides/transformers.md"
IMPLEMENTATIONS = ("megapack", "sdpa", "eager")

# What the check says -> the table's word.
WORDS = {
    "another document": "documents meet",
    "changes earlier logits": "sees the future",
    "one document alone": "drops a rule",
    "logits of a row differ": "documents meet",
    "has one longer than": "documents meet",
    "building a tiny model": "not offered",
    "fails on a row": "fails",
}


def outcome(name: str, implementation: str) -> str:
    """One cell: with the sizes that transformers gives an architecture by default."""
    register("eager" if name.startswith("gemma") else "sdpa")  # a soft cap needs the formula

    def build(configuration: object, attention: str) -> object:
        return AutoModelForCausalLM.from_config(
            configuration, attn_implementation=attention, dtype=torch.float32
        )

    try:
        how = {"attention": implementation, "build": build, "device": torch.device("cpu")}
        check_architecture(AutoConfig.for_model(name), **how)
    except ConfigError as error:
        return next(word for part, word in WORDS.items() if part in str(error))
    return "right"


def rows() -> dict[str, list[str]]:
    """Return the table of the guide: architecture -> its cells."""
    lines = re.findall(r"^\| `(\w+)` \| (.*) \|$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in lines}


# Architectures that people train, and some that leak. Other ones are only in the guide.
RIGHT = "llama qwen2 qwen3 mistral phi3 olmo2 qwen3_moe mixtral gemma3_text deepseek_v3 gpt_neox"
WRONG = "bloom mpt mamba mamba2 gpt_oss llama4_text"


@pytest.mark.parametrize("name", [*RIGHT.split(), *WRONG.split()])
def test_model_check_agrees_with_the_guide(name: str) -> None:
    found = [outcome(name, implementation) for implementation in IMPLEMENTATIONS]
    assert found == rows()[name] and (found[0] == "right") == (name in RIGHT.split())


@pytest.mark.pages
@pytest.mark.parametrize("name", sorted({*rows()} - {*RIGHT.split(), *WRONG.split()}))
def test_model_check_agrees_with_the_whole_guide(name: str) -> None:
    assert [outcome(name, implementation) for implementation in IMPLEMENTATIONS] == rows()[name]


if __name__ == "__main__":
    for name in sorted(rows()):
        cells = " | ".join(outcome(name, implementation) for implementation in IMPLEMENTATIONS)
        print(f"| `{name}` | {cells} |")
