"""Corpus of the demo: Python source on this disk, as train.jsonl and valid.jsonl.

One document per file, from the standard library and this environment's site-packages: real
documents with heavy-tailed lengths, without network. Files above 8 kB are left out, so that most
documents fit into a sample that a laptop can train on. The selection and the split depend on
relative paths alone, so the same installation gives the same corpus.

    python launch/demo_corpus.py --output-dir demo --max-megabytes 16
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

VALID_SHARE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--max-megabytes", type=float, default=16, help="size of both files")
    parser.add_argument("--max-file-kilobytes", type=float, default=8, help="largest document")
    args = parser.parse_args()

    args.output_dir.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "valid": 0, "duplicate": 0, "large": 0, "unreadable": 0}
    budget = int(args.max_megabytes * 1e6)
    seen: set[bytes] = set()
    with (
        (args.output_dir / "train.jsonl").open("w", encoding="utf-8") as train,
        (args.output_dir / "valid.jsonl").open("w", encoding="utf-8") as valid,
    ):
        for rank, name, path in sorted(python_files()):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                counts["unreadable"] += 1
                continue
            if len(text) > args.max_file_kilobytes * 1000:
                counts["large"] += 1
                continue
            digest = hashlib.sha256(text.encode()).digest()
            if not text.strip() or digest in seen:
                counts["duplicate"] += 1
                continue
            seen.add(digest)
            budget -= len(text)
            if budget < 0:
                break
            held_out = rank[-1] < VALID_SHARE * 256
            (valid if held_out else train).write(json.dumps({"text": text, "path": name}) + "\n")
            counts["valid" if held_out else "train"] += 1
    if not counts["train"] or not counts["valid"]:
        raise SystemExit(f"too little Python source under {source_roots()}: found {counts}")
    print(
        f"{counts['train']:,} training and {counts['valid']:,} held-out documents "
        f"({counts['duplicate']:,} duplicate or empty, {counts['large']:,} large and "
        f"{counts['unreadable']:,} unreadable files skipped)"
    )


def source_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    return [Path(paths["stdlib"]), Path(paths["purelib"])]


def python_files() -> Iterator[tuple[bytes, str, Path]]:
    """Yield (hash of the relative path, relative path, path); sorted, they are shuffled."""
    stdlib, site_packages = source_roots()
    for root in (stdlib, site_packages):
        for path in root.rglob("*.py"):
            name = path.relative_to(root).as_posix()
            if root == stdlib and name.startswith(("site-packages/", "dist-packages/")):
                continue  # belongs to another interpreter, or is listed with site_packages
            yield hashlib.sha256(name.encode()).digest(), name, path


if __name__ == "__main__":
    main()
