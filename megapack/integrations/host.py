"""Helpers of all adapters: checks of options, replaced names, the model without a wrapper.

check_options({"packing": (args.packing, False, "rows are packed already")})
# ConfigError: packing is True: rows are packed already. Set it to False.

rebinding = Rebinding("GPT-NeoX")
rebinding.replace(data_utils, "build_weighted_datasets", ours)
rebinding.undo()
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from megapack.errors import ConfigError


def check_options(options: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Raise ConfigError for the first option whose value is not the required one. ``options`` maps
    the name, as the user writes it, to (value, required value, reason). None as required value
    means that the user must leave the option out; False, 0 and "" pass, too."""
    for name, (value, required, reason) in options.items():
        if value == required or (required is None and not value):
            continue
        remedy = "Leave it out" if required is None else f"Set it to {required!r}"
        raise ConfigError(f"{name} is {value!r}: {reason}. {remedy}.")


class Rebinding:
    """Replaces attributes of a host's modules and classes; ``undo()`` restores them, the last one
    first. ``host`` is the name and release of the host, for errors."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._replaced: list[tuple[ModuleType | type, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, owner: ModuleType | type, name: str, value: Any) -> None:
        """Bind ``owner.name`` to ``value``. If ``owner`` has no such name, undo all replacements
        and raise ConfigError."""
        if not hasattr(owner, name):
            self.undo()
            raise ConfigError(
                f"{self.host} has no {owner.__name__}.{name} "
                f"({getattr(owner, '__file__', 'a class')}): megapack does not know this release; "
                "docs/guides lists the releases that it supports"
            )
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore the host's own names."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)


def bare_model(model: Any) -> Any:
    """Return the model without PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
