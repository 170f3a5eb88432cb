"""Conversations through a tokenizer's own chat template: tokens, and which of them carry loss.

- TemplateChats: conversations -> tokens, and which of them carry loss
- keys_beside: what is read of a document beside its messages

Which part of the rendered text the assistant wrote is known in two ways. A template that marks it,
``{% generation %}...{% endgeneration %}``, is taken at its word. Otherwise the conversation is
rendered up to every answer, with and without it, and the answer is what came to be in between:

    up to the answer, with a generation prompt    <user>hi<end>\\n<assistant>
    with the answer                               <user>hi<end>\\n<assistant>yo<end>\\n
    learned, up to the token that ends the turn                              yo<end>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megapack.errors import ConfigError, DataError, require
from megapack.tokenization.corpus.documents import json_kind
from megapack.tokenization.tokenizers.chat_template import (
    ChatTemplate,
    Rendered,
    Span,
    clock,
    normalized,
)
from megapack.tokenization.tokenizers.coding import ASSISTANT, Chat, ChatLoss, CodedChat, Message
from megapack.tokenization.tokenizers.encoders import load_tokenizers
from megapack.tokenization.tokenizers.limited import LimitError, run_limited
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

_TOOLS, _DOCUMENTS, _CLOCK = "tools", "documents", "strftime_now"
# Given by whoever renders a template, never by a document.
_GIVEN = frozenset({"messages", _TOOLS, _CLOCK, "add_generation_prompt"}) | {
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}

_LIMITS = {"seconds": 10, "num_bytes": 2 << 30}  # of one rendering


class TemplateChats:
    """Conversations as the tokenizer's publisher writes them.

    The text is rendered whole and tokenized whole, so the tokens are those of Hugging Face's
    ``apply_chat_template``. A token carries loss when it holds a character of an answer. ``loss``
    on the ``content`` learns what a model writes after the generation prompt, up to the token that
    ends the turn; on the ``turn``, the role header as well, but for its first token.

    Args:
        variables: of the template, each as ``--template-variables`` has it.

    Raises:
        ConfigError: the tokenizer has no chat template, or a broken one, or is not a
            tokenizer.json; a variable is not one of the template.
    """

    def __init__(
        self, files: TokenizerFiles, loss: ChatLoss, variables: Sequence[str] = ()
    ) -> None:
        self._templates = _open_templates(files)
        self._variables = _read_variables(variables, _names_read(self._templates), files.name)
        self._fixed = {**_special_variables(files), **self._variables.fixed}
        self._loss = loss
        self._special = tuple(files.special)
        tokenizers = require("tokenizers", f"tokenizer {files.name}")
        self._tokenizer = load_tokenizers(files)
        # Nothing is added to a rendered text, and offsets shall cover white space, too.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)

    def render_all(self, texts: Sequence[str]) -> Iterator[Rendered | DataError]:
        """Render JSON documents in a child process; yield an error for each that has no text.

        Raises:
            LimitError: the template needs too much time or memory for the next document.
        """
        return run_limited(map(self._render_json, texts), **_LIMITS)

    def _render_json(self, text: str) -> Rendered | DataError:
        try:
            return self.render(Chat.read(text))
        except DataError as error:
            return error.with_traceback(None)

    def render(self, chat: Chat) -> Rendered:
        """Return a conversation's text and the answers in it. Raises DataError."""
        said = self._said_beside(chat)
        tools = said[_TOOLS] is not None and "tool_use" in self._templates
        template = self._templates["tool_use" if tools else "default"]
        if said[_TOOLS] and _TOOLS not in template.variables:
            raise DataError(
                "the chat template does not read its tools; --tools-key '' leaves them out"
            )
        variables = {**self._fixed, **said}

        def render(messages: Sequence[Message], *, prompt: bool = False) -> Rendered:
            given = {"messages": normalized(messages), "add_generation_prompt": prompt}
            return template.render(**given, **variables)

        # Marks enclose the content only, not the role header.
        if template.marks_answers and self._loss == "content":
            return render(chat.messages)
        return _compared(render, chat.messages, self._loss, self._special)

    def code(self, rendered: Rendered | DataError) -> CodedChat:
        """Return the tokens of a rendered conversation. Raises an error that it is given."""
        if isinstance(rendered, DataError):
            raise rendered
        encoding = self._tokenizer.encode(rendered.text, add_special_tokens=False)
        at = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learned = np.zeros(len(at), np.bool_)
        for begin, end in rendered.answers:
            inside = np.flatnonzero((at[:, 0] < end) & (at[:, 1] > begin))
            learned[inside[1:] if self._loss == "turn" else inside] = True
        return CodedChat(np.array(encoding.ids, np.int32), learned)

    def _said_beside(self, chat: Chat) -> dict[str, Any]:
        """The document's own variables; ``tools`` and ``documents`` are None where it has none."""
        unnamed = [name for name in chat.beside if name not in (_TOOLS, *self._variables.named)]
        if unnamed:
            name = unnamed[0]
            raise DataError(
                f"it has {name!r}, which the chat template reads: say --template-variables {name} "
                f"to pass it on, {name}= to leave it out"
            )
        said: dict[str, Any] = {_TOOLS: None, _DOCUMENTS: None, **chat.beside}
        if _DOCUMENTS in self._fixed and _DOCUMENTS not in chat.beside:
            del said[_DOCUMENTS]
        for name in (_TOOLS, _DOCUMENTS):
            values = said.get(name)
            wrong = [] if values is None else [values]
            if isinstance(values, list):
                wrong = [value for value in values if not isinstance(value, dict)]
            if wrong:
                kind = json_kind(wrong[0])
                raise DataError(f"{name} must be a list of objects, and holds {kind}")
        return said


