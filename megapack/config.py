"""Configurations: frozen dataclasses that are read from YAML, overridden, checked and printed.

A configuration class is ``@dataclass(frozen=True, kw_only=True)``; nested classes nest in the
YAML. Errors are an unknown key (the message names the nearest known one), a duplicate key, a value
of a wrong type, a number that is not finite, and an integer beyond 64 bits. Booleans do not count
as integers. ``check_range`` checks ranges.

    from_dict(LearningRateConfig, {"kind": "wsd", "warmup_step": 2}, where="learning_rate")
    # -> ConfigError: learning_rate: unknown key 'warmup_step'; did you mean 'warmup_steps'? ...
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from megapack.calls import nearest
from megapack.errors import ConfigError, check_name

T = TypeVar("T")


def load_config(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file into ``cls``, a frozen dataclass; apply ``"a.b=value"`` overrides (YAML).
    Raises ConfigError for invalid YAML, an unknown key, a wrong type, or a value that ``cls``
    refuses, OSError if the file cannot be read."""
    try:
        tree = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {_one_line(error)}") from error
    tree = {} if tree is None else tree
    where = str(path)
    if not isinstance(tree, dict):
        return from_dict(cls, tree, where=where)
    try:
        return from_dict(cls, apply_overrides(tree, overrides), where=where)
    except ConfigError as error:
        problem = str(error)
    if problem.startswith("--set "):  # one override is invalid
        raise ConfigError(problem)

    def is_cause(*removed: int) -> bool:
        kept = [text for i, text in enumerate(overrides) if i not in removed]
        try:
            from_dict(cls, apply_overrides(tree, kept), where=where)
        except ConfigError as error:
            # An error about --set means that another override depends on a removed one.
            return str(error) != problem and not str(error).startswith("--set ")
        return True

    # An override is a cause if the error changes or disappears without it. If removing any one
    # changes nothing, several cause the same error: blame all of them.
    every = range(len(overrides))
    blamed = [i for i in every if is_cause(i)] or [i for i in every if is_cause(*every)]
    if blamed:
        causes = " ".join(f"--set {overrides[i]}" for i in blamed)
        problem = f"{causes}: {problem.removeprefix(f'{where}: ')}"
    raise ConfigError(problem)


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return a copy of ``tree`` with every ``"a.b=value"`` set; missing mappings are created."""
    result = _copy_mapping(tree)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item} is not of the form key=value (as in --set seed=7)")
        try:
            value = read_yaml(text)
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {item}: the value is not valid YAML: {_one_line(error)}"
            ) from error
        *parents, leaf = key.strip().split(".")
        node = result
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise ConfigError(f"--set {item}: {parent} is a single value; set it directly")
            node = child
        node[leaf] = value
    return result


def from_dict(cls: type[T], tree: Any, *, where: str = "configuration") -> T:
    """Build ``cls`` from nested mappings. Raises ConfigError as in ``load_config``. The error for
    an unknown key x suggests the field with ``metadata={"formerly": "x"}``."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} is {tree!r:.200}; it must be a mapping of keys")
    hints, required, formerly = _keys(cls)  # type: ignore[arg-type]
    if unknown := [key for key in tree if key not in hints]:
        nested = _keys_of_sections(cls)
        formerly = {key: nested[key] for key in unknown if key in nested} | formerly
    check_known(where, "key", tree, hints, formerly)
    values = {key: _convert(hints[key], tree[key], f"{where}: {key}") for key in tree}
    for name in required:
        if name not in values:
            raise ConfigError(f"{where}: missing key {name!r}; it has no default, so add it")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


@functools.cache
def _keys(cls: type[Any]) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """Return key -> type hint, the keys without a default, and former key -> key."""
    all_hints, fields = get_type_hints(cls), [f for f in dataclasses.fields(cls) if f.init]
    missing = dataclasses.MISSING
    required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    formerly = {f.metadata["formerly"]: f.name for f in fields if "formerly" in f.metadata}
    return {f.name: all_hints[f.name] for f in fields}, required, formerly


def _keys_of_sections(cls: type[Any]) -> dict[str, str]:
    """Return key -> section.key, for keys that exactly one section of ``cls`` has."""
    paths: dict[str, list[str]] = {}
    for section, hint in _keys(cls)[0].items():  # type: ignore[arg-type]
        kinds: list[Any] = [hint, *get_args(hint)]
        for kind in filter(dataclasses.is_dataclass, kinds):
            for key in _keys(kind)[0]:  # type: ignore[arg-type]
                paths.setdefault(key, []).append(f"{section}.{key}")
    return {key: each[0] for key, each in paths.items() if len(each) == 1}


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to dicts, lists and scalars, as ``from_dict`` reads them."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


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


MAX_DEPTH = 100  # of nested YAML: far below Python's recursion limit
MAX_NODES = 1_000_000  # of a YAML file after its aliases are expanded
MAX_BITS = 4096  # of an integer: Python refuses to print much longer ones


