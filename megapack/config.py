"""Frozen dataclasses from YAML: one way to read, override, check and print a configuration.

A configuration class is ``@dataclass(frozen=True, kw_only=True)``; nested classes nest in the
YAML. An unknown key is an error that names the nearest known one, and a value of the wrong type
is an error that names the field, the value and the type it must have.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from megapack.errors import ConfigError

__all__ = ["apply_overrides", "check_positive", "from_dict", "load_config", "to_dict"]

T = TypeVar("T")


def load_config(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file into ``cls``.

    Args:
        cls: a frozen dataclass.
        path: the YAML file.
        overrides: ``"a.b=value"`` strings, applied in order; values are parsed as YAML.

    Raises:
        ConfigError: not YAML, unknown key, wrong type, or a value ``cls`` refuses.
        OSError: the file cannot be read.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}; it must be a mapping of keys")
    return from_dict(cls, apply_overrides(tree, overrides), where=str(path))


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``tree`` with every ``"a.b=value"`` set (the path is created where missing)."""
    result = _copy_mapping(tree)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"override {item!r} is not of the form key=value (as in seed=7)")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {item!r}: the value is not valid YAML: {error}") from error
        *parents, leaf = key.strip().split(".")
        node = result
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"override {item!r}: {parent} is a value, it has no keys")
            node = child
        node[leaf] = value
    return result


def from_dict(cls: type[T], tree: Mapping[str, Any], *, where: str = "configuration") -> T:
    """Build ``cls`` from nested mappings. Raises ConfigError (see ``load_config``)."""
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}{_nearest(str(key), list(fields))}")
        values[key] = _convert(hints[key], value, f"{where}: {key}")
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            raise ConfigError(f"{where}: missing key {name!r}; it has no default")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_dict(config: Any) -> dict[str, Any]:
    """The inverse of ``from_dict``: plain dicts, lists and scalars, ready for YAML or JSON."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        result[field.name] = _plain(getattr(config, field.name))
    return result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _copy_mapping(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy_mapping(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _nearest(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (known: {', '.join(sorted(known))})"


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, where)
    if origin is typing.Literal:
        choices = get_args(hint)
        if value not in choices:
            known = ", ".join(map(str, choices))
            raise ConfigError(f"{where} is {value!r}; it must be one of {known}")
        return value
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}; it must be a mapping of keys")
        return from_dict(typing.cast("type[Any]", hint), value, where=where)
    if origin in (tuple, list):
        return _convert_sequence(hint, value, where)
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}; it must be a mapping of keys")
        return dict(value)
    return _convert_scalar(hint, value, where)


def _convert_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    problems = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _convert(choice, value, where)
        except ConfigError as error:
            problems.append(error)
    raise problems[0]


def _convert_sequence(hint: Any, value: Any, where: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{where} is {value!r}; it must be a list")
    args = get_args(hint)
    item_hint = args[0] if args else Any
    items = [_convert(item_hint, item, f"{where}[{i}]") for i, item in enumerate(value)]
    return tuple(items) if get_origin(hint) is tuple else items


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML reads 3e-4 (no dot) as a string
        except ValueError:
            pass
    if hint is Path and isinstance(value, str):
        return Path(value)
    accepted = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    if not accepted:
        raise ConfigError(f"{where} is {value!r}; it must be of type {hint.__name__}")
    return value


def check_positive(section: str, **values: float) -> None:
    """Fields of a section that make no sense at 0 or below.

    Raises:
        ConfigError: naming section, field and value.
    """
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"{section}: {name} is {value}; it must be above 0")
