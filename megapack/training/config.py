"""Configuration of a training run: frozen dataclasses, read from YAML by ``megapack.config``.

``PretrainConfig`` has one field per section; ``DataConfig`` is in ``megapack.data.run``.
``megapack-pretrain --config x.yaml --set a.b=v`` reads a file and overrides fields; ``--dry-run
--show-config`` prints the result. The classes check names, ranges and conflicts without torch.

    LearningRateConfig(kind="wsd", warmup_steps=2, min_ratio=0.5).at(0, num_steps=10, peak=1.0)
    # -> 0.5; steps 1 to 7: 1.0; step 8: 0.75; step 9: 0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megapack.calls import nearest
from megapack.config import check_known, check_positive, check_range, to_dict
from megapack.data.resume import ORDER_FIELDS
from megapack.data.run import DataConfig
from megapack.errors import ConfigError
from megapack.storage.address import is_remote
from megapack.training.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model to train: new (a preset or any transformers architecture), or from a checkpoint."""

    preset: str | None = None
    """Name in ``megapack.training.presets.PRESETS``."""
    pretrained: str | None = None
    """Directory (or hub name) that ``from_pretrained`` loads. A check at startup trains a small
    model of its architecture on packed rows."""
    config: str | dict[str, Any] | None = None
    """Transformers configuration to train from scratch: a config.json, a directory (or hub name)
    with one, or its keys, as in ``{model_type: qwen3, hidden_size: 512}``. Missing keys have the
    defaults of transformers, except dropouts (0) and ``vocab_size`` (that of the dataset)."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers configuration to set, as in ``num_hidden_layers: 4``.
    ``output_router_logits: true`` adds the load-balancing loss of a mixture of experts."""
    allow_missing: tuple[str, ...] = ()
    """With ``pretrained``: tensors (shell-style patterns, as in ``[lm_head.*]``) that may be
    missing from the checkpoint or the model, or differ in shape. Tensors of the model that the
    checkpoint cannot fill get random initial values."""
    tokenizer: str | None = None
    """Tokenizer of the documents (directory, tokenizer.json or .model), exported with the model;
    null takes the checkpoint's."""
    vocab_size: int | None = None
    """Vocabulary size; null takes the dataset's."""
    vocab_multiple: int = 128
    """Round the number of embedding rows up to a multiple of this, because aligned matrices are
    faster. Applies to a preset, or to a ``config`` without ``vocab_size``."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, the mean square of the logits' logsumexp over the labels of the
    loss (PaLM: 1e-4). Losses in the log do not contain it."""
    replay_routes: bool = False
    """Every token uses the experts that the column ``routes`` (named in ``data.columns``) records
    for it, with the weights of the model's own router (``megapack.attention.routes``). Validation
    uses the router's choices."""
    attention_backend: str = field(default="auto", metadata={"formerly": "attention"})
    """One of ``megapack.attention.BACKENDS``; auto takes the first that supports the model."""
    probe: bool = True
    """Probe the model on an early micro batch: seven forwards check that no document depends on
    another. The probe does not run with sequence parallelism."""

    def __post_init__(self) -> None:
        if [self.preset, self.config, self.pretrained].count(None) != 2:
            raise ConfigError(
                "model: give exactly one of preset and config (from scratch) and pretrained"
            )
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ConfigError("model: config has no model_type; give one, as in model_type: qwen3")
        if self.allow_missing and self.pretrained is None:
            raise ConfigError("model: allow_missing needs a checkpoint; set pretrained, too")
        if self.preset is not None:
            check_known("model", "preset", [self.preset], PRESETS)
        check_range("model", at_least=0, z_loss=self.z_loss)
        sizes = {"vocab_size": self.vocab_size, "vocab_multiple": self.vocab_multiple}
        check_range("model", above=0, at_most=2**31, **sizes)  # a token id is 32 bits

    @property
    def has_vocabulary(self) -> bool:
        """The model decides the vocabulary size; otherwise the dataset does."""
        keys = {} if self.config is None else self.config
        return self.pretrained is not None or isinstance(keys, str) or "vocab_size" in keys


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon with AdamW. Norms and biases have no weight decay."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon``: DeepSpeed's Muon (Jordan et al. 2024) for the matrices of decoder layers, AdamW for
    embeddings, the head, norms and biases. Needs ``engine.zero_stage`` 1 in bfloat16, or 0."""
    lr: float = 2e-4
    """Peak learning rate."""
    muon_lr: float = 0.02
    """Peak learning rate of the matrices that ``muon`` updates; follows the schedule of ``lr``. The
    singular values of an update are about 1, times sqrt(rows / columns) if rows > columns."""
    muon_momentum: float = 0.95
    """With ``muon``: decay of the running mean of the gradient, per step (Nesterov)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square, per step."""
    eps: float = 1e-8
    """Added to the root of the mean square in the denominator of an update."""
    weight_decay: float = 0.1
    """Decoupled: a step subtracts ``lr * weight_decay`` of every decayed weight."""
    decay_embeddings: bool = True
    """Apply weight decay to embedding matrices, too."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 disables clipping."""
    max_skipped: int = 10
    """Largest number of consecutive updates skipped because the gradient is not finite."""
    ema_decay: float | None = None
    """Decay per step of an exponential average of the weights, as in 0.999; null keeps none. The
    average is evaluated with the weights (``average`` in evaluation.jsonl), saved in checkpoints,
    and exported to ``run_dir/model_average``."""

    def __post_init__(self) -> None:
        rates = {"lr": self.lr, "eps": self.eps, "muon_lr": self.muon_lr}
        check_range("optimizer", above=0, at_most=1e30, **rates)  # 1e31 still fits float32
        check_range("optimizer", at_least=0, below=1, muon_momentum=self.muon_momentum)
        check_range("optimizer", above=0, below=1, ema_decay=self.ema_decay)
        others = {name: getattr(self, name) for name in ("weight_decay", "clip", "max_skipped")}
        check_range("optimizer", at_least=0, **others)
        if len(self.betas) != 2:
            raise ConfigError(f"optimizer: betas are {self.betas}; they must be two numbers")
        for beta in self.betas:
            check_range("optimizer", at_least=0, below=1, betas=beta)


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """Learning rate, a pure function of the step, so that a run resumes from one integer."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """``cosine`` and ``linear`` decay from the peak to the lowest rate at the last step; ``wsd``
    (warmup, stable, decay) keeps the peak and decays linearly at the end; ``constant`` keeps it."""
    warmup_steps: int | None = None
    """Steps of warmup; null takes ``warmup_fraction`` of the run."""
    warmup_fraction: float = 0.01
    """Fraction of the run's steps for warmup, if ``warmup_steps`` is null."""
    min_ratio: float = 0.1
    """Lowest learning rate, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """With ``wsd``: fraction of the run, at its end, for the decay."""

    def __post_init__(self) -> None:
        check_range("learning_rate", at_least=0, warmup_steps=self.warmup_steps)
        shares = {n: getattr(self, n) for n in ("warmup_fraction", "min_ratio", "decay_fraction")}
        check_range("learning_rate", at_least=0, at_most=1, **shares)

    def warmup(self, num_steps: int) -> int:
        """Return the steps of warmup, at most those of the run."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, num_steps)
        return min(round(self.warmup_fraction * num_steps), num_steps)

    def at(self, step: int, *, num_steps: int, peak: float) -> float:
        """Return the learning rate of optimizer step ``step`` (from 0) of ``num_steps``.

        Warmup rises linearly and reaches ``peak`` at its last step; step 0 already has a rate.

        Raises ValueError if the step is outside the run.
        """
        if not 0 <= step < num_steps:
            raise ValueError(f"step {step} is outside of the run's {num_steps} steps")
        decay_begin = self.warmup(num_steps)
        if step < decay_begin:
            return peak * (step + 1) / decay_begin
        lowest = self.min_ratio * peak
        if self.kind == "wsd":
            decay_steps = max(1, round(self.decay_fraction * num_steps))
            decay_begin = max(decay_begin, num_steps - decay_steps)
        if self.kind == "constant" or step < decay_begin:
            return peak
        progress = (step - decay_begin + 1) / (num_steps - decay_begin)  # 1 at the last step
        if self.kind == "cosine":
            return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
        return peak + (lowest - peak) * progress


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, which are kept, and how a run resumes."""

    every: int | None = 1000
    """Steps between checkpoints; null writes one at the end and at a signal only."""
    keep: int = 3
    """Number of newest checkpoints to keep. With ``autopilot.spikes`` the one that a rollback may
    need is kept, too."""
    keep_every: int | None = None
    """Write and keep a checkpoint every so many steps: milestones, for branches."""
    keep_steps: tuple[int, ...] = ()
    """Write and keep the checkpoints of these steps."""
    branch_from: str | None = None
    """Checkpoint of another run (the trunk) from which this run starts while its ``run_dir`` has no
    checkpoints (``--branch-from``), with the trunk's weights, optimizer state and data order. Set
    the options that differ in the branch (a decay, a mixture) in this file; the trunk stays."""
    mirror: str | None = None
    """Address (s3://bucket/folder, ...) for copies of every checkpoint, made while training
    continues. A ``run_dir`` without checkpoints is restored from it. Each run needs its own."""
    asynchronous: bool = True
    """true: training waits only until the state is copied to host memory. false: training waits
    until the state is on disk, and no extra host memory is needed."""
    resume: Literal["auto", "never"] = "auto"
    """auto resumes from the newest checkpoint of ``run_dir``; never raises if there is one."""
    allow_change: tuple[str, ...] = ()
    """Keys that may differ from those recorded in the checkpoint, as in ``[seed,
    optimizer.betas]``: keys that define the order of samples, keys of this file or of the model
    configuration (``model.rope_theta``), ``model.tokenizer``, and ``data.content`` (the bytes of
    the data). The name of a section allows all of its keys; ``run`` accepts a checkpoint without a
    record of its run."""
    fallback: bool = False
    """If the newest checkpoint is damaged, try the one before it instead of stopping."""
    verify: Literal["size", "checksum"] = "checksum"
    """How to check the checkpoint's files before loading. ``size`` compares sizes only, so it does
    not detect damage or swapped files of the same length."""
    export: bool = True
    """Write ``run_dir/model``, which ``from_pretrained`` loads, when the run ends."""

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint is due after this many steps."""
        return self.is_milestone(step) or (self.every is not None and step % self.every == 0)

    def is_milestone(self, step: int) -> bool:
        """Return True if the checkpoint of this step is never removed."""
        return step in self.keep_steps or (
            self.keep_every is not None and step % self.keep_every == 0
        )

    def __post_init__(self) -> None:
        names = ("keep", "every", "keep_every", "keep_steps")
        check_positive("checkpoint", **{name: getattr(self, name) for name in names})
        if self.mirror is not None and not is_remote(self.mirror):
            raise ConfigError(
                f"checkpoint: mirror is {self.mirror!r}; give an address, as in s3://bucket/run"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation during training, over ``data.valid_prefix``."""

    every: int | None = None
    """Steps between validations, which need held-out documents; null: validate at the end only, if
    there are held-out documents."""
    max_tokens: int | None = None
    """Largest number of tokens per bucket to evaluate; null takes all."""
    buckets: tuple[int, ...] = ()
    """Capacities for packing the validation documents; empty takes the training buckets. Validation
    losses of two runs are comparable only if their validation buckets are equal."""

    def __post_init__(self) -> None:
        check_positive("evaluation", **self.__dict__)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Output while training; ``run_dir/log.jsonl`` always has one line per step."""

    every: int = 10
    """Steps between log lines; training waits for the device only then."""
    tensorboard: bool = True
    """Write event files to ``run_dir/tensorboard``."""
    wandb_project: str | None = None
    """Project of Weights & Biases; null does not use it."""
    batches: bool = False
    """Log the samples of every micro batch of every rank (``run_dir/batches``)."""

    def __post_init__(self) -> None:
        check_positive("logging", every=self.every)


@dataclass(frozen=True, kw_only=True)
class AutopilotConfig:
    """Response to spikes of the loss or the gradients: load the last good checkpoint before the
    spike and skip the samples of its steps (``megapack.training.autopilot``)."""

    spikes: bool = False
    """true: detect spikes and roll back. false: only end the run at a NaN or infinite loss."""
    window: int = 128
    """Number of earlier values of the same bucket or source with which a new value is compared."""
    deviations: float = 8.0
    """A value this many deviations (scaled median absolute deviation) above the median is an
    outlier."""
    confirm: int = 3
    """Number of outliers that confirm a spike, if they occur within twice as many steps."""
    margin_steps: int = 1
    """Additional steps to skip on both sides of a spike."""
    max_rollbacks: int = 10
    """Largest number of rollbacks; the next spike ends the run."""

    def __post_init__(self) -> None:
        check_positive("autopilot", deviations=self.deviations, confirm=self.confirm)
        check_range("autopilot", at_least=16, window=self.window)
        counts = {"margin_steps": self.margin_steps, "max_rollbacks": self.max_rollbacks}
        check_range("autopilot", at_least=0, **counts)

    @property
    def reach(self) -> int:
        """Largest number of steps from the first skipped step to the one that confirms a spike."""
        return 2 * self.confirm - 1 + self.margin_steps


@dataclass(frozen=True, kw_only=True)
class MixingConfig:
    """Rule that changes the weights of the blend's sources during the run."""

    rule: str | None = None
    """``odm`` (online data mixing), or a Python function, as in ``package.module:function``. It
    gets a ``SourceReport``; it returns the weights by source name, and its new state (JSON)."""
    every: int = 500
    """Steps between two decisions."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the rule, as in ``smoothing: 0.9`` of odm."""

    def __post_init__(self) -> None:
        check_positive("mixing", every=self.every)
        if self.options and self.rule is None:
            raise ConfigError("mixing: options need a rule; set rule, too")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation from a teacher whose most likely tokens are columns (``megapack-teacher``).

    The loss of a label is ``(1 - alpha) * cross entropy + alpha * temperature^2 * KL(teacher ||
    student)`` over the teacher's most likely tokens and one bucket for all others
    (``megapack.training.model.loss``); that of a token without a teacher is the cross entropy. The
    log has both parts: ``loss`` and ``distillation_loss``. Validation measures the cross entropy.
    """

    alpha: float = 0.5
    """Weight of the divergence from the teacher; 1: no cross entropy."""
    temperature: float = 1.0
    """Exponent ``1 / temperature`` of the probabilities of both models before they are compared."""
    ids: str = "teacher_ids"
    """Column of token ids."""
    logits: str = "teacher_logits"
    """Column of their log-probabilities."""

    def __post_init__(self) -> None:
        check_range("distill", above=0, at_most=1, alpha=self.alpha)
        check_range("distill", above=0, at_most=1e3, temperature=self.temperature)


# Key of DeepSpeed's configuration -> key of this configuration that sets it.
DECIDED = {
    "train_batch_size": "data.tokens_per_step",
    "train_micro_batch_size_per_gpu": "data.micro_batch_tokens",
    "gradient_accumulation_steps": "data.tokens_per_step and data.micro_batch_tokens",
    "managed_gradient_accumulation": "data.tokens_per_step and data.micro_batch_tokens",
    "data_efficiency": "data.order",
    "curriculum_learning": "data.order",
    "progressive_layer_drop": "the model",
    "dataloader_drop_last": "data",
    "gradient_clipping": "optimizer.clip",
    "gradient_allreduce_op": "the loss, which is the mean over all ranks",
    "optimizer": "optimizer",
    "zero_allow_untested_optimizer": "optimizer",
    "scheduler": "learning_rate",
    "zero_optimization.stage": "engine.zero_stage",
    "fp16": "engine.precision",
    "bf16": "engine.precision",
    "bfloat16": "engine.precision",
    "torch_autocast": "engine.precision",
    "amp": "engine.precision",
    "data_types": "engine.precision",
    "activation_checkpointing": "engine.activation_checkpointing",
    "compile": "engine.compile",
    "sequence_parallel_size": "engine.sequence_parallel_size",
    "tensor_parallel": "engine.sequence_parallel_size",
    "checkpoint.load_universal": "checkpoint.resume",
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Execution by DeepSpeed: precision, ZeRO stage, memory, parallelism, timeouts."""

    precision: Literal["bf16", "fp32"] = "bf16"
    """bf16 keeps float32 master weights and accumulates gradients in float32."""
    zero_stage: Literal["auto", 0, 1, 2, 3] = "auto"
    """auto: 2 in bfloat16 and 1 in float32; these stages reduce gradients during the backward
    (``--dry-run`` prints how many bytes, and when)."""
    activation_checkpointing: bool = False
    """Recompute every layer's activations in the backward."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in page-locked host memory."""
    compile: bool = False
    """torch.compile every decoder layer: one graph per bucket, and one for validation."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that share every sample longer than ``data.micro_batch_tokens``, each with
    a slice of it (DeepSpeed-Ulysses). Shorter samples are not shared."""
    loss_chunk_tokens: int = 2048
    """Positions whose logits exist at once: chunk x vocabulary x 4 bytes of memory."""
    mlp_chunk_tokens: int | None = None
    """Tokens whose MLP activations exist at once (the backward recomputes them); null: all tokens
    of the micro batch."""
    timeout_minutes: float = 30.0
    """Timeout of collectives; the job ends with an error when it expires."""
    heartbeat_timeout_seconds: float = 300.0
    """Time without a heartbeat after which a rank counts as lost: the job ends and names it."""
    hang_timeout_seconds: float = 1800.0
    """Time without progress on any rank (a batch, a part of a checkpoint) after which the job ends
    and names the ranks that are behind."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Further DeepSpeed configuration; its keys override those that megapack generates. Keys that
    other options of this file set, and keys that DeepSpeed would not read, are errors."""

    def __post_init__(self) -> None:
        names = ["sequence_parallel_size", "loss_chunk_tokens", "mlp_chunk_tokens"]
        names += ["heartbeat_timeout_seconds", "hang_timeout_seconds"]
        check_positive("engine", **{name: getattr(self, name) for name in names})
        check_range("engine", above=0, at_most=2**24, timeout_minutes=self.timeout_minutes)
        if self.offload_activations and not self.activation_checkpointing:
            raise ConfigError(
                "engine: offload_activations is true and activation_checkpointing is false; only "
                "inputs of recomputed layers can be offloaded: set activation_checkpointing, too"
            )
        for name, reason in (
            ("offload_activations", "a compiled layer saves its input inside its own graph"),
            ("mlp_chunk_tokens", "a compiled layer cannot recompute its MLP chunk by chunk"),
        ):
            if self.compile and getattr(self, name):
                raise ConfigError(
                    f"engine: compile is true and {name} is set; {reason}: disable one of the two"
                )
        _refuse_decided(self.deepspeed)
        printed = self.deepspeed.get("steps_per_print")
        if printed is not None and not (isinstance(printed, int) and printed > 0):
            raise ConfigError(
                f"engine.deepspeed: steps_per_print is {printed!r}; it must be an integer above 0"
            )

    @property
    def stage(self) -> int:
        """ZeRO stage, after ``auto``."""
        if self.zero_stage == "auto":
            return 2 if self.precision == "bf16" else 1
        return self.zero_stage


def _refuse_decided(section: dict[str, Any], path: str = "") -> None:
    # These keys of ``engine.deepspeed`` have their own keys in the configuration.
    for key, value in section.items():
        name = f"{path}{key}"
        if name in DECIDED:
            raise ConfigError(f"engine.deepspeed: {name} is set by {DECIDED[name]}; leave it out")
        if isinstance(value, dict):
            _refuse_decided(value, f"{name}.")
        elif any(known.startswith(f"{name}.") for known in DECIDED):
            raise ConfigError(f"engine.deepspeed: {name} is {value!r}; it must be a mapping")


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Configuration of one run. ``run_dir`` contains everything that the run writes."""

    run_dir: str
    """Directory of the run: checkpoints, logs, the exported model. Created if it is missing."""
    seed: int = 0
    """Random seed of initial weights and of the order of samples."""
    num_steps: int | None = None
    """Optimizer steps; null takes ``num_epochs`` of the data."""
    num_epochs: int = 1
    """Passes over the data, if ``num_steps`` is null."""
    stop_at: int | None = None
    """Step after which the run saves a checkpoint and stops, without exporting the model, so that
    you can edit the configuration and resume. The planned number of steps, and so the learning
    rate, does not change."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learning_rate: LearningRateConfig = field(
        default_factory=LearningRateConfig, metadata={"formerly": "schedule"}
    )
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    autopilot: AutopilotConfig = field(default_factory=AutopilotConfig)
    mixing: MixingConfig = field(default_factory=MixingConfig)
    distill: DistillConfig | None = None
    """null: the loss is the cross entropy."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if not self.run_dir.strip():
            raise ConfigError(f"run: run_dir is {self.run_dir!r}; it must name a directory")
        check_range("run", at_least=0, seed=self.seed)
        lengths = {name: getattr(self, name) for name in ("num_epochs", "num_steps", "stop_at")}
        check_range("run", above=0, at_most=2**40, **lengths)
        self._check_allow_change()
        if self.optimizer.kind == "muon":
            self._check_muon()
        engine = self.engine
        if self.model.replay_routes and engine.compile and engine.activation_checkpointing:
            raise ConfigError(
                "model: replay_routes is true, and engine.compile and "
                "engine.activation_checkpointing are, too; a layer that is both compiled and "
                "recomputed cannot replay: disable one of the two"
            )
        if self.mixing.rule is not None and self.data.blend is None:
            raise ConfigError("mixing: a rule weighs the sources of a blend; give data.blend")
        if self.autopilot.spikes and self.checkpoint.every is None:
            raise ConfigError(
                "autopilot: spikes is true and checkpoint.every is null: a rollback needs "
                "checkpoints; set checkpoint.every"
            )

    def _check_allow_change(self) -> None:
        # Refuse names that no comparison uses.
        tree = to_dict(self)
        known = {*ORDER_FIELDS, *tree, "run", "data.content", "content", "tokenizer"}
        for section, keys in tree.items():
            if isinstance(keys, dict):
                known |= {*keys, *(f"{section}.{key}" for key in keys)}
        # Users choose the fields of the model, and the keys of dictionaries.
        names = [
            name
            for name in self.checkpoint.allow_change
            if name.partition(".")[0] != "model" and ".".join(name.split(".")[:2]) not in known
        ]
        if names:
            raise ConfigError(
                f"checkpoint.allow_change: unknown key {names[0]!r}{nearest(names[0], known)} Give "
                "the key that the error message at the resume names"
            )

    def _check_muon(self) -> None:
        # DeepSpeed 0.19 accepts other stages, but with them it clips Muon's updates, which are
        # already orthogonal, instead of the gradient.
        engine = self.engine
        stage, offload = engine.stage, "offload_optimizer"
        if stage != 0 and (stage, engine.precision) != (1, "bf16"):
            raise ConfigError(
                f"optimizer: kind is muon and engine.zero_stage {stage} in {engine.precision}, "
                "where DeepSpeed would clip the update and not the gradient; set engine.zero_stage "
                "to 1 with engine.precision bf16, or to 0"
            )
        if offload in engine.deepspeed.get("zero_optimization", {}):
            raise ConfigError(
                f"optimizer: kind is muon and engine.deepspeed.zero_optimization.{offload} is set, "
                "where DeepSpeed would clip the update and not the gradient; leave it out"
            )
