"""python -m megapack.integrations.hosts.megatron [options] pretrain_gpt.py [the script's arguments]

Runs Megatron-LM's own script with megapack's dataset for --data-path. Under torchrun:

    torchrun --nproc-per-node 8 -m megapack.integrations.hosts.megatron \\
        pretrain_gpt.py --data-path ...

``python -m megapack.integrations.hosts.megatron check pretrain_gpt.py ...`` prints what the run
would read; it needs no GPU and no torchrun.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megapack.integrations.hosts.megatron.swap import install


def main(argv: Sequence[str] | None = None) -> None:
    """Call ``install``, then run the script as ``__main__``, like ``python script.py``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["check"]:
        check = importlib.import_module("megapack.integrations.hosts.megatron.check")
        sys.exit(check.main(arguments[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m megapack.integrations.hosts.megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, choices = parser.add_argument, ("auto", "yes", "no")
    own = "replace the script's get_batch: auto (default) on megatron-core 0.16 and 0.17"
    add("--own-get-batch", choices=choices, default="auto", help=own)
    no_probe = "do not probe the model on its first micro batch before training"
    add("--no-probe", action="store_true", help=no_probe)
    add("script", help="Megatron-LM's pretrain_gpt.py, or one of your own")
    add("arguments", nargs=argparse.REMAINDER, help="passed on unchanged")
    args = parser.parse_args(arguments)
    install(own_get_batch=args.own_get_batch, probe=not args.no_probe)
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main()
