"""Outputs that refactoring must not change: their hashes are in tests/golden/outputs.json.

What users get (datasets, samples, steps, batches) is made here through the command line and the
public names alone, and its bytes are hashed (first on fee8912; since then five schedules of one
source changed: stages that only changed its weight no longer restart its order; the schedules of
`bucket` keep `promote: on`, which was its default choice). A deliberate change is
written anew by

    python tests/test_outputs.py
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from peers import peer

from megapack import IndexedDataset, SampleIndex, pack
from megapack.cli.main import main

GOLDEN = Path(__file__).parent / "golden" / "outputs.json"
BUCKETS = [64, 128, 256]
BYTES = ["--tokenizer", "bytes"]
WORDS = ["the", "of", "packing", "tokens", "whole", "documents", "a", "rank", "step", "Zug"]
WORDS += ["\u6570", "\u00e9\u0301", "\U0001f600", "\n\t"]

ONE, MANY = {"buckets": 256}, {"buckets": BUCKETS}
STRATEGIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["pad", "concat", "next_fit", "length_sorted", "seamless"], ONE),
    **dict.fromkeys(["best_fit_decreasing", "first_fit_decreasing"], ONE),
    **dict.fromkeys(["decompose", "bucket_llm", "bucket_v0", "bucket_naive"], MANY),
    "bucket": {**MANY, "promote": "on"},
    "concat_atoms": {"strategy": "concat", **ONE, "atom_size": 64},
    "concat_shuffled": {"strategy": "concat", **ONE, "shuffle": True},
    "bucket_aligned": {"strategy": "bucket", **MANY, "promote": "on", "alignment": 8},
    "bucket_capped": {"strategy": "bucket", **MANY, "promote": "on", "max_segments": 4},
    "bucket_default": {"strategy": "bucket", **MANY},
    "bucket_lookahead": {"strategy": "bucket", **MANY, "promote": "lookahead"},
}


def _digest(*parts: Any) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        data = part if isinstance(part, bytes) else np.ascontiguousarray(part)
        if isinstance(data, np.ndarray):
            digest.update(f"{data.dtype.str}{data.shape}".encode())
            data = data.tobytes()
        digest.update(data)
    return digest.hexdigest()


def _texts(seed: int, count: int) -> list[str]:
    chance = random.Random(seed)
    return [
        " ".join(chance.choices(WORDS, k=int(chance.paretovariate(0.9) * 6) % 700 + 1))
        for _ in range(count)
    ]


def _pair(prefix: Path) -> str:
    return _digest(Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes())


def _arrays(index: SampleIndex) -> str:
    names = ("bucket_capacity", "bucket_sample_offsets", "sample_segment_offsets")
    arrays = [getattr(index, name) for name in names]
    segments = ("segment_document", "segment_begin", "segment_length")
    return _digest(*arrays, *(getattr(index, name) for name in segments))


def _datasets(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield hashes of datasets that tokenize and merge write."""
    for number, count in enumerate((2500, 300, 7)):
        texts = enumerate(_texts(number, count))
        lines = [json.dumps({"text": text, "id": i}) for i, text in texts]
        (folder / f"{number}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    runs = {
        "all": ["0.jsonl", "1.jsonl", "2.jsonl", "--workers", "2", "--append-eod"],
        "split": ["0.jsonl", "--split", "90,8,2", "--workers", "1"],
        "none": ["2.jsonl", "--workers", "1"],
    }
    for name, (*arguments,) in runs.items():
        out = folder / name
        files = [str(folder / a) if a.endswith(".jsonl") else a for a in arguments]
        assert main(["tokenize", "--input", *files, *BYTES, "--output-prefix", str(out)]) == 0
        for prefix in sorted(folder.glob(f"{name}*.idx")):
            yield f"tokenize/{prefix.stem}", _pair(prefix.with_suffix(""))
    merged = folder / "merged"
    parts = [str(folder / "none"), str(folder / "all")]
    mixed = "--allow-mixed-tokenizers"  # "none" was built without --append-eod
    assert main(["merge", *parts, mixed, "--output-prefix", str(merged)]) == 0
    yield "merge", _pair(merged)


