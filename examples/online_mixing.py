"""Online mixing: train for a while, look at the loss of every source, give the sources new weights.

    python examples/online_mixing.py config.yaml --every 500
    python examples/online_mixing.py config.yaml --every 500 --command \
        "torchrun --nproc-per-node 8 -m megapack.training.pretrain"

The rule is that of ADO (Jiang et al. 2024, "Adaptive Data Optimization", arXiv 2410.11820), without
its averaging between single steps: a law e + b n^-a is fitted to the loss of every source over its
label tokens n, and a source is preferred by how fast the law says its loss falls per token, its
share so far (credit) and its prior weight. Nothing of it is inside the trainer: it reads
``source_loss`` of the run's log and appends a stage to the manifest, which the run takes up when it
resumes. So every mix that was ever used stands in the manifest, and the run can be repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megapack.data import load_blend
from megapack.storage.files import atomic_write
from megapack.training.command import read_config
from megapack.training.engine.directory import read_jsonl

CREDIT, FLOOR = 0.5, 0.01  # power of the share so far; the least share of a source


def fit(tokens: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """(e, b, a) of the law e + b n^-a: for every e the line in logarithms, of these the best."""
    laws = []
    for e in np.linspace(0, 0.99, 100) * losses.min():
        slope, height = np.polyfit(np.log(tokens), np.log(losses - e), 1)
        error = np.square(np.log(e + np.exp(height) * tokens**slope) - np.log(losses)).sum()
        laws.append((error, e, np.exp(height), max(0.0, -slope)))
    return min(laws)[1:]


def new_weights(lines: Sequence[Mapping[str, Any]], prior: Mapping[str, float]) -> dict[str, float]:
    """Weights of the next stage from the steps so far; a source hardly seen keeps its prior."""
    seen = dict.fromkeys(prior, 0)
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in prior}
    for line in lines:
        for name, loss in line["source_loss"].items():
            seen[name] += line["source_label_tokens"][name]
            curves[name].append((seen[name], loss))
    shares = {name: weight / sum(prior.values()) for name, weight in prior.items()}
    preferred = {}
    for name, curve in curves.items():
        if len(curve) >= 3:
            tokens, losses = np.array(curve).T
            _, b, a = fit(tokens, losses)
            speed = a * b * tokens[-1] ** (-a - 1)  # minus the law's derivative
            preferred[name] = shares[name] * (seen[name] / sum(seen.values())) ** CREDIT * speed
    to_give = sum(shares[name] for name in preferred)
    for name, preference in preferred.items():
        shares[name] = max(FLOOR, to_give * preference / max(sum(preferred.values()), 1e-300))
    total = float(sum(shares.values()))
    return {name: round(float(share) / total, 6) for name, share in shares.items()}


def run(command: list[str]) -> int:
    """Its exit code."""
    return subprocess.run(command, check=False).returncode


def main(argv: Sequence[str] | None = None, run: Callable[[list[str]], int] = run) -> int:
    """Train in parts, and edit the manifest between them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="of megapack-pretrain, with data.blend and num_steps")
    parser.add_argument("--every", type=int, required=True, help="steps between two mixes")
    parser.add_argument("--command", default=f"{sys.executable} -m megapack.training.pretrain")
    args = parser.parse_args(argv)
    config = read_config(args.config)
    if config.data.blend is None or config.num_steps is None:
        parser.error(f"{args.config} needs data.blend (sources to mix) and num_steps")
    manifest, log = Path(config.data.blend), Path(config.run_dir) / "log.jsonl"
    sources = load_blend(manifest).sources
    prior = {source.name or source.prefix: source.weight or 1.0 for source in sources}
    train = [*shlex.split(args.command), "--config", args.config]

    for done in range(args.every, config.num_steps + args.every, args.every):
        code = run([*train, "--set", f"stop_at={done}"])
        if code or done >= config.num_steps:
            return code
        tree = yaml.safe_load(manifest.read_text())
        stages = tree.setdefault("stages", [])
        if all(stage.get("from_step", 0) < done for stage in stages):  # else it was edited before
            stages.append({"from_step": done, "weights": new_weights(list(read_jsonl(log)), prior)})
            with atomic_write(manifest, "w") as file:
                yaml.safe_dump(tree, file, sort_keys=False)
            print(f"from step {done} on: {json.dumps(stages[-1]['weights'])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
