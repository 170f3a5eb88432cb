"""Checks of the arguments of public functions, and suggestions for misspelled names.

- ``checked_call``: decorator of a function or class. A wrong name or type is an ArgumentError.
- ``nearest``: "; did you mean 'x'?", for every error about an unknown name.
- ``explained``: text of an error, with a similar name if a file is missing.
- ``without_none``: arguments that are not None.

    @checked_call
    def build(steps: int, *, order: Literal["shuffled", "sorted"] = "shuffled") -> None: ...

    build(3, ordr="sorted")  # build: unknown argument 'ordr'; did you mean 'order'?
    build("3")               # build: steps is '3'; it must be an integer
    build(3, order="sort")   # build: order is 'sort'; it must be 'shuffled' or 'sorted'

Only the standard library is imported: the leak detector works without other packages.
"""

from __future__ import annotations

import collections.abc
import contextlib
import difflib
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

from megapack.errors import ArgumentError

F = TypeVar("F", bound=Callable[..., Any])


def nearest(name: str, known: Iterable[str], formerly: Mapping[str, str] | None = None) -> str:
    """Return ``"; did you mean 'x'?"`` for a similar known name, or an empty string.

    Case, ``-`` and ``_`` do not count. The only name that begins with ``name``, or whose initials
    it consists of, comes before similar ones. ``formerly`` maps old names to known ones.
    """
    names = {**{one: one for one in known}, **(formerly or {})}
    plain, written = {_plain(one): names[one] for one in names}, _plain(name)
    begins = {plain[one] for one in plain if one.startswith(written)}
    initials = {one for text, one in names.items() if _initials(text) == written}
    if written in plain:
        intended = {plain[written]}
    elif len(written) > 2 and len(begins) == 1:  # two letters begin, or abbreviate, too many names
        intended = begins
    elif len(written) > 2 and len(initials) == 1:
        intended = initials
    else:
        close = difflib.get_close_matches(written, plain, n=1, cutoff=0.6)
        intended = {plain[one] for one in close}
    return "".join(f"; did you mean {one!r}?" for one in intended)


def explained(error: Exception) -> str:
    """Return the text of an error; for a missing file, with a similar name in its folder."""
    if not isinstance(error, FileNotFoundError) or error.filename is None:
        return str(error)
    path, near = Path(error.filename), list[Path]()
    with contextlib.suppress(OSError):
        near = [p for p in path.parent.iterdir() if p.suffix == path.suffix]
    hint = nearest(path.name, (), {each.name: str(each) for each in near})
    return f"{error.strerror}: {error.filename}{hint}"


def _plain(name: str) -> str:
    return re.sub(r"(?<=\w)[-_]", "", name.lower())  # keep the hyphens before an option


def _initials(name: str) -> str:
    return "".join(word[:1] for word in re.split("[-_]", name.lower()))


