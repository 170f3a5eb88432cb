"""Chat templates (Hugging Face's Jinja templates), rendered as transformers renders them.

    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}", "t")
    template.render(messages=[{"role": "user", "content": "hi"}])  # -> Rendered("user: hi", [])

Sandbox, tags, filters, functions, and the keys of a message's reasoning are those of
``apply_chat_template``, with two differences:

- The text depends neither on the current date nor on random numbers: ``strftime_now`` uses a fixed
  date (``clock``); ``random`` and ``lipsum`` raise.
- Every error names the template and its line.

A template may loop without end or allocate without limit: ``run_limited`` (limited.py) runs it.

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
    text: str
    answers: list[Span]  # written by the assistant (in {% generation %} blocks)


class ChatTemplate:
    """A compiled template; ``name`` is its name in messages. ``variables`` are the names that
    ``render`` has to pass to it; ``marks_answers`` is True if it has ``{% generation %}`` blocks.
    Raises ConfigError if the template cannot be compiled."""

    def __init__(self, source: str, name: str) -> None:
        self._name = name
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except Exception as error:
            line = getattr(error, "lineno", None)
            place = name if line is None else f"line {line} of {name}"
            raise ConfigError(f"{place} cannot be compiled: {_reason(error)}") from error
        undeclared = jinja2.meta.find_undeclared_variables(tree)
        self.variables = frozenset(undeclared) - set(self._environment.globals)
        self.marks_answers = self._environment.has_generation

    def render(self, **variables: Any) -> Rendered:
        """Return the text for ``variables``: plain JSON values, and a ``clock``. Raises DataError
        if the template refuses the conversation (``raise_exception``), TemplateError for any other
        error of the template, and MemoryError."""
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
            raise DataError(f"{self._name} refuses the conversation: {error}") from error
        except MemoryError:
            raise
        except Exception as error:
            raise TemplateError(f"{self._place(error)}: {_reason(error)}") from error
        text = "".join(blocks)
        spans = []
        for begin, answer in environment.generated:
            # A macro or a {% set %} block returns the answer: its final position is unknown.
            if not text.startswith(answer, begin):
                raise TemplateError(
                    f"{self._name} has {{% generation %}} inside a macro or a {{% set %}} block; "
                    "move it out"
                )
            spans.append((begin, begin + len(answer)))
        return Rendered(text, spans)

    def _place(self, error: Exception) -> str:
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<template>":
                line = trace.tb_lineno
            trace = trace.tb_next
        return self._name if line is None else f"line {line} of {self._name}"


def normalized(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates expect them: no null values, reasoning under all its names."""
    result = []
    for message in messages:
        present = {key: value for key, value in message.items() if value is not None}
        reasoning = next((present[key] for key in _REASONING if key in present), None)
        if reasoning is not None:
            present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
        result.append(present)
    return result


def clock(date: str) -> Callable[[str], str]:
    """Return ``strftime_now`` for a date like 2026-01-31. Raises ValueError for another form."""
    return datetime.datetime.fromisoformat(date).strftime


class _Refusal(jinja2.TemplateError):  # type: ignore[misc]
    """Raised by a template through ``raise_exception``."""


class _Excess(jinja2.TemplateRuntimeError):  # type: ignore[misc]
    """The text is too long."""


class _Generation(jinja2.ext.Extension):  # type: ignore[misc]
    """The tag {% generation %} ... {% endgeneration %}: a block with its own scope."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.has_generation = True
        call = self.call_method("_generated")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _generated(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.environment.generated.append((self.environment.num_characters, text))
        return text


class _Namespace(jinja2.utils.Namespace):  # type: ignore[misc]
    """``namespace`` of templates. Attributes must not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no self: namespace(self=1) is allowed
        self, *positional = args
        attributes = dict(*positional, **kwargs)
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
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):  # type: ignore[misc]
    def __init__(self) -> None:
        self.has_generation = False
        self.num_characters = 0  # written before the current block
        self.generated: list[tuple[int, str]] = []  # where each marked answer begins, its text
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
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
    raise jinja2.TemplateRuntimeError("random and lipsum give different text in every run")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """``tojson`` of templates. Unlike Jinja's filter, it escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
