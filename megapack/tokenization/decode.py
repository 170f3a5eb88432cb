"""Token ids back to text, for people who look at data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megapack.tokenization.optional import require
from megapack.tokenization.tokenizer import TokenizerFiles

__all__ = ["load_decoder"]


def load_decoder(source: str) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text; special tokens are shown by name.

    Args:
        source: a tokenizer as ``megapack-build tokenize --tokenizer`` takes it.

    Raises:
        ConfigError: there is no such tokenizer.
        FormatError: the file is not a tokenizer.
        MegapackError: a package that runs it is not installed.
    """
    files = TokenizerFiles.open(source)
    if files.kind == "bytes":
        return _bytes_decoder({token_id: text for text, token_id in files.special.items()})
    if files.kind == "sentencepiece":
        module = require("sentencepiece", None, f"tokenizer {source}")
        processor = module.SentencePieceProcessor(model_file=str(files.path))
        names = {token_id: text for text, token_id in files.special.items()}
        return lambda ids: _with_names(ids, names, processor.decode)
    tokenizer = require("tokenizers", "tokenizers", f"tokenizer {source}").Tokenizer.from_file(
        str(files.path)
    )
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _bytes_decoder(names: dict[int, str]) -> Callable[[Sequence[int]], str]:
    def decode_bytes(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    return lambda ids: _with_names(ids, names, decode_bytes)


def _with_names(
    ids: Sequence[int], names: dict[int, str], decode: Callable[[list[int]], str]
) -> str:
    """Decode the runs between special tokens, which decoders would drop, and name those."""
    parts: list[str] = []
    run: list[int] = []
    for token in ids:
        if token not in names:
            run.append(token)
            continue
        parts += [decode(run)] if run else []
        parts.append(names[token])
        run = []
    return "".join(parts + ([decode(run)] if run else []))
