"""Probe the first batch of a training run: ``watch`` in a script, ``LeakCallback`` in a trainer.

    watch(model)                     # one line before the loop; the first forward pass is probed

    with watch(model) as watched:    # or for a block, or @watch(model) on a function
        trainer.train()
    print(watched.report)

    Trainer(..., callbacks=[LeakCallback()])      # transformers, TRL, Lightning

The probe runs inside of the first forward pass in training mode, with the arguments of this pass.
It does not change gradients, buffers or random states. A leak raises LeakError.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megapack.calls import checked_call
from megapack.errors import MegapackWarning
from megapack.probe.call import unwrapped
from megapack.probe.detector import probe
from megapack.probe.report import LeakError, Report


class watch(ContextDecorator):  # noqa: N801  # read as a function, like contextlib's own
    """Probe the first forward pass of a model in training; usable as a call, ``with`` or decorator.

    Args:
        model: the module that the training loop calls; of several, the one called first is probed.
        on_leak: ``raise`` LeakError, or ``warn`` and continue; the warning is the report, or the
            reason why the batch cannot be probed.
        boundaries .. gradients: see ``probe``.
    """

    report: Report | None = None
    """Result; None until a forward pass ran in training mode."""

    @checked_call
    def __init__(
        self,
        *model: nn.Module,
        on_leak: Literal["raise", "warn"] = "raise",
        boundaries: Any = None,
        loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
        gradients: bool = True,
    ) -> None:
        self._on_leak = on_leak
        self._options: dict[str, Any] = {
            "boundaries": boundaries,
            "loss": loss,
            "gradients": gradients,
        }
        self._hooks = [self._hook(module) for module in model]

    def _hook(self, module: nn.Module) -> Any:
        # Hooks of a compiled module would be compiled with it.
        hook = torch.compiler.disable(self._probe)  # type: ignore[no-untyped-call]
        # Register before the hooks of FSDP, which gather the parameters for the real pass.
        return module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def remove(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __enter__(self) -> watch:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self.remove()
        if self.report is None and error is None:
            warnings.warn(
                "the watched model ran no forward pass in training mode, so nothing was probed; "
                "watch the module that the training loop calls",
                MegapackWarning,
                stacklevel=2,
            )

    def _probe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self.remove()  # the probe's own passes must not call this hook again
        signature = inspect.signature(unwrapped(module).forward)
        batch = dict(signature.bind(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                batch |= batch.pop(name, {})
        whole = [value for value in batch.values() if isinstance(value, Mapping)]
        takes_batch = len(batch) == len(whole) == 1  # as one argument

        def call(_: Any, given: Any) -> Any:
            return module(given) if takes_batch else module(**given)

        try:
            given = whole[0] if takes_batch else batch
            self.report = probe(module, given, call=call, **self._options)
            self.report.raise_if_leaking()
        except LeakError as error:
            if self._on_leak == "raise":
                raise
            warnings.warn(str(error), MegapackWarning, stacklevel=2)


class LeakCallback:
    """Callback of transformers' Trainer, TRL's trainers and Lightning: ``watch`` when training
    begins. Options are those of ``watch``.

    Trainers call their callbacks by name; all other events do nothing here. In Lightning, the
    module that ``training_step`` calls is watched: the LightningModule, or a direct child of it.
    """

    @checked_call
    def __init__(
        self,
        *,
        on_leak: Literal["raise", "warn"] = "raise",
        boundaries: Any = None,
        loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
        gradients: bool = True,
    ) -> None:
        self._options: dict[str, Any] = {
            "on_leak": on_leak,
            "boundaries": boundaries,
            "loss": loss,
            "gradients": gradients,
        }
        self._watched: watch | None = None

    @property
    def report(self) -> Report | None:
        """Result; None until the first forward pass."""
        return self._watched.report if self._watched else None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Watch the model of a transformers or TRL trainer."""
        del args, state, control
        self._watched = watch(model, **self._options)

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        """Watch the LightningModule, and its children."""
        del trainer
        self._watched = watch(module, *module.children(), **self._options)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop watching."""
        if self._watched is not None:
            self._watched.__exit__(None)

    state_key = "megapack.probe.LeakCallback"

    def __getattr__(self, event: str) -> Callable[..., None]:
        if not event.startswith(("on_", "setup", "teardown", "state_dict", "load_state_dict")):
            raise AttributeError(f"LeakCallback has no attribute {event!r}")
        return lambda *_, **__: None
