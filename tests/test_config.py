"""Configuration: unknown keys, wrong types and overrides answer in words a person can act on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from megapack.config import apply_overrides, from_dict, load_config, to_dict
from megapack.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "linear"] = "cosine"

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be positive")


@dataclass(frozen=True, kw_only=True)
class Outer:
    seed: int = 0
    buckets: tuple[int, ...] = (1024,)
    output: Path | None = None
    optimizer: Inner = field(default_factory=Inner)


def test_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'bukets'; did you mean 'buckets'\?"):
        from_dict(Outer, {"bukets": [1]})


def test_unknown_key_in_a_nested_block_says_where() -> None:
    with pytest.raises(ConfigError, match=r"optimizer: unknown key 'learning_rat'"):
        from_dict(Outer, {"optimizer": {"learning_rat": 1.0}})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"seed": "seven"}, "seed is 'seven'; it must be of type int"),
        ({"seed": True}, "it must be of type int"),
        ({"buckets": 7}, "it must be a list"),
        ({"optimizer": {"schedule": "step"}}, "it must be one of cosine, linear"),
        ({"optimizer": {"learning_rate": -1}}, "it must be positive"),
        ({"optimizer": 3}, "it must be a mapping"),
    ],
)
def test_wrong_values_name_the_field_the_value_and_the_remedy(tree: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(Outer, tree)


def test_yaml_overrides_and_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 3\nbuckets: [1024, 2048]\noptimizer: {learning_rate: 3e-4}\n")
    config = load_config(Outer, path, ["seed=7", "optimizer.schedule=linear", "output=runs/a"])
    assert config.seed == 7
    assert config.buckets == (1024, 2048)
    assert config.optimizer == Inner(learning_rate=3e-4, schedule="linear")
    assert config.output == Path("runs/a")
    assert from_dict(Outer, to_dict(config)) == config


@pytest.mark.parametrize("text", ["seed", "=3", "seed.deeper=1"])
def test_malformed_overrides_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        apply_overrides({"seed": 1}, [text])


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    with pytest.raises(ConfigError, match="it must be a mapping"):
        load_config(Outer, path)
