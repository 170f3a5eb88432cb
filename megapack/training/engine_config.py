"""How DeepSpeed runs a model: section ``engine`` of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megapack.config import check_positive
from megapack.errors import ConfigError

__all__ = ["DECIDED", "EngineConfig"]


# Key of DeepSpeed's configuration -> what decides it here.
DECIDED = {
    "train_batch_size": "data.tokens_per_step",
    "train_micro_batch_size_per_gpu": "data.micro_batch_tokens",
    "gradient_accumulation_steps": "data.tokens_per_step and data.micro_batch_tokens",
    "managed_gradient_accumulation": "data.tokens_per_step and data.micro_batch_tokens",
    "data_efficiency": "data.order",
    "dataloader_drop_last": "data",
    "gradient_clipping": "optimizer.clip",
    "gradient_allreduce_op": "the loss, which is the mean over all ranks",
    "optimizer": "optimizer",
    "zero_allow_untested_optimizer": "optimizer",
    "scheduler": "schedule",
    "zero_optimization.stage": "engine.zero_stage",
    "fp16": "engine.precision",
    "bf16": "engine.precision",
    "bfloat16": "engine.precision",
    "torch_autocast": "engine.precision",
    "data_types": "engine.precision",
    "activation_checkpointing": "engine.activation_checkpointing",
    "compile": "engine.compile",
    "sequence_parallel_size": "engine.sequence_parallel_size",
    "tensor_parallel": "engine.sequence_parallel_size",
    "checkpoint.load_universal": "checkpoint.resume",
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How DeepSpeed runs it."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps float32 master weights, gradients accumulated in float32."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """auto: 2 in bfloat16 and 1 in float32, of these two the one that reduces gradients while the
    backward goes on (``--dry-run`` says how much of them, and when)."""
    activation_checkpointing: bool = False
    """Recompute every layer's activations in the backward pass."""
    offload_activations: bool = False
    """What they are recomputed from, every layer's input, waits in page-locked host memory."""
    compile: bool = False
    """torch.compile every decoder layer: one graph per bucket, and one more that validates."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that share every sample longer than ``data.micro_batch_tokens``, each a
    slice of it (DeepSpeed-Ulysses). Shorter samples are not shared."""
    loss_chunk_tokens: int = 2048
    """Positions whose logits exist at once: chunk x vocabulary x 4 bytes of memory."""
    mlp_chunk_tokens: int | None = None
    """Tokens whose MLP activations exist at once, computed again in the backward; null keeps those
    of the whole micro batch."""
    timeout_minutes: float = 30.0
    """How long a collective waits for the other ranks before the job ends with an error."""
    silence_seconds: float = 300.0
    """How long a rank may show no sign of life before the job ends and names it."""
    stall_seconds: float = 1800.0
    """How long no rank may get on (a batch, a part of a checkpoint) before the job ends and names
    those that are behind."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Any further DeepSpeed configuration; merged over ours, key by key. What another key of this
    file decides is refused here, and so is what DeepSpeed would not read."""

    def __post_init__(self) -> None:
        check_positive(
            "engine",
            sequence_parallel_size=self.sequence_parallel_size,
            loss_chunk_tokens=self.loss_chunk_tokens,
            mlp_chunk_tokens=self.mlp_chunk_tokens,
            timeout_minutes=self.timeout_minutes,
            silence_seconds=self.silence_seconds,
            stall_seconds=self.stall_seconds,
        )
        if self.offload_activations:
            self._check_offload()
        if self.mlp_chunk_tokens is not None and self.compile:
            raise ConfigError(
                "engine: compile is true and mlp_chunk_tokens is set; a compiled layer cannot "
                "compute its MLP again chunk by chunk: set one of them"
            )
        _refuse_decided(self.deepspeed)

    def _check_offload(self) -> None:
        if not self.activation_checkpointing:
            raise ConfigError(
                "engine: offload_activations is true and activation_checkpointing is false; only "
                "the inputs of layers that are computed again go to the host: set "
                "activation_checkpointing to true, too"
            )
        if self.compile:
            raise ConfigError(
                "engine: compile is true and offload_activations is set; a compiled layer saves "
                "its input inside its own graph: set one of them"
            )

    @property
    def stage(self) -> int:
        """The ZeRO stage, whoever chose it."""
        if self.zero_stage == "auto":
            return 2 if self.precision == "bf16" else 1
        return self.zero_stage


def _refuse_decided(section: dict[str, Any], path: str = "") -> None:
    """Refuse keys of ``engine.deepspeed`` that the configuration decides elsewhere."""
    for key, value in section.items():
        name = f"{path}{key}"
        if name in DECIDED:
            raise ConfigError(
                f"engine.deepspeed: {name} is decided by {DECIDED[name]}; leave it out here"
            )
        if isinstance(value, dict):
            _refuse_decided(value, f"{name}.")
