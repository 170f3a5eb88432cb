"""The probe in Megatron's schedule: once, before the first step of training, on the real model.

    forward_backward_func, first step    what Megatron, or Megatron-Bridge, calls
      read     the first micro batch of several documents; all are put back for the run
      probe    six forward-only passes of the same schedule and the script's own forward step, as
               Megatron evaluates: all pipeline stages, no dropout, no gradients
      step     as if nothing had been: generators, modes, timers and gradients are as before

Segments are those that the dataset told (cu_seqlens), not what positions look like. A loss counts
where the script's own loss function has a gradient, so its mask is seen on whatever way it came.
All ranks go the same way and fail together. Other loops than these two have ``watch_first_call``.
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

from megapack.attention.probe import SegmentPlaces, probe
from megapack.errors import ConfigError
from megapack.integrations.hosts.megatron.host import HOST, device
from megapack.planning import context_parallel_indices

Schedule = Callable[..., Any]
ROW_KEYS = {"tokens", "labels", "loss_mask", "cu_seqlens"}
# Micro batches of one long document have nothing to keep apart: how many are looked at for others.
LOOKED_AT = 64
# Names of Megatron-Bridge, and those of Megatron-LM.
_BRIDGE = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), "cu_seqlens"),
    **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), "cu_seqlens_padded"),
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), "max_seqlen"),
}


class _NotProbedError(Exception):
    """Why nothing could be seen."""


def probing(get_schedule: Callable[..., Schedule]) -> Callable[..., Schedule]:
    """``get_forward_backward_func`` whose schedules probe the model before its first step."""
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
    """Probe the model of a step; the arguments with which the step goes on.

    Every rank calls it, with what its schedule is called with.

    Raises:
        ConfigError: on all ranks, when documents see each other on one (``megapack.attention``).
    """
    model = step["model"] if isinstance(step["model"], list) else [step["model"]]
    config = get_model_config(model[0])
    group = parallel_state.get_model_parallel_group()
    read, step = _read_ahead(step, reads=dist.get_rank() == dist.get_process_group_ranks(group)[0])
    told: dict[str, Any] = _broadcast(read, group, first=True)
    batch = _as_megatron(told)
    problem, said = None, "not probed: "
    try:
        _check_config(config, batch)
        count = _num_segments(batch)
        with _as_evaluated(model, config):
            seconds = probe(
                functools.partial(_losses, schedule, step, config, told),
                batch,
                outputs="losses",
                precision=config.params_dtype,
                host=HOST,
            )
        said = f"{count} segments of a micro batch are kept apart: probed in {seconds:.1f} s"
    except _NotProbedError as error:
        said += str(error)
    except ConfigError as error:
        problem = error
    _fail_together(problem)
    if dist.get_rank() == 0:
        print(f"megapack: {said}", flush=True)  # noqa: T201 - as Megatron's own log
    return step


def _as_megatron(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch that has the boundaries of Megatron-Bridge under Megatron-LM's names as well."""
    return {**batch, **{ours: batch[its] for its, ours in _BRIDGE.items() if its in batch}}


def _num_segments(batch: dict[str, Any]) -> int:
    """Those of more than one token; 0 where there are no boundaries."""
    if any(key not in batch for key in ROW_KEYS):
        return 0
    return int((SegmentPlaces.of(batch).lengths > 1).sum())


def _check_config(config: Any, batch: dict[str, Any]) -> None:
    """Where documents depend on each other though their boundaries are right, or on what is not
    called again."""
    if _num_segments(batch) == 0:
        raise _NotProbedError("the data is not megapack's, its batches tell no boundaries")
    low = next((name for name in ("fp8", "fp4") if getattr(config, name, None)), None)
    if low:
        raise _NotProbedError(f"{low} scales a whole micro batch by its largest value")
    if getattr(config, "moe_expert_capacity_factor", None) is not None:
        raise _NotProbedError("experts of a limited capacity drop tokens by what others choose")
    graphs = getattr(config, "cuda_graph_impl", None)
    if graphs not in (None, "none") or getattr(config, "enable_cuda_graph", False):
        raise _NotProbedError("CUDA graphs repeat a step instead of calling it")


# ---- The first micro batch: read, put back, and told to all stages


class _PutBack:
    """An iterator that gives items before it goes on."""

    def __init__(self, items: list[Any], behind: Iterator[Any]) -> None:
        self.items, self.behind = deque(items), behind

    def __iter__(self) -> _PutBack:
        return self

    def __next__(self) -> Any:
        return self.items.popleft() if self.items else next(self.behind)

    def __getattr__(self, name: str) -> Any:  # save_state() of an external loader
        return getattr(self.behind, name)


