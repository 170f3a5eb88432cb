"""``megapack-probe``: test which attention implementations of a transformers model keep packed
documents apart, for each way of passing boundaries.

    megapack-probe llama --attention sdpa,eager          # an architecture, a folder, a config.json
    # llama, float32
    #                 sdpa                                        eager
    # position_ids    safe                                        safe
    # mask of ones    leaks: model.layers.0.self_attn             leaks: model.layers.0.self_attn
    megapack-probe qwen3_next --boundaries cu_seqlens --dtype bfloat16 --json

A tiny model with random weights is built from the configuration: a few layers of every kind, short
windows and chunks, position thresholds of 32 tokens. The test row has documents shorter and longer
than each of these sizes. Nothing is downloaded for an architecture or a local path.

Exit status: 0 no leak; 1 a leak; 2 the command line is wrong; 3 every combination was refused.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megapack.attention.model_check import isolated, tiny_reference
from megapack.attention.tiny_model import VOCABULARY, Row
from megapack.attention.transformers_interface import register
from megapack.calls import nearest
from megapack.command_line import Parser, add_program_options
from megapack.errors import MegapackError, exit_code, require
from megapack.hub import hub_answers
from megapack.probe import LeakError, probe

ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "megapack")
LENGTHS = (41, 5, 23, 37)  # below and above every window, chunk and threshold of a tiny model
THRESHOLD = 32  # position at which RoPE of a tiny model changes, if its type has a threshold


def _numbers(row: Row) -> Tensor:
    """Return the number of each token's document, from 1, ``[1, T]``."""
    return (row.position_ids == 0).cumsum(1)


def _block_mask(row: Row) -> Tensor:
    """Return which keys a query sees, bool ``[1, 1, T, T]``."""
    numbers = _numbers(row)[0]
    return ((numbers[:, None] == numbers) & torch.ones(len(numbers), len(numbers)).tril().bool())[
        None, None
    ]


# Ways in which trainers pass boundaries to a model: name -> arguments in addition to input_ids.
WAYS: dict[str, Callable[[Row], dict[str, Any]]] = {
    # positions that restart, no mask: TRL's padding-free collator
    "position_ids": lambda row: {"position_ids": row.position_ids},
    # the same plus segment ends, for varlen kernels and recurrent layers: transformers'
    # DataCollatorWithFlattening
    "cu_seqlens": lambda row: {
        **row.arguments(),
        "seq_idx": _numbers(row).int() - 1,
    },
    # the same, with use_cache left at True, the default of most configurations
    "position_ids and use_cache": lambda row: {"position_ids": row.position_ids, "use_cache": True},
    # positions that restart, and the all-ones attention mask that some collators add
    "mask of ones": lambda row: {
        "position_ids": row.position_ids,
        "attention_mask": torch.ones_like(row.tokens),
    },
    # 1 1 1 2 2: axolotl's multipack, LLaMA-Factory's neat packing
    "numbered mask": lambda row: {
        "position_ids": row.position_ids,
        "attention_mask": _numbers(row),
    },
    "4-D mask": lambda row: {
        "position_ids": row.position_ids,
        "attention_mask": _block_mask(row),
    },
}


@dataclass(frozen=True)
class Combination:
    """One combination of a model, an attention implementation and a way of passing boundaries."""

    model: str
    attention: str
    boundaries: str
    dtype: str
    verdict: Literal["safe", "leaks", "refused"]
    detail: str = ""
    """Layer and kind of the first leak, or the reason for a refusal."""

    def __str__(self) -> str:
        return (
            f"leaks: {self.detail.partition(' ')[0]}" if self.verdict == "leaks" else self.verdict
        )


def findings(
    name: str,
    configuration: Any,
    *,
    attention: Iterable[str] = ATTENTION,
    boundaries: Iterable[str] = tuple(WAYS),
    dtype: torch.dtype = torch.float32,
) -> list[Combination]:
    """Probe a tiny model of a transformers configuration with every combination."""
    register("eager")  # the kernel for "megapack" here, because it supports soft caps
    row, label = Row.of(_documents()), str(dtype).removeprefix("torch.")
    build = partial(_build, dtype)
    found: list[Combination] = []
    reference: Any = None  # the tiny configuration and its model, built once for all kernels
    for implementation in attention:
        try:
            with isolated(torch.device("cpu")):
                reference = reference or tiny_reference(configuration, build, _lower_thresholds)
            model = build(reference[0], implementation)
            model.load_state_dict(reference[1].state_dict())
            model.train()
        except Exception as error:  # many types: the model may lack this kernel
            found += [
                Combination(name, implementation, way, label, "refused", _first_line(error))
                for way in boundaries
            ]
            continue
        for way in boundaries:
            batch = {"input_ids": row.tokens, "use_cache": False, **WAYS[way](row)}
            if way == "4-D mask":
                seen = batch["attention_mask"]  # transformers adds the mask to the scores
                batch["attention_mask"] = (~seen).to(dtype) * torch.finfo(dtype).min
            verdict, detail = _verdict(model, batch, row)
            found.append(Combination(name, implementation, way, label, verdict, detail))
    return found


