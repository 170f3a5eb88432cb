"""Blocks of documents -> tokens as they are stored, and labels where not every token is learned.

- Frame: what is put around a document's ids; Coded: documents ready to be stored
- TextCoder: plain text; read_weights: what a document says of the loss weights of its tokens
- ChatCoder: conversations, each turned into tokens by ``HeaderChats.code`` (role headers) or
  ``TemplateChats.code`` (template_chats.py)

    coder = TextCoder(encoder, Frame("uint16", vocab_size=259, prefix=(257,), suffix=(256,)))
    coder.code(TextBlock.of_texts(["a", "bc"]), Faults())
    # -> tokens [257, 97, 256, 257, 98, 99, 256], offsets [0, 3, 7], labels None

Labels are aligned with the tokens, not shifted: the token's own id where it carries loss, -100
where it does not, as in GPT-NeoX's label files.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megapack import _core
from megapack.errors import ConfigError, DataError, first_line, is_foreign
from megapack.storage.tokens import as_loss_weights, open_npy
from megapack.tokenization.corpus.documents import (
    Faults,
    TextBlock,
    hashed_split,
    json_kind,
    offsets_of,
)
from megapack.tokenization.tokenizers.encoders import Encoder
from megapack.tokenization.tokenizers.limited import LimitError
from megapack.tokenization.tokenizers.probe import first_difference

T = TypeVar("T")
Message = Mapping[str, Any]
ChatLoss = Literal["content", "turn"]

ASSISTANT = "assistant"
NO_LOSS = -100


class Coded(NamedTuple):
    """Documents ready to be stored."""

    tokens: NDArray[Any]  # of the stored dtype
    offsets: NDArray[np.int64]  # (documents + 1)
    labels: NDArray[np.int32] | None  # aligned with tokens; None where every token is learned
    kept: NDArray[np.bool_]  # of the block's documents: those that these are
    weights: NDArray[np.float64] | None = None  # of the loss, aligned with tokens; None: 1
    controls: Mapping[int, int] = {}  # special tokens that texts contain: id -> how often


class Frame(NamedTuple):
    """Changes to a document's ids before they are stored."""

    dtype: str  # "uint16" or "int32"
    vocab_size: int
    prefix: tuple[int, ...]  # ids before every document
    suffix: tuple[int, ...]  # and behind it

    def put_around(
        self, ids: NDArray[Any], offsets: NDArray[np.int64], *, bare: bool = False
    ) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Check, narrow and (unless ``bare``) frame ids. Raises DataError for an id outside."""
        narrow = self.dtype == "uint16"
        frame = _core.frame_documents_uint16 if narrow else _core.frame_documents_int32
        before, behind = ([], []) if bare else (list(self.prefix), list(self.suffix))
        tokens, framed, _ = frame(ids, offsets, before, behind, self.vocab_size)
        return tokens, framed


# Turns a block of documents into tokens; those of which nothing is left are recorded and left out.
Coder = Callable[[TextBlock, Faults], Coded]


class TextCoder:
    """Plain text.

    Args:
        controls: ids of special tokens; those that a text contains are counted.
        reference: when given, ``verify_fraction`` of the documents is encoded by it as well, and a
            difference is a DataError.
    """

    def __init__(
        self,
        encoder: Encoder,
        frame: Frame,
        *,
        controls: Iterable[int] = (),
        reference: Encoder | None = None,
        verify_fraction: float = 0.0,
    ) -> None:
        self._encoder = encoder
        self._frame = frame
        self._is_control = np.zeros(frame.vocab_size, np.bool_)
        self._is_control[list(controls)] = True
        self._reference = reference
        self._verify_fraction = verify_fraction

    def code(self, block: TextBlock, faults: Faults) -> Coded:
        ids, offsets, failed = self._encode(block, faults)
        if self._reference is not None:
            self._verify(block.select(~failed), self._reference)
        empty = (offsets[:-1] == offsets[1:]) & ~failed
        if empty.any():  # text of which a tokenizer's normalization leaves nothing
            faults.record_rows("empty document", np.flatnonzero(empty), block.place)
        kept, weights = ~(empty | failed), None
        offsets = offsets[np.concatenate([kept, [True]])]
        if block.weights is not None:
            rest = block.select(kept)
            usable, ids, offsets, weights = self._weighed(rest, ids, offsets, faults)
            kept[kept] = usable
        tokens, framed = self._frame.put_around(ids, offsets)
        controls = ids[self._is_control[ids]] if self._is_control.any() else ids[:0]
        return Coded(tokens, framed, None, kept, weights, collections.Counter(controls.tolist()))

    def _encode(
        self, block: TextBlock, faults: Faults
    ) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.bool_]]:
        """Ids and offsets of all documents, and which ones the tokenizer failed on (no ids)."""
        failed = np.zeros(len(block), np.bool_)
        try:
            return (*self._encoder.encode(block), failed)
        except BaseException as error:
            if not is_foreign(error):
                raise
        # Libraries do not say which document it was: encode them one by one.
        parts = []
        for i in range(len(block)):
            try:
                parts.append(self._encoder.encode(block.select(np.arange(len(block)) == i))[0])
            except BaseException as error:
                if not is_foreign(error):
                    raise
                faults.record("tokenizer failed", block.place(i), first_line(error))
                failed[i] = True
                parts.append(np.zeros(0, np.int32))
        ids = np.concatenate([np.zeros(0, np.int32), *parts])
        return ids, offsets_of([len(part) for part in parts]), failed

    def _weighed(
        self, block: TextBlock, ids: NDArray[Any], offsets: NDArray[np.int64], faults: Faults
    ) -> tuple[NDArray[np.bool_], NDArray[Any], NDArray[np.int64], NDArray[np.float64]]:
        """Which documents have loss weights that can be used, and these, of the tokens around,
        too."""
        lengths, found, usable = np.diff(offsets), [], np.ones(len(block), np.bool_)
        before, behind = len(self._frame.prefix), len(self._frame.suffix)
        for i, (said, text) in enumerate(zip(block.weights or (), block.strings(), strict=True)):
            try:
                own = read_weights(said, int(lengths[i]), text, self._encoder.spans)
            except BaseException as error:
                if not isinstance(error, DataError) and not is_foreign(error):
                    raise
                faults.record("unusable loss weights", block.place(i), first_line(error))
                usable[i] = False
                continue
            # Who learns the last token with some weight learns with it that the document ends.
            found.append(np.concatenate([np.ones(before), own, np.full(behind, own[-1])]))
        ids = ids[np.repeat(usable, lengths)]
        weights = np.concatenate([np.zeros(0), *found])
        return usable, ids, offsets_of(lengths[usable]), weights

    def _verify(self, block: TextBlock, reference: Encoder) -> None:
        # Chosen by their text, so that every run checks the same documents; by another hash than
        # the one that splits the corpus, or all of them would be training documents.
        hashes = block.text_hashes(seed=1)
        chosen = hashed_split((self._verify_fraction, 1 - self._verify_fraction), hashes)
        sample = block.select(chosen == 0)
        difference = first_difference(sample, reference, self._encoder) if len(sample) else None
        if difference is not None:
            raise DataError(
                f"{self._encoder.backend} is not what it was on the first sample: {difference}; "
                f"build with --backend {reference.backend}"
            )


# ---- Loss weights of text ------------------------------------------------------------------------


def read_weights(
    said: str, num_tokens: int, text: str, spans: Callable[[str], NDArray[np.int64]]
) -> NDArray[np.float64]:
    """The loss weights of a document's tokens.

        read_weights("[[2, 5, 0.5]]", 4, "ab cd ef", spans)    # tokens at 0-2 2-5 5-6 6-8
        # -> [1, 0.5, 1, 1]

    Args:
        said: JSON: one number per token; or spans of the text, [begin, end, weight] in characters,
            half open: a token that holds a character of one has its weight (of several the last),
            all others 1; or the path of a .npy of one number per token. "" or null: all are 1.
        num_tokens: of the document, without what is put around it.
        text: of the document.
        spans: the characters of every token of it, as ``Encoder.spans`` gives them.

    Raises:
        DataError: it says something else, or of another number of tokens; a weight that no float16
            holds (``as_loss_weights``).
    """
    weights = np.ones(num_tokens)
    try:
        value = json.loads(said or "null")
        if value is None:
            return weights
        if isinstance(value, str):
            value = open_npy(value)
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"they are of dtype {array.dtype}")
    except Exception as error:  # of json, numpy or zipfile
        raise DataError(f"weights are no numbers: {str(error)[:200]}") from error
    array = array.astype(np.float64)
    if array.ndim == 2 and array.shape[1] == 3:
        as_loss_weights(array[:, 2])
        at = spans(text)
        for begin, end, weight in array:
            if not 0 <= begin < min(end, len(text)):
                raise DataError(
                    f"weights have span [{begin:g}, {end:g}), which holds no character of the "
                    f"{len(text)} of the text"
                )
            weights[(at[:, 0] < end) & (at[:, 1] > begin)] = weight
        return weights
    if array.shape != (num_tokens,) and array.size:
        raise DataError(
            f"weights have shape {array.shape}, and the document {num_tokens} tokens: give one "
            "number for each, or spans [begin, end, weight] of characters"
        )
    as_loss_weights(array)
    return array if array.size else weights


# ---- Conversations ------------------------------------------------------------------------------


class TemplateError(DataError):
    """A chat template fails on a conversation, rather than refusing it."""


class Chat(NamedTuple):
    """A conversation, and what is said beside it: tools, documents, other variables by name."""

    messages: Sequence[Message]
    beside: Mapping[str, Any]

    @staticmethod
    def read(text: str) -> Chat:
        """A document's JSON. Raises DataError where it is no conversation."""
        document = _from_json(text, "it")
        beside = document if isinstance(document, dict) else {"messages": document}
        messages: list[Message] = beside.pop("messages")
        if isinstance(beside.get("tools"), str):  # as columns of parquet have schemas that differ
            beside["tools"] = _from_json(beside["tools"], "tools is a string that")
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


