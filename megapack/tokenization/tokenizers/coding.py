"""Turn blocks of documents into tokens to store, and columns: labels, loss weights and others.

- Frame: ids added around each document, stored dtype; Coded: documents ready to be stored
- TextCoder: plain text, with the columns of its tokens
- ChatCoder: conversations, tokenized by HeaderChats (role headers) or TemplateChats
  (template_chats.py)

    coder = TextCoder(encoder, Frame("uint16", vocab_size=259, prefix=(257,), suffix=(256,)))
    coder.code(TextBlock.of_texts(["a", "bc"]), Faults())
    # -> tokens [257, 97, 256, 257, 98, 99, 256], offsets [0, 3, 7]

Labels are aligned with the tokens, not shifted. A label is the token's id, or -100 without loss.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError, first_line, is_foreign
from megapack.storage.columns import LABELS
from megapack.tokenization.corpus.documents import (
    Faults,
    TextBlock,
    hashed_split,
    json_kind,
    offsets_of,
)
from megapack.tokenization.corpus.token_values import TokenValues
from megapack.tokenization.tokenizers.encoders import Encoder
from megapack.tokenization.tokenizers.limited import LimitError
from megapack.tokenization.tokenizers.probe import first_difference
from megapack.tokenization.tokenizers.tokenizer import TokenizerFiles

T = TypeVar("T")

_NO_MARKS = np.zeros(0, np.uint8)
Message = Mapping[str, Any]
ChatLoss = Literal["content", "turn"]

ASSISTANT = "assistant"
NO_LOSS = -100


class Coded(NamedTuple):
    tokens: NDArray[Any]  # in the stored dtype
    offsets: NDArray[np.int64]  # shape (documents + 1,)
    kept: NDArray[np.bool_]  # per document of the block: True if it is in ``tokens``
    columns: Mapping[str, NDArray[Any]] = {}  # rows aligned with tokens, by name
    controls: Mapping[int, int] = {}  # special tokens in the texts: id -> count


class Frame(NamedTuple):
    """Dtype of stored ids, and ids that are added around each document."""

    dtype: str  # "uint16" or "int32"
    vocab_size: int
    prefix: tuple[int, ...]  # ids before every document
    suffix: tuple[int, ...]  # ids after every document

    def put_around(
        self,
        ids: NDArray[Any],
        offsets: NDArray[np.int64],
        *,
        bare: bool = False,
        marks: NDArray[np.uint8] = _NO_MARKS,
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
        """Check ids, convert them to ``dtype`` and, unless ``bare``, add prefix and suffix. Return
        tokens, offsets, and those of ``ids`` with a nonzero byte in ``marks`` (vocab_size,). Raises
        DataError if an id is outside the vocabulary."""
        narrow = self.dtype == "uint16"
        frame = _core.frame_documents_uint16 if narrow else _core.frame_documents_int32
        before, after = ([], []) if bare else (list(self.prefix), list(self.suffix))
        return frame(ids, offsets, before, after, self.vocab_size, marks)


# Turns a block of documents into tokens. Drops documents without tokens and records them as faults.
Coder = Callable[[TextBlock, Faults], Coded]


@dataclass(frozen=True)
class TextCoder:
    """Tokenizes plain text. ``controls`` are the ids of the special tokens to count. ``values``
    maps names to functions that read ``TextBlock.values``. ``reference`` encodes
    ``verify_fraction`` of the documents again; ``code`` raises DataError if the ids differ."""

    encoder: Encoder
    frame: Frame
    _: KW_ONLY
    controls: Iterable[int] = ()
    values: Mapping[str, TokenValues] = field(default_factory=dict)
    reference: Encoder | None = None
    verify_fraction: float = 0.0

    @functools.cached_property
    def _control_marks(self) -> NDArray[np.uint8]:
        marks = np.isin(np.arange(self.frame.vocab_size), list(self.controls))
        return marks.astype(np.uint8) if marks.any() else _NO_MARKS

    def code(self, block: TextBlock, faults: Faults) -> Coded:
        ids, offsets, failed = self._encode(block, faults)
        if self.reference is not None:
            self._verify(block.select(~failed), self.reference)
        empty = (offsets[:-1] == offsets[1:]) & ~failed
        if empty.any():  # the tokenizer's normalization removed the whole text
            faults.record_rows("empty document", np.flatnonzero(empty), block.place)
        kept, values = ~(empty | failed), dict[str, NDArray[Any]]()
        offsets = offsets[np.concatenate([kept, [True]])]
        if self.values:
            nonempty = block.select(kept)
            usable, values = self._read_values(nonempty, offsets, faults)
            lengths = np.diff(offsets)
            ids, offsets = ids[np.repeat(usable, lengths)], offsets_of(lengths[usable])
            kept[kept] = usable
        tokens, framed, controls = self.frame.put_around(ids, offsets, marks=self._control_marks)
        return Coded(tokens, framed, kept, values, collections.Counter(controls.tolist()))

    def _encode(
        self, block: TextBlock, faults: Faults
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.bool_]]:
        """Return ids and offsets of all documents, and a mask of failed ones, which have no ids."""
        failed = np.zeros(len(block), np.bool_)
        try:
            return (*self.encoder.encode(block), failed)
        except BaseException as error:
            if not is_foreign(error):
                raise
        # The library does not say which document failed: encode them one by one.
        parts = []
        for i in range(len(block)):
            try:
                parts.append(self.encoder.encode(block.select(np.arange(len(block)) == i))[0])
            except BaseException as error:
                if not is_foreign(error):
                    raise
                faults.record("tokenizer failed", block.place(i), first_line(error))
                failed[i] = True
                parts.append(np.zeros(0, np.int32))
        ids = np.concatenate([np.zeros(0, np.int32), *parts])
        return ids, offsets_of([len(part) for part in parts]), failed

    def _read_values(
        self, block: TextBlock, offsets: NDArray[np.int64], faults: Faults
    ) -> tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]:
        """Return a mask of documents whose values all fit their tokens, and the rows of the tokens
        of these documents and their frames, by name."""
        lengths, usable = np.diff(offsets).tolist(), np.ones(len(block), np.bool_)
        rows: dict[str, list[NDArray[Any]]] = {name: [] for name in self.values}
        frame = len(self.frame.prefix), len(self.frame.suffix)
        for i, text in enumerate(block.strings()):
            rows_of_document = {}
            for name, reader in self.values.items():
                value = block.values[name][i] if name in block.values else ""
                folder = Path(block.place(i).path).parent
                try:
                    read = reader.read(value, lengths[i], text, self.encoder.spans, folder)
                except BaseException as error:
                    if not isinstance(error, DataError) and not is_foreign(error):
                        raise
                    faults.record(f"unusable {reader.what}", block.place(i), first_line(error))
                    usable[i] = False
                    break
                rows_of_document[name] = reader.framed(read, *frame)
            else:
                for name, framed in rows_of_document.items():
                    rows[name].append(framed)
        empty = {name: reader.rows([]) for name, reader in self.values.items()}
        return usable, {name: np.concatenate([empty[name], *rows[name]]) for name in rows}

    def _verify(self, block: TextBlock, reference: Encoder) -> None:
        # Choose by a hash of the text, so that every run checks the same documents. With the seed
        # of the dataset split, all of them would be training documents.
        hashes = block.text_hashes(seed=1)
        chosen = hashed_split((self.verify_fraction, 1 - self.verify_fraction), hashes)
        sample = block.select(chosen == 0)
        difference = first_difference(sample, reference, self.encoder) if len(sample) else None
        if difference is not None:
            raise DataError(
                f"{self.encoder.backend} differs from {reference.backend}: {difference}; "
                f"build with --backend {reference.backend}"
            )


# ---- Conversations ------------------------------------------------------------------------------


class TemplateError(DataError):
    """Error inside a chat template. A refusal by ``raise_exception`` is a plain DataError."""


class Chat(NamedTuple):
    """Messages of a conversation, and its template variables by name: tools, documents, ..."""

    messages: Sequence[Message]
    variables: Mapping[str, Any]

    @staticmethod
    def read(text: str) -> Chat:
        """Parse a document's JSON. Raises DataError if it is not a conversation."""
        document = _from_json(text, "it")
        variables = document if isinstance(document, dict) else {"messages": document}
        messages: list[Message] = variables.pop("messages")
        if isinstance(variables.get("tools"), str):  # Parquet columns have one schema
            variables["tools"] = _from_json(variables["tools"], "tools is a string that")
        if not messages:
            raise DataError("the list of messages is empty")
        for i, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(f'message {i} is not of the form {{"role": ..., "content": ...}}')
        if "\\u" in text:  # the text is UTF-8, so only escapes can encode surrogates
            try:
                json.dumps([messages, variables], ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:
                raise DataError("a message contains half a surrogate pair") from error
        return Chat(messages, variables)


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also: integer too long, nesting too deep
        raise DataError(f"{what} is not JSON ({error})") from error


class CodedChat(NamedTuple):
    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]  # per token: True if it carries loss


