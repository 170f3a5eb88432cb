"""Router replay: train a mixture of experts with experts that were chosen earlier.

- ``record_routes``: record which experts the tokens of a forward pass choose
- ``replay_routes``: make the tokens of a forward pass use recorded experts
- ``check_replay``: check at startup that an architecture can replay routes

In reinforcement learning, the model that generated a text and the trained model choose slightly
different experts for the same tokens, because kernels and weights differ. With replay, the trained
model uses the experts chosen during generation; its router computes their weights (normalized to a
sum of 1 here)::

    logits of a token        1.0   3.0   2.0   0.5
    softmax                  .09   .63   .23   .05
    the token's own choice   experts 1 and 2, weights .73 and .27
    recorded                 experts 2 and 3, weights .82 and .18

So gradients reach the router and the experts as if the routes were an input of the model. The
load-balancing loss, if there is one, still counts the router's own choices, which it balances.

Example, also with activation checkpointing (the recomputation replays the same routes)::

    with record_routes(model) as recording:
        model(**inputs)
    routes = recording.routes()                      # int16 (tokens, layers, top_k)
    with replay_routes(model, routes):
        loss = model(**inputs).loss
    loss.backward()

A router is a module that chooses ``top_k`` of ``num_experts`` by ``topk`` over a matrix of scores,
(tokens, experts); all such routers of transformers compute weights from the chosen scores. While
one runs, ``topk`` returns the recorded experts with their scores.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megapack.attention.model_check import Build, tiny_reference
from megapack.attention.tiny_model import VOCABULARY, plain_arguments
from megapack.errors import ConfigError, DataError

COLUMN = "routes"  # of a dataset and of batches: (layers, top_k) per token
MOST_EXPERTS = 1 << 15  # ids are int16


class _Choice(TorchFunctionMode):
    """Replace the choice of experts inside a router's forward by recorded experts.

    Attributes:
        routes: (tokens, top_k) expert ids; negative: the token keeps its own choice; None: all
            tokens do.
        experts, scores: chosen experts and their scores, (tokens, top_k); None before the choice.
    """

    def __init__(self, router: nn.Module, routes: Tensor | None) -> None:
        super().__init__()
        self.router: Any = router
        self.routes = routes
        self.experts: Tensor | None = None
        self.scores: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk" or args[0].dim() != 2:
            return result
        scores, num_groups = args[0], getattr(self.router, "num_group", None)
        experts = result.indices
        if scores.shape[1] >= self.router.num_experts and experts.shape[1] == self.router.top_k:
            if self.routes is not None:
                if len(self.routes) != len(scores):
                    raise DataError(
                        f"there are routes for {len(self.routes)} tokens, but the forward pass has "
                        f"{len(scores)}: replay the routes that belong to this batch"
                    )
                experts = _replaced(experts, self.routes)
                result = _with_scores(scores, experts)
            self.experts, self.scores = experts, result.values
        elif self.routes is not None and scores.shape[1] == num_groups:
            # Routers limited to groups of experts mask all other groups: choose the recorded ones.
            groups = self.routes // (self.router.num_experts // num_groups)
            result = _with_scores(scores, _replaced(experts, groups))
        return result


def _replaced(chosen: Tensor, recorded: Tensor) -> Tensor:
    """Return the recorded numbers; where one is negative, return the chosen number instead. Both
    are (tokens, any width); the narrower one is repeated to the larger width."""
    width = max(chosen.shape[1], recorded.shape[1])
    columns = torch.arange(width, device=chosen.device)
    chosen, recorded = (part[:, columns % part.shape[1]] for part in (chosen, recorded))
    return torch.where((recorded < 0).any(1, keepdim=True), chosen, recorded)


def _with_scores(scores: Tensor, chosen: Tensor) -> Any:
    return torch.return_types.topk((scores.gather(1, chosen), chosen))


class _Router:
    """Forward of a router module that records or replays its choices.

    It replaces the module's ``forward`` permanently, because a checkpointed layer runs again in the
    backward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.forward = module.forward
        self.routes: Tensor | None = None
        self.choice: _Choice | None = None  # of the last recorded or replayed forward pass
        self.recording = False
        self.replayed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.routes is None and self.replayed and _in_backward():
            raise RuntimeError(
                f"{type(self.module).__name__} runs again in the backward pass, but the routes of "
                "its forward pass are gone: use the activation checkpointing "
                "of transformers (model.gradient_checkpointing_enable), or none"
            )
        if not _in_backward():
            self.replayed = self.routes is not None
        if self.routes is None and not self.recording:
            return self.forward(*args, **kwargs)
        choice = _Choice(self.module, self.routes)
        with choice:
            result = self.forward(*args, **kwargs)
        if choice.experts is None:
            raise ConfigError(
                f"{type(self.module).__name__} did not choose {self.module.top_k} of "
                f"{self.module.num_experts} experts by topk over (tokens, experts), so its routes "
                "cannot be recorded or replayed"
            )
        self.choice = choice
        return result


