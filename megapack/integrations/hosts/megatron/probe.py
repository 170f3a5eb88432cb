"""Probe of the real model in Megatron's schedule, once, before the first step of training.

    forward_backward_func, first step    Megatron or Megatron-Bridge calls it
      read     the first micro batch with several documents; all batches read are put back
      probe    six forward-only passes of the same schedule and the script's own forward step, in
               evaluation mode: all pipeline stages, no dropout, no gradients
      step     generators, modes, timers and gradients are restored

Segments come from the dataset's cu_seqlens, not from positions. A loss counts if the script's own
loss function has a gradient for it, so the probe checks the mask that training uses. All ranks must
call the probe, and all fail if one does. Other training loops use ``watch_first_call``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.nn.functional import pad

from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron.host import HOST, device
from megapack.planning import context_parallel_indices
from megapack.probe import SegmentPlaces, check_rows

Schedule = Callable[..., Any]
ROW_KEYS = {"tokens", "labels", "loss_mask", "cu_seqlens"}
LOOKED_AT = 64  # micro batches to search for one with several documents
# Names of Megatron-Bridge -> names of Megatron-LM.
_BRIDGE = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), "cu_seqlens"),
    **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), "cu_seqlens_padded"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), "max_seqlen"),
}


class _NotProbedError(Exception):
    """Reason why the probe cannot run."""


def probing(get_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """Wrap ``get_forward_backward_func``: its schedules probe the model before the first step."""
    to_probe = True

    @functools.wraps(get_schedule)
    def get(*args: Any, **kwargs: Any) -> Schedule:
        schedule = get_schedule(*args, **kwargs)

        @functools.wraps(schedule)
        def run(**step: Any) -> Any:
            nonlocal to_probe
            if to_probe and not step.get("forward_only"):
                to_probe = False
                step = probe_step(schedule, step)
            return schedule(**step)

        return run

    return get


def probe_step(schedule: Schedule, step: dict[str, Any]) -> dict[str, Any]:
    """Probe the model of a step; return the arguments for the step itself. Every rank calls it with
    the arguments of its schedule. Raises ConfigError on all ranks if the probe fails on one."""
    model = step["model"] if isinstance(step["model"], list) else [step["model"]]
    config = get_model_config(model[0])
    group = parallel_state.get_model_parallel_group()
    is_reader = dist.get_rank() == dist.get_process_group_ranks(group)[0]
    first_batch, step = _read_ahead(step, is_reader=is_reader)
    host_batch: dict[str, Any] = _broadcast(first_batch, group, from_first=True)
    batch = _with_megatron_names(host_batch)
    problem, message = None, "not probed: "
    try:
        _check_config(config, batch)
        count = _num_segments(batch)
        with _evaluating(model, config):
            seconds = check_rows(
                functools.partial(_losses, schedule, step, config, host_batch),
                batch,
                host=HOST,
            )
        message = f"{count} segments of a micro batch are kept apart: probed in {seconds:.1f} s"
    except _NotProbedError as error:
        message += str(error)
    except ConfigError as error:
        problem = error
    _fail_together(problem)
    if dist.get_rank() == 0:
        print(f"megapack: {message}", flush=True)  # noqa: T201 - Megatron prints its log
    return step


def _with_megatron_names(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch that has Megatron-Bridge's boundaries also under Megatron-LM's names."""
    return {**batch, **{name: batch[key] for key, name in _BRIDGE.items() if key in batch}}


def _num_segments(batch: dict[str, Any]) -> int:
    """Return the number of segments of more than one token; 0 without boundaries."""
    if any(key not in batch for key in ROW_KEYS):
        return 0
    return int((SegmentPlaces.of(batch).lengths > 1).sum())


def _check_config(config: Any, batch: dict[str, Any]) -> None:
    """Raise _NotProbedError if the batch has no boundaries, if documents depend on each other even
    with correct ones, or if the schedule does not call the model again."""
    if _num_segments(batch) == 0:
        raise _NotProbedError("the batches have no boundaries, so the data is not megapack's")
    low = next((name for name in ("fp8", "fp4") if getattr(config, name, None)), None)
    if low:
        raise _NotProbedError(f"{low} scales a whole micro batch by its largest value")
    if getattr(config, "moe_expert_capacity_factor", None) is not None:
        raise _NotProbedError("experts of limited capacity drop tokens because of other tokens")
    graphs = getattr(config, "cuda_graph_impl", None)
    if graphs not in (None, "none") or getattr(config, "enable_cuda_graph", False):
        raise _NotProbedError("CUDA graphs repeat a step instead of calling it")


