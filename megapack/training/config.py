"""The configuration of a training run: frozen dataclasses, read from YAML by ``megapack.config``.

``PretrainConfig`` is the whole, and each of its sections a class of its own: ``ModelConfig``,
``DataConfig`` (``megapack.data.run``), ``OptimizerConfig``, ``LearningRateConfig``,
``CheckpointConfig``, ``EvaluationConfig``, ``LoggingConfig``, ``AutopilotConfig``,
``MixingConfig``, ``EngineConfig``. Every field has one meaning, written under it.
``megapack-pretrain --config x.yaml --set a.b=v`` reads a file and
overrides; ``--dry-run --show-config`` prints the result. Whatever a configuration says by itself is
checked here, without torch: the names, the range of every number, what excludes what.

    LearningRateConfig(kind="wsd", warmup_steps=2, min_ratio=0.5).at(0, num_steps=10, peak=1.0)
    # -> 0.5; steps 1 to 7: 1.0; step 8: 0.75; step 9: 0.5
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from megapack.config import check_known, check_positive, check_range, nearest, to_dict
from megapack.data.resume import ORDER_FIELDS
from megapack.data.run import DataConfig
from megapack.errors import ConfigError
from megapack.storage.address import is_remote
from megapack.training.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained: a preset or any architecture from scratch, or a checkpoint further
    (continual pretraining)."""

    preset: str | None = None
    """A name of ``megapack.training.presets.PRESETS``."""
    pretrained: str | None = None
    """A directory (or hub name) that ``from_pretrained`` loads, of any architecture that packed
    rows train right: it is tried at start."""
    config: str | dict[str, Any] | None = None
    """A transformers configuration to train from scratch: a config.json, a directory (or hub name)
    with one, or its keys, as in ``{model_type: qwen3, hidden_size: 512}``. Keys that are left out
    are those of transformers, dropouts 0, and ``vocab_size`` the dataset's."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers configuration to set, as in ``num_hidden_layers: 4``. A mixture
    of experts has its load-balancing loss with ``output_router_logits: true``."""
    allow_missing: tuple[str, ...] = ()
    """With ``pretrained``: tensors (shell-style patterns, as in ``[lm_head.*]``) that may be
    missing from the checkpoint or the model, or differ in shape; those of the model begin at
    random."""
    tokenizer: str | None = None
    """The documents' tokenizer (directory, tokenizer.json or .model): it goes along
    with the exported model; null takes the checkpoint's."""
    vocab_size: int | None = None
    """Tokens of the vocabulary; null takes the dataset's."""
    vocab_multiple: int = 128
    """Embedding rows of a preset, and of a ``config`` without ``vocab_size``, are rounded up to
    this: aligned matrices are faster."""
    z_loss: float = 0.0
    """This times the mean square of the logits' logsumexp, over the labels that the loss is a mean
    of, is added to what is trained (PaLM took 1e-4); losses in the log are without it."""
    attention_backend: str = field(default="auto", metadata={"formerly": "attention"})
    """One of ``megapack.attention.BACKENDS``, or auto: the first that can serve."""
    probe: bool = True
    """Try the model itself on an early micro batch: seven forwards, in which no document may notice
    that another one changed. Not where ranks share micro batches (sequence parallelism)."""

    def __post_init__(self) -> None:
        if [self.preset, self.config, self.pretrained].count(None) != 2:
            raise ConfigError(
                "model: give exactly one of preset and config (from scratch) and pretrained (a "
                "checkpoint)"
            )
        if isinstance(self.config, dict) and "model_type" not in self.config:
            raise ConfigError("model: config has no model_type; give one, as in model_type: qwen3")
        if self.allow_missing and self.pretrained is None:
            raise ConfigError("model: allow_missing is of a checkpoint, and there is no pretrained")
        if self.preset is not None:
            check_known("model", "preset", [self.preset], PRESETS)
        check_range("model", at_least=0, z_loss=self.z_loss)
        sizes = {"vocab_size": self.vocab_size, "vocab_multiple": self.vocab_multiple}
        check_range("model", above=0, at_most=2**31, **sizes)  # a token id is 32 bits

    @property
    def has_vocabulary(self) -> bool:
        """Whether the model says how many tokens there are; else the dataset does."""
        keys = {} if self.config is None else self.config
        return self.pretrained is not None or isinstance(keys, str) or "vocab_size" in keys


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, or Muon with AdamW beside it. Norms and biases are never decayed."""

    kind: Literal["adamw", "muon"] = "adamw"
    """``muon``: DeepSpeed's (Jordan et al. 2024), for the matrices of decoder layers; AdamW for
    embeddings, the head, norms and biases. With ``engine.zero_stage`` 1 in bfloat16, or 0."""
    lr: float = 2e-4
    """Peak learning rate."""
    muon_lr: float = 0.02
    """That of the matrices with ``muon``, whose updates have singular values of about 1 (times the
    root of rows / columns, if there are more rows); it rises and falls with ``lr``."""
    muon_momentum: float = 0.95
    """With ``muon``: decay of the running mean of the gradient, per step (Nesterov's)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square, per step."""
    eps: float = 1e-8
    """Added to the root of the mean square, by which an update is divided."""
    weight_decay: float = 0.1
    """Decoupled: a step takes ``lr * weight_decay`` of every decayed weight."""
    decay_embeddings: bool = True
    """Whether embedding matrices are decayed like the other matrices."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 clips nothing."""
    max_skipped: int = 10
    """Updates in a row that may be skipped because the gradient is not finite."""
    ema_decay: float | None = None
    """What is left, after a step, of an exponential average of the weights, as in 0.999. It is
    evaluated beside them (``average`` in evaluation.jsonl), part of checkpoints, and exported to
    ``run_dir/model_average``; null keeps none."""

    def __post_init__(self) -> None:
        rates = {"lr": self.lr, "eps": self.eps, "muon_lr": self.muon_lr}
        check_range("optimizer", above=0, at_most=1e30, **rates)  # and ten times that is a float32
        check_range("optimizer", at_least=0, below=1, muon_momentum=self.muon_momentum)
        check_range("optimizer", above=0, below=1, ema_decay=self.ema_decay)
        check_range(
            "optimizer",
            at_least=0,
            weight_decay=self.weight_decay,
            clip=self.clip,
            max_skipped=self.max_skipped,
        )
        if len(self.betas) != 2:
            raise ConfigError(f"optimizer: betas are {self.betas}; they must be two numbers")
        for beta in self.betas:
            check_range("optimizer", at_least=0, below=1, betas=beta)


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """The learning rate, a pure function of the step, so that a run resumes with one integer."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """``cosine`` and ``linear`` fall from the peak to the lowest at the last step; ``wsd`` (warmup,
    stable, decay) stays at the peak and falls linearly in the end; ``constant`` stays."""
    warmup_steps: int | None = None
    """Steps of warmup; null takes ``warmup_fraction`` of the run."""
    warmup_fraction: float = 0.01
    """Part of the run's steps in which the rate rises, where ``warmup_steps`` is null."""
    min_ratio: float = 0.1
    """The lowest learning rate, as a fraction of the peak."""
    decay_fraction: float = 0.2
    """With ``wsd``: the last part of the run, in which the rate falls."""

    def __post_init__(self) -> None:
        check_range("learning_rate", at_least=0, warmup_steps=self.warmup_steps)
        shares = {n: getattr(self, n) for n in ("warmup_fraction", "min_ratio", "decay_fraction")}
        check_range("learning_rate", at_least=0, at_most=1, **shares)

    def warmup(self, num_steps: int) -> int:
        """Steps of warmup: given, or a fraction of the run; never more than the run has."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, num_steps)
        return min(round(self.warmup_fraction * num_steps), num_steps)

    def at(self, step: int, *, num_steps: int, peak: float) -> float:
        """The learning rate of optimizer step ``step`` (the first one is 0) of ``num_steps``.

        Warmup rises linearly and reaches ``peak`` at its last step, so step 0 already learns.

        Raises:
            ValueError: the run has no such step.
        """
        if not 0 <= step < num_steps:
            raise ValueError(f"step {step} is outside of the run's {num_steps} steps")
        first = self.warmup(num_steps)  # of the fall
        if step < first:
            return peak * (step + 1) / first
        lowest = self.min_ratio * peak
        if self.kind == "wsd":
            first = max(first, num_steps - max(1, round(self.decay_fraction * num_steps)))
        if self.kind == "constant" or step < first:
            return peak
        progress = (step - first + 1) / (num_steps - first)  # 1 at the last step
        if self.kind == "cosine":
            return lowest + (peak - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
        return peak + (lowest - peak) * progress


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is written, how much of it is kept, and how a run begins again."""

    every: int | None = 1000
    """Steps between checkpoints; null writes one at the end (and on a signal) only."""
    keep: int = 3
    """Newest checkpoints kept; older ones are removed after a newer one is complete, but not the
    one that ``autopilot.spikes`` may have to go back to."""
    keep_every: int | None = None
    """Those of every so many steps stay beside the newest: milestones, to branch from; they are
    written in any case."""
    keep_steps: tuple[int, ...] = ()
    """Those of these steps stay, too, and are written in any case."""
    branch_from: str | None = None
    """Where another run's checkpoint lies, from which a ``run_dir`` without checkpoints of its own
    begins (``--branch-from``): with its weights, its optimizer, and its data order continued. What
    is to be different from there on (a decay, a mixture) is said here; the trunk stays as it is."""
    mirror: str | None = None
    """An address (s3://bucket/folder, ...), of this run alone, to which every checkpoint is copied
    while training goes on, and from which a ``run_dir`` without checkpoints is restored."""
    asynchronous: bool = True
    """Training waits for a copy in host memory only, and goes on while that is written; false
    takes no such memory, and waits."""
    resume: Literal["auto", "never"] = "auto"
    """auto continues from the newest checkpoint of ``run_dir``; never refuses to find one."""
    allow_change: tuple[str, ...] = ()
    """Keys that may differ from the checkpoint's, as in ``[seed, optimizer.betas]``: of the order
    of samples, of this file, of the model (``model.rope_theta``), ``model.tokenizer``, and
    ``data.content`` (the bytes of the data). A section's name allows all of its keys; ``run``
    accepts a checkpoint without a record of its run."""
    fallback: bool = False
    """When the newest checkpoint is damaged: try the one before it instead of stopping."""
    verify: Literal["size", "checksum"] = "checksum"
    """How files are checked before they are loaded; ``size`` reads none of them, and misses other
    bytes of the same length (damage, or two files that were swapped)."""
    export: bool = True
    """Write ``run_dir/model``, which ``from_pretrained`` loads, when the run ends."""

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is written after so many steps."""
        return self.is_milestone(step) or (self.every is not None and step % self.every == 0)

    def is_milestone(self, step: int) -> bool:
        """Whether the checkpoint after so many steps stays."""
        return step in self.keep_steps or (
            self.keep_every is not None and step % self.keep_every == 0
        )

    def __post_init__(self) -> None:
        names = ("keep", "every", "keep_every", "keep_steps")
        check_positive("checkpoint", **{name: getattr(self, name) for name in names})
        if self.mirror is not None and not is_remote(self.mirror):
            raise ConfigError(
                f"checkpoint: mirror is {self.mirror!r}; it is an address, as in s3://bucket/run"
            )


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Validation during training, over ``data.valid_prefix``."""

    every: int | None = None
    """Steps between evaluations, for which there must be held-out documents; null evaluates at the
    end only, if there are any."""
    max_tokens: int | None = None
    """Evaluate samples up to this many tokens per bucket; null takes all."""
    buckets: tuple[int, ...] = ()
    """Capacities into which validation documents are packed; empty takes the training buckets.
    Runs that are compared need the same ones."""

    def __post_init__(self) -> None:
        check_positive("evaluation", **self.__dict__)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What is written while training; ``run_dir/log.jsonl`` has one line per step in any case."""

    every: int = 10
    """Steps between log lines; the device is waited for only then."""
    tensorboard: bool = True
    """Write event files to ``run_dir/tensorboard``."""
    wandb_project: str | None = None
    """Weights & Biases, when a project is named and wandb is installed."""
    batches: bool = False
    """Write down what every rank was fed (``run_dir/batches``): samples of every micro batch."""

    def __post_init__(self) -> None:
        check_positive("logging", every=self.every)


@dataclass(frozen=True, kw_only=True)
class AutopilotConfig:
    """What a run does by itself when its loss or its gradients leave their path: it goes back to
    the last good checkpoint of before and skips the samples of the steps that did it
    (``megapack.training.autopilot``)."""

    spikes: bool = False
    """Watch for spikes; false: a loss that is not a number ends the run, and nothing else does."""
    window: int = 128
    """Values of a bucket, or of a source, that a new one is compared with."""
    deviations: float = 8.0
    """A value is out of its band when it is so many deviations (of the median absolute kind) above
    the median."""
    confirm: int = 3
    """Steps, of twice as many, that must be out before anything is done."""
    margin_steps: int = 1
    """Steps that are skipped beside those, before them and behind them."""
    max_rollbacks: int = 10
    """Times that a run may go back in all, before it ends instead."""

    def __post_init__(self) -> None:
        check_positive("autopilot", deviations=self.deviations, confirm=self.confirm)
        check_range("autopilot", at_least=16, window=self.window)
        check_range("autopilot", at_least=0, margin_steps=self.margin_steps)
        check_range("autopilot", at_least=0, max_rollbacks=self.max_rollbacks)

    @property
    def reach(self) -> int:
        """Steps from the first that is skipped to the one that confirms a spike, at most."""
        return 2 * self.confirm - 1 + self.margin_steps


@dataclass(frozen=True, kw_only=True)
class MixingConfig:
    """Weights of the blend's sources that a rule gives anew every so many steps."""

    rule: str | None = None
    """``odm`` (online data mixing), or a Python function, as in ``package.module:function``: it is
    given a ``SourceReport`` and returns weights by name and what it wants to keep (JSON)."""
    every: int = 500
    """Steps between two decisions."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the rule, as in ``smoothing: 0.9`` of odm."""

    def __post_init__(self) -> None:
        check_positive("mixing", every=self.every)
        if self.options and self.rule is None:
            raise ConfigError("mixing: options are of a rule, and there is none; name it")


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
    "scheduler": "learning_rate",
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
    """Every layer's input, from which they are recomputed, waits in page-locked host memory."""
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
    heartbeat_timeout_seconds: float = 300.0
    """How long a rank may show no sign of life before the job ends and names it."""
    hang_timeout_seconds: float = 1800.0
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
            heartbeat_timeout_seconds=self.heartbeat_timeout_seconds,
            hang_timeout_seconds=self.hang_timeout_seconds,
        )
        check_range("engine", above=0, at_most=2**24, timeout_minutes=self.timeout_minutes)
        if self.offload_activations and not self.activation_checkpointing:
            raise ConfigError(
                "engine: offload_activations is true and activation_checkpointing is false; only "
                "the inputs of layers that are computed again go to the host: set "
                "activation_checkpointing to true, too"
            )
        if self.offload_activations and self.compile:
            raise ConfigError(
                "engine: compile is true and offload_activations is set; a compiled layer saves "
                "its input inside its own graph: set one of them"
            )
        if self.mlp_chunk_tokens is not None and self.compile:
            raise ConfigError(
                "engine: compile is true and mlp_chunk_tokens is set; a compiled layer cannot "
                "compute its MLP again chunk by chunk: set one of them"
            )
        _refuse_decided(self.deepspeed)
        printed = self.deepspeed.get("steps_per_print")
        if printed is not None and not (isinstance(printed, int) and printed > 0):
            raise ConfigError(
                f"engine.deepspeed: steps_per_print is {printed!r}; it must be an integer above 0"
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
        elif any(known.startswith(f"{name}.") for known in DECIDED):
            raise ConfigError(
                f"engine.deepspeed: {name} is {value!r}; it must be a mapping of keys"
            )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One run. ``run_dir`` holds everything it writes."""

    run_dir: str
    """Directory of the run: checkpoints, logs, the exported model. Made where it is missing."""
    seed: int = 0
    """Decides initial weights and the order of samples."""
    num_steps: int | None = None
    """Optimizer steps; null takes ``num_epochs`` of the data."""
    num_epochs: int = 1
    """How often the data are seen, where ``num_steps`` does not say the length of the run."""
    stop_at: int | None = None
    """Stop when so many steps of the run are done, saved, as at its end but without the export: to
    look at it, to edit it, and to start it again. Its length, and so the learning rate, stays."""
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
        if self.mixing.rule is not None and self.data.blend is None:
            raise ConfigError("mixing: a rule weighs the sources of a blend; give data.blend")
        if self.autopilot.spikes and self.checkpoint.every is None:
            raise ConfigError(
                "autopilot: spikes is true and checkpoint.every null: there would be nothing to go "
                "back to; set checkpoint.every"
            )

    def _check_allow_change(self) -> None:
        """Refuse names in ``checkpoint.allow_change`` that nothing is compared by."""
        tree = to_dict(self)
        known = {*ORDER_FIELDS, *tree, "run", "data.content", "content", "tokenizer"}
        for section, keys in tree.items():
            if isinstance(keys, dict):
                known |= {*keys, *(f"{section}.{key}" for key in keys)}
        # Fields of the model, and keys of dictionaries, are the user's.
        names = [
            name
            for name in self.checkpoint.allow_change
            if name.partition(".")[0] != "model" and ".".join(name.split(".")[:2]) not in known
        ]
        if names:
            raise ConfigError(
                f"checkpoint.allow_change: unknown key {names[0]!r}{nearest(names[0], known)} Give "
                "keys as the error of a resume names them"
            )

    def _check_muon(self) -> None:
        """Refuse what DeepSpeed 0.19 takes and does otherwise: in other stages it clips Muon's
        updates, which are orthogonal already, in place of the gradient."""
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
