"""nanochat's base_train on packed rows. In the folder of a nanochat checkout, with its data:

    python -m nanochat.dataset -n 8 && python -m scripts.tok_train
    PYTHONPATH=. torchrun --nproc-per-node 8 /path/to/nanochat_packed.py climbmix --depth=12

The first argument is the prefix of the documents, written by the first rank if they do not exist;
all others are those of scripts.base_train. docs/guides/nanochat.md.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from megapack.integrations.hosts.nanochat import install, write_documents


def main() -> None:
    prefix = sys.argv.pop(1)
    if not Path(f"{prefix}.idx").exists():
        if os.environ.get("RANK", "0") == "0":
            write_documents(prefix)
        while not Path(f"{prefix}.idx").exists():
            time.sleep(1)
    install(prefix)
    runpy.run_module("scripts.base_train", run_name="__main__")


if __name__ == "__main__":
    main()
