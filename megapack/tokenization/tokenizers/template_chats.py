"""Tokenize conversations with the tokenizer's chat template.

- TemplateChats: conversations -> tokens, and which of them carry loss
- template_keys: keys of a document that are read in addition to its messages

The template's ``{% generation %}`` marks show the assistant's text. Without marks, the
conversation is rendered with and without each answer; the difference is the answer:

    up to the answer, with a generation prompt    <user>hi<end>\\n<assistant>
    with the answer                               <user>hi<end>\\n<assistant>yo<end>\\n
    loss, up to the token that ends the turn                                 yo<end>
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
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
from megapack.tokenization.tokenizers.coding import (
    ASSISTANT,
    TRAIN_WITH_MARKERS,
    Chat,
    ChatLoss,
    CodedChat,
    Message,
)
from megapack.tokenization.tokenizers.encoders import load_tokenizers
from megapack.tokenization.tokenizers.limited import LimitError, run_limited
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

_TOOLS, _DOCUMENTS, _CLOCK = "tools", "documents", "strftime_now"
# Set by the program that renders a template, never by a document.
_GIVEN = frozenset({"messages", _TOOLS, _CLOCK, "add_generation_prompt"}) | {
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
}

_LIMITS: dict[str, Any] = {"seconds": 10, "num_bytes": 2 << 30}  # per rendering


class TemplateChats:
    """Tokenizes conversations in the format that the tokenizer's publisher uses.

    The whole text is rendered, then tokenized, so the tokens equal those of Hugging Face's
    ``apply_chat_template``. A token carries loss if it contains a character of an answer. With
    ``loss`` "content", the answer is what the model writes after the generation prompt, up to the
    token that ends the turn; with "turn", also the role header except its first token.
    ``variables`` are the words of ``--template-variables``. Raises ConfigError if the tokenizer is
    not a tokenizer.json, or its chat template is missing, cannot be compiled, or does not read one
    of ``variables``.
    """

    def __init__(
        self, files: TokenizerFiles, loss: ChatLoss, variables: Sequence[str] = ()
    ) -> None:
        self._files = files
        self._variables = _read_variables(variables, _names_read(files), files.name)
        self._fixed = {**_special_variables(files), **self._variables.fixed}
        self._loss = loss
        self._special = tuple(files.special)
        tokenizers = require("tokenizers", f"tokenizer {files.name}")
        self._tokenizer = load_tokenizers(files)
        # Add no special tokens to a rendered text; offsets must cover white space.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)

    @functools.cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        return _open_templates(self._files)  # compiled in the child process

    def render_all(self, texts: Sequence[str]) -> Iterator[Rendered | DataError]:
        """Render JSON documents in a child process; yield a DataError for an unusable one. Raises
        LimitError if the next document needs too much time or memory."""
        return run_limited(self._render_json, texts, **_LIMITS)

    def _render_json(self, text: str) -> Rendered | DataError:
        try:
            return self.render(Chat.read(text))
        except DataError as error:
            return error.with_traceback(None)

    def render(self, chat: Chat) -> Rendered:
        """Return a conversation's text and its answers. Raises DataError if it is unusable."""
        extra = self._extra_variables(chat)
        tools = extra[_TOOLS] is not None and "tool_use" in self._templates
        template = self._templates["tool_use" if tools else "default"]
        if extra[_TOOLS] and _TOOLS not in template.variables:
            raise DataError("the chat template reads no tools; ignore them with --tools-key ''")
        variables = {**self._fixed, **extra}

        def render(messages: Sequence[Message], *, prompt: bool = False) -> Rendered:
            given = {"messages": normalized(messages), "add_generation_prompt": prompt}
            return template.render(**given, **variables)

        # Marks enclose the content only, not the role header.
        if template.marks_answers and self._loss == "content":
            return render(chat.messages)
        return _find_answers(render, chat.messages, self._loss, self._special)

    def code(self, rendered: Rendered | DataError) -> CodedChat:
        """Return the tokens of a rendered conversation. Raises ``rendered`` if it is an error."""
        if isinstance(rendered, DataError):
            raise rendered
        encoding = self._tokenizer.encode(rendered.text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learned = np.zeros(len(offsets), np.bool_)
        for begin, end in rendered.answers:
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > begin))
            learned[inside[1:] if self._loss == "turn" else inside] = True
        return CodedChat(np.array(encoding.ids, np.int32), learned)

    def _extra_variables(self, chat: Chat) -> dict[str, Any]:
        """Return the document's variables; ``tools`` and ``documents`` default to None."""
        unnamed = [name for name in chat.variables if name not in (_TOOLS, *self._variables.named)]
        if unnamed:
            name = unnamed[0]
            raise DataError(
                f"it has {name!r}, which the chat template reads: pass it with "
                f"--template-variables {name}, or ignore it with --template-variables {name}="
            )
        extra: dict[str, Any] = {_TOOLS: None, _DOCUMENTS: None, **chat.variables}
        if _DOCUMENTS in self._fixed and _DOCUMENTS not in chat.variables:
            del extra[_DOCUMENTS]
        for name in (_TOOLS, _DOCUMENTS):
            values = extra.get(name)
            wrong = [] if values is None else [values]
            if isinstance(values, list):
                wrong = [value for value in values if not isinstance(value, dict)]
            if wrong:
                kind = json_kind(wrong[0])
                raise DataError(f"{name} must be a list of objects; it contains {kind}")
        return extra


