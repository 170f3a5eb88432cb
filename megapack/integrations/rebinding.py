"""Names of a host's modules bound to ours, and given back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from megapack.errors import ConfigError


class Rebinding:
    """A set of replaced names; ``undo()`` restores them, last first.

    Args:
        host: its name and release, for the message about a name that it does not have.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        self._replaced: list[tuple[ModuleType | type, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, owner: ModuleType | type, name: str, value: Any) -> None:
        """Bind ``owner.name`` to ``value``.

        Raises:
            ConfigError: the host has no such name; what was replaced before is given back.
        """
        if not hasattr(owner, name):
            self.undo()
            raise ConfigError(
                f"{self.host} has no {owner.__name__}.{name} "
                f"({getattr(owner, '__file__', 'a class')}): megapack does not know this release; "
                "docs/guides names those it was tried with"
            )
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Give every module its own names back."""
        while self._replaced:
            owner, name, original = self._replaced.pop()
            setattr(owner, name, original)