# libyaml, if PyYAML was built with it, is many times faster.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Loader that refuses duplicate keys (YAML would keep the second; ``<<`` merges do not count)
    and integers that are too long to print."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.checked: set[int] = set()  # ids of mapping nodes

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the keys of a mapping before YAML adds those of ``<<``."""
        seen: set[str] = set()
        for key, _ in () if id(node) in self.checked else node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    _refuse(f"key {key.value!r} occurs twice", key.start_mark)
                seen.add(key.value)
        self.checked.add(id(node))
        super().flatten_mapping(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > MAX_BITS:
            _refuse(f"an integer has {value.bit_length():,} bits", node.start_mark)
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refuse(problem: str, mark: Any) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, problem, mark)


def _check_size(text: str) -> None:
    """Refuse values nested too deeply, and aliases that contain themselves or become too large."""
    sizes: dict[str, int | None] = {}  # anchor -> values after expansion; None: still open
    unended: list[tuple[str | None, int]] = []  # anchor, values of each open collection
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            if len(unended) >= MAX_DEPTH:
                _refuse(f"values are nested more than {MAX_DEPTH} levels deep", event.start_mark)
            if event.anchor is not None:
                sizes[event.anchor] = None
            unended.append((event.anchor, 1))
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = unended.pop()
        elif isinstance(event, yaml.AliasEvent):
            anchor, known = None, sizes.get(str(event.anchor), 1)  # YAML refuses an unknown alias
            if known is None:
                _refuse("an alias refers to a value that contains it", event.start_mark)
            size = known
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1
        else:  # of the stream or the document
            continue
        if anchor is not None:
            sizes[anchor] = size
        if unended:
            anchor, others = unended.pop()
            if others + size > MAX_NODES:
                problem = f"aliases expand to more than {MAX_NODES:,} values"
                _refuse(problem, event.start_mark)
            unended.append((anchor, others + size))


def read_yaml(text: str) -> Any:
    """Parse untrusted YAML. Raises yaml.YAMLError, also for hostile nesting and aliases."""
    try:
        _check_size(text)
        return yaml.load(text, _Loader)
    except (ValueError, OverflowError) as error:  # an impossible date or number
        raise yaml.YAMLError(str(error)) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def check_known(
    where: str,
    what: str,
    names: Iterable[Any],
    known: Iterable[str],
    formerly: Mapping[str, str] | None = None,
) -> None:
    """Raise ConfigError if a name is unknown; it names the nearest known one, and all known ones.

    Args:
        where: start of the message: the origin of the names.
        what: kind of the names, as in "key".
        formerly: old name -> known name.
    """
    known = dict.fromkeys(known)
    for name in names:
        if name not in known:
            hint, listed = nearest(str(name), known, formerly), ", ".join(sorted(known))
            raise ConfigError(f"{where}: unknown {what} {name!r}{hint} (known: {listed})")


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(hint), value, where)
    if origin is typing.Literal:
        choices = get_args(hint)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            known = ", ".join(map(str, choices))
            raise ConfigError(f"{where} is {value!r:.200}; it must be one of {known}")
        return value
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast("type[Any]", hint), value, where=where)
    if origin in (tuple, list):
        return _convert_sequence(hint, value, where)
    if origin is dict or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r:.200}; it must be a mapping of keys")
        key_hint, item_hint = get_args(hint) or (Any, Any)
        return {
            _convert(key_hint, key, f"{where}: key"): _convert(item_hint, item, f"{where}: {key}")
            for key, item in value.items()
        }
    return _convert_scalar(hint, value, where)


def _convert_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    if type(value) is int and {int, float} <= set(choices):
        return value  # a float might round it
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
        raise ConfigError(f"{where} is {value!r:.200}; it must be a list")
    args = get_args(hint)
    item_hint = args[0] if args else Any
    items = [_convert(item_hint, item, f"{where}[{i}]") for i, item in enumerate(value)]
    return tuple(items) if get_origin(hint) is tuple else items


def _convert_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            value = float(value)  # YAML reads 3e-4 (no dot) as a string
    if isinstance(value, str):
        check_name(value, f"{where}:")
    if hint is Path and isinstance(value, str):
        return Path(value)
    accepted = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
    if not accepted:
        raise ConfigError(f"{where} is {value!r:.200}; it must be of type {hint.__name__}")
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where} is {value}; it must be a finite number")
    if hint is int and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{where} is {value}; it must be a 64-bit integer")
    return value


def check_range(
    section: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    **values: float | None,
) -> None:
    """Check that numbers are finite and in a range; None values are not checked.

    Args:
        section: start of the message: the origin of the numbers.
        above, at_least: lower bound, exclusive or inclusive.
        below, at_most: upper bound, exclusive or inclusive.
        values: name -> number.

    Raises ConfigError: "section: name is VALUE; it must be ...".
    """
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool) or not abs(value) < math.inf:
            raise ConfigError(f"{section}: {name} is {value}; it must be a finite number")
        if (
            (above is not None and not value > above)
            or (at_least is not None and not value >= at_least)
            or (below is not None and not value < below)
            or (at_most is not None and not value <= at_most)
        ):
            bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
            limits = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
            range_ = " and ".join(limits)
            raise ConfigError(f"{section}: {name} is {value}; it must be {range_}")


def check_positive(section: str, **values: float | Sequence[float] | None) -> None:
    """Check with ``check_range`` that numbers, or all numbers of sequences, are above 0."""
    for name, value in values.items():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            check_range(section, above=0, **{name: each})


def whole_numbers(section: str, config: Any, *names: str, **bounds: float) -> None:
    """Check fields of a frozen dataclass with ``check_range`` and convert them to int. JSON does
    not accept numpy.int64. Raises ConfigError also if a field is not a whole number."""
    values = {name: getattr(config, name) for name in names}
    check_range(section, **bounds, **values)
    for name, value in values.items():
        try:
            object.__setattr__(config, name, None if value is None else operator.index(value))
        except TypeError:
            message = f"{section}: {name} is {value!r:.200}; it must be a whole number"
            raise ConfigError(message) from None
