"""Configurations that come with the package, by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megapack.config import nearest
from megapack.errors import ConfigError
from megapack.training.config import PretrainConfig, load_config

__all__ = ["read_config"]

_RECIPES = Path(__file__).parents[1] / "configs"


def read_config(name: str, overrides: Sequence[str] = ()) -> PretrainConfig:
    """A run's configuration from a YAML file, or from a recipe that comes with the package.

    Args:
        name: a path, or the name of a file of ``configs/`` without ``.yaml``.
        overrides: ``"a.b=value"``.

    Raises:
        ConfigError: neither, or as ``load_config``.
        OSError: the file cannot be read.
    """
    recipes = {path.stem: path for path in sorted(_RECIPES.glob("*.yaml"))}
    if not Path(name).is_file():
        if name not in recipes:
            raise ConfigError(
                f"{name} is neither a file nor a recipe{nearest(name, recipes)} (recipes: "
                f"{', '.join(recipes)})"
            )
        return load_config(PretrainConfig, recipes[name], overrides)
    return load_config(PretrainConfig, name, overrides)
