"""What DeepSpeed is told, what of it a user may add, and what its ZeRO stage means for gradients.

Of the stages that leave parameters whole, one reduces gradients while the backward goes on, and it
depends on the precision which (DeepSpeed 0.19). In bfloat16, stage 1 is DeepSpeed's
``BF16_Optimizer``: one all-reduce after the last backward of a step, and nothing overlaps it. Stage
2 reduces after every micro step, bucket by bucket, behind the backward of what comes before. In
float32 stage 1 does that, too, and only in the last micro step.

``deepspeed_configuration`` merges ``engine.deepspeed`` over ours. What other keys of the
configuration decide is refused by ``EngineConfig`` itself; in ``check_deepspeed`` DeepSpeed's own
configuration reads the result, and a key that it does not ask for is refused. So what is known is
what the installed DeepSpeed knows. ``describe_reduction`` says for people what the stage means:

    ZeRO: stage 2 (auto); 4.62 GiB of gradients (float32) are reduced in each of 4 micro steps,
    during the backward
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megapack.config import check_known, nearest
from megapack.errors import ConfigError
from megapack.training.config import DECIDED, EngineConfig, PretrainConfig


def deepspeed_configuration(config: PretrainConfig, world_size: int) -> dict[str, Any]:
    """Configuration for ``deepspeed.initialize``; ``engine.deepspeed`` is merged over it.

    Args:
        world_size: data parallel size.
    """
    engine = config.engine
    micro_steps = max(
        1, config.data.tokens_per_step // (config.data.micro_batch_tokens * world_size)
    )
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # one stream of micro_batch_tokens
        "gradient_accumulation_steps": micro_steps,
        # Without ZeRO DeepSpeed clips, and forgets the norm: our optimizer does it (clip_and_skip).
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
        ours["communication_data_type"] = "fp32"  # as stage 1 and 0 have it
    return _merge(ours, engine.deepspeed)


def zero_3_configuration(config: PretrainConfig, world_size: int) -> dict[str, Any] | None:
    """Configuration with which ``open_model`` divides a model; None: the model stays whole."""
    return deepspeed_configuration(config, world_size) if config.engine.stage == 3 else None


def _precision(engine: EngineConfig) -> dict[str, Any]:
    if engine.precision == "fp32":
        return {}
    if engine.stage == 0:
        # DeepSpeed has no float32 accumulation of bfloat16 gradients without ZeRO; autocast over
        # float32 parameters has, and computes in bfloat16 as well.
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def _merge(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    result = dict(ours)
    for key, value in theirs.items():
        mine = ours.get(key)
        nested = isinstance(mine, dict) and isinstance(value, dict)
        result[key] = _merge(mine or {}, value) if nested else value
    return result


class _Read(dict[str, Any]):
    """A mapping that remembers which keys were asked for, in itself and in those inside."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: _Read(v) if isinstance(v, dict) else v for k, v in values.items()})
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self.asked |= super().keys()  # somebody takes all there is, and refuses what is unknown
        return super().__iter__()

    def check(self, where: str) -> None:
        """Refuse keys that were not asked for. Raises ConfigError with the nearest that was."""
        for key, value in self.items():
            known = self.asked if key in self.asked else self.asked - DECIDED.keys()
            check_known(where, "key", [key], known)
            # One of which no key was asked for went whole into a model, which refuses by itself.
            if isinstance(value, _Read) and value.asked:
                value.check(f"{where}: {key}")


def check_deepspeed(config: PretrainConfig) -> None:
    """Have DeepSpeed read its configuration, before there are processes.

    Raises:
        ConfigError: a key that it does not know, with the nearest one, or a value that it refuses.
    """
    if not config.engine.deepspeed:
        return
    import deepspeed.runtime.config as theirs  # noqa: PLC0415
    from pydantic import ValidationError  # noqa: PLC0415

    section = _Read(deepspeed_configuration(config, 1))
    where = "engine.deepspeed"
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        theirs.DeepSpeedConfig(section)
    except ValidationError as error:
        first = error.errors()[0]
        *parents, key = (str(part) for part in first["loc"])
        known = _fields_of(error.title, parents)
        near = nearest(key, known) if first["type"] == "extra_forbidden" else ""
        place = ".".join([error.title, *parents])
        raise ConfigError(f"{where}: {key} of {place}: {first['msg']}{near}") from error
    except Exception as error:  # assertions, ValueErrors, its own; whatever it says is the reason
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    section.check(where)


def _fields_of(title: str, parents: list[str]) -> list[str]:
    """Names of fields of DeepSpeed's model of that name, or of the one inside it."""
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
    """A line for people: the stage, why, and when how much is reduced.

    Args:
        num_parameters: of the model.
        ranks: data parallel size.
        micro_steps: of an optimizer step.
    """
    chosen = f"ZeRO: stage {engine.stage}" + (" (auto)" if engine.zero_stage == "auto" else "")
    if ranks == 1:
        return f"{chosen}; one rank, nothing to reduce"
    size = f"{num_parameters * 4 / 2**30:.2f} GiB of gradients (float32)"
    every = f"{size} are reduced in each of {micro_steps} micro steps"
    once = f"{size} are reduced once per step"
    if engine.stage == 0:
        return f"{chosen}; {once}, after the last backward, which does not hide it"
    if engine.stage == 3:
        return f"{chosen}; {every}, during the backward, and parameters are gathered twice"
    if engine.stage == 2:
        return f"{chosen}; {every}, during the backward"
    if engine.precision == "fp32":
        return f"{chosen}; {once}, during the last backward"
    return (
        f"{chosen}; {once}, after the last backward, which does not hide it (stage 2 reduces in "
        f"each of {micro_steps} micro steps, during the backward)"
    )
