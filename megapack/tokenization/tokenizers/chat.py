"""Conversations: tokens, and labels that leave loss on the assistant's tokens alone.

Labels are aligned with the tokens, not shifted: the token's own id where it carries loss, -100
where it does not, as in GPT-NeoX's label files.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapack.errors import ConfigError, DataError
from megapack.tokenization.corpus.documents import Faults, TextBlock, json_kind
from megapack.tokenization.tokenizers.coding import Coded, Coder, Frame
from megapack.tokenization.tokenizers.encoders import Encoder

__all__ = [
    "ASSISTANT",
    "NO_LOSS",
    "Chat",
    "ChatCoder",
    "ChatLoss",
    "Chats",
    "CodedChat",
    "HeaderChats",
    "Message",
    "TemplateError",
]

Message = Mapping[str, Any]
ChatLoss = Literal["content", "turn"]

ASSISTANT = "assistant"
NO_LOSS = -100
_START, _END, _EOT = _MARKERS = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"


# What tells a model more than its content does.
_NOT_IN_HEADERS = ("tool_calls", "reasoning_content", "thinking", "reasoning")


class TemplateError(DataError):
    """A chat template fails on a conversation, rather than refusing it."""


class CodedChat(NamedTuple):
    """One conversation."""

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]  # of every token: does it carry loss?


class Chat(NamedTuple):
    """A conversation, and what is said beside it: tools, documents, other variables by name."""

    messages: Sequence[Message]
    beside: Mapping[str, Any]


class Chats(abc.ABC):
    """Turns conversations into tokens."""

    @abc.abstractmethod
    def code(self, chat: Chat) -> CodedChat:
        """Raises DataError for a conversation that cannot be said."""


class ChatCoder(Coder):
    """Blocks whose documents are JSON lists of ``{"role": ..., "content": ...}``, or objects that
    hold one as ``messages`` (``ReadOptions.beside``).

    The tokens that frame a document carry no loss, but for an end token behind a learned one: a
    model that learns its last answer learns that it ends there.
    """

    def __init__(self, chats: Chats, frame: Frame) -> None:
        self._chats = chats
        self._frame = frame

    def code(self, block: TextBlock, faults: Faults) -> Coded:
        coded = []
        for i, text in enumerate(block.strings()):
            try:
                chat = self._chats.code(_chat(text))
            except DataError as error:
                failed = isinstance(error, TemplateError)
                kind = "chat template failed" if failed else "unusable chat"
                faults.record(kind, block.place(i), str(error))
                continue
            if chat.learned.any():
                coded.append(self._framed(chat))
            else:
                faults.record("chat without assistant", block.place(i))
        return self._joined(coded)

    def _framed(self, chat: CodedChat) -> CodedChat:
        prefix, suffix = self._frame.prefix, self._frame.suffix
        if (prefix and chat.ids[0] == prefix[0]) or (suffix and chat.ids[-1] == suffix[0]):
            raise ConfigError(
                "the chat template writes the token that begins or ends a document itself; leave "
                "out --prepend-bos or --append-eod, or it would stand there twice"
            )
        ids = np.concatenate([prefix, chat.ids, suffix]).astype(np.int32)
        learned = np.concatenate(
            [
                np.zeros(len(prefix), np.bool_),
                chat.learned,
                np.full(len(suffix), chat.learned[-1]),
            ]
        )
        return CodedChat(ids, learned)

    def _joined(self, chats: Sequence[CodedChat]) -> Coded:
        offsets = np.zeros(len(chats) + 1, np.int64)
        np.cumsum([len(chat.ids) for chat in chats], out=offsets[1:])
        ids = np.concatenate([np.zeros(0, np.int32), *(chat.ids for chat in chats)])
        learned = np.concatenate([np.zeros(0, np.bool_), *(chat.learned for chat in chats)])
        tokens, offsets = self._frame.put_around(ids, offsets, bare=True)
        labels = np.where(learned, ids, np.int32(NO_LOSS)).astype(np.int32)
        return Coded(tokens, offsets, labels)


class HeaderChats(Chats):
    """Role headers as in Llama 3, every turn tokenized by itself:
    ``<|start_header_id|>role<|end_header_id|>``, two line ends, the content, ``<|eot_id|>``.

    With loss on the ``turn``, all tokens of an assistant's turn but its first are learned; with
    loss on the ``content``, the header, which a model is given when it answers, is not.

    Source: "Data Loading: Tokenization, Sequence Packing, Padding Strategies, and Attention Masks",
    section 8.1.
    """

    def __init__(self, encoder: Encoder, loss: ChatLoss, name: str) -> None:
        """``name`` is the tokenizer, which must have the three markers.

        Raises:
            ConfigError: it does not, and would store one in pieces.
        """
        self._encoder = encoder
        self._loss = loss
        for marker in _MARKERS:
            ids = encoder.encode(TextBlock.of_strings([marker]))[0].tolist()
            if marker not in [encoder.decode([token]) for token in ids]:
                raise ConfigError(
                    f"{name} has no token {marker}, which --chat-format headers writes: it would "
                    f"be stored in {len(ids)} pieces; choose a tokenizer that has it, train one "
                    "with --special-token, or use --chat-format template"
                )

    def code(self, chat: Chat) -> CodedChat:
        if chat.beside.get("tools"):
            raise DataError("role headers do not say its tools; --tools-key '' leaves them out")
        texts: list[str] = []
        given: list[int | None] = []  # tokens at the start of each text without loss; None: all
        for i, message in enumerate(chat.messages):
            content = message.get("content")
            if not isinstance(content, str):
                raise DataError(
                    f"content of message {i} is {json_kind(content)}; role headers need a string"
                )
            unsaid = [key for key in _NOT_IN_HEADERS if message.get(key)]
            if unsaid:
                raise DataError(
                    f"role headers do not say the {unsaid[0]} of message {i}; use --chat-format "
                    "template"
                )
            header = f"{_START}{message['role']}{_END}\n\n"
            answer = f"{content}{_EOT}"
            if message["role"] != ASSISTANT:
                texts.append(header + answer)
                given.append(None)
            elif self._loss == "turn":
                texts.append(header + answer)
                given.append(1)
            else:
                texts += [header, answer]
                given += [None, 0]
        ids, offsets = self._encoder.encode(TextBlock.of_strings(texts))
        learned = np.zeros(len(ids), np.bool_)
        for begin, end, skipped in zip(offsets[:-1], offsets[1:], given, strict=True):
            if skipped is not None:
                learned[begin + skipped : end] = True
        return CodedChat(ids.astype(np.int32), learned)


def _chat(text: str) -> Chat:
    document = json.loads(text)
    beside = document if isinstance(document, dict) else {"messages": document}
    messages: list[Message] = beside.pop("messages")
    if not messages:
        raise DataError("the list of messages is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'message {i} is not of the form {{"role": ..., "content": ...}}')
    if "\\u" in text:  # else it has no surrogates: it was UTF-8
        try:
            json.dumps([messages, beside], ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError("a message holds half of a surrogate pair") from error
    return Chat(messages, beside)