def keys_beside(
    files: TokenizerFiles, tools_key: str, variables: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """What is read of a document beside its messages (``ReadOptions.beside``): its tools, and all
    that the template would take from it, so that nothing is left out without a word.

    Raises:
        ConfigError: as ``TemplateChats``.
    """
    names = _names_read(_open_templates(files))
    ours = _read_variables(variables, names, files.name)
    own = sorted(names - _GIVEN - set(ours.fixed) - set(ours.ignored))
    return (*([(_TOOLS, tools_key)] if tools_key else ()), *((name, name) for name in own))


class _Variables(NamedTuple):
    """``--template-variables``, taken apart."""

    named: list[str]  # NAME: the document's
    fixed: dict[str, Any]  # NAME=JSON: the same for all
    ignored: list[str]  # NAME=: what documents say is not passed on


def _read_variables(words: Sequence[str], known: frozenset[str], name: str) -> _Variables:
    result = _Variables([], {}, [])
    for word in words:
        variable, fixes, value = word.partition("=")
        fixable = value and (variable == _CLOCK or variable.endswith("_token"))
        if variable not in known or (variable in _GIVEN and not fixable):
            names = ", ".join(sorted(known - _GIVEN)) or "none of its own"
            raise ConfigError(
                f"--template-variables {word}: the chat template of {name} takes no {variable!r} "
                f"from documents; it takes: {names}"
            )
        if not fixes:
            result.named.append(variable)
        elif not value:
            result.ignored.append(variable)
        else:
            read: Callable[[str], Any] = json.loads
            form = "JSON; a string has quotes of its own"
            if variable == _CLOCK:
                read, form = clock, "a date, 2026-01-31"
            try:
                result.fixed[variable] = read(value)
            except ValueError as error:
                raise ConfigError(
                    f"--template-variables {word}: the value must be {form} ({error})"
                ) from error
    return result


def _compared(
    render: Callable[..., Rendered],
    messages: Sequence[Message],
    loss: ChatLoss,
    special: tuple[str, ...],
) -> Rendered:
    """The conversation, with the answers found by rendering it with and without them."""
    text, _ = render(messages)
    spans: list[Span] = []
    for k, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, _ = render(messages[:k], prompt=loss == "content")
        behind = text if k + 1 == len(messages) else render(messages[: k + 1]).text
        if not (behind.startswith(before) and text.startswith(behind)):
            raise DataError(
                f"the chat template writes message {k} differently when others follow; it "
                "needs {% generation %} marks around answers, or use --chat-format headers"
            )
        # Templates write a line end behind the token that ends the turn; models do not.
        stripped = behind.rstrip()
        end = len(stripped) if stripped.endswith(special) else len(behind)
        spans.append((len(before), end))
    return Rendered(text, spans)


def _open_templates(files: TokenizerFiles) -> dict[str, ChatTemplate]:
    """By name: ``default``, and ``tool_use`` for conversations with tools where there is one."""
    if files.kind != "hf":
        raise ConfigError(
            f"{files.name} is a {files.kind} tokenizer; chat templates belong to a "
            "tokenizer.json: use --chat-format headers"
        )
    sources = files.chat_templates
    if "default" not in sources:
        raise ConfigError(
            f"{files.name} has no chat template (tokenizer_config.json or chat_template.jinja "
            "beside it); use --chat-format headers"
        )
    title = f"the chat template of {files.name}"

    def compiled() -> dict[str, ChatTemplate]:
        names = [name for name in ("default", "tool_use") if name in sources]
        return {name: ChatTemplate(sources[name], title) for name in names}

    # Jinja evaluates constant expressions when it compiles: try in a child process first.
    try:
        any(run_limited((not compiled() for _ in range(1)), **_LIMITS))
    except LimitError as error:
        raise ConfigError(f"{title} cannot be compiled: {error}; use another template") from error
    return compiled()


def _names_read(templates: Mapping[str, ChatTemplate]) -> frozenset[str]:
    return frozenset().union(*(template.variables for template in templates.values()))


def _special_variables(files: TokenizerFiles) -> dict[str, str]:
    """bos_token, eos_token and so on, as templates call them."""
    more = files.config.get("extra_special_tokens")
    variables = {}
    for name, value in {**files.config, **(more if isinstance(more, dict) else {})}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    return variables
