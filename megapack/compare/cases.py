"""Which strategies to compare, from words on a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from megapack.errors import ConfigError
from megapack.packing import STRATEGIES, check_packing, find_strategy

__all__ = ["Case", "default_cases", "parse_case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy with its capacities and the parameters that differ from the defaults.

    Attributes:
        label: name in tables: ``concat@4096``, ``bucket``, ``seamless@2048 r_max=0.3``.
        strategy: name in ``STRATEGIES``.
        buckets: capacities, ascending.
        parameters: keywords of ``pack``; ``preset`` is one of them.
        alignment: as in ``pack``.
    """

    label: str
    strategy: str
    buckets: tuple[int, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    alignment: int = 1

    def __post_init__(self) -> None:
        """Refuse what ``pack`` would refuse, before anything else of a comparison has run."""
        values = dict(self.parameters)
        check_packing(
            self.strategy,
            buckets=self.buckets,
            alignment=self.alignment,
            preset=values.pop("preset", None),
            parameters=values,
        )

    def command(self, prefix: str, seed: int) -> str:
        """The command that packs the dataset at ``prefix`` like this."""
        words = ["megapack-build", "pack", prefix, "--strategy", self.strategy]
        words += ["--buckets", ",".join(map(str, self.buckets))]
        for name, value in self.parameters.items():
            option = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{option}")
            else:
                words += [f"--{option}", str(value)]
        words += ["--alignment", str(self.alignment)] if self.alignment > 1 else []
        words += ["--seed", str(seed)] if seed else []
        return shlex.join(words)

    @property
    def is_fixed_length(self) -> bool:
        """One shape for all samples."""
        return len(self.buckets) == 1


def parse_case(
    text: str, *, buckets: Sequence[int], capacities: Sequence[int], alignment: int = 1
) -> list[Case]:
    """Read ``NAME[@CAPACITY[+CAPACITY...]][:KEY=VALUE[,KEY=VALUE...]]``.

    Args:
        text: for instance ``bucket``, ``concat@4096``, ``seamless@2048:preset=paper,last=drop``.
        buckets: capacities of a bucket strategy that names none.
        capacities: a fixed-length strategy that names none becomes one case for each of these.
        alignment: as in ``pack``.

    Raises:
        ConfigError: the text is not of this form, names no strategy or no parameter of it, or the
            strategy cannot serve these capacities.
    """
    head, _, tail = text.partition(":")
    name, at, places = head.partition("@")
    many = find_strategy(name).many_buckets
    parameters = _parse_parameters(tail, text)
    suffix = "".join(f" {key}={value}" for key, value in parameters.items())
    if at:
        chosen = [(head, _parse_capacities(places, text))]
    elif many:
        chosen = [(name, tuple(sorted(buckets)))]
    else:
        chosen = [(f"{name}@{capacity}", (capacity,)) for capacity in capacities]
    return [
        Case(
            label=label + suffix,
            strategy=name,
            buckets=given,
            parameters=parameters,
            alignment=alignment,
        )
        for label, given in chosen
    ]


def _parse_parameters(text: str, whole: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"strategy {whole!r}: {item!r} is not of the form key=value")
        # YAML reads on and off as booleans; a parameter that has them as words means the words.
        parameters[key.strip()] = value if value in ("on", "off") else yaml.safe_load(value)
    return parameters


def _parse_capacities(text: str, whole: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(int(place) for place in text.split("+")))
    except ValueError:
        raise ConfigError(
            f"strategy {whole!r}: {text!r} is no capacity; write @4096, or @1024+2048 for buckets"
        ) from None


def default_cases(
    *, buckets: Sequence[int], capacities: Sequence[int], alignment: int = 1
) -> tuple[list[Case], dict[str, str]]:
    """Every strategy of the registry with its default parameters.

    Returns:
        The cases, and for each strategy that cannot serve these capacities why: name -> sentence.

    Raises:
        ConfigError: none can.
    """
    cases: list[Case] = []
    left_out: dict[str, str] = {}
    for name in STRATEGIES:
        try:
            cases += parse_case(name, buckets=buckets, capacities=capacities, alignment=alignment)
        except ConfigError as error:
            left_out[name] = str(error)
    if not cases:
        raise ConfigError(f"no strategy can serve: {next(iter(left_out.values()))}")
    return cases, left_out