def _in_backward() -> bool:
    if torch.compiler.is_compiling():  # autograd never recomputes a compiled layer
        return False
    return int(torch._C._current_graph_task_id()) != -1


class _Recompute:
    """Checkpoint function of a layer: the recomputation replays the routes of the forward pass."""

    def __init__(self, checkpoint: Callable[..., Any], routers: list[_Router]) -> None:
        self.checkpoint, self.routers = checkpoint, routers

    def __call__(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        routes = [router.routes for router in self.routers]
        return self.checkpoint(partial(self._run, routes, layer), *args, **kwargs)

    def _run(self, routes: list[Tensor | None], layer: Callable[..., Any], *args: Any) -> Any:
        former = [router.routes for router in self.routers]
        self._set(routes)
        try:
            return layer(*args)
        finally:
            self._set(former)

    def _set(self, routes: list[Tensor | None]) -> None:
        for router, of_router in zip(self.routers, routes, strict=True):
            router.routes = of_router


def open_routers(model: nn.Module) -> list[_Router]:
    """Return the routers of a model in the order of its layers, prepared for recording and replay.

    Raises:
        ConfigError: the model has no router that can be replayed, its routers differ in ``top_k``,
            or it has too many experts for int16.
    """
    modules: list[Any] = [module for module in model.modules() if _is_router(module)]
    if not modules:
        unknown = sorted({type(m).__name__ for m in model.modules() if _looks_like_router(m)})
        reason = (
            f"its {' and '.join(unknown)} chooses experts without topk"
            if unknown
            else "it has no router that chooses experts by topk"
        )
        raise ConfigError(f"{type(model).__name__}: routes cannot be replayed: {reason}")
    widths = {module.top_k for module in modules}
    most = max(module.num_experts for module in modules)
    if len(widths) > 1 or most > MOST_EXPERTS:
        raise ConfigError(
            f"{type(model).__name__}: routes cannot be replayed: its layers choose "
            f"{sorted(widths)} of up to {most} experts; a column needs the same number in every "
            f"layer, and expert ids below {MOST_EXPERTS}"
        )
    for module in modules:
        if not isinstance(module.forward, _Router):
            module.forward = _Router(module)
    return [module.forward for module in modules]


def _is_router(module: Any) -> bool:
    code = inspect.unwrap(type(module).forward).__code__
    counts = (getattr(module, name, None) for name in ("num_experts", "top_k"))
    return "topk" in code.co_names and all(isinstance(count, int) for count in counts)


def _looks_like_router(module: nn.Module) -> bool:
    return re.search(r"Router|Gat(e|ing)$", type(module).__name__) is not None


# ---- Record and replay ---------------------------------------------------------------------------


class Recording:
    """Choices of the last forward pass inside ``record_routes``."""

    def __init__(self, routers: list[_Router]) -> None:
        self._routers = routers

    def routes(self) -> Tensor:
        """Return the chosen experts, int16 (tokens, layers, top_k), on the model's device; layers
        without a router do not count. Raises RuntimeError before a forward pass."""
        return torch.stack([_chosen(r).experts for r in self._routers], dim=1).to(torch.int16)

    def scores(self) -> list[Tensor]:
        """Return the scores among which ``topk`` chose, (tokens, top_k) of every layer."""
        return [_chosen(router).scores for router in self._routers]


def _chosen(router: _Router) -> Any:
    if router.choice is None:
        raise RuntimeError(f"{type(router.module).__name__} has not run: call the model first")
    return router.choice


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Recording]:
    """Record the experts that tokens use in the forward passes of the ``with`` block. Raises
    ConfigError if the model has no such routers."""
    routers = open_routers(model)
    for router in routers:
        router.recording, router.choice = True, None
    try:
        yield Recording(routers)
    finally:
        for router in routers:
            router.recording = False


@contextmanager
def replay_routes(model: nn.Module, routes: Tensor) -> Iterator[None]:
    """Make tokens use recorded experts in the forward passes of the ``with`` block; the backward
    passes may come after it.

    Args:
        routes: expert ids, any integer dtype, (tokens, layers, top_k), also with a leading
            dimension of 1, in the order of ``Recording.routes``. A token with a negative id in a
            layer (padding, inserted tokens) chooses for itself.

    Raises:
        ConfigError: the model has no such routers, or a layer did not run its router.
        DataError: the shape is wrong, or an id is too large (on a GPU: a device assertion).
    """
    routers = open_routers(model)
    table = _checked(routes.long(), routers)
    module: Any
    for module in model.modules():
        recompute = vars(module).get("_gradient_checkpointing_func")
        if recompute is not None and not isinstance(recompute, _Recompute):
            within = [m.forward for m in module.modules() if isinstance(m.forward, _Router)]
            if within:
                module._gradient_checkpointing_func = _Recompute(recompute, within)
    for i, router in enumerate(routers):
        router.routes, router.choice = table[:, i], None
    try:
        yield
        for router in routers:
            if router.choice is None:
                raise ConfigError(
                    f"{type(router.module).__name__} did not run, so its routes were not replayed; "
                    "a kernel that replaces the whole block of experts cannot replay them"
                )
    finally:
        for router in routers:
            router.routes = router.choice = None


