"""What a build would do, and what it did: as text, or as one JSON value."""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapack.storage import IndexedDataset
from megapack.tokenization.build.plan import Plan
from megapack.tokenization.build.run import BuildResult, Preview
from megapack.tokenization.build.space import free_bytes
from megapack.tokenization.corpus.split import SPLIT_NAMES
from megapack.units import count, counted, percent, short, size

__all__ = ["print_previews", "print_results"]


def print_previews(previews: Sequence[Preview], *, as_json: bool) -> None:
    """What builds would do; JSON is an object, or an array where there are several."""
    if as_json:
        _print_json([_preview_tree(preview) for preview in previews])
        return
    for preview in previews:
        _print_preview(preview)


def _preview_tree(preview: Preview) -> dict[str, Any]:
    return {
        "digest": preview.plan.digest,
        "plan": preview.plan.tree(),
        "datasets": list(preview.prefixes.values()),
        "estimate": dataclasses.asdict(preview.estimate),
        "missing_shards": preview.num_missing,
        "finished": preview.finished,
        "left_behind": list(preview.left_behind),
    }


def _print_preview(preview: Preview) -> None:
    plan = preview.plan
    print(f"plan       {plan.digest}")
    formats = collections.Counter(
        file.format + (file.compression and f".{file.compression}") for file in plan.inputs
    )
    kinds = ", ".join(f"{name} {count(number)}" for name, number in formats.most_common())
    on_disk = size(sum(file.size for file in plan.inputs))
    print(f"input      {counted(len(plan.inputs), 'file')}, {on_disk} ({kinds})")
    what = "conversations" if plan.has_labels else "text"
    print(f"documents  {what} under {plan.read.json_key!r}, {_filters(plan)}")
    _print_tokens(plan)
    for package, version in plan.libraries.items():
        if package != "megapack":
            print(f"library    {package} {version}")
    if plan.split is not None:
        shares = zip(SPLIT_NAMES, plan.split, strict=True)
        said = ", ".join(f"{name} {percent(w / sum(plan.split))}" for name, w in shares if w)
        print(f"split      {said}, by {plan.read.split_key or plan.split_by}")
    estimate = preview.estimate
    print(f"tokens     about {short(estimate.num_tokens)} ({plan.dtype})")
    finished = len(plan.shards) - preview.num_missing
    print(
        f"shards     {count(len(plan.shards))} of about {size(plan.shard_bytes)} of text, "
        f"{count(finished)} finished"
    )
    free = free_bytes(_existing(Path(next(iter(preview.prefixes.values()))).parent))
    print(
        f"disk       about {size(estimate.num_bytes)}, and as much for shards until they are "
        f"joined; {size(free)} free"
    )
    for prefix in preview.prefixes.values():
        print(f"dataset    {prefix}.bin, {prefix}.idx")
    for line in preview.left_behind:
        print(f"beside     {line}")
    if preview.finished:
        print("nothing to do: this very build is finished")


def _filters(plan: Plan) -> str:
    words = [
        f"{limit} {counted(number, 'word')}"
        for limit, number in (("at least", plan.min_words), ("at most", plan.max_words))
        if number is not None
    ]
    faults = "faults stop the build" if plan.on_error == "fail" else "faulty ones skipped"
    return ", ".join([*words, faults])


def _existing(directory: Path) -> Path:
    while not directory.exists():
        directory = directory.parent
    return directory


def print_results(done: Sequence[tuple[BuildResult, float]], *, as_json: bool) -> None:
    """What builds did, each with the seconds it took."""
    if as_json:
        _print_json([_result_tree(result, seconds) for result, seconds in done])
        return
    for result, seconds in done:
        _print_result(result, seconds)


def _result_tree(result: BuildResult, seconds: float) -> dict[str, Any]:
    return {
        "state": result.state,
        "digest": result.plan.digest,
        "datasets": {prefix: _counts(prefix) for prefix in _written(result)},
        "shards": result.num_shards,
        "kept_shards": result.num_shards_kept,
        "seconds": seconds,
        **dataclasses.asdict(result.totals),
    }


def _print_result(result: BuildResult, seconds: float) -> None:
    totals = result.totals
    for line in totals.fault_lines():
        print(f"skipped {line}", file=sys.stderr)
    _print_tokens(result.plan)
    print(
        f"documents  {count(totals.num_documents)} ({size(totals.num_text_bytes)} of text, "
        f"{count(totals.num_skipped)} skipped)"
    )
    print(f"tokens     {count(totals.num_tokens)} ({result.plan.dtype})")
    if result.state == "found":
        print("nothing to do: this very build is finished")
    else:
        kept = f" ({count(result.num_shards_kept)} kept from before)"
        rate = f"{size(int(totals.num_text_bytes / seconds))}/s"
        print(
            f"shards     {count(result.num_shards)}{kept if result.num_shards_kept else ''} in "
            f"{seconds:.1f} s, {rate}"
        )
    if result.state == "part":
        print("this part is done; when all are, join them with --finish")
    for prefix in _written(result):
        held = _counts(prefix)
        print(
            f"dataset    {prefix}.bin, {prefix}.idx: {counted(held['documents'], 'document')}, "
            f"{counted(held['tokens'], 'token')}"
        )


def _written(result: BuildResult) -> list[str]:
    return [] if result.state == "part" else list(result.prefixes.values())


def _counts(prefix: str) -> dict[str, int]:
    dataset = IndexedDataset(prefix)
    return {"documents": dataset.num_documents, "tokens": dataset.num_tokens}


def _print_tokens(plan: Plan) -> None:
    tokenizer = plan.tokenizer
    print(f"tokenizer  {tokenizer.name} ({count(tokenizer.vocab_size)} ids, {plan.backend})")
    for name, token in (("BOS", plan.bos), ("EOD", plan.eod)):
        if token is not None:
            print(f"{name}        {token.text} = {token.id}")


def _print_json(values: list[dict[str, Any]]) -> None:
    print(json.dumps(values[0] if len(values) == 1 else values, indent=1))