def _read_ahead(step: dict[str, Any], *, reads: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first micro batch of several segments, empty on ranks that do not read; the step, which
    will read the same again."""
    given = step["data_iterator"]
    several = isinstance(given, list)
    iterators = list(given) if several else [given]
    if iterators[0] is None or not reads:
        return {}, step
    # Megatron wraps iterators to replay a step; what it keeps for that must not have it twice.
    replaying = hasattr(iterators[0], "iterable")
    source = iterators[0].iterable if replaying else iterators[0]
    read: list[dict[str, Any]] = []
    for batch in islice(source, LOOKED_AT):
        read.append(batch)
        if _num_segments(_as_megatron(batch)) != 1:
            break
    if replaying:
        iterators[0].iterable = _PutBack(read, source)
    else:
        iterators[0] = _PutBack(read, source)
    return read[-1], {**step, "data_iterator": iterators if several else iterators[0]}


def _broadcast(value: Any, group: dist.ProcessGroup, *, first: bool) -> Any:
    """What the first, or last, rank of a group has."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=ranks[0 if first else -1], group=group)
    return box[0]


# ---- A forward pass of the whole pipeline


@contextlib.contextmanager
def _as_evaluated(model: list[Any], config: Any) -> Iterator[None]:
    """The model in evaluation mode, nothing timed, and everything as before at the end."""
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
    told: dict[str, Any],
    batch: dict[str, Any],
) -> Tensor:
    """Loss of every token of a batch, 0 where the script leaves it out.

    Args:
        told: the batch that the script read; other batches differ in tokens, labels, boundaries.
    """
    own_names = {its: batch[ours] for its, ours in _BRIDGE.items() if its in told}
    told = {key: {**batch, **own_names}[key] for key in told}
    given = step["data_iterator"]
    several = isinstance(given, list)
    # One micro batch, but virtual stages take their turns with a group of them.
    count = config.microbatch_group_size_per_vp_stage if several and len(given) > 1 else 1

    def feed(iterator: Any) -> Any:
        return None if iterator is None else map(dict, repeat(told))

    found: list[Tensor] = []

    def forward_step(iterator: Any, model: Any, *more: Any, **named: Any) -> tuple[Any, Any]:
        output, loss = step["forward_step_func"](iterator, model, *more, **named)

        def collect(output: Tensor, *, non_loss_data: bool) -> None:
            assert non_loss_data
            found.append(_counted(output, loss))

        return output, collect

    here = device()
    with torch.random.fork_rng(
        [here] if here.type == "cuda" else []
    ):  # a noise that is the same in every pass
        schedule(
            **{
                **step,
                "forward_step_func": forward_step,
                "data_iterator": [feed(one) for one in given] if several else feed(given),
                "num_microbatches": count,
                "forward_only": True,
                "collect_non_loss_data": True,
            }
        )
    return _of_all_ranks(found[0] if found else None, batch)


def _counted(output: Tensor, loss: Callable[[Tensor], Any]) -> Tensor:
    """Losses (tokens,), 0 where the sum that is trained on does not depend on them."""
    with torch.enable_grad():
        leaf = output.detach().clone().requires_grad_()
        (weights,) = torch.autograd.grad(loss(leaf)[0], leaf)
    # A loss that counts is not 0, however well its token is known.
    return torch.where(weights != 0, output.float() + 1e-30, 0.0).flatten().cpu()


def _of_all_ranks(losses: Tensor | None, batch: dict[str, Any]) -> Tensor:
    """Those of the whole row, from its context-parallel parts, on all stages."""
    num_tokens = batch["tokens"].numel()
    size = parallel_state.get_context_parallel_world_size()
    if losses is not None and size > 1 and losses.numel() * size == num_tokens:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, losses, group=parallel_state.get_context_parallel_group())
        bounds = pad(SegmentPlaces.of(batch).rooms.cumsum(0), (1, 0)).numpy()
        losses = torch.zeros(num_tokens)
        for rank, part in enumerate(parts):
            losses[torch.from_numpy(context_parallel_indices(bounds, size, rank))] = part
    group = parallel_state.get_pipeline_model_parallel_group()
    whole: Tensor | None = _broadcast(losses, group, first=False)
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
        raise ConfigError("the probe of the model failed on another rank, whose log says why")


# ---- Whoever trains on rows, and by whatever loop: the first call of a model


def watch_first_call() -> None:
    """Refuse boundaries that are lost on their way to a language model of megatron-core.

    A dataset asks for it when it is built. Its positions begin anew where a segment does (but
    behind a window), so the first call in training that has such a place must have a boundary
    there; with context parallelism, boundaries at all. Then nothing is watched any more.
    """
    home = importlib.import_module("megatron.core.models.common.language_module.language_module")
    base = home.LanguageModule
    if "__call__" in vars(base):
        return

    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if model.training:
            given = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
            if _is_told(given.get("position_ids"), given.get("packed_seq_params"), model):
                del base.__call__
        return super(base, model).__call__(*args, **kwargs)

    base.__call__ = call


def _is_told(positions: Tensor | None, params: Any, model: Any) -> bool:
    """Whether a call shows that boundaries arrive. Raises ConfigError where they do not."""
    if positions is None:
        return False
    begins = (positions[:, 1:] == 0).nonzero()
    begins = begins[:, 0] * positions.shape[1] + begins[:, 1] + 1
    bounds = getattr(params, "cu_seqlens_q_padded", None)
    if bounds is None:
        bounds = getattr(params, "cu_seqlens_q", None)
    cut = parallel_state.get_context_parallel_world_size() > 1
    lost = bounds is None or bounds.numel() < 2 or not (cut or torch.isin(begins, bounds).all())
    if begins.numel() and lost:
        told = "none" if bounds is None else bounds.tolist()
        raise ConfigError(
            f"{type(model).__name__} is called with boundaries {told}, and positions begin anew at "
            f"{begins.tolist()}: what stands between megapack's rows and the model drops "
            "cu_seqlens, so attention would cross documents. Run Megatron-LM's script by python -m "
            "megapack.integrations.hosts.megatron; elsewhere hand packed_seq_params to the model "
            "(megapack.integrations.hosts.megatron.to_packed_seq_params)"
        )
    return bool(begins.numel())