def routes_shape(model: nn.Module) -> tuple[int, int]:
    """Return the shape of a token's routes: (layers with a router, experts per token). Raises
    ConfigError if the model has no routers that can be replayed."""
    routers = open_routers(model)
    return len(routers), routers[0].module.top_k


def _checked(routes: Tensor, routers: list[_Router]) -> Tensor:
    shape = (len(routers), routers[0].module.top_k)
    rows = routes.flatten(0, -3) if routes.dim() > 2 else routes
    if rows.shape[1:] != shape:
        raise DataError(
            f"routes have shape {list(routes.shape)}; the model needs {list(shape)} (layers with "
            "experts, experts per token) per token: record them with the same architecture"
        )
    fits = (rows < min(router.module.num_experts for router in routers)).all()
    if fits.device.type != "cpu":  # do not wait for the device
        torch._assert_async(fits, "routes contain an expert id that is too large")
    elif not fits:
        raise DataError(
            f"routes contain expert {int(rows.max())}, and a layer has "
            f"{min(router.module.num_experts for router in routers)} experts: record them with the "
            "same architecture"
        )
    return rows


# ---- Check of an architecture --------------------------------------------------------------------


def check_replay(configuration: Any, build: Build) -> None:
    """Check on a tiny model that an architecture can replay routes.

    The model's own routes must reproduce its logits. If every token gets the routes of the first
    token, only those experts may have gradients, and no mask may have hidden their scores.

    Args:
        configuration: transformers configuration of the run.
        build: builds a float32 model from a configuration and an ``attn_implementation``.

    Raises:
        ConfigError: names the architecture and the reason.
    """
    with torch.random.fork_rng(devices=[]):
        _, model = tiny_reference(configuration, build, _fewer_choices)
        if problem := _replay_problem(model):
            raise ConfigError(
                f"architecture {configuration.model_type!r}: routes cannot be replayed: {problem}"
            )


def _fewer_choices(fields: Any) -> None:
    """Let tokens of a tiny model choose 2 of 4 experts. If the model limits the choice to groups of
    experts, let them choose from one of two groups."""
    for name, value in fields.to_dict().items():
        if re.search(r"experts_per_tok|^(moe_)?top_?k(_experts)?$|moe_k$", name) and value:
            setattr(fields, name, min(value, 2))
        elif re.search(r"^n_group$|^num_expert_group$", name) and value:
            setattr(fields, name, 2)


def _replay_problem(model: Any) -> str | None:
    """Return why a tiny model cannot replay routes; None: it can."""
    arguments = plain_arguments(torch.arange(24) * 5 % VOCABULARY)
    model.zero_grad()
    with torch.no_grad(), record_routes(model) as recording:
        logits = model(**arguments).logits
        routes = recording.routes()
        with replay_routes(model, routes):
            if not torch.allclose(model(**arguments).logits, logits, atol=1e-5):
                return "its own routes do not reproduce its logits"
    routes[:] = routes[0].clone()
    with record_routes(model) as recording, replay_routes(model, routes):
        model(**arguments).logits.square().sum().backward()
        scores = recording.scores()
    if any((~score.isfinite() | (score == 0)).any() for score in scores):
        return "its router hides scores of experts that it would not choose"
    for i, router in enumerate(open_routers(model)):
        used, chosen = _used_experts(model, router.module), set(routes[0, i].tolist())
        if used != chosen:
            name = type(router.module).__name__
            return f"with routes {sorted(chosen)}, {name} trains experts {sorted(used)}"
    return None


def _used_experts(model: nn.Module, router: Any) -> set[int]:
    """Return the experts of a router whose parameters have a gradient."""
    block = next(m for m in model.modules() if any(child is router for child in m.children()))
    weights = {id(parameter) for parameter in router.parameters()}
    used: set[int] = set()
    for module in block.modules():
        if isinstance(module, nn.ModuleList) and len(module) == router.num_experts:
            for i, expert in enumerate(module):
                if any(p.grad is not None and p.grad.any() for p in expert.parameters()):
                    used.add(i)
        for parameter in module.parameters(recurse=False):
            grad = parameter.grad
            stacked = len(parameter) == router.num_experts and parameter.dim() > 2
            if grad is not None and stacked and id(parameter) not in weights:
                used.update(grad.flatten(1).any(1).nonzero().flatten().tolist())
    return used
