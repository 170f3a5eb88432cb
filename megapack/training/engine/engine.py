"""DeepSpeed engine of a model, and one optimizer step with it.

The loss of a step is the mean over the label tokens of all ranks and micro batches; with loss
weights, the weighted mean, divided by the sum of the weights. Every micro batch contributes the sum
of its losses times ``number of ranks / loss denominator of the step``. DeepSpeed averages over
ranks, which cancels the number of ranks, also if ranks share a micro batch in slices. So the
gradient does not depend on how the step is split into ranks and micro batches, and clipping uses
the gradient of the mean. The load-balancing loss of a mixture of experts is scaled in the same way,
and weighted by the labels of its micro batch (``megapack.attention.experts``).

``start_engine`` creates the engine (AdamW or Muon, and the average of weights), ``train_step``
runs a step, ``StepResult`` is a rank's result. Example: 2 ranks, each with micro batches of 100
and 50 label tokens, 300 in the step. Each loss is a sum times 2 / 300; the mean over the 2 ranks is
the sum of all losses / 300.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from megapack.data import Batch
from megapack.training.config import EngineConfig, OptimizerConfig, PretrainConfig
from megapack.training.engine.deepspeed_config import deepspeed_configuration
from megapack.training.engine.world import World
from megapack.training.model.flops import whole_shape
from megapack.training.model.training_model import TrainingModel, is_weighted, on_device

logger = logging.getLogger("megapack")


class Stopwatch:
    """``with stopwatch:`` measures the device time of a block, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def __enter__(self) -> None:
        self._begin = self._now()

    def __exit__(self, *exception: object) -> None:
        self._spans.append((self._begin, self._now()))

    def seconds(self) -> float:
        """Return the seconds of all blocks; waits for the last one."""
        if not self._cuda:
            return float(sum(end - begin for begin, end in self._spans))
        for _, end in self._spans[-1:]:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._spans)) / 1000


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One rank's result of a step. Creating it does not wait for the device."""

    loss_sum: Tensor
    """Scalar on the device: weighted sum of the losses of this rank's label tokens."""
    balance_sum: Tensor | None
    """Sum of the load-balancing losses of this rank's micro batches, weighted by their labels,
    without their coefficient; None if the model has no such loss."""
    divergence_sum: Tensor | None
    """Scalar on the device: weighted sum of the divergences of this rank's label tokens from a
    teacher; None without one."""
    label_weight: float
    """Denominator of the whole step on all ranks: its label tokens, or the sum of their weights."""
    sample_losses: Tensor
    """(samples,) on the device: unweighted sum of the losses of each sample of this rank; with
    prefix trees, weighted."""
    source: NDArray[np.int64]  # (samples,) source number of each sample
    grad_norm: float | Tensor  # norm of the whole gradient before clipping
    forward: Stopwatch  # time of this rank's forwards
    skipped: bool  # the gradient was not finite: no rank updated its weights


