"""Configuration: messages about unknown keys, wrong types and overrides say what to do."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapack.config import apply_overrides, check_range, from_dict, load_config, to_dict
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
    stage: Literal["auto", 1, 2] = "auto"
    weights: dict[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Anything:
    a: dict[str, int]
    b: dict[str, dict[str, int]]
    c: dict[str, int]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"bukets": [1]}, r"unknown key 'bukets'; did you mean 'buckets'\?"),
        ({"optimizer": {"learning_rat": 1.0}}, "optimizer: unknown key 'learning_rat'"),
        ({"seed": "seven"}, "seed is 'seven'; it must be of type int"),
        ({"seed": True}, "it must be of type int"),
        ({"buckets": 7}, "it must be a list"),
        ({"optimizer": {"schedule": "step"}}, "it must be one of cosine, linear"),
        ({"optimizer": {"learning_rate": -1}}, "it must be positive"),
        ({"optimizer": 3}, "it must be a mapping"),
        ({"seed": 2**63}, "it must be a 64-bit integer"),
        ({"seed": -(2**63) - 1}, "it must be a 64-bit integer"),
        ({"optimizer": {"learning_rate": float("nan")}}, "learning_rate is nan; it must be a fin"),
        ({"optimizer": {"learning_rate": ".inf"}}, "it must be of type float"),
        ({"optimizer": {"learning_rate": "inf"}}, "learning_rate is inf; it must be a finite"),
        ({"optimizer": {"learning_rate": 10**400}}, "it must be of type float"),
        ({"optimizer": {"learning_rate": True}}, "it must be of type float"),
        ({"stage": True}, "stage is True; it must be one of auto, 1, 2"),
        ({"stage": 1.0}, "it must be one of auto, 1, 2"),
        ({"weights": {"web": True}}, "weights: web is True; it must be of type float"),
        ({"weights": {"web": float("nan")}}, "weights: web is nan; it must be a finite number"),
        ({"weights": {3: 1.0}}, "weights: key is 3; it must be of type str"),
        ({"output": "a\0b"}, r"output: 'a\\x00b' contains NUL, which no file name can: remove it"),
        ({"weights": {"a\ud800": 1.0}}, r"weights: key: a\\ud800 is not UTF-8"),
    ],
)
def test_wrong_keys_and_values_are_named_with_the_remedy(tree: dict, message: str) -> None:
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
    with pytest.raises(ConfigError, match="--set "):
        apply_overrides({"seed": 1}, [text])


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["seed=1", "sede=2"], "--set sede=2: unknown key 'sede'; did you mean 'seed'?"),
        (["optimizer.schedul=linear"], "--set optimizer.schedul=linear: optimizer: unknown key"),
        (["seed=1", "seed=x", "buckets=[1]"], "--set seed=x: seed is 'x'; it must be"),
        (["sede=1", "sede=2"], "--set sede=1 --set sede=2: unknown key 'sede'"),
        (["seed={}", "seed.a=1", "sede=2"], "--set sede=2: unknown key 'sede'"),
        (["seed=1", "seed.a=1", "sede=2"], "--set seed.a=1: seed is a single value"),
        (["seed=1"], "run.yaml: unknown key 'sede'; did you mean 'seed'?"),
    ],
)
def test_an_error_names_the_override_that_causes_it(
    tmp_path: Path, overrides: list[str], blamed: str
) -> None:
    """And the file, if no override does."""
    path = tmp_path / "run.yaml"
    wrong = "sede: 2\n" if "run.yaml" in blamed else ""
    path.write_text(f"{wrong}seed: 0\nbuckets: [1024]\noptimizer: {{learning_rate: 3e-4}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(Outer, path, overrides)
    assert str(error.value).removeprefix(f"{tmp_path}/").startswith(blamed)


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("- 1\n- 2\n")
    for overrides in ([], ["seed=1"]):
        with pytest.raises(ConfigError, match=r"list.yaml is \[1, 2\]; it must be a mapping"):
            load_config(Outer, path, overrides)


@pytest.mark.parametrize(
    "text", ["seed: 1\nseed: 2\n", "optimizer: {schedule: cosine, schedule: linear}"]
)
def test_a_key_that_comes_twice_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"key '\w+' occurs twice"):
        load_config(Outer, path)


def test_a_merged_key_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("optimizer: {<<: {schedule: linear}, learning_rate: 0.5}\nseed: 1\n")
    assert load_config(Outer, path).optimizer == Inner(learning_rate=0.5, schedule="linear")
    # A merge of a mapping that merges another one.
    path.write_text("a: &a {one: 1}\nb: {deep: &b {<<: *a, one: 2}}\nc: {<<: *b, two: 3}\n")
    assert load_config(Anything, path, []).c == {"one": 2, "two": 3}


MEANING = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt}
MEANING["at_most"] = operator.le


@given(
    value=st.one_of(st.floats(), st.integers(), st.booleans()),
    bounds=st.dictionaries(st.sampled_from([*MEANING]), st.integers(-3, 3)),
)
def test_numbers_are_in_their_range_or_refused(value: float, bounds: dict[str, int]) -> None:
    good = not isinstance(value, bool) and abs(value) < math.inf
    good = good and all(MEANING[name](value, bound) for name, bound in bounds.items())
    if good:
        check_range("part", **bounds, size=value, other=None)
        return
    with pytest.raises(ConfigError, match=r"^part: size is \S+; it must be \w+"):
        check_range("part", **bounds, size=value)
