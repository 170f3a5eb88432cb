"""Names of a host's modules bound to ours, and given back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

__all__ = ["Rebinding"]


class Rebinding:
    """A set of replaced names; ``undo()`` restores them, last first."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, module: ModuleType, name: str, value: Any) -> None:
        """Bind ``module.name`` to ``value``. AttributeError where the host has no such name."""
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def undo(self) -> None:
        """Give every module its own names back."""
        while self._replaced:
            module, name, original = self._replaced.pop()
            setattr(module, name, original)
