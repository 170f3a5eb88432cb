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
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.tests

from megapack.errors import ConfigError, DataError
from megapack.tokenization.tokenizers.coding import TemplateError

Span = tuple[int, int]  # [begin, end) of a text, in characters

# Work of one rendering: 2^28, and 1,000 for every character of its variables. A character that is
# made costs 1, a step 128: up to 2 million steps.
_WORK = 1 << 28
_WORK_PER_CHARACTER = 1000
_STEP = 128
_PART = 64  # of a list or an object that is written
_MAX_INTEGER_BITS = 1 << 16

# Filters that pass values on, or count them, and never write them as text.
_PASSING = frozenset(
    ("abs", "attr", "count", "d", "default", "dictsort", "first", "float", "groupby", "int")
    + ("items", "last", "length", "list", "map", "max", "min", "reject", "rejectattr", "reverse")
    + ("safe", "select", "selectattr", "sort", "unique")
)

# Filters and tests that compare or hash values: their work grows with everything inside a value.
_COMPARING = frozenset(
    ("dictsort", "groupby", "max", "min", "sort", "unique", "in", "eq", "equalto", "==", "ne", "!=")
    + ("lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">=")
)

_REASONING = ("reasoning_content", "thinking", "reasoning")


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    generated: list[Span]  # what the template marks as the assistant's, {% generation %}


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
        environment.begin(variables)
        blocks = []
        try:
            for block in self._template.generate(**variables):
                blocks.append(block)
                environment.num_characters += len(block)
        except _Refusal as error:
            raise DataError(f"{self._name} refuses it: {error}") from error
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
    """Too much work."""


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
    """transformers' environment. Work is counted where a template can multiply it: by iterations
    and calls, the four operators that make long values of short ones, ``~``, filters and outputs.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.has_generation = False
        self.begin({})
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._written,
        )
        filters = {**jinja2.filters.FILTERS, "tojson": _to_json, "random": _no_chance}
        self.filters = {name: self._counted(name, f) for name, f in filters.items()}
        self.filters |= {"megapack.iterated": self._iterated, "megapack.written": self._written}
        self.filters["megapack.walked"] = self._walked
        tests = jinja2.tests.TESTS
        compared = {name: self._counted(name, tests[name]) for name in _COMPARING & {*tests}}
        self.tests = {**tests, **compared}
        self.globals["lipsum"] = _no_chance
        self.globals["raise_exception"] = _refuse
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace

    def begin(self, variables: Mapping[str, Any]) -> None:
        """Start counting for a rendering."""
        self.num_characters = 0  # written so far
        self.generated: list[tuple[int, str]] = []  # where it begins, and the text
        self._left = _WORK
        self._unmeasured: Mapping[str, Any] | None = dict(variables)  # measured when _WORK is spent

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(_STEP)
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(owner, (str, bytes, int)):
            if obj.__name__ == "join" and args:
                args = (list(self._iterated(args[0])),)
            given = [*args, *kwargs.values()]
            self._written(given)
            self._allow(_method_bound(obj.__name__, owner, given))
        elif owner is not None or isinstance(obj, _Dict):
            searched = [owner] if getattr(obj, "__name__", "") in ("count", "index") else []
            self._walked([*searched, *args, *kwargs.values()])
        elif isinstance(obj, jinja2.runtime.LoopContext):  # {% for ... recursive %}
            args = (self._iterated(args[0]), *args[1:])
        result = super().call(context, obj, *args, **kwargs)
        self._spend(_size(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self._spend(len(left) + len(right))  # most of what templates do
            return left + right
        if operator == "%" and isinstance(left, (str, bytes)):
            self._allow(_format_bound(str(left), [right]))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits + right.bit_length() > _MAX_INTEGER_BITS:
                raise _Excess(f"an integer of more than {_MAX_INTEGER_BITS:,} bits")
        elif operator == "*":
            self._allow(max(_size(left), 1) * right if isinstance(right, int) else 0)
            self._allow(max(_size(right), 1) * left if isinstance(left, int) else 0)
        elif isinstance(left, (list, tuple)):
            self._allow(_PART * (len(left) + _size(right)))
        result = super().call_binop(context, operator, left, right)
        self._spend(_size(result) * (_PART if isinstance(result, (list, tuple)) else 1))
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        """The template with counting filters in its loops and around the operands of ``~``."""
        tree = super()._parse(source, name, filename)

        def filtered(node: Any, filter: str) -> Any:
            result = jinja2.nodes.Filter(node, filter, [], [], None, None, lineno=node.lineno)
            return result.set_environment(self)

        for loop in list(tree.find_all(jinja2.nodes.For)):
            loop.iter = filtered(loop.iter, "megapack.iterated")
        for concat in list(tree.find_all(jinja2.nodes.Concat)):
            concat.nodes = [filtered(node, "megapack.written") for node in concat.nodes]
        # Comparing and hashing walk nested values, a part that lies in them many times many times.
        for compare in list(tree.find_all(jinja2.nodes.Compare)):
            operands = [compare.expr, *(operand.expr for operand in compare.ops)]
            if len(operands) == 2 and any(isinstance(o, jinja2.nodes.Const) for o in operands):
                continue  # with a constant there is nothing to walk
            compare.expr = filtered(compare.expr, "megapack.walked")
            for operand in compare.ops:
                operand.expr = filtered(operand.expr, "megapack.walked")
        for pair in list(tree.find_all(jinja2.nodes.Pair)):
            pair.key = filtered(pair.key, "megapack.walked")
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self._walked(argument))

    def _iterated(self, values: Any) -> Any:
        if hasattr(values, "__len__"):
            self._spend(_STEP * len(values))
            return values
        return self._each(values)

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._spend(_STEP)
            yield value

    def _written(self, value: Any) -> Any:
        """Before it becomes text. What lies in a value many times is written many times."""
        if isinstance(value, str):
            self._spend(len(value))
        else:
            for part in _walk(value):
                self._spend(_characters(part))
        return value

    def _walked(self, value: Any) -> Any:
        """Before it is compared or hashed. Objects and lists cost by what lies in them."""
        if isinstance(value, (list, tuple, dict)):
            for _ in _walk(value):
                self._spend(_PART)
        return value

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        skipped = int(hasattr(function, "jinja_pass_arg"))  # a context stands before the value

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._spend(4 * _STEP)  # about the time it takes
            value, *rest = [*args[skipped:], *kwargs.values()]
            if name in _COMPARING:
                self._walked([value, *rest])
            if name in _PASSING or name in _COMPARING:
                self._spend(_size(value))
            else:
                before = self._left
                self._written([value, *rest])
                widths = [part if isinstance(part, int) else _size(part) for part in rest]
                if name == "format":
                    self._allow(_format_bound(str(value), rest))
                else:
                    self._allow((before - self._left) * max([1, *widths]))
            result = function(*args, **kwargs)
            self._spend(_size(result))
            return result

        return run

    def _spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            self._allow(0)

    def _allow(self, work: int) -> None:
        """Before work that is seen coming."""
        if work > self._left and self._unmeasured is not None:
            self._left += _WORK_PER_CHARACTER * sum(map(_characters, _walk(self._unmeasured)))
            self._unmeasured = None
        if work > self._left:
            raise _Excess(
                f"more work than {_WORK:,} characters made, and {_WORK_PER_CHARACTER:,} for each "
                f"of the conversation (a step of a loop counts {_STEP}): loops or text multiply "
                "without end"
            )


def _walk(value: Any) -> Iterator[Any]:
    """A value and all that is written with it; without end only where it is."""
    stack = [value]
    while stack:
        part = stack.pop()
        yield part
        if isinstance(part, dict):
            stack += part
            stack += part.values()
        elif isinstance(part, (list, tuple)):
            stack += part


def _characters(value: Any) -> int:
    return _PART + (len(value) if isinstance(value, (str, bytes)) else 0)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _method_bound(name: str, owner: Any, args: Sequence[Any]) -> int:
    """Characters that a method of a string, of bytes or of an integer may make of it."""
    size = _size(owner)
    width = max([0, *(value for value in args if isinstance(value, int))])
    if name in ("ljust", "rjust", "center", "zfill", "to_bytes"):
        return size + width
    if name == "expandtabs":
        return size * max(8, width)
    if name == "replace" and len(args) > 1 and isinstance(args[0], type(owner)):
        return size + int(owner.count(args[0])) * _size(args[1])
    if name == "translate" and args:
        table = args[0].values() if isinstance(args[0], dict) else args[0]
        return size * max([1, *map(_size, table)])
    if name == "join" and args:
        return size * len(args[0]) + sum(map(_size, args[0]))
    return _format_bound(str(owner), args) if name in ("format", "format_map") else 0


def _format_bound(text: str, args: Sequence[Any]) -> int:
    """Most characters that ``%`` and ``format`` make; a width ``*`` stands in ``args``."""
    widths = [int(digits[:18]) for digits in re.findall(r"\d+", text)]
    if "*" in text or re.search(r":[^}]*{", text):
        widths += [value for value in _walk(list(args)) if isinstance(value, int)]
    fields = max(text.count("%"), text.count("{"))
    return fields * (max([0, *widths]) + sum(map(_characters, _walk(list(args)))))


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
