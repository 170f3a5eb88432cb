"""Evaluate exported models, or compare runs.

    megapack-evaluate --model runs/a/model --data valid
    megapack-evaluate --model runs/a/model --blend blend.yaml
    torchrun --nproc-per-node 8 -m megapack.training.evaluate --model bucket=runs/a/model \\
        --model concat=runs/b/model --data valid --contexts 1024 2048 4096 8192 16384 --output out
    megapack-evaluate --model runs/a/model --lm-eval hellaswag,piqa --tokenizer tok
    megapack-evaluate --run bucket=runs/a --run concat=runs/b --output out

Models are scored on held-out documents: every token once, within its document. --blend scores the
held-out documents (valid_prefix) of the manifest's sources, by source and in total. Runs are
compared by their logs: final perplexity and mean rank over the last epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapack.config import check_positive
from megapack.data import check_token_ids
from megapack.data.blend import load_blend
from megapack.errors import ConfigError
from megapack.storage import IndexedDataset
from megapack.storage.files import atomic_write
from megapack.training.command import command_parser, run_command, set_rank_environment
from megapack.training.config import EngineConfig, ModelConfig
from megapack.training.curves import compared, plot_contexts, plot_curves, read_curve, standings
from megapack.training.engine.export import open_tokenizer
from megapack.training.engine.inputs import open_validation, open_validation_of_sources
from megapack.training.engine.world import World, connect_ranks
from megapack.training.model.architecture import (
    model_configuration,
    position_limit,
    register_architectures,
)
from megapack.training.model.opening import check_document_positions, compute_dtype, open_model
from megapack.training.validation import num_scored, perplexity_by_context, validate_sources
from megapack.units import counted

if TYPE_CHECKING:
    from megapack.data import PackedDataset

    # Documents of --data, and of the sources of --blend.
    HeldOut = tuple[PackedDataset | None, dict[str, PackedDataset]]

logger = logging.getLogger("megapack")


def main() -> int:
    """Run the command; return its exit code."""
    return run_command(evaluate, build_parser().parse_args())


def evaluate(args: argparse.Namespace) -> int:
    """Print the results, and write them into --output; return the exit code."""
    logging.basicConfig(level=logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        results = evaluations(args)
    if results and args.json:
        print(json.dumps(results, indent=2))
    if results and args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        with atomic_write(args.output / "evaluation.json", "w") as file:
            json.dump(results, file, indent=1)
    return 0


def evaluations(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the results of models and runs; empty on all ranks but the first. Raises
    ConfigError for options that do not fit together."""
    results: dict[str, Any] = {}
    for option, given in (("--model", args.model), ("--run", args.run)):
        if len({name for name, _ in given}) < len(given):
            raise ConfigError(f"two {option} have the same name; give each a NAME=DIR")
    numbers = ("max_tokens", "micro_batch_tokens", "limit", "contexts")
    check_positive(
        "command line", **{f"--{name.replace('_', '-')}": getattr(args, name) for name in numbers}
    )
    if bool(args.model) != bool(args.data or args.blend or args.lm_eval):
        raise ConfigError(
            "--model needs one of --data, --blend and --lm-eval, and each of these needs --model"
        )
    if args.contexts and not args.data:
        raise ConfigError("--contexts scores the documents of --data: give --data, too")
    if args.model and (args.data or args.blend):
        set_rank_environment(args.local_rank)
        documents = held_out(args)
        for _, directory in args.model:
            check_documents(directory, documents, args.contexts)
        with connect_ranks(timeout_minutes=30) as world:
            scored = {
                name: score(directory, documents, args, world) for name, directory in args.model
            }
        if not world.is_first:
            return {}
        results["models"] = scored
        show_models(scored, args.output)
    if args.run:
        results["runs"] = compare_runs(dict(args.run), args.output)
    if args.lm_eval:
        results["lm_eval"] = {name: benchmarks(directory, args) for name, directory in args.model}
    if not results:
        raise ConfigError(
            "nothing to do: give --model with --data, --blend or --lm-eval, or --run "
            "(megapack-build report RUN_DIR makes a page of one run)"
        )
    return results


