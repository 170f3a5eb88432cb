"""JSON Schemas of configurations accept what ``from_dict`` reads and refuse what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from programs import PYTHON, ended

from megapack.config import from_dict, to_dict
from megapack.data.blend import BlendConfig
from megapack.errors import ConfigError
from megapack.json_schema import json_schema
from megapack.training.command import RECIPES, read_config
from megapack.training.config import PretrainConfig

SCHEMA = json_schema(PretrainConfig)
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def test_a_schema_is_a_valid_one_and_describes_keys() -> None:
    for cls in (PretrainConfig, BlendConfig):
        jsonschema.Draft202012Validator.check_schema(json_schema(cls))
    order = SCHEMA["$defs"]["DataConfig"]["properties"]["order"]
    assert order["default"] == "proportional" and order["description"].startswith("Order of the")


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_and_full_configurations_are_accepted(recipe: str) -> None:
    CHECK.validate(yaml.safe_load(RECIPES[recipe].read_text()))
    CHECK.validate(to_dict(read_config(recipe)))


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "tokens_per_stp", 4),
        ("data", "tokens_per_step", "many"),
        ("data", "mix", "steps"),
        ("optimizer", "betas", 0.9),
        ("checkpoint", "keep", None),
    ],
)
def test_what_is_refused_at_start_is_refused_in_an_editor(
    section: str, key: str, value: Any
) -> None:
    tree = yaml.safe_load(RECIPES["demo_cpu"].read_text())
    tree.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError):
        from_dict(PretrainConfig, tree)
    assert not CHECK.is_valid(tree)


def test_manifests(tmp_path: Path) -> None:
    """A manifest with stages; the command prints the same schema."""
    done = ended(*PYTHON[:1], "-m", "megapack.training.pretrain", "--print-schema", "manifest")
    schema = json.loads(done.stdout)
    assert schema == json_schema(BlendConfig)
    check = jsonschema.Draft202012Validator(schema)
    source = {"prefix": "web", "index": "web.samples", "weight": 0.5}
    check.validate({"sources": [source], "stages": [{"from_step": 100, "weights": {"web": 1}}]})
    assert not check.is_valid({"sources": [{**source, "wieght": 1}]})