def _from_json(text: str, what: str) -> Any:
    """DataError where Python does not take it: it may be no JSON, an integer of thousands of digits
    or lists in lists without end.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} is not JSON ({error})") from error


class CodedChat(NamedTuple):
    """One conversation."""

    ids: NDArray[np.int32]
    learned: NDArray[np.bool_]  # of every token: does it carry loss?


class ChatCoder(Generic[T]):
    """Blocks whose documents are JSON lists of ``{"role": ..., "content": ...}``, or objects that
    hold one as ``messages`` (``ReadOptions.beside``).

    The tokens that frame a document carry no loss, except an end token after a learned one: a
    model that learns its last answer learns that it ends there.

    Args:
        read: runs over all documents of a block first; yields an item for each.
        code: tokens of an item; raises DataError if the conversation is unusable.
    """

    def __init__(
        self,
        read: Callable[[Sequence[str]], Iterable[T]],
        code: Callable[[T], CodedChat],
        frame: Frame,
    ) -> None:
        self._read = read
        self._code = code
        self._frame = frame

    def code(self, block: TextBlock, faults: Faults) -> Coded:
        chats = []
        kept = np.zeros(len(block), np.bool_)
        for i, item in enumerate(self._items(block)):
            try:
                chat = self._code(item)
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
        tokens, offsets = self._frame.put_around(ids, offsets, bare=True)
        labels = np.where(learned, ids, np.int32(NO_LOSS)).astype(np.int32)
        return Coded(tokens, offsets, labels, kept)

    def _items(self, block: TextBlock) -> Iterator[T]:
        num_read = 0
        try:
            for item in self._read(block.strings()):
                yield item
                num_read += 1
        except LimitError as error:
            # Not a fault of the document that --on-error skip may leave out: another machine may
            # be fast enough, and both must build the same dataset.
            raise ConfigError(
                f"{block.place(num_read)}: the chat template cannot render it: {error}; use "
                "another template, or remove the document"
            ) from error

    def _framed(self, chat: CodedChat) -> CodedChat:
        prefix, suffix = self._frame.prefix, self._frame.suffix
        if (prefix and chat.ids[0] == prefix[0]) or (suffix and chat.ids[-1] == suffix[0]):
            raise ConfigError(
                "the chat template writes the token that begins or ends a document itself; leave "
                "out --prepend-bos or --append-eod, or it would stand there twice"
            )
        ids = np.concatenate([prefix, chat.ids, suffix]).astype(np.int32)
        around = [False] * len(prefix), [chat.learned[-1]] * len(suffix)
        return CodedChat(ids, np.concatenate([around[0], chat.learned, around[1]]).astype(np.bool_))


_START, _END, _EOT = _MARKERS = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
# What tells a model more than its content does.
_NOT_IN_HEADERS = ("tool_calls", "reasoning_content", "thinking", "reasoning")


class HeaderChats:
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
            ids = encoder.encode(TextBlock.of_texts([marker]))[0].tolist()
            if marker not in [encoder.decode([token]) for token in ids]:
                raise ConfigError(
                    f"{name} has no token {marker}, which --chat-format headers writes: it would "
                    f"be stored in {len(ids)} pieces; choose a tokenizer that has it, train one "
                    "with --special-token, or use --chat-format template"
                )

    def code(self, document: str) -> CodedChat:
        """Return the tokens of a document's JSON. Raises DataError."""
        chat = Chat.read(document)
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
            if message["role"] == ASSISTANT and self._loss == "content":
                texts += [header, answer]
                given += [None, 0]
            else:
                texts.append(header + answer)
                given.append(1 if message["role"] == ASSISTANT else None)
        ids, offsets = self._encoder.encode(TextBlock.of_texts(texts))
        learned = np.zeros(len(ids), np.bool_)
        for begin, end, skipped in zip(offsets[:-1], offsets[1:], given, strict=True):
            if skipped is not None:
                learned[begin + skipped : end] = True
        return CodedChat(ids.astype(np.int32), learned)