def parameter_groups(model: TrainingModel, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """Return the optimizer's groups: matrices with weight decay; norms, biases and (if configured)
    embeddings without; with Muon, the matrices of decoder layers (``use_muon``)."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    muon = model.hidden_matrices if optimizer.kind == "muon" else []
    in_muon = {id(parameter) for parameter in muon}
    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        if not parameter.requires_grad or id(parameter) in in_muon:
            continue
        exempt = id(parameter) in embeddings and not optimizer.decay_embeddings
        (not_decayed if len(whole_shape(parameter)) < 2 or exempt else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": optimizer.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    if optimizer.kind == "muon":
        adamw = {"lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps}
        groups = [{**group, **adamw, "use_muon": False} for group in groups]
        options = {"lr": optimizer.muon_lr, "momentum": optimizer.muon_momentum, "use_muon": True}
        groups.append({"params": muon, "weight_decay": optimizer.weight_decay, **options})
    return [group for group in groups if group["params"]]


@contextmanager
def _compiled_at_first_call() -> Iterator[None]:
    """Defer ``torch.compile`` to the first call of a function. DeepSpeed compiles Muon at import,
    and importing the compiler would add seconds to every start."""
    compile_now: Callable[..., Any] = torch.compile

    def compile_later(function: Any = None, **options: Any) -> Callable[..., Any]:
        if function is None:  # @torch.compile(option=...)
            return partial(compile_later, **options)

        @cache
        def compiled() -> Callable[..., Any]:
            result: Callable[..., Any] = compile_now(function, **options)
            return result

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def start_engine(model: TrainingModel, config: PretrainConfig, world: World) -> Any:
    """Return a DeepSpeed engine of ``model``, ready for ``train_step`` or a checkpoint."""
    import deepspeed  # noqa: PLC0415

    with _compiled_at_first_call():
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam  # noqa: PLC0415

    if config.engine.activation_checkpointing:
        # Copies to and from page-locked memory are asynchronous.
        on_host = partial(save_on_cpu, pin_memory=world.device.type == "cuda")
        model.checkpoint_activations(on_host if config.engine.offload_activations else None)
    buffers = {
        name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()
    }
    options: dict[str, Any] = {
        "lr": config.optimizer.lr,
        "betas": config.optimizer.betas,
        "eps": config.optimizer.eps,
        "fused": world.device.type == "cuda",
    }
    groups = parameter_groups(model, config.optimizer)
    optimizer: torch.optim.Optimizer
    if config.optimizer.kind == "muon":
        optimizer = MuonWithAuxAdam(groups, torch.optim.AdamW, options)
    else:
        optimizer = torch.optim.AdamW(groups, **options)
    if config.engine.stage == 0:
        clip_and_skip(optimizer, config.optimizer.clip)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_configuration(config, world.size),
        dist_init_required=False,
    )
    # Some DeepSpeed versions cast buffers with the parameters. Restore float32: RoPE frequencies
    # rounded to bfloat16 are wrong by 32 positions at 16k.
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.dtype != buffers[name].dtype:
            buffer.data = buffers[name].to(world.device)
    if config.engine.stage == 3:
        # ``linear_cross_entropy`` reads the head's weight outside the head's own forward pass.
        head = model.model.get_output_embeddings()  # type: ignore[operator]
        deepspeed.zero.register_external_parameter(model, head.weight)
    if config.engine.compile:
        # All layers share one graph per longest segment (see ``longest_segment``). ZeRO-3 fetches
        # parameters between the parts of a layer, so its layers cannot be single graphs.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for layer in model.layers:
            layer.compile(fullgraph=config.engine.stage < 3, dynamic=False)
    engine.muon_lr_ratio = config.optimizer.muon_lr / config.optimizer.lr
    decay = config.optimizer.ema_decay
    engine.weight_average = None if decay is None else WeightAverage(engine, decay)
    return engine


def clip_and_skip(optimizer: torch.optim.Optimizer, clip: float) -> None:
    """Make an optimizer clip gradients (0: do not), and skip updates whose gradient is not finite,
    as DeepSpeed's ZeRO optimizers do. Without ZeRO, DeepSpeed reads ``overflow`` and
    ``_global_grad_norm``."""
    patched: Any = optimizer
    update = optimizer.step

    @torch.no_grad()
    def step(closure: Any = None) -> Any:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        patched._global_grad_norm = norm
        patched.overflow = not bool(torch.isfinite(norm))
        if patched.overflow:
            return None
        if clip > 0:
            nn.utils.clip_grads_with_norm_(params, clip, norm)
        return update(closure)

    patched.step, patched.overflow = step, False


def train_step(
    engine: Any, micro_batches: Iterable[Batch], *, world: World, config: EngineConfig, lr: float
) -> StepResult:
    """Run forward and backward of this rank's micro batches of one step, then the optimizer. All
    ranks have the same number of micro batches. ``lr`` is the learning rate of this step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr * (engine.muon_lr_ratio if group.get("use_muon") else 1.0)
    loss_sums, sample_losses, source, forward = [], [], [], Stopwatch(world.device)
    balances: list[Tensor] = []
    divergence_sums: list[Tensor] = []
    for batch in micro_batches:
        world.progress.at(f"micro step {batch['micro_step']} of step {batch['step']}")
        # The denominator is 0 for a step without labels, whose loss sums are 0, too.
        denominator = "step_label_weight" if is_weighted(batch) else "num_step_label_tokens"
        weight = float(batch[denominator])
        scale = world.size / (weight or 1.0)
        last = batch["micro_step"] == batch["num_micro_steps"] - 1
        engine.set_gradient_accumulation_boundary(last)
        arguments = on_device(batch, world.device, config, engine.module.distill)
        with forward:
            loss, losses, balance, divergences = engine(**arguments, scale=scale)
        # Clone: without ZeRO, DeepSpeed 0.19 divides by the accumulation steps in spite of
        # scale_wrt_gas if backward starts at the very tensor that its forward returned.
        engine.backward(loss.clone(), scale_wrt_gas=False)
        factors = arguments["label_weights"].flatten() if "label_weights" in arguments else 1
        loss_sums.append((losses * factors).sum())
        if divergences is not None:
            divergence_sums.append((divergences * factors).sum())
        if balance is not None:
            balances.append(balance)
        # In trees, several documents have the loss of a token.
        own = losses * factors if "kv_index" in batch else losses
        sample_losses.append(_sum_by_sample(own, batch))
        source.append(batch["source"].numpy())
    skipped_before = engine.skipped_steps
    engine.step()
    skipped = engine.skipped_steps > skipped_before
    if engine.weight_average is not None and not skipped:
        engine.weight_average.update()
    return StepResult(
        loss_sum=torch.stack(loss_sums).sum(),
        balance_sum=torch.stack(balances).sum() if balances else None,
        divergence_sum=torch.stack(divergence_sums).sum() if divergence_sums else None,
        label_weight=weight,
        sample_losses=torch.cat(sample_losses),
        source=np.concatenate(source),
        grad_norm=engine.get_global_grad_norm(),
        forward=forward,
        skipped=skipped,
    )


def _sum_by_sample(losses: Tensor, batch: Batch) -> Tensor:
    """Return (samples,) sums of the losses (T,); a slice yields its part of every sample."""
    if (shared := batch.get("sequence_parallel_size", 1)) > 1:
        whole = losses.new_zeros(shared, len(losses))
        whole[batch["sequence_parallel_rank"]] = losses
        losses = whole.flatten()
    capacity = int(batch["capacity"])
    row = int(batch.get("row_tokens", capacity))
    # A sample is at the start of its slot, before the padding; the row may end in padding.
    slots = row // capacity
    slot = row // slots
    by_slot = losses.view(-1, row)[:, : slots * slot].reshape(-1, slot)
    return by_slot[: len(batch["sample_ids"])].sum(1)


def not_finite(model: nn.Module) -> list[str]:
    """Return the names of parameters whose part on this rank contains infinities or NaN."""
    shares = {name: getattr(p, "ds_tensor", p).detach() for name, p in model.named_parameters()}
    sums = torch.stack([share.sum(dtype=torch.float32) for share in shares.values()])
    bad = (~torch.isfinite(sums)).tolist()
    return [name for name, is_bad in zip(shares, bad, strict=True) if is_bad]


# ---- Average of the weights ----------------------------------------------------------------------
# A rank averages only the float32 master weights that it owns (all of them without ZeRO), so that
# updates need no communication. Files record which part of a parameter they contain, so that any
# number of ranks can read them.

Pieces: TypeAlias = dict[str, tuple[int, Tensor]]
"""Parameter name -> offset of this rank's part, and the part's flat values."""

_FILES = "average_rank_*.pt"


def master_pieces(engine: Any) -> Pieces:
    """Return the float32 weights that this rank updates, as views or copies."""
    from deepspeed.utils import safe_get_local_fp32_param  # noqa: PLC0415

    stage, pieces = engine.zero_optimization_stage(), {}
    for name, parameter in engine.module.named_parameters():
        if stage == 0:
            pieces[name] = 0, parameter.detach().flatten()
        elif stage == 3:
            share = safe_get_local_fp32_param(parameter).detach().flatten()
            begin = dist.get_rank() * parameter.ds_tensor.ds_numel
            real = max(0, min(share.numel(), parameter.ds_numel - begin))  # without padding
            pieces[name] = begin, share[:real]
        elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
            begin = mapping.lp_fragment_address.start
            pieces[name] = begin, mapping.hp_fragment.detach().flatten()
    return pieces


class WeightAverage:
    """Exponential average of an engine's weights, in float32, from the initial weights on. An
    update is ``average = decay * average + (1 - decay) * weights``: with decay 0.9, a weight of 1.0
    that becomes 2.0 gives 1.1, 1.19, 1.271. All methods but ``update`` are collective."""

    def __init__(self, engine: Any, decay: float) -> None:
        self.decay, self._engine = decay, engine
        self._stage = engine.zero_optimization_stage()
        self.begin()

    def begin(self) -> None:
        pieces = master_pieces(self._engine)
        self._average = {name: (begin, piece.clone()) for name, (begin, piece) in pieces.items()}

    def update(self) -> None:
        weights = [piece for _, piece in master_pieces(self._engine).values()]
        torch._foreach_lerp_(
            [piece for _, piece in self._average.values()], weights, 1 - self.decay
        )

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Replace the model's weights with the average, and restore them afterwards."""
        weights = master_pieces(self._engine)
        if self._stage == 0:  # these are views of the model's weights: copy them
            weights = {name: (begin, piece.clone()) for name, (begin, piece) in weights.items()}
        self._put(self._average)
        try:
            yield
        finally:
            self._put(weights)

    @torch.no_grad()
    def _put(self, pieces: Pieces) -> None:
        import deepspeed  # noqa: PLC0415

        for name, parameter in self._engine.module.named_parameters():
            shape = whole_shape(parameter)
            begin, piece = pieces.get(name, (0, torch.empty(0)))
            whole = torch.zeros(shape, device=parameter.device).flatten()
            whole[begin : begin + piece.numel()] = piece
            if self._stage:
                dist.all_reduce(whole)  # every value has one owner
            divided = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
            with divided if self._stage == 3 else nullcontext():
                parameter.data.copy_(whole.view(shape))

    def save(self, save: Callable[[Any, str], None], directory: Path) -> None:
        """Call ``save`` with this rank's part and its path in a checkpoint's directory."""
        rank = dist.get_rank()
        if self._stage or rank == 0:
            tree = {
                name: {"begin": b, "values": piece} for name, (b, piece) in self._average.items()
            }
            save(tree, str(directory / _FILES.replace("*", f"{rank:05d}")))

    def load(self, directory: Path) -> None:
        """Load the average from a checkpoint; if it has none, start from the loaded weights."""
        self.begin()
        paths = sorted(directory.glob(_FILES))
        if not paths:
            logger.warning("%s has no average of weights: it starts from the weights", directory)
        for path in paths:
            for name, piece in torch.load(path, map_location="cpu", mmap=True).items():
                begin, average = self._average.get(name, (0, torch.empty(0)))
                saved_begin, values = piece["begin"], piece["values"]
                first = max(begin, saved_begin)
                last = min(begin + average.numel(), saved_begin + values.numel())
                if first < last:
                    saved = values[first - saved_begin : last - saved_begin]
                    average[first - begin : last - begin] = saved