# ---- The first micro batch: read, put back, and sent to all stages


class _PutBack:
    """Iterator over items, then over the following iterator."""

    def __init__(self, items: list[Any], following: Iterator[Any]) -> None:
        self.items, self.following = deque(items), following

    def __iter__(self) -> _PutBack:
        return self

    def __next__(self) -> Any:
        return self.items.popleft() if self.items else next(self.following)

    def __getattr__(self, name: str) -> Any:  # such as save_state() of an external loader
        return getattr(self.following, name)


def _read_ahead(step: dict[str, Any], *, is_reader: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the first micro batch of several segments (empty on ranks that do not read), and the
    arguments of the step with all read batches put back."""
    data_iterator = step["data_iterator"]
    is_list = isinstance(data_iterator, list)
    iterators = list(data_iterator) if is_list else [data_iterator]
    if iterators[0] is None or not is_reader:
        return {}, step
    # Megatron may wrap the iterator to replay a step; read the wrapped one, or the wrapper would
    # record the batches twice.
    replaying = hasattr(iterators[0], "iterable")
    source = iterators[0].iterable if replaying else iterators[0]
    batches: list[dict[str, Any]] = []
    for batch in islice(source, LOOKED_AT):
        batches.append(batch)
        if _num_segments(_with_megatron_names(batch)) != 1:
            break
    if replaying:
        iterators[0].iterable = _PutBack(batches, source)
    else:
        iterators[0] = _PutBack(batches, source)
    return batches[-1], {**step, "data_iterator": iterators if is_list else iterators[0]}


def _broadcast(value: Any, group: dist.ProcessGroup, *, from_first: bool) -> Any:
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=ranks[0 if from_first else -1], group=group)
    return box[0]


# ---- A forward pass of the whole pipeline


@contextlib.contextmanager
def _evaluating(model: list[Any], config: Any) -> Iterator[None]:
    """Set evaluation mode; switch timers and reruns off; restore everything at the end."""
    modes = [(module, module.training) for chunk in model for module in chunk.modules()]
    rerun, timers = get_rerun_state_machine(), config.timers
    rerun_mode = rerun.get_mode()
    try:
        for chunk in model:
            chunk.eval()
        rerun.set_mode(RerunMode.DISABLED)
        config.timers = None
        yield
    finally:
        for module, training in modes:
            module.training = training
        rerun.set_mode(rerun_mode)
        config.timers = timers


def _losses(
    schedule: Schedule,
    step: dict[str, Any],
    config: Any,
    host_batch: dict[str, Any],
    batch: dict[str, Any],
) -> Tensor:
    """Return the loss of every token in a batch, 0 where the script masks it. ``host_batch`` is the
    batch that the script read; in ``batch`` tokens, labels or boundaries differ."""
    renamed = {key: batch[name] for key, name in _BRIDGE.items() if key in host_batch}
    host_batch = {key: {**batch, **renamed}[key] for key in host_batch}
    data_iterator = step["data_iterator"]
    is_list = isinstance(data_iterator, list)
    # One micro batch; virtual stages need a whole group of them.
    virtual = is_list and len(data_iterator) > 1
    num_micro_batches = config.microbatch_group_size_per_vp_stage if virtual else 1

    def feed(iterator: Any) -> Any:
        return None if iterator is None else map(dict, repeat(host_batch))

    losses: list[Tensor] = []

    def forward_step(iterator: Any, model: Any, *more: Any, **named: Any) -> tuple[Any, Any]:
        output, loss = step["forward_step_func"](iterator, model, *more, **named)

        def collect(output: Tensor, *, non_loss_data: bool) -> None:
            assert non_loss_data
            losses.append(_mark_counted(output, loss))

        return output, collect

    cuda_devices = [device()] if device().type == "cuda" else []
    with torch.random.fork_rng(cuda_devices):  # the same noise in every pass
        replaced = {
            "forward_step_func": forward_step,
            "data_iterator": list(map(feed, data_iterator)) if is_list else feed(data_iterator),
            "num_microbatches": num_micro_batches,
            "forward_only": True,
            "collect_non_loss_data": True,
        }
        schedule(**{**step, **replaced})
    return _gather_losses(losses[0] if losses else None, batch)


def _mark_counted(output: Tensor, loss: Callable[[Tensor], Any]) -> Tensor:
    """Return losses (tokens,), 0 where the training loss does not depend on them."""
    with torch.enable_grad():
        leaf = output.detach().clone().requires_grad_()
        (weights,) = torch.autograd.grad(loss(leaf)[0], leaf)
    # A loss that counts must not be 0, even if the model predicts the token with certainty.
    return torch.where(weights != 0, output.float() + 1e-30, 0.0).flatten().cpu()


def _gather_losses(losses: Tensor | None, batch: dict[str, Any]) -> Tensor:
    """Join the losses of context-parallel ranks; send them from the last stage to all."""
    num_tokens = batch["tokens"].numel()
    size = parallel_state.get_context_parallel_world_size()
    if losses is not None and size > 1 and losses.numel() * size == num_tokens:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, losses, group=parallel_state.get_context_parallel_group())
        bounds = pad(SegmentPlaces.of(batch).padded_lengths.cumsum(0), (1, 0)).numpy()
        losses = torch.zeros(num_tokens)
        for rank, part in enumerate(parts):
            losses[torch.from_numpy(context_parallel_indices(bounds, size, rank))] = part
    group = parallel_state.get_pipeline_model_parallel_group()
    whole: Tensor | None = _broadcast(losses, group, from_first=False)
    if whole is None or whole.numel() != num_tokens:
        got = "nothing" if whole is None else f"{whole.numel()} numbers"
        raise _NotProbedError(f"the forward step gives {got} for {num_tokens} tokens, not losses")
    return whole


def _fail_together(problem: ConfigError | None) -> None:
    failed = torch.tensor([int(problem is not None)], device=device())
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if problem is not None:
        raise problem
    if failed.item():
        raise ConfigError("the probe of the model failed on another rank; see the log of that rank")


# ---- Other training loops: the first call of a model


def watch_first_call() -> None:
    """Raise ConfigError if a training loop drops boundaries before megatron-core's language model.

    A dataset calls this when it is built. Positions restart where a segment begins (except after an
    attention window), so the first training call with restarts must have a boundary at each (with
    context parallelism: must have boundaries). After that call the watch ends.
    """
    home = importlib.import_module("megatron.core.models.common.language_module.language_module")
    base = home.LanguageModule
    if "__call__" in vars(base):
        return

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            named = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
            if _shows_boundaries(named.get("position_ids"), named.get("packed_seq_params"), model):
                del base.__call__
        return super(base, model).__call__(*args, **kwargs)

    base.__call__ = call


def _shows_boundaries(positions: Tensor | None, params: Any, model: Any) -> bool:
    """Return True if positions restart, at boundaries only, and False if they never restart. Raise
    ConfigError for a restart without a boundary."""
    if positions is None:
        return False
    begins = (positions[:, 1:] == 0).nonzero()
    begins = begins[:, 0] * positions.shape[1] + begins[:, 1] + 1
    bounds = getattr(params, "cu_seqlens_q_padded", None)
    if bounds is None:
        bounds = getattr(params, "cu_seqlens_q", None)
    sliced = parallel_state.get_context_parallel_world_size() > 1
    lost = bounds is None or bounds.numel() < 2 or not (sliced or torch.isin(begins, bounds).all())
    if begins.numel() and lost:
        received = "none" if bounds is None else bounds.tolist()
        raise ConfigError(
            f"{type(model).__name__} is called with boundaries {received}, and positions restart "
            f"at {begins.tolist()}: the code between megapack's rows and the model drops "
            "cu_seqlens, so attention would cross documents. Run Megatron-LM's script with python "
            "-m megapack.integrations.hosts.megatron; in other loops pass packed_seq_params to the "
            "model (megapack.integrations.hosts.megatron.to_packed_seq_params)"
        )
    return bool(begins.numel())
