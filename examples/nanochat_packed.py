"""nanochat's base_train on packed rows. In a nanochat checkout:

    python -m nanochat.dataset -n 8 && python -m scripts.tok_train
    PYTHONPATH=. torchrun --nproc-per-node 8 /path/to/nanochat_packed.py climbmix --depth=12

The first argument is the prefix of the documents; the first rank writes them if they do not exist.
All other arguments go to scripts.base_train. docs/guides/nanochat.md.
"""

import os
import runpy
import sys
import time
from pathlib import Path

import numpy as np
from nanochat.dataset import list_parquet_files
from nanochat.tokenizer import get_tokenizer
from pyarrow.parquet import ParquetFile

from megapack import IndexedDatasetBuilder
from megapack.integrations.hosts.nanochat import install


def write_documents(prefix: str) -> None:
    """Tokenize nanochat's training shards (the last one is for validation), each document after a
    BOS, as nanochat's loader does."""
    tokenizer = get_tokenizer()
    bos, vocab_size = tokenizer.get_bos_token_id(), tokenizer.get_vocab_size()
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
    with IndexedDatasetBuilder(prefix, dtype, vocab_size=vocab_size) as builder:
        for path in list_parquet_files()[:-1]:
            shard = ParquetFile(path)
            for group in range(shard.num_row_groups):
                texts = shard.read_row_group(group, columns=["text"])["text"].to_pylist()
                for tokens in tokenizer.encode(texts, prepend=bos, num_threads=4):
                    builder.add_document(tokens)


def main() -> None:
    prefix = sys.argv.pop(1)
    if not Path(f"{prefix}.idx").exists() and os.environ.get("RANK", "0") == "0":
        write_documents(prefix)
    while not Path(f"{prefix}.idx").exists():  # other ranks wait for the first
        time.sleep(1)
    install(prefix)
    runpy.run_module("scripts.base_train", run_name="__main__")


if __name__ == "__main__":
    main()