def template_keys(
    files: TokenizerFiles, tools_key: str, variables: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Return the keys of a document to read with its messages (``ReadOptions.extra_keys``): the
    tools, and every variable of the template that a document may set. So a document with a variable
    that the user did not name is refused, not rendered without the variable. Raises the same errors
    as ``TemplateChats``."""
    names = _names_read(files)
    options = _read_variables(variables, names, files.name)
    unset = sorted(names - _GIVEN - set(options.fixed) - set(options.ignored))
    return (*([(_TOOLS, tools_key)] if tools_key else ()), *((name, name) for name in unset))


class _Variables(NamedTuple):
    """Parsed ``--template-variables``."""

    named: list[str]  # NAME: value from the document
    fixed: dict[str, Any]  # NAME=JSON: the same for all documents
    ignored: list[str]  # NAME=: never passed to the template


def _read_variables(words: Sequence[str], known: frozenset[str], name: str) -> _Variables:
    result = _Variables([], {}, [])
    for word in words:
        variable, fixes, value = word.partition("=")
        fixable = value and (variable == _CLOCK or variable.endswith("_token"))
        if variable not in known or (variable in _GIVEN and not fixable):
            names = ", ".join(sorted(known - _GIVEN)) or "none"
            raise ConfigError(
                f"--template-variables {word}: the chat template of {name} reads no {variable!r} "
                f"from documents; it reads: {names}"
            )
        if not fixes:
            result.named.append(variable)
        elif not value:
            result.ignored.append(variable)
        else:
            parse: Callable[[str], Any] = json.loads
            form = "JSON (a string with its quotes)"
            if variable == _CLOCK:
                parse, form = clock, "a date, 2026-01-31"
            try:
                result.fixed[variable] = parse(value)
            except ValueError as error:
                raise ConfigError(
                    f"--template-variables {word}: the value must be {form} ({error})"
                ) from error
    return result


def _find_answers(
    render: Callable[..., Rendered],
    messages: Sequence[Message],
    loss: ChatLoss,
    special: tuple[str, ...],
) -> Rendered:
    """Render a conversation; find the answers by rendering it with and without each of them."""
    text, _ = render(messages)
    spans: list[Span] = []
    for k, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, _ = render(messages[:k], prompt=loss == "content")
        after = text if k + 1 == len(messages) else render(messages[: k + 1]).text
        if not (after.startswith(before) and text.startswith(after)):
            raise DataError(
                f"the chat template writes message {k} differently when others follow: add "
                "{% generation %} marks around answers, or use --chat-format headers"
            )
        # Templates write a line end after the token that ends the turn; models do not.
        stripped = after.rstrip()
        end = len(stripped) if stripped.endswith(special) else len(after)
        spans.append((len(before), end))
    return Rendered(text, spans)


def _open_templates(files: TokenizerFiles) -> dict[str, ChatTemplate]:
    """Return templates by name: ``default``, and ``tool_use`` for conversations with tools."""
    if files.kind != "hf":
        raise ConfigError(
            f"{files.name} is a {files.kind} tokenizer; chat templates belong to a "
            "tokenizer.json: use --chat-format headers with a tokenizer that has the tokens of "
            f"role headers, or {TRAIN_WITH_MARKERS}"
        )
    sources = files.chat_templates
    if "default" not in sources:
        raise ConfigError(
            f"{files.name} has no chat template (tokenizer_config.json or chat_template.jinja "
            "in its directory): use --chat-format headers with a tokenizer that has the tokens of "
            f"role headers, or {TRAIN_WITH_MARKERS}"
        )
    return {
        name: ChatTemplate(sources[name], f"the chat template of {files.name}")
        for name in ("default", "tool_use")
        if name in sources
    }


def _names_read(files: TokenizerFiles) -> frozenset[str]:
    # Runs in a child process, as Jinja evaluates constant expressions when it compiles.
    def names(files: TokenizerFiles) -> frozenset[str]:
        templates = _open_templates(files).values()
        return frozenset().union(*(template.variables for template in templates))

    try:
        (result,) = run_limited(names, [files], **_LIMITS)
    except LimitError as error:
        raise ConfigError(
            f"the chat template of {files.name} cannot be compiled: {error}; use another template"
        ) from error
    return result


def _special_variables(files: TokenizerFiles) -> dict[str, str]:
    extra = files.config.get("extra_special_tokens")
    variables = {}
    for name, value in {**files.config, **(extra if isinstance(extra, dict) else {})}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    return variables
