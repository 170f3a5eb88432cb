"""What a packing strategy is: a name, a meaning, parameters that are checked, and a function."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megapack import _core
from megapack.errors import ConfigError

__all__ = ["Packing", "Parameter", "Request", "Strategy", "name_nearest"]

# The arrays of SampleIndex, dropped_tokens, repeated_tokens and, of some strategies, decisions.
Packing = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a strategy works on; ``buckets`` ascends, ``parameters`` are the strategy's own."""

    lengths: _core.DocumentLengths
    buckets: list[int]
    parameters: dict[str, Any]
    seed: int
    threads: int
    progress: Callable[[int, int], None] | None = None
    wide_ids: bool = False

    @property
    def capacity(self) -> int:
        return self.buckets[-1]

    def pack(self, strategy: str, **rules: Any) -> Packing:
        """What a strategy of the core makes of the documents by these rules."""
        run = _core.Run(
            seed=self.seed, threads=self.threads, wide_ids=self.wide_ids, progress=self.progress
        )
        return _core.pack(strategy, self.lengths, rules, run)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One keyword of ``pack`` and one option of ``megapack-build pack``."""

    name: str
    default: Any  # None: an integer that follows from the buckets
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None

    @property
    def kind(self) -> type:
        return int if self.default is None else type(self.default)

    def check(self, value: Any) -> Any:
        """``value`` as ``kind``, or ConfigError with the name, the value and the limit."""
        if value is None and self.default is None:
            return None
        if self.choices:
            if value not in self.choices:
                known = ", ".join(self.choices)
                raise ConfigError(f"{self.name} is {value!r}; it must be one of {known}")
            return value
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{self.name} is {value!r}; it must be True or False")
            return value
        accepted = numbers.Integral if self.kind is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise ConfigError(f"{self.name} is {value!r}; it must be of type {self.kind.__name__}")
        number = self.kind(value)
        above = self.minimum is None or number >= self.minimum
        below = self.maximum is None or number <= self.maximum
        if not (above and below):
            raise ConfigError(f"{self.name} is {value}; it must be {self._range()}")
        return number

    def _range(self) -> str:
        if self.maximum is None:
            return f"at least {self.minimum}"
        return f"from {self.minimum} to {self.maximum}"


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to turn document lengths into samples.

    Attributes:
        name: what ``pack`` and the command line call it.
        description: its meaning in a sentence.
        source: where it was published.
        many_buckets: whether ``buckets`` may hold more than one capacity.
        may_drop, may_repeat: whether by definition a token may be in no sample, or in several.
        parameters: its keywords, in the order of the table in docs.
        presets: name -> function of the largest capacity that gives the parameters of a paper.
        check: refuses, before any work, buckets (ascending) that do not go with the parameters.
        run: the function that packs.
    """

    name: str
    description: str
    source: str
    run: Callable[[Request], Packing]
    parameters: tuple[Parameter, ...] = ()
    many_buckets: bool = False
    may_drop: bool = False
    may_repeat: bool = False
    presets: Mapping[str, Callable[[int], dict[str, Any]]] = field(default_factory=dict)
    check: Callable[[list[int], Mapping[str, Any]], None] | None = None

    def resolve(
        self, values: Mapping[str, Any], *, preset: str | None = None, capacity: int = 0
    ) -> dict[str, Any]:
        """Defaults, then the preset, then ``values``; checked.

        Raises:
            ConfigError: an unknown parameter or preset (the nearest known one is named), or a
                value out of range.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        resolved = {name: parameter.default for name, parameter in known.items()}
        if preset is not None:
            if preset not in self.presets:
                raise ConfigError(
                    f"strategy {self.name!r} has no preset {preset!r}"
                    f"{name_nearest(preset, list(self.presets))}"
                )
            resolved |= self.presets[preset](capacity)
        for name, value in values.items():
            if name not in known:
                hint = name_nearest(name, list(known))
                raise ConfigError(f"strategy {self.name!r} has no parameter {name!r}{hint}")
            resolved[name] = known[name].check(value)
        return resolved


def name_nearest(name: str, known: list[str]) -> str:
    """The end of a message about an unknown name."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (known: {', '.join(sorted(known)) or 'none'})"
