"""The configuration of a training run: frozen dataclasses, read from YAML by ``megapack.config``.

Every field has one meaning, written under it. ``megapack-pretrain --config x.yaml --set a.b=v``
reads a file and overrides; ``--dry-run`` prints the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from megapack.config import check_positive, load_config
from megapack.errors import ConfigError
from megapack.packing.shard_manifest import is_shard_manifest
from megapack.training.engine_config import EngineConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "LearningRateConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PretrainConfig",
    "load_config",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained: a preset from scratch, or a checkpoint further (continual pretraining)."""

    preset: str | None = None
    """A name of ``megapack.training.model.presets.PRESETS``."""
    pretrained: str | None = None
    """A directory (or hub name) that ``from_pretrained`` loads, of any architecture that packed
    rows train right: it is tried at start."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers configuration to set, as in ``num_hidden_layers: 4``. A mixture
    of experts has its load-balancing loss with ``output_router_logits: true``."""
    allow_missing: tuple[str, ...] = ()
    """Of ``pretrained``: tensors (shell-style patterns, as in ``[lm_head.*]``) that the checkpoint
    or the model may lack, or have in another shape: in the model they begin at random."""
    tokenizer: str | None = None
    """What the documents were tokenized with (directory, tokenizer.json or .model): it goes along
    with the exported model; null takes the checkpoint's."""
    vocab_size: int | None = None
    """Tokens of the vocabulary; null takes the dataset's."""
    vocab_multiple: int = 128
    """A preset's embedding rows are rounded up to this: aligned matrices are faster."""
    attention: str = "auto"
    """A backend of ``megapack.attention.BACKENDS``, or auto: the first that can serve."""

    def __post_init__(self) -> None:
        if (self.preset is None) == (self.pretrained is None):
            raise ConfigError(
                "model: give exactly one of preset (from scratch) and pretrained (a checkpoint)"
            )
        if self.allow_missing and self.pretrained is None:
            raise ConfigError("model: allow_missing is of a checkpoint, and there is no pretrained")
        check_positive("model", vocab_multiple=self.vocab_multiple)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Documents, samples, and how many tokens make a step."""

    prefix: str | None = None
    """Training documents, a path without .bin/.idx."""
    index: str | None = None
    """Their samples, made by ``megapack-build pack``: a .samples file, or a shard manifest (many
    datasets), which names the documents, so that there is no prefix."""
    blend: str | None = None
    """A manifest of several datasets (``megapack.data.blend``), instead of prefix and index."""
    valid_prefix: str | None = None
    """Held-out documents, for the one figure of the run; null: those of the blend's sources, if
    they have any (``valid_prefix`` in the manifest), which are scored one by one in any case."""
    valid_index: str | None = None
    """Their samples; null packs them on the fly, see ``evaluation.buckets``."""
    tokens_per_step: int
    """Tokens of one optimizer step over all ranks, padding included."""
    micro_batch_tokens: int
    """Tokens of one forward of one rank: capacity x samples, the same in every bucket."""
    order: str = "proportional"
    """How buckets follow each other; a name of ``megapack.data.order.ORDERS``."""
    num_cycles: int | None = None
    """Times per epoch that a curriculum starts over; null takes the order's own number."""
    mix: Literal["step", "micro_step"] = "step"
    """One bucket per optimizer step, or one per ``micro_step_tokens``."""
    micro_step_tokens: int | None = None
    """Of ``mix: micro_step``: tokens that all ranks take from one bucket at a time."""
    row_tokens: int | None = None
    """Rows that hold whole samples, when capacities do not divide ``tokens_per_step``."""
    cost_window: int = 1
    """Draws over which samples of like attention cost are brought together; 1 is off."""
    positions: Literal["segment", "document", "sample"] = "segment"
    """Where position ids restart."""
    attention: Literal["document", "sample"] = "document"
    """What attention may see: its own document, or the whole sample (the baseline)."""
    labels: Literal["document", "sample"] = "document"
    """Whether the last token of a document predicts the next document's first (the baseline)."""
    uneven: Literal["error", "pad"] = "error"
    """When ranks do not divide the micro batches of a step: stop, or give some an empty one."""
    verify: bool = True
    """Read the .samples files once per node at start and compare their checksums."""
    check_ranks_every: int = 100
    """Steps between comparisons of what the ranks are about to train on; 0 never compares."""

    def __post_init__(self) -> None:
        check_positive(
            "data",
            tokens_per_step=self.tokens_per_step,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        sharded = self.index is not None and is_shard_manifest(self.index)
        alone = self.index is not None and (self.prefix is None) == sharded
        neither = self.prefix is None and self.index is None
        if not (neither if self.blend else alone):
            raise ConfigError(
                "data: give prefix and index (a shard manifest needs no prefix), or blend, and not "
                "both"
            )
        if self.tokens_per_step % self.micro_batch_tokens:
            raise ConfigError(
                f"data: tokens_per_step {self.tokens_per_step} is not a multiple of "
                f"micro_batch_tokens {self.micro_batch_tokens}"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW. Norms and biases are never decayed."""

    lr: float = 2e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = True
    """Whether embedding matrices are decayed like the other matrices."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 clips nothing."""
    max_skipped: int = 10
    """Updates in a row that may be skipped because the gradient is not finite."""

    def __post_init__(self) -> None:
        check_positive("optimizer", lr=self.lr, eps=self.eps)
        if self.weight_decay < 0 or self.clip < 0 or self.max_skipped < 0:
            raise ConfigError("optimizer: weight_decay, clip and max_skipped must be 0 or more")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optimizer: betas are {self.betas}; two numbers in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """The learning rate over the run; see ``megapack.training.run.learning_rate``."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int | None = None
    """Steps of warmup; null takes ``warmup_fraction`` of the run."""
    warmup_fraction: float = 0.01
    min_ratio: float = 0.1
    """The lowest learning rate, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """Of ``wsd``: the last part of the run, in which the rate falls."""

    def __post_init__(self) -> None:
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ConfigError(f"schedule: warmup_steps is {self.warmup_steps}; 0 or more")
        for name in ("warmup_fraction", "min_ratio", "decay_fraction"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(f"schedule: {name} is {value}; it must be within 0 and 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is written, how much of it is kept, and how a run begins again."""

    every: int | None = 1000
    """Steps between checkpoints; null writes one at the end (and on a signal) only."""
    keep: int = 3
    """Newest checkpoints kept; older ones are removed after a newer one is complete."""
    asynchronous: bool = True
    """Training waits for a copy in host memory only, and goes on while that is written; false
    takes no such memory, and waits."""
    resume: Literal["auto", "never"] = "auto"
    """auto continues from the newest checkpoint of ``run_dir``; never refuses to find one."""
    allow_change: tuple[str, ...] = ()
    """Fields of the data order that may differ from the checkpoint's, as in ``[seed]``."""
    fallback: bool = False
    """When the newest checkpoint is damaged: try the one before it instead of stopping."""
    verify: Literal["size", "checksum"] = "checksum"
    """How files are checked before they are loaded."""
    export: bool = True
    """Write ``run_dir/model``, which ``from_pretrained`` loads, when the run ends."""

    def __post_init__(self) -> None:
        check_positive("checkpoint", keep=self.keep)
        if self.every is not None:
            check_positive("checkpoint", every=self.every)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation during training, over ``data.valid_prefix``."""

    every: int | None = None
    """Steps between evaluations; null evaluates at the end only."""
    max_tokens: int | None = None
    """Evaluate samples up to this many tokens per bucket; null takes all."""
    buckets: tuple[int, ...] = ()
    """Capacities into which validation documents are packed; empty takes the training buckets.
    Runs that are compared need the same ones."""

    def __post_init__(self) -> None:
        if self.every is not None:
            check_positive("evaluation", every=self.every)
        if self.max_tokens is not None:
            check_positive("evaluation", max_tokens=self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written while training; ``run_dir/log.jsonl`` has one line per step in any case."""

    every: int = 10
    """Steps between log lines; the device is waited for only then."""
    tensorboard: bool = True
    wandb_project: str | None = None
    """Weights & Biases, when a project is named and wandb is installed."""
    batches: bool = False
    """Write down what every rank was fed (``run_dir/batches``): samples of every micro batch."""

    def __post_init__(self) -> None:
        check_positive("logging", every=self.every)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One run. ``run_dir`` holds everything it writes."""

    run_dir: str
    seed: int = 0
    """Decides initial weights and the order of samples."""
    num_steps: int | None = None
    """Optimizer steps; null takes ``num_epochs`` of the data."""
    num_epochs: int = 1
    stop_at: int | None = None
    """Stop when so many steps of the run are done, saved, as at its end but without the export: to
    look at it, to edit it, and to start it again. Its length, and so the learning rate, stays."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: LearningRateConfig = field(default_factory=LearningRateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        check_positive("run", num_epochs=self.num_epochs)
        if self.num_steps is not None:
            check_positive("run", num_steps=self.num_steps)
        if self.stop_at is not None:
            check_positive("run", stop_at=self.stop_at)