def check_documents(directory: str, documents: HeldOut, contexts: Sequence[int]) -> None:
    """Raise ConfigError, before loading, if a model lacks token ids or positions of the documents;
    warn if it may not have been trained on as many positions."""
    architecture = model_configuration(ModelConfig(pretrained=directory), 1)
    data, sources = documents
    longest = 0
    if data is not None and contexts:
        longest = min(max(contexts), *(index.longest_reach for index in data.samples.indices))
    datasets = [one for one in (data, *sources.values()) if one is not None]
    for dataset in datasets:
        check_token_ids(dataset, architecture.vocab_size)
        longest = max(longest, *(index.longest_segment for index in dataset.samples.indices))
    positions = max([longest, *(dataset.longest_position() for dataset in datasets)])
    check_document_positions(architecture, positions)
    limit = position_limit(architecture, longest)
    if limit is None or longest <= limit.tokens:
        return
    problem = (
        f"{directory}: {limit.source} is {limit.tokens}, and held-out documents take {longest} "
        f"positions; --buckets, --index, --contexts of at most {limit.tokens} score them in pieces"
    )
    if limit.is_hard:
        raise ConfigError(problem)
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s. RoPE computes them, but the model may not have learned them", problem)


def score(
    directory: str, documents: HeldOut, args: argparse.Namespace, world: World
) -> dict[str, Any]:
    """Return the perplexity of one model: in total, by bucket, and by context length."""
    precision: Any = args.precision or ("bf16" if world.device.type == "cuda" else "fp32")
    config = ModelConfig(pretrained=directory, attention_backend=args.attention_backend)
    engine = EngineConfig(precision=precision)
    model, _ = open_model(config, engine, model_configuration(config, 1), device=world.device)
    model.cast(compute_dtype(engine))
    options = {
        "world": world,
        "config": engine,
        "micro_batch_tokens": args.micro_batch_tokens,
        "max_tokens": args.max_tokens,
    }
    if world.is_first:
        count = num_scored(filter(None, (documents[0], *documents[1].values())), args.max_tokens)
        print(f"note: {directory}: scoring {counted(count, 'sample')}", file=sys.stderr)
    result: dict[str, Any] = validate_sources(model, *documents, **options).report()
    if args.contexts:
        dataset = IndexedDataset(args.data)
        results = perplexity_by_context(model, dataset, args.contexts, **options)
        result["contexts"] = {str(c): r.perplexity for c, r in results.items()}
    return result


def held_out(args: argparse.Namespace) -> HeldOut:
    """Open the documents of --data, and those of the sources of --blend."""
    data, sources = None, {}
    if args.data:
        data = open_validation(args.data, args.index, buckets=args.buckets)
    if args.blend:
        sources = open_validation_of_sources(load_blend(args.blend), buckets=args.buckets)
        if not sources:
            raise ConfigError(f"{args.blend}: no source has held-out documents (valid_prefix)")
    return data, sources


def show_models(scored: dict[str, dict[str, Any]], output: Path | None) -> None:
    for name, result in scored.items():
        print(f"{name}: perplexity {result['perplexity']:.4f} on {result['label_tokens']:,} tokens")
        for capacity, loss in result["bucket_loss"].items():
            print(f"  bucket {capacity:>6}: loss {loss:.4f}")
        for source, perplexity in result.get("source_perplexity", {}).items():
            print(f"  source {source}: perplexity {perplexity:.4f}")
        for context, perplexity in result.get("contexts", {}).items():
            print(f"  context {context:>6}: perplexity {perplexity:.4f}")
    if output is not None and all("contexts" in result for result in scored.values()):
        lines = {n: {int(c): p for c, p in r["contexts"].items()} for n, r in scored.items()}
        plot_contexts(output / "perplexity_by_context.png", lines)