def without_none(arguments: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return those arguments (``locals()``) that ``names`` lists and that are not None."""
    return {name: arguments[name] for name in names if arguments[name] is not None}


def checked_call(function: F, instead: Mapping[str, str] | None = None) -> F:
    """Check the names and types of arguments at every call.

    Scalars, literals and classes are checked. A sequence, mapping or array is only checked not to
    be a scalar. numpy's numbers count as numbers; booleans do not. ``instead``: arguments that
    users of similar functions try, or give a value of another type, and what to do instead.

    Raises ArgumentError, which is a ConfigError, a ValueError and a TypeError.
    """
    if isinstance(function, type):
        cls: Any = function
        cls.__init__ = checked_call(vars(cls)["__init__"], instead)
        return function
    subject = function.__qualname__.removesuffix(".__init__")

    @functools.cache  # at the first call, when all names of the hints exist
    def declared() -> tuple[inspect.Signature, dict[str, Any], list[tuple[int, str]]]:
        signature, hints = inspect.signature(function), _hints(function)
        chosen = [(i, n) for i, n in enumerate(signature.parameters) if _choices(hints.get(n))]
        return signature, hints, chosen

    accepted: set[tuple[Any, ...]] = set()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        signature, hints, chosen = declared()
        # Checks depend on types, and on the values of choices: what passed once passes again.
        values = [args[i] if i < len(args) else kwargs.get(name) for i, name in chosen]
        kinds = (*map(type, args), *kwargs, *map(type, kwargs.values()), *map(_kind, values))
        if kinds in accepted:
            return function(*args, **kwargs)
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            misfit = _misfit(signature, args, kwargs, error, instead or {})
            raise ArgumentError(f"{subject}: {misfit}") from None
        for name, value in arguments.items():
            is_one = signature.parameters[name].kind not in _VARIADIC
            if is_one and name in hints and not _accepts(hints[name], value):
                choices = [choice for choice in _choices(hints[name]) if isinstance(choice, str)]
                words = [word for word in _describe(hints[name]) if word != "None"]
                limit = " or ".join(dict.fromkeys(words))
                if isinstance(value, str):
                    limit += nearest(value, choices) if choices else ""
                    limit += _as_list(hints[name], value) if not choices else ""
                limit += f"; {instead[name]}" if instead and name in instead else ""
                raise ArgumentError(f"{subject}: {name} is {value!r:.200}; it must be {limit}")
        if len(accepted) < _MOST_KINDS:
            accepted.add(kinds)
        return function(*args, **kwargs)

    return typing.cast("F", call)


_MOST_KINDS = 1024  # of the arguments of one function


def _kind(value: Any) -> Any:
    return value if type(value) is str else type(value)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the type hints of arguments, without those that only a type checker can resolve."""
    hints: dict[str, Any] = {}
    for name, text in function.__annotations__.items():
        one = types.SimpleNamespace(__annotations__={name: text})
        with contextlib.suppress(NameError, TypeError):
            hints |= typing.get_type_hints(one, function.__globals__)
    return hints


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _misfit(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: TypeError,
    instead: Mapping[str, str],
) -> str:
    """Describe the first argument that does not fit a signature."""
    known = {name: p for name, p in signature.parameters.items() if name != "self"}
    for name in kwargs:
        if name not in known:
            if name in instead:
                return f"unknown argument {name!r}; {instead[name]}"
            listed = nearest(name, known) or f" (known: {', '.join(known)})"
            return f"unknown argument {name!r}{listed}"
    by_position = [name for name, p in signature.parameters.items() if p.kind < p.VAR_POSITIONAL]
    if len(args) > len(by_position):
        names = ", ".join(name for name in by_position if name in known) or "none"
        return f"too many positional arguments (allowed: {names}); pass the others by name"
    for name, parameter in list(signature.parameters.items())[len(args) :]:
        if parameter.default is parameter.empty and name not in kwargs:
            return f"missing argument {name!r}; it has no default: pass it"
    return str(error)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _choices(hint: Any) -> list[Any]:
    literals = [one for one in _members(hint) if get_origin(one) is typing.Literal]
    return [choice for literal in literals for choice in get_args(literal)]


def _as_list(hint: Any, value: str) -> str:
    """Return ", as in [512, 1024]": the list that a string may have meant, or an empty string."""
    lists = [one for one in _members(hint) if _describe(one) == ["a list"]]
    types_of_items = [item for one in lists for item in _members(get_args(one)[0])]
    if str in types_of_items:
        return f", as in [{value!r}]"
    for number in [one for one in (int, float) if one in types_of_items]:
        with contextlib.suppress(ValueError):
            return f", as in {[number(part) for part in value.split(',')]}"
    return ""


_SCALARS = (str, bytes, int, float, bool, type(None))


def _accepts(hint: Any, value: Any) -> bool:
    """Return whether a value fits a type hint; True if that cannot be decided."""
    if len(_members(hint)) > 1:
        return any(_accepts(one, value) for one in _members(hint))
    origin, is_bool = get_origin(hint), type(value).__name__ in ("bool", "bool_")
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is not None:
        return not isinstance(value, _SCALARS)
    if hint in (None, type(None)):
        return value is None
    if hint is bool:
        return is_bool
    if hint in (int, float):  # also numpy's, and arrays and tensors of one number
        names = ("__index__",) if hint is int else ("__index__", "__float__")
        return not is_bool and any(hasattr(value, name) for name in names)
    try:
        return getattr(hint, "_is_protocol", False) or isinstance(value, hint)
    except TypeError:  # Any, a TypeVar, a TypedDict
        return True


_NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
_NAMES |= {type(None): "None", os.PathLike: "a path"}


def _describe(hint: Any) -> list[str]:
    """Return words for the types of a hint."""
    if len(_members(hint)) > 1:
        return [word for one in _members(hint) for word in _describe(one)]
    origin = get_origin(hint) or hint
    if origin is typing.Literal:
        return [repr(choice) for choice in get_args(hint)]
    if origin in _NAMES:
        return [_NAMES[origin]]
    if origin is collections.abc.Callable:
        return ["a function"]
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return ["a mapping"]
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable) and get_args(hint):
        return ["a list"]
    return [getattr(origin, "__name__", str(origin))]