def _packed(prefix: Path) -> Iterator[tuple[str, str, SampleIndex]]:
    lengths = IndexedDataset(prefix).document_lengths
    for name, options in STRATEGIES.items():
        given = {"strategy": name, "seed": 3, **options}
        strategy = given.pop("strategy")
        index = pack(lengths, strategy, **given)
        yield f"pack/{name}", _arrays(index), index


def _programs(samples: list[SampleIndex]) -> Iterator[tuple[str, str]]:
    """Yield hashes of 50 schedules (orders, mixes, blends, stages) over 40 steps."""
    from megapack.data import Schedule, Stage  # noqa: PLC0415

    chance = random.Random(7)
    for number in range(50):
        count = chance.randint(1, len(samples))
        names = [f"s{i}" for i in range(count)]
        mixed = chance.random() < 0.4
        stages = []
        for begin in sorted(chance.sample(range(1, 36), chance.randint(0, 3))):
            change: dict[str, Any] = {"tokens_per_step": 512 * chance.randint(1, 4)}
            if chance.random() < 0.6:
                change["weights"] = {name: chance.randint(1, 5) / 5 for name in names}
            if chance.random() < 0.3:
                change["skip_steps"] = chance.randint(1, 4)
            stages.append(Stage(from_step=begin, **change))
        schedule = Schedule(
            samples[:count],
            names=names,
            weights=[chance.choice([0.1, 1.0, 3.0]) for _ in names],
            tokens_per_step=2048,
            seed=chance.randrange(1 << 40),
            order=chance.choice(["proportional", "uniform", "grow-p2", "shrink-p100"]),
            mix="micro_step" if mixed else "step",
            micro_step_tokens=512 if mixed else None,
            stages=stages,
        )
        steps = [schedule.step(step) for step in range(40)]
        ids = [draw.sample_ids for step in steps for draw in step.draws]
        yield f"schedule/{number}", _digest(*ids)


def _batches(prefix: Path, index: Path) -> Iterator[tuple[str, str]]:
    """Yield hashes of all arrays of the micro batches of a rank, per kind of boundaries."""
    import torch  # noqa: PLC0415

    from megapack.data import BucketBatchSampler, PackedDataset, Schedule  # noqa: PLC0415

    ways = [
        {"attention": attention, "label_boundary": boundary, "positions": positions}
        for attention in ("document", "sample")
        for boundary in ("document", "sample")
        for positions in ("segment", "document", "sample")
    ]
    for way in ways:
        data = PackedDataset(prefix, index, **way)
        schedule = Schedule(data, tokens_per_step=2048, seed=5)
        rank = {"data_parallel_rank": 1, "data_parallel_size": 2}
        sampler = BucketBatchSampler(schedule, **rank, micro_batch_tokens=512, num_steps=8)
        parts: list[Any] = []
        for ids in sampler:
            batch = data.micro_batch(ids)
            for name in sorted(batch.keys() - {"dataset_ids"}):
                value = batch[name]
                if isinstance(value, torch.Tensor):
                    parts += [name.encode(), value.numpy()]
        assert len(parts) > 50
        yield "batches/" + "/".join(way.values()), _digest(*parts)


def outputs(folder: Path) -> dict[str, str]:
    """Return name of an output -> hash of its bytes."""
    result = dict(_datasets(folder))
    prefix = folder / "all"
    indices = {}
    for name, digest, index in _packed(prefix):
        result[name], indices[name] = digest, index
    names = ("pack/bucket", "pack/decompose", "pack/bucket_llm", "pack/concat")
    result |= dict(_programs([indices[name] for name in names]))
    indices["pack/bucket"].save(folder / "all.samples", source=IndexedDataset(prefix))
    result |= dict(_batches(prefix, folder / "all.samples"))
    return result


def test_outputs_equal_the_golden_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer("torch")
    found = outputs(tmp_path)
    capsys.readouterr()
    kept = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(kept) > 75
    assert {name for name in found if found[name] != kept.get(name)} == set()
    assert found.keys() == kept.keys()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(outputs(Path(folder)), indent=1)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