def _verdict(
    model: Any, batch: dict[str, Any], row: Row
) -> tuple[Literal["safe", "leaks", "refused"], str]:
    try:
        report = probe(model, batch, boundaries=row.cu_seqlens)
    except Exception as error:  # a model that refuses a mask or a kernel
        return "refused", _first_line(error)
    if report.ok:
        return "safe", ""
    leak = report.leaks[0]
    return "leaks", f"{leak.layer or 'outside'} ({leak.kind})"


def _first_line(error: Exception) -> str:
    text = str(error) if isinstance(error, LeakError) else f"{type(error).__name__}: {error}"
    return text.strip().partition("\n")[0][:200]


def _documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY - 8, (n,), generator=generator) for n in LENGTHS]


def _build(dtype: torch.dtype, tiny: Any, attention: str) -> Any:
    transformers = require("transformers", "megapack-probe")
    if attention == "flex_attention" and not torch.cuda.is_available():
        raise MegapackError("flex_attention is probed on a GPU; its CPU kernel is compiled")
    return transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(tiny), attn_implementation=attention, dtype=dtype
    )


def _lower_thresholds(tiny: Any) -> None:
    """Let RoPE change at THRESHOLD positions, where its type has a threshold."""
    rope = getattr(tiny, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            tiny.max_position_embeddings = (
                max(LENGTHS) if "long_factor" in parameters else THRESHOLD
            )
            if "original_max_position_embeddings" in parameters:
                parameters["original_max_position_embeddings"] = THRESHOLD
            if hasattr(tiny, "original_max_position_embeddings"):
                tiny.original_max_position_embeddings = THRESHOLD


def architectures() -> list[str]:
    """Return every architecture of the installed transformers that has a causal language model."""
    transformers = require("transformers", "megapack-probe")
    return sorted({config.model_type for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING})


def read_configuration(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the text configuration of an architecture, a folder, a config.json or a model id.

    Raises:
        MegapackError: transformers does not know it.
    """
    config = require("transformers", "megapack-probe").AutoConfig
    try:
        if name in architectures():
            return config.for_model(name).get_text_config(decoder=True)
        path = Path(name)
        place = path.parent if path.name == "config.json" else name
        # transformers would retry for half a minute if the hub does not answer.
        made = config.from_pretrained(
            place,
            trust_remote_code=trust_remote_code,
            local_files_only=not (Path(place).exists() or hub_answers()),
        )
        return made.get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise MegapackError(
            f"{name!r} is not an architecture of the installed transformers, and no configuration "
            f"was found there ({_first_line(error)}); pass a folder with a config.json, or one of "
            f"{', '.join(architectures()[:4])}, ..."
        ) from error


# ---- The command


def _parser() -> argparse.ArgumentParser:
    def listed(known: Iterable[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            if unknown := [part for part in text.split(",") if part not in known]:
                raise argparse.ArgumentTypeError(
                    f"{unknown[0]!r} is unknown{nearest(unknown[0], known)} (known: "
                    f"{', '.join(known)})"
                )
            return text.split(",")

        return read

    parser = Parser("megapack-probe", description=__doc__)
    add_program_options(parser)
    parser.add_argument("model", nargs="*", help="architecture, folder, config.json or model id")
    parser.add_argument("--all", action="store_true", help="every architecture of transformers")
    parser.add_argument(
        "--attention", type=lambda text: text.split(","), default=list(ATTENTION),
        help="attention implementations, separated by commas (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--boundaries", type=listed(WAYS), default=list(WAYS), help="ways of passing boundaries"
    )
    parser.add_argument(
        "--dtype", type=listed(("float32", "bfloat16", "float16")), default=["float32"],
        help="one or more dtypes of weights (default: float32)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON list of findings")
    parser.add_argument("--trust-remote-code", action="store_true", help="run a model's own code")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if bool(args.model) == args.all:
        parser.error("name one or more models, or --all")
    found: list[Combination] = []
    try:
        require("transformers", "megapack-probe").logging.set_verbosity_error()
        warnings.simplefilter("ignore")
        for name in architectures() if args.all else args.model:
            configuration = read_configuration(name, trust_remote_code=args.trust_remote_code)
            for dtype in args.dtype:
                new = findings(
                    name, configuration, attention=args.attention, boundaries=args.boundaries,
                    dtype=getattr(torch, dtype),
                )  # fmt: skip
                found += new
                if not args.json:
                    print(_table(f"{name}, {dtype}", new), flush=True)
    except MegapackError as error:
        print(f"megapack-probe: error: {error}", file=sys.stderr)
        return exit_code(error)
    if args.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1))
    verdicts = {finding.verdict for finding in found}
    return 1 if "leaks" in verdicts else 0 if "safe" in verdicts else 3


def _table(title: str, found: Sequence[Combination]) -> str:
    """Return a table with one row per way of passing boundaries and one column per
    implementation."""
    columns = list(dict.fromkeys(finding.attention for finding in found))
    rows = [["", *columns]]
    for way in dict.fromkeys(finding.boundaries for finding in found):
        rows.append([way, *(str(finding) for finding in found if finding.boundaries == way)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in rows]  # fmt: skip
    reasons = dict.fromkeys(
        f"{finding.attention} refused: {finding.detail}"
        for finding in found
        if finding.verdict == "refused"
    )
    return "\n".join([title, *lines, *reasons, ""])


if __name__ == "__main__":
    sys.exit(main())