@dataclass(frozen=True)
class ChatCoder(Generic[T]):
    """Tokenizes conversations: JSON lists of ``{"role": ..., "content": ...}``, or objects with
    such a list under ``messages`` (``ReadOptions.extra_keys``). ``read`` prepares the documents of
    a block and yields an item for each; ``tokenize`` returns its tokens, or raises DataError if the
    conversation is unusable.

    Frame tokens carry no loss, except an end token after a token with loss, so that the model also
    learns to end the document after its last answer.
    """

    read: Callable[[Sequence[str]], Iterable[T]]
    tokenize: Callable[[T], CodedChat]
    frame: Frame

    def code(self, block: TextBlock, faults: Faults) -> Coded:
        chats = []
        kept = np.zeros(len(block), np.bool_)
        with contextlib.closing(self._items(block)) as items:  # ends the child process
            for i, item in enumerate(items):
                try:
                    chat = self.tokenize(item)
                except DataError as error:
                    failed = isinstance(error, TemplateError)
                    kind = "chat template failed" if failed else "unusable chat"
                    faults.record(kind, block.place(i), str(error))
                    continue
                except BaseException as error:
                    if not is_foreign(error):
                        raise
                    faults.record("tokenizer failed", block.place(i), first_line(error))
                    continue
                if chat.learned.any():
                    chats.append(self._framed(chat))
                    kept[i] = True
                else:
                    faults.record("chat without assistant", block.place(i))
        ids = np.concatenate([np.zeros(0, np.int32), *(chat.ids for chat in chats)])
        learned = np.concatenate([np.zeros(0, np.bool_), *(chat.learned for chat in chats)])
        offsets = offsets_of([len(chat.ids) for chat in chats])
        tokens, offsets, _ = self.frame.put_around(ids, offsets, bare=True)
        labels = np.where(learned, ids, np.int32(NO_LOSS)).astype(np.int32)
        return Coded(tokens, offsets, kept, {LABELS: labels})

    def _items(self, block: TextBlock) -> Generator[T, None, None]:
        num_read = 0
        try:
            for item in self.read(block.strings()):
                yield item
                num_read += 1
        except LimitError as error:
            # --on-error skip must not drop this document: a faster machine may render it, but all
            # machines must build the same dataset.
            raise ConfigError(
                f"{block.place(num_read)}: the chat template cannot render it: {error}; use "
                "another template, or remove the document"
            ) from error

    def _framed(self, chat: CodedChat) -> CodedChat:
        prefix, suffix = self.frame.prefix, self.frame.suffix
        if (prefix and chat.ids[0] == prefix[0]) or (suffix and chat.ids[-1] == suffix[0]):
            raise ConfigError(
                "the chat template itself writes the token that begins or ends a document: leave "
                "out --prepend-bos or --append-eod"
            )
        ids = np.concatenate([prefix, chat.ids, suffix]).astype(np.int32)
        around = [False] * len(prefix), [chat.learned[-1]] * len(suffix)
        return CodedChat(ids, np.concatenate([around[0], chat.learned, around[1]]).astype(np.bool_))


