"""One rank: validation with shared and with whole samples, saved to a file.

argv: config, output. Started by test_sequence_parallel.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from megapack.config import load_config
from megapack.training.command import set_rank_environment
from megapack.training.config import PretrainConfig
from megapack.training.engine.deepspeed_config import zero_3_configuration
from megapack.training.engine.engine import start_engine
from megapack.training.engine.inputs import Inputs, open_validation
from megapack.training.engine.world import connect_ranks
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import open_model
from megapack.training.validation import validate_sources

SOURCES = {"short": [16, 32], "odd": [48, 133]}  # 133 is not a multiple of the group size


def main() -> None:
    config = load_config(PretrainConfig, sys.argv[1])
    shared = config.engine.sequence_parallel_size
    set_rank_environment()
    with connect_ranks(timeout_minutes=20, sequence_parallel_size=shared) as here:
        inputs = Inputs(config)
        model, _ = open_model(
            replace(config.model, overrides={"initializer_range": 0.2}),
            config.engine,
            model_configuration(config.model, inputs.vocab_size),
            device=here.device,
            seed=config.seed,
            zero_3=zero_3_configuration(config, here.size),
            sequence_group=here.sequence_group,
        )
        engine = start_engine(model, config, here)
        forwards: list[tuple[int, int]] = []  # tokens of this rank, ranks of the micro batch

        def note(_: Any, __: Any, given: dict[str, Any]) -> None:
            forwards.append((given["tokens"].shape[1], given["sequence_parallel_size"]))

        model.register_forward_pre_hook(note, with_kwargs=True)
        prefix = str(config.data.valid_prefix)
        sources = {
            name: open_validation(prefix, None, buckets=buckets)
            for name, buckets in SOURCES.items()
        }
        found = {}
        for size in (1, shared):
            for max_tokens in (None, 128):
                result = validate_sources(
                    engine,
                    inputs.valid,
                    sources,
                    world=here,
                    config=replace(config.engine, sequence_parallel_size=size),
                    micro_batch_tokens=config.data.micro_batch_tokens,
                    max_tokens=max_tokens,
                )
                seen = here.gather(list(forwards))
                forwards.clear()
                found[size > 1, max_tokens] = {
                    name: {"losses": part.loss_sums, "labels": part.label_tokens}
                    for name, part in {"all": result, **result.sources}.items()
                } | {"forwards": seen}
        if here.is_first:
            torch.save(found, sys.argv[2])


main()
