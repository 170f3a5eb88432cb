"""DeepSpeed's configuration, its check, and how each ZeRO stage reduces gradients.

In DeepSpeed 0.19, whether stages 1 and 2 overlap the reduction of gradients with the backward pass
depends on the precision. In bfloat16, stage 1 (``BF16_Optimizer``) does one all-reduce after the
last backward pass of a step, without overlap; stage 2 reduces in every micro step, bucket by
bucket, during the backward pass. In float32, stage 1 reduces during the last backward pass.

``deepspeed_configuration`` merges ``engine.deepspeed`` into megapack's configuration,
``check_deepspeed`` lets the installed DeepSpeed read the result, ``describe_reduction`` explains:

    ZeRO: stage 2 (auto); 4.62 GiB of gradients (float32) are reduced in each of 4 micro steps,
    during the backward
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megapack.calls import nearest
from megapack.config import check_known
from megapack.errors import ConfigError
from megapack.training.config import DECIDED, EngineConfig, PretrainConfig
from megapack.units import size


def deepspeed_configuration(config: PretrainConfig, world_size: int) -> dict[str, Any]:
    """Return the configuration for ``deepspeed.initialize``, including ``engine.deepspeed``."""
    engine = config.engine
    micro_steps = max(
        1, config.data.tokens_per_step // (config.data.micro_batch_tokens * world_size)
    )
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # one stream of micro_batch_tokens
        "gradient_accumulation_steps": micro_steps,
        # Without ZeRO, DeepSpeed clips but loses the norm: our optimizer clips (clip_and_skip).
        "gradient_clipping": config.optimizer.clip if engine.stage else 0.0,
        "steps_per_print": 10**9,  # the monitor prints
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": engine.stage,
            "overlap_comm": torch.cuda.is_available() and engine.stage > 0,
            "contiguous_gradients": True,
        },
        **_precision(engine),
    }
    if engine.precision == "bf16" and engine.stage >= 2:
        ours["communication_data_type"] = "fp32"  # as in stages 0 and 1
    return _merge(ours, engine.deepspeed)


def zero_3_configuration(config: PretrainConfig, world_size: int) -> dict[str, Any] | None:
    """Return the configuration with which ``open_model`` divides a model; None without ZeRO-3."""
    return deepspeed_configuration(config, world_size) if config.engine.stage == 3 else None


def _precision(engine: EngineConfig) -> dict[str, Any]:
    if engine.precision == "fp32":
        return {}
    if engine.stage == 0:
        # Without ZeRO, DeepSpeed cannot accumulate bfloat16 gradients in float32. Autocast with
        # float32 parameters can, and it also computes in bfloat16.
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _merge(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    result = dict(ours)
    for key, value in theirs.items():
        our_value = ours.get(key)
        nested = isinstance(our_value, dict) and isinstance(value, dict)
        result[key] = _merge(our_value or {}, value) if nested else value
    return result


class _RecordedReads(dict[str, Any]):
    """Mapping that records which of its keys were read, also in nested mappings."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(
            {k: _RecordedReads(v) if isinstance(v, dict) else v for k, v in values.items()}
        )
        self.reads: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.reads.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.reads.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.reads.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.reads |= super().keys()  # code that iterates checks all keys itself
        return super().__iter__()

    def check(self, where: str) -> None:
        """Check that all keys were read. Raises ConfigError, which names the nearest known key."""
        for key, value in self.items():
            known = self.reads if key in self.reads else self.reads - DECIDED.keys()
            check_known(where, "key", [key], known)
            # Pydantic models accept a mapping without reading its keys here, and check it.
            if isinstance(value, _RecordedReads) and value.reads:
                value.check(f"{where}: {key}")


def check_deepspeed(config: PretrainConfig) -> None:
    """Let DeepSpeed read its configuration, before ranks connect. Raises ConfigError if it does not
    know a key (the error names the nearest one) or refuses a value."""
    if not config.engine.deepspeed:
        return
    import deepspeed.runtime.config as deepspeed_config  # noqa: PLC0415
    from pydantic import ValidationError  # noqa: PLC0415

    section = _RecordedReads(deepspeed_configuration(config, 1))
    where = "engine.deepspeed"
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        deepspeed_config.DeepSpeedConfig(section)
    except ValidationError as error:
        first = error.errors()[0]
        *parents, key = (str(part) for part in first["loc"])
        known = _fields_of(error.title, parents)
        near = nearest(key, known) if first["type"] == "extra_forbidden" else ""
        place = ".".join([error.title, *parents])
        raise ConfigError(f"{where}: {key} of {place}: {first['msg']}{near}") from error
    except Exception as error:  # assertions, ValueErrors, errors of DeepSpeed
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    section.check(where)


def _fields_of(title: str, parents: list[str]) -> list[str]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel  # noqa: PLC0415

    models = {model.__name__: model for model in DeepSpeedConfigModel.__subclasses__()}
    model: Any = models.get(title)
    for parent in parents:
        annotation = str(model.model_fields[parent].annotation) if model is not None else ""
        model = next((one for name, one in models.items() if name in annotation), None)
    return [] if model is None else list(model.model_fields)


def describe_reduction(
    engine: EngineConfig, num_parameters: int, ranks: int, micro_steps: int
) -> str:
    """Return a line about the stage: how many bytes are reduced, and when."""
    chosen = f"ZeRO: stage {engine.stage}" + (" (auto)" if engine.zero_stage == "auto" else "")
    if ranks == 1:
        # Stages 0 and 1 (bfloat16) copy gradients to reduce them; other modes keep a buffer.
        is_kept = engine.stage > 1 or (engine.stage == 1 and engine.precision == "fp32")
        kept = ", but DeepSpeed allocates its reduce buckets" if is_kept else ""
        return f"{chosen}; one rank, nothing to reduce{kept}"
    gradients = f"{size(num_parameters * 4)} of gradients (float32)"
    every = f"{gradients} are reduced in each of {micro_steps} micro steps"
    once = f"{gradients} are reduced once per step"
    if engine.stage == 3:
        return f"{chosen}; {every}, during the backward, and parameters are gathered twice"
    if engine.stage == 2:
        return f"{chosen}; {every}, during the backward"
    if engine.precision == "fp32" and engine.stage:
        return f"{chosen}; {once}, during the last backward"
    late = f"{chosen}; {once}, after the last backward, without overlap"
    if engine.stage == 0:
        return late
    return f"{late} (stage 2 reduces in each of {micro_steps} micro steps, during the backward)"