_START, _END, _EOT = _MARKERS = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
TRAIN_WITH_MARKERS = (
    "train one: megapack-build train-tokenizer --input ... --output chat.model --special-token "
    f"{' '.join(map(repr, _MARKERS))}"
)
# Keys of a message that role headers cannot express.
_NOT_IN_HEADERS = ("tool_calls", "reasoning_content", "thinking", "reasoning")


class HeaderChats:
    """Tokenizes turns with role headers as in Llama 3, each turn separately:
    ``<|start_header_id|>role<|end_header_id|>``, two newlines, the content, ``<|eot_id|>``.

    With loss "turn", all tokens of an assistant's turn except the first carry loss; with "content",
    all except the header, which is part of the prompt at inference. Source: "Data Loading:
    Tokenization, Sequence Packing, Padding Strategies, and Attention Masks", section 8.1.
    """

    def __init__(self, encoder: Encoder, loss: ChatLoss, files: TokenizerFiles) -> None:
        """Raises ConfigError if the tokenizer (``files``) would split one of the three markers."""
        self._encoder = encoder
        self._loss = loss
        ids = {marker: encoder.encode(TextBlock.of_texts([marker]))[0] for marker in _MARKERS}
        split = [m for m in _MARKERS if m not in [encoder.decode([t]) for t in ids[m].tolist()]]
        if split:
            template = ", or use --chat-format template" if files.chat_templates else ""
            raise ConfigError(
                f"{files.name} has no token {' and no token '.join(split)}, which --chat-format "
                f"headers writes: it would split {'them' if split[1:] else 'it'} into "
                f"{sum(len(ids[marker]) for marker in split)} pieces; choose a tokenizer that has "
                f"all three{template}, or {TRAIN_WITH_MARKERS}"
            )

    def code(self, document: str) -> CodedChat:
        """Return the tokens of a document (JSON). Raises DataError if it is unusable."""
        chat = Chat.read(document)
        if chat.variables.get("tools"):
            raise DataError("role headers cannot express tools; ignore them with --tools-key ''")
        texts: list[str] = []
        num_given: list[int | None] = []  # tokens without loss at the start of each text; None: all
        for i, message in enumerate(chat.messages):
            content = message.get("content")
            if not isinstance(content, str):
                raise DataError(
                    f"content of message {i} is {json_kind(content)}; role headers need a string"
                )
            unsupported = [key for key in _NOT_IN_HEADERS if message.get(key)]
            if unsupported:
                raise DataError(
                    f"role headers cannot express the {unsupported[0]} of message {i}; use "
                    "--chat-format template"
                )
            header = f"{_START}{message['role']}{_END}\n\n"
            answer = f"{content}{_EOT}"
            if message["role"] == ASSISTANT and self._loss == "content":
                texts += [header, answer]
                num_given += [None, 0]
            else:
                texts.append(header + answer)
                num_given.append(1 if message["role"] == ASSISTANT else None)
        ids, offsets = self._encoder.encode(TextBlock.of_texts(texts))
        learned = np.zeros(len(ids), np.bool_)
        for begin, end, skipped in zip(offsets[:-1], offsets[1:], num_given, strict=True):
            if skipped is not None:
                learned[begin + skipped : end] = True
        return CodedChat(ids.astype(np.int32), learned)
