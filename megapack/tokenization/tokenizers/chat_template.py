"""A chat template (Hugging Face's Jinja templates), rendered as transformers'
``apply_chat_template`` renders it, with bounded work.

    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "t")
    template.render(messages=[{"role": "user", "content": "hi"}])  # -> Rendered("user: hi", [])

The environment is that of transformers: its sandbox, tags, filters and functions, and the names
under which it copies a message's reasoning. It differs in three things:

- Nothing depends on the day or on chance: ``strftime_now`` is there only where a date was given
  (``clock``), ``random`` and ``lipsum`` are refused.
- Work is bounded, by counts that are the same on every machine: steps (iterations and calls) and
  the characters that operators, filters, calls and outputs make.
- Whatever goes wrong is an error that names the template and its line.

Source: transformers 5.23, ``utils/chat_template_utils.py`` and ``apply_chat_template``.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from megapack.errors import ConfigError, DataError
from megapack.tokenization.tokenizers.coding import TemplateError
from megapack.tokenization.tokenizers.limited import renew_time_limit

Span = tuple[int, int]  # [begin, end) of a text, in characters

_MAX_CHARACTERS = 1 << 28  # of one rendered conversation

_REASONING = ("reasoning_content", "thinking", "reasoning")


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    answers: list[Span]  # written by the assistant, e.g. in {% generation %} blocks


class ChatTemplate:
    """A compiled template.

    ``variables`` are the names it reads from outside; ``marks_answers`` says whether it has
    ``{% generation %}`` blocks.

    Raises:
        ConfigError: it cannot be compiled; ``name`` is what the message calls it.
    """

    def __init__(self, source: str, name: str) -> None:
        self._name = name
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except Exception as error:
            line = getattr(error, "lineno", None)
            where = name if line is None else f"line {line} of {name}"
            raise ConfigError(f"{where} is broken: {_reason(error)}") from error
        undeclared = jinja2.meta.find_undeclared_variables(tree)
        self.variables = frozenset(undeclared) - set(self._environment.globals)
        self.marks_answers = self._environment.has_generation

    def render(self, **variables: Any) -> Rendered:
        """Args:
            variables: plain JSON values, and what ``clock`` gives.

        Raises:
            DataError: the template refuses them (``raise_exception``).
            TemplateError: anything else went wrong.
        """
        environment = self._environment
        environment.num_characters, environment.generated = 0, []
        renew_time_limit()
        blocks = []
        try:
            for block in self._template.generate(**variables):
                blocks.append(block)
                environment.num_characters += len(block)
                if environment.num_characters > _MAX_CHARACTERS:
                    raise _Excess(f"it writes more than {_MAX_CHARACTERS:,} characters")
        except _Refusal as error:
            raise DataError(f"{self._name} refuses it: {error}") from error
        except MemoryError:
            raise
        except Exception as error:
            raise TemplateError(f"{self._place(error)}: {_reason(error)}") from error
        text = "".join(blocks)
        spans = []
        for begin, said in environment.generated:
            # Inside a macro or a {% set %} block it is not known where the answer will stand.
            if not text.startswith(said, begin):
                raise TemplateError(
                    f"{self._name} has {{% generation %}} where its text is not written at once"
                )
            spans.append((begin, begin + len(said)))
        return Rendered(text, spans)

    def _place(self, error: Exception) -> str:
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<template>":
                line = trace.tb_lineno
            trace = trace.tb_next
        return self._name if line is None else f"line {line} of {self._name}"


def normalized(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates are given them: without null values, reasoning under all its names."""
    result = []
    for message in messages:
        said = {key: value for key, value in message.items() if value is not None}
        reasoning = next((said[key] for key in _REASONING if key in said), None)
        if reasoning is not None:
            said = {"thinking": reasoning, **said, "reasoning_content": reasoning}
        result.append(said)
    return result


def clock(date: str) -> Callable[[str], str]:
    """``strftime_now`` of a day that never changes.

    Raises:
        ValueError: ``date`` is not of the form 2026-01-31.
    """
    return datetime.datetime.fromisoformat(date).strftime


class _Refusal(jinja2.TemplateError):  # type: ignore[misc]
    """The error a template raises by ``raise_exception``."""


class _Excess(jinja2.TemplateRuntimeError):  # type: ignore[misc]
    """Too long a text."""


class _Generation(jinja2.ext.Extension):  # type: ignore[misc]
    """{% generation %} ... {% endgeneration %}: a block with a scope of its own."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation = True
        call = self.call_method("_generated")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _generated(self, caller: Callable[[], str]) -> str:
        said = caller()
        self.environment.generated.append((self.environment.num_characters, said))
        return said


class _Namespace(jinja2.utils.Namespace):  # type: ignore[misc]
    """Without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may say namespace(self=1)
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


class _Dict:
    """``dict`` of templates."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """transformers' environment."""

    def __init__(self) -> None:
        self.has_generation = False
        self.num_characters = 0  # written so far
        self.generated: list[tuple[int, str]] = []  # where each marked answer begins, its text
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        self.filters |= {"tojson": _to_json, "random": _no_chance}
        self.globals["lipsum"] = _no_chance
        self.globals["raise_exception"] = _refuse
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace


def _reason(error: Exception) -> str:
    names = (jinja2.TemplateError, RecursionError)
    return str(error) if isinstance(error, names) else f"{type(error).__name__}: {error}"


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _no_chance(*_args: Any, **_kwargs: Any) -> None:
    raise jinja2.TemplateRuntimeError("random and lipsum would make another corpus every time")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
