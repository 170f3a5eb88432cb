"""The corpora of the training recipes: text from the packages of this environment.

Two domains, from packages whose versions ``constraints.txt`` pins: ``code`` (Python source, a file
per document) and ``prose`` (docstrings, one per document). The choice of training and held-out
documents depends only on relative paths, so other installed packages do not change the corpus. A
held-out document never comes from a file with training documents; with ``Corpus.folders`` not even
from the same folder.

``prepare`` tokenizes with this project's commands: one BPE of 1,024 tokens for both domains, since
a small model spends most of its time on its vocabulary.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megapack.storage import IndexedDataset

VOCAB_SIZE = 1024
TOKENIZER_BYTES = 2_000_000  # of text per domain, from which the vocabulary is learned
WORK = Path(os.environ.get("MEGAPACK_PAPERS_WORK") or Path(__file__).with_name(".work"))
VALID_SHARE = 0.1  # of the files
PACKAGES = ("torch", "transformers", "deepspeed", "megatron", "trl")
WRITTEN_BY_INSTALLERS = ("version.py", "git_version_info_installed.py")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Selection of documents from the installed packages."""

    domain: Literal["code", "prose"]
    train_bytes: int
    """Training documents are taken until they hold this many bytes of text."""
    after_bytes: int = 0
    """Bytes of training documents to skip first."""
    valid_bytes: int = 200_000
    min_bytes: int = 200
    max_bytes: int = 16_000
    """Documents of other sizes are left out."""
    injected: tuple[str, ...] = ()
    """Texts of further training documents, in front of the others."""
    cut: float = 0.0
    """Share of the training documents that are cut in two, at a position given by a hash."""
    folders: bool = False
    """Files of a folder are consecutive and form a group; whole folders are held out."""


@dataclass(frozen=True)
class Prepared:
    """Tokenized documents: ``train`` and ``valid`` are prefixes of .bin/.idx."""

    train: Path
    valid: Path
    key: str
    """Digest of text and tokenizer: equal keys mean equal tokens."""
    tokenizer: Path
    """Model file of the tokenizer."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the training documents."""
        return IndexedDataset(self.train).num_tokens


Document = tuple[str, str]  # text, and its folder if folders are groups (else "")

_ready: dict[Corpus, Prepared] = {}


def remember(corpus: Corpus, prepared: Prepared) -> None:
    """Use documents that another process prepared, because searching the text takes seconds."""
    _ready[corpus] = prepared


def tokenizer_file() -> Path:
    """Return the model file of the tokenizer that all corpora share."""
    return next((prepared.tokenizer for prepared in _ready.values()), None) or tokenizer()[0]


@contextlib.contextmanager
def complete(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to; rename it to ``folder`` if the block ends without an
    error. If another process has already created ``folder``, drop the temporary one."""
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    try:
        partial.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        shutil.rmtree(partial)


@functools.cache
def prepare(corpus: Corpus) -> Prepared:
    """Return the tokenized documents of ``corpus``; tokenize them unless they are on disk.

    Raises:
        SystemExit: this installation has too little text.
        RuntimeError: a command of this project failed; its message is part of the error.
    """
    if corpus in _ready:
        return _ready[corpus]
    model, vocabulary = tokenizer()
    texts = _texts(corpus)
    texts["train"] = [(t, of) for text, of in texts["train"] for t in _parts(text, corpus.cut)]
    digests = [[_digest("".join(document)) for document in of] for of in texts.values()]
    content = [asdict(corpus), vocabulary, *digests]
    key = _digest(json.dumps(content))
    grouped = ("--group-key", "folder") if corpus.folders else ()
    folder = WORK / "corpora" / key
    if not folder.exists():
        with complete(folder) as partial:
            for split, part in texts.items():
                _write(partial / f"{split}.jsonl", part)
                _megapack("tokenize", "--input", partial / f"{split}.jsonl", "--json-key", "text",
                          "--append-eod", "--tokenizer", model, "--output-prefix", partial / split,
                          "--workers", 1, *grouped)  # fmt: skip
    return Prepared(folder / "train", folder / "valid", key, model)


@functools.cache
def tokenizer() -> tuple[Path, str]:
    """Return the model file (train it unless it exists) and the key of its training text."""
    sample = [
        document
        for domain in ("code", "prose")
        for document in _texts(Corpus(domain=domain, train_bytes=TOKENIZER_BYTES))["train"]
    ]
    key = _digest(json.dumps([VOCAB_SIZE, *(_digest(text) for text, _ in sample)]))
    folder = WORK / "tokenizers" / key
    if not folder.exists():
        with complete(folder) as partial:
            _write(partial / "sample.jsonl", sample)
            _megapack("train-tokenizer", "--input", partial / "sample.jsonl", "--vocab-size",
                      VOCAB_SIZE, "--output", partial / "tokenizer.model")  # fmt: skip
    return folder / "tokenizer.model", key


def _texts(corpus: Corpus) -> dict[str, list[Document]]:
    """Return the documents of both splits, in the order of ``_files``."""
    budget = {"train": corpus.after_bytes + corpus.train_bytes, "valid": corpus.valid_bytes}
    texts: dict[str, list[Document]] = {"train": [(t, "") for t in corpus.injected], "valid": []}
    seen: set[str] = set()
    for rank, path, folder in _files(corpus.folders):
        split = "valid" if rank[-1] < VALID_SHARE * 256 else "train"
        if budget[split] <= 0:
            continue
        for text in _documents(path, corpus.domain):
            size = len(text.encode())
            if text in seen or not corpus.min_bytes <= size <= corpus.max_bytes:
                continue
            seen.add(text)
            if split == "valid" or budget[split] <= corpus.train_bytes:
                texts[split].append((text, folder))
            budget[split] -= size
            if budget[split] <= 0:
                break
        if max(budget.values()) <= 0:
            return texts
    missing = {split: size for split, size in budget.items() if size > 0}
    raise SystemExit(
        f"this installation has too little {corpus.domain}: {missing} bytes are missing; "
        "install more packages or take a smaller corpus"
    )


def _parts(text: str, share: float) -> tuple[str, ...]:
    """Return the text, or its two parts if its hash falls into ``share``."""
    chosen, place = (int(_digest(text)[i : i + 12], 16) / 16**12 for i in (0, 12))
    at = round(place * len(text))
    return (text[:at], text[at:]) if chosen < share and 0 < at < len(text) else (text,)


@functools.cache
def _files(folders: bool) -> list[tuple[bytes, Path, str]]:
    """Return (hash, path, folder) of all files, shuffled by the hash of the relative path, or of
    the folder if ``folders``."""
    root = Path(sysconfig.get_paths()["purelib"])
    if missing := [package for package in PACKAGES if not (root / package).is_dir()]:
        print(f"{', '.join(missing)} not installed: corpora differ from the logs", file=sys.stderr)
    found = []
    for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        if path.name not in WRITTEN_BY_INSTALLERS:
            name = path.relative_to(root)
            folder = name.parent.as_posix() if folders else ""
            rank = hashlib.sha256((folder or name.as_posix()).encode()).digest()
            found.append((rank, path, folder))
    return sorted(found)


def _documents(path: Path, domain: str) -> Iterator[str]:
    try:
        source = path.read_text(encoding="utf-8")
        if domain == "code":
            yield source
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the packages' source
            tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, OSError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _write(path: Path, documents: list[Document]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": t, "folder": of}) + "\n" for t, of in documents)


def _megapack(*arguments: object) -> None:
    command = [sys.executable, "-m", "megapack.cli.main", *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
