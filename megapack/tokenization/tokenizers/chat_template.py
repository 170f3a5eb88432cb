"""Conversations through a tokenizer's own chat template (Hugging Face's Jinja templates).

Which part of the rendered text the assistant wrote is known in two ways. A template that marks it,
``{% generation %}...{% endgeneration %}``, is taken at its word. Otherwise the conversation is
rendered up to every answer, with and without it, and the answer is what came to be in between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megapack.errors import ConfigError, DataError
from megapack.optional import require
from megapack.tokenization.tokenizers.chat import ASSISTANT, ChatLoss, Chats, CodedChat, Message
from megapack.tokenization.tokenizers.encoders import load_tokenizers
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

__all__ = ["TemplateChats"]

# Stand around an answer in the rendered text until it is searched for them. Not characters: no
# text has them, and a conversation that does is refused.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"

# What an expression of a template can run into when a message has not the form it expects.
_WRONG = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

Span = tuple[int, int]


class TemplateChats(Chats):
    """Conversations as the tokenizer's publisher writes them.

    The text is rendered whole and tokenized whole, so the tokens are those of Hugging Face's
    ``apply_chat_template``. A token carries loss when it holds a character of an answer. ``loss``
    on the ``content`` learns what a model writes after the generation prompt, up to the token that
    ends the turn; on the ``turn``, the role header as well, but for its first token.

    Raises:
        ConfigError: the tokenizer has no chat template, or a broken one, or is not a
            tokenizer.json.
    """

    def __init__(self, files: TokenizerFiles, loss: ChatLoss) -> None:
        if files.kind != "hf":
            raise ConfigError(
                f"{files.name} is a {files.kind} tokenizer; chat templates belong to a "
                "tokenizer.json: use --chat-format headers"
            )
        self._loss = loss
        self._special = tuple(files.special)
        tokenizers = require("tokenizers", f"tokenizer {files.name}")
        self._tokenizer = load_tokenizers(files)
        # Nothing is added to a rendered text, and offsets shall cover white space, too.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        text = _template_of(files)
        # Marks stand around the content; what a role header is they do not say.
        self._marks_answers = "endgeneration" in text and loss == "content"
        self._errors, self._template = _compile(files, text)
        self._variables = _special_variables(files)

    def code(self, messages: Sequence[Message]) -> CodedChat:
        said = json.dumps(messages, ensure_ascii=False)
        if _OPEN in said or _CLOSE in said:
            raise DataError("the text holds U+FDD0 or U+FDD1, which are no characters")
        text, spans = self._marked(messages) if self._marks_answers else self._compared(messages)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        at = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learned = np.zeros(len(at), np.bool_)
        for begin, end in spans:
            inside = np.flatnonzero((at[:, 0] < end) & (at[:, 1] > begin))
            learned[inside[1:] if self._loss == "turn" else inside] = True
        return CodedChat(np.array(encoding.ids, np.int32), learned)

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        try:
            return str(
                self._template.render(
                    messages=messages, add_generation_prompt=prompt, **self._variables
                )
            )
        except self._errors as error:
            raise DataError(f"the chat template refuses it: {error}") from error

    def _marked(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        spans: list[Span] = []
        text = ""
        for part in self._render(messages).split(_OPEN):
            answer, closed, rest = part.partition(_CLOSE)
            if closed:
                spans.append((len(text), len(text) + len(answer)))
            text += answer + rest
        return text, spans

    def _compared(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        text = self._render(messages)
        spans: list[Span] = []
        for k, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:k], prompt=self._loss == "content")
            behind = self._render(messages[: k + 1])
            if not (behind.startswith(before) and text.startswith(behind)):
                raise DataError(
                    f"the chat template writes message {k} differently when others follow; it "
                    "needs {% generation %} marks around answers, or use --chat-format headers"
                )
            spans.append((len(before), self._answer_end(behind)))
        return text, spans

    def _answer_end(self, text: str) -> int:
        """Behind the token that ends the turn; templates write a line end there, models do not."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._special) else len(text)


def _template_of(files: TokenizerFiles) -> str:
    template = files.config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"{files.name} has no chat template (tokenizer_config.json or chat_template.jinja "
            "beside it); use --chat-format headers"
        )
    return template


def _special_variables(files: TokenizerFiles) -> dict[str, str]:
    """bos_token, eos_token and so on, as templates call them."""
    variables = {}
    for name, value in files.config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    return variables


def _compile(files: TokenizerFiles, text: str) -> tuple[tuple[type[Exception], ...], Any]:
    """The errors a template can raise, and the template.

    There is no ``strftime_now``: a corpus must not depend on the day it was built. Published
    templates have a fixed date for hosts without it.
    """
    why = f"the chat template of {files.name}"
    jinja2 = require("jinja2", why)
    extensions = require("jinja2.ext", why)
    sandbox = require("jinja2.sandbox", why)

    class Generation(extensions.Extension):  # type: ignore[misc, name-defined]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return [_literal(jinja2, _OPEN, line), *body, _literal(jinja2, _CLOSE, line)]

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[extensions.loopcontrols, Generation]
    )
    environment.filters["tojson"] = _to_json

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    try:
        return (jinja2.TemplateError, *_WRONG), environment.from_string(text)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{why} is broken: {error}") from error


def _literal(jinja2: Any, text: str, line: int) -> Any:
    return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)]).set_lineno(line)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