def compare_runs(runs: dict[str, str], output: Path | None) -> dict[str, Any]:
    curves = {name: read_curve(directory) for name, directory in runs.items()}
    standing = standings(curves)
    print("in epochs {:.4g} to {:.4g}, the last of all runs:".format(*compared(curves)))
    for name, one in sorted(standing.items(), key=lambda item: item[1].mean_rank):
        print(f"{name}: final perplexity {one.final_perplexity:.4f}, rank {one.mean_rank:.2f}")
    if output is not None:
        plot_curves(output / "training_perplexity.png", curves)
    return {name: dataclasses.asdict(one) for name, one in standing.items()}


@functools.cache
def _task_manager(path: str | None) -> Any:
    # Cached, because listing the tasks takes seconds.
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    return TaskManager(include_path=path)


def benchmarks(directory: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return task -> metric -> value of lm-evaluation-harness (extra ``lm-eval``). Raises
    ConfigError if the harness is not installed, or a task or tokenizer is unknown."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    try:
        import lm_eval  # noqa: PLC0415
        from lm_eval.models.huggingface import HFLM  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"--lm-eval needs the harness: pip install lm-eval ({error})") from error
    tasks, manager = args.lm_eval.split(","), _task_manager(args.lm_eval_path)
    unknown = sorted(set(tasks) - set(manager.all_tasks))
    if unknown:
        raise ConfigError(f"lm-evaluation-harness has no task {', '.join(unknown)}")
    register_architectures()
    model = AutoModelForCausalLM.from_pretrained(directory)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = open_tokenizer(args.tokenizer or directory, required=True)
    if tokenizer.eos_token_id is None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokenizer.vocab_size - 1)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    results = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model.to(device).eval(), tokenizer=tokenizer, batch_size=8),
        tasks=tasks,
        task_manager=manager,
        limit=args.limit,
        bootstrap_iters=0,
    )
    scores = {}
    for task, values in results["results"].items():
        scores[task] = {name: float(v) for name, v in values.items() if isinstance(v, (int, float))}
        text = ", ".join(f"{metric} {value:.4f}" for metric, value in scores[task].items())
        print(f"{directory}: {task}: {text}")
    return scores


def named(text: str) -> tuple[str, str]:
    """Split ``name=directory``; a directory alone is also the name."""
    name, equals, directory = text.partition("=")
    return (name, directory) if equals else (text, text)


def build_parser() -> argparse.ArgumentParser:
    parser = command_parser("megapack-evaluate", __doc__)
    add = parser.add_argument
    many: dict[str, Any] = {"action": "append", "type": named, "default": []}
    add("--model", **many, metavar="[NAME=]DIR", help="an exported model; may be repeated")
    add("--run", **many, metavar="[NAME=]DIR", help="a run to compare by its log; may be repeated")
    add("--output", type=Path, help="directory for evaluation.json and plots")
    add("--json", action="store_true", help="print the results as JSON")
    add = parser.add_argument_group("held-out documents").add_argument
    add("--data", help="prefix of the documents")
    blend = "manifest, to score the held-out documents of its sources"
    add("--blend", metavar="FILE", help=blend)
    add("--index", help=".samples file of the documents (default: pack them on the fly)")
    several: dict[str, Any] = {"type": int, "nargs": "+"}
    buckets = [1024, 2048, 4096, 8192, 16384]
    packed = "capacities to pack them into (default: %(default)s)"
    add("--buckets", **several, default=buckets, help=packed)
    add("--contexts", **several, default=[], help="context lengths to score, in tokens")
    add("--max-tokens", type=int, help="largest number of tokens per bucket")
    forward = "tokens of one forward (default: 16384)"
    add("--micro-batch-tokens", type=int, default=16384, help=forward)
    add("--precision", choices=["bf16", "fp32"], help="default: bf16 on CUDA, else fp32")
    add("--attention-backend", default="auto", help="as model.attention_backend")
    add = parser.add_argument_group("lm-evaluation-harness").add_argument
    add("--lm-eval", metavar="TASKS", help="tasks, separated by commas")
    add("--lm-eval-path", metavar="DIR", help="folder with YAML files of further tasks")
    add("--tokenizer", help="directory or tokenizer.json (default: that of the model)")
    add("--limit", type=int, help="documents per task")
    return parser


if __name__ == "__main__":
    sys.exit(main())
