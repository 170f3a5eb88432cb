"""JSON Schema of a configuration class, for editors that complete and check its YAML.

    json_schema(PretrainConfig)["properties"]["seed"]
    # -> {"type": "integer", "default": 0, "description": "Seed of the run. ..."}

    # yaml-language-server: $schema=run.schema.json      (first line of the YAML)

The schema rejects unknown keys and wrong types, as ``megapack.config`` does. Checks in the code of
a class (ranges, fields that require each other) are not part of it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, Union, get_args, get_origin

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
_TYPES |= {type(None): "null"}


def json_schema(cls: type) -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a configuration class and the classes of its fields."""
    definitions: dict[str, Any] = {}
    schema = _of_class(cls, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": cls.__name__,
        **schema,
        "$defs": definitions,
    }


def field_docstrings(cls: type) -> dict[str, str]:
    """Return field -> docstring of the field, including base classes."""
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
            ):
                docstrings[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return docstrings


def _of_class(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, meanings = typing.get_type_hints(cls), field_docstrings(cls)
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        schema = _of(hints[field.name], definitions)
        has_factory = field.default_factory is not dataclasses.MISSING
        if field.default is dataclasses.MISSING and not has_factory:
            required.append(field.name)
        elif isinstance(field.default, tuple):
            schema["default"] = list(field.default)
        elif isinstance(field.default, (bool, int, float, str)):
            schema["default"] = field.default
        if field.name in meanings:
            schema["description"] = " ".join(meanings[field.name].split())
        properties[field.name] = schema
    about = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")[0]
    return {
        "type": "object",
        "description": " ".join(about.split()),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of(one, definitions) for one in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if dataclasses.is_dataclass(hint):
        name = typing.cast("type", hint).__name__
        if name not in definitions:
            definitions[name] = {}  # a class may contain itself
            definitions[name] = _of_class(typing.cast("type", hint), definitions)
        return {"$ref": f"#/$defs/{name}"}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin in (tuple, list):
        return {"type": "array", "items": _of(arguments[0], definitions)}
    if hint is dict or origin is dict:
        values = _of(arguments[1], definitions) if arguments else {}
        return {"type": "object", "additionalProperties": values}
    return {}
