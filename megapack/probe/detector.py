"""``probe``: changes tokens of some documents and looks at the others.

    documents    | a a a a | b b b | c c c c c |     X: changed tokens
    pass 1, 2    | a a a a | b b b | c c c c c |     equal up to rounding, or dropout is on
    pass 3       | a a a a | X X X | c c c c c |     a and c must not change
    pass 4       | X X X X | b b b | X X X X X |     b must not change
    pass 5       | X X X X | b b b | c c c c c |     after a leak: which document leaks, and to where
    alone                            c c c c c       equal to c in its row

Pass 2 also takes gradients: outputs of some documents must have none at tokens of the others.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megapack.probe.boundaries import Documents, alone, read_documents, tokens_of
from megapack.probe.layers import TOLERANCE, Call, Recorder, kind_of, names_of, per_token, reduce
from megapack.probe.layers import tensors
from megapack.probe.report import Leak, LeakError, Report

HEAD = 256  # logits per token that are computed
ALONE = 3  # documents that also run alone


def probe(
    target: Any,
    batch: Mapping[str, Any],
    *,
    boundaries: Any = None,
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
    call: Callable[[Any, Mapping[str, Any]], Any] | None = None,
) -> Report:
    """Return which documents of a batch depend on others, and where that begins.

    Runs at most five forward passes of the batch and three of single documents. Random numbers and
    buffers are restored. Raises LeakError if the probe cannot tell: no boundaries, one document,
    outputs that are random, not finite, or do not depend on the tokens.

    Args:
        target: module or function of the batch. Its output is a tensor of hidden states, logits or
            losses per token, or contains such tensors.
        batch: tensors, with tokens ``(rows, row)`` or ``(tokens,)``.
        boundaries: name in the batch or value: cu_seqlens, positions that restart, ids, lengths or
            a mask; None: those that the batch has.
        loss: maps output and batch to a loss, for gradients; None: random sums of the outputs.
        gradients: whether to check gradients, too.
        tolerance: change that rounding explains, as a fraction of the change in documents whose
            tokens changed; None: by dtype.
        call: calls the target with a batch; None: ``target(**batch)`` for a module, with the
            arguments that it takes, else ``target(batch)``.
    """
    return _Probe(target, batch, boundaries, loss, gradients, tolerance, call).report()


class _Run:
    """Outputs and calls of one pass."""

    def __init__(self, outputs: list[Tensor], calls: list[Call]) -> None:
        self.outputs, self.calls = outputs, calls


class _Probe:
    def __init__(
        self,
        target: Any,
        batch: Mapping[str, Any],
        boundaries: Any,
        loss: Any,
        gradients: bool,
        tolerance: float | None,
        call: Any,
    ) -> None:
        self.began = time.perf_counter()
        self.target, self.batch, self.loss = target, dict(batch), loss
        self.call = call or _call
        self.documents = read_documents(batch, boundaries)
        self.numbers = self.documents.numbers
        if len(self.numbers) < 2:
            raise LeakError(f"the batch has {len(self.numbers)} documents; a probe needs two")
        self.recorder = Recorder(self.documents)
        self.given_tolerance, self.gradients = tolerance, gradients
        self.forwards = 0
        self.notes: list[str] = []

    def report(self) -> Report:
        plain = self.run(self.batch)
        again = self.run(self.batch, seed=1)
        of_token = self.documents.of_token
        leaks: list[Leak] = []
        scale = [torch.zeros(())] * len(plain.outputs)
        affected: dict[int, Tensor] = {}
        changes = []
        for parity in (1, 0):
            changed = (of_token % 2 == parity) & (of_token >= 0)
            changes.append((changed, self.run(self.changed(changed))))
        moved = max(_largest(_difference(r.outputs, plain.outputs), c) for c, r in changes)
        if moved == 0:
            raise LeakError(
                "outputs do not change when tokens change, so the probe cannot check anything"
            )
        noise = _largest(_difference(again.outputs, plain.outputs), of_token >= 0) / moved
        allowed = max(self.tolerance, 4 * noise)
        if noise > self.tolerance:
            raise LeakError(
                f"two equal passes differ by {noise:.2g} of a change, but rounding explains only "
                f"{self.tolerance:.2g}: dropout or another random layer is on; call eval(), or set "
                "its probability to 0"
            )
        for changed, run in changes:
            leaks += self.leaks_of(plain, run, changed, moved, allowed)
        if leaks and len(self.numbers) > 2:
            leaks = self.single(plain, leaks, moved, allowed)
        return Report(
            leaks=tuple(leaks),
            forwards=self.forwards,
            seconds=time.perf_counter() - self.began,
            noise=allowed,
            documents=len(self.numbers),
            notes=tuple(self.notes),
        )

    @property
    def tolerance(self) -> float:
        """Fraction of a change that rounding explains."""
        if self.given_tolerance is not None:
            return self.given_tolerance
        return max(TOLERANCE.get(dtype, 1e-3) for dtype in self.recorder.dtypes or [torch.float32])

    # ---- Passes

    def run(
        self, batch: dict[str, Any], *, seed: int = 0, documents: Documents | None = None
    ) -> _Run:
        """Run the target without gradients."""
        documents = documents or self.documents
        self.forwards += documents is self.documents
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices), torch.no_grad(), _narrow_head(self.target):
            torch.manual_seed(seed)
            with self.recorder.calls(documents) as calls:
                output = self.call(self.target, dict(batch))
        outputs = []
        for value in tensors(_fields(output)):
            tokens = per_token(value, documents)
            if tokens is not None:
                self.recorder.dtypes.add(value.dtype)
                outputs.append(reduce(tokens).cpu())
        if not outputs:
            raise LeakError(
                f"the target returns no float tensor per token of {documents.rows} x "
                f"{documents.row} tokens"
            )
        return _Run(outputs, calls)

    def changed(self, changed: Tensor) -> dict[str, Any]:
        """Return the batch with other tokens, and labels that follow them."""
        name = tokens_of(self.batch)
        tokens = self.batch[name]
        where = changed.to(tokens.device)
        if tokens.is_floating_point():
            return {
                **self.batch,
                name: torch.where(where.view(*tokens.shape[:-1], 1), -tokens, tokens),
            }
        where = where.view_as(tokens)
        return {**self.batch, name: torch.where(where, _other(tokens), tokens)}

    # ---- Findings

    def leaks_of(
        self, plain: _Run, run: _Run, changed: Tensor, moved: float, allowed: float
    ) -> list[Leak]:
        """Return the leaks from changed documents into the others, one per document."""
        of_token = self.documents.of_token
        difference = _difference(run.outputs, plain.outputs) / moved
        if not bool((difference.isfinite() | (of_token < 0)).all()):
            raise LeakError("outputs are not finite; check weights and precision")
        leaking = (difference > allowed) & ~changed & (of_token >= 0)
        if not leaking.any():
            return []
        module, layer = self.origin(plain, run, changed, allowed)
        sources = of_token[changed].unique().tolist()
        leaks = []
        for number in of_token[leaking].unique().tolist():
            places = (leaking & (of_token == number)).nonzero()[:, 0]
            earlier = [n for n in sources if n < number]
            forward = bool(earlier)
            leaks.append(
                Leak(
                    kind=kind_of(module, layer or "", alone=False),
                    from_document=earlier[-1] if forward else min(n for n in sources if n > number),
                    to_document=number,
                    direction="forward" if forward else "backward",
                    first_position=int(places[0]),
                    size=float(difference[places].max()),
                    noise=allowed,
                    layer=layer,
                )
            )
        return leaks

    def single(self, plain: _Run, leaks: list[Leak], moved: float, allowed: float) -> list[Leak]:
        """Change only one document, from which the first leak may come."""
        first = leaks[0]
        source = first.from_document
        changed = self.documents.of_token == source
        exact = self.leaks_of(plain, self.run(self.changed(changed)), changed, moved, allowed)
        reached = {leak.to_document for leak in exact}
        return exact + [leak for leak in leaks if leak.to_document not in reached]

    def origin(
        self, plain: _Run, run: _Run, changed: Tensor, allowed: float
    ) -> tuple[nn.Module | None, str | None]:
        """Return the first module whose outputs leak while its inputs do not."""
        names = names_of(self.target, plain.calls)
        kept = ~changed & (self.documents.of_token >= 0)

        def leaks(ours: list[Tensor], theirs: list[Tensor]) -> bool:
            for a, b in zip(ours, theirs, strict=True):
                difference = _difference([a.cpu()], [b.cpu()])
                largest = _largest(difference, changed)
                if _largest(difference, kept) > allowed * (largest or float(b.abs().max())):
                    return True
            return False

        if len(plain.calls) != len(run.calls):
            return None, None
        for before, after in zip(plain.calls, run.calls, strict=True):
            if leaks(after.outputs, before.outputs) and not leaks(after.inputs, before.inputs):
                return after.module, names.get(id(after.module), type(after.module).__name__)
        return None, None


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """Return the largest difference of every token, (tokens,)."""
    parts = [
        (a - b).masked_fill(a == b, 0).abs().amax(dim=1) for a, b in zip(ours, theirs, strict=True)
    ]
    return torch.stack(parts).amax(dim=0)


def _largest(difference: Tensor, where: Tensor) -> float:
    return float(difference[where].max()) if where.any() else 0.0


def _other(tokens: Tensor) -> Tensor:
    """Return a different id for each token, within the range of ids that occur (plus a neighbor if
    only one occurs)."""
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        low, high = (0, 1) if low <= 1 else (low - 1, low)
    return low + (tokens - low + 1) % (high - low + 1)


def _call(target: Any, batch: dict[str, Any]) -> Any:
    """Call a module with the arguments that it takes, or a function with the batch."""
    if not isinstance(target, nn.Module):
        return target(batch)
    inner = getattr(target, "module", getattr(target, "_orig_mod", target))
    takes = inspect.signature(inner.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        batch = {name: value for name, value in batch.items() if name in takes}
    return target(**batch)


def _fields(output: Any) -> Any:
    """Return what an output contains: a ModelOutput is a mapping, other objects have attributes."""
    if isinstance(output, Tensor | dict | list | tuple):
        return output
    return [
        getattr(output, name)
        for name in ("logits", "last_hidden_state", "losses")
        if hasattr(output, name)
    ]


@contextmanager
def _narrow_head(target: Any) -> Iterator[None]:
    """Let the head of a language model compute only its first logits."""
    get = getattr(target, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if type(head) is not nn.Linear or head.out_features <= HEAD:
        yield
        return

    def forward(x: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias[:HEAD]
        return nn.functional.linear(x, head.weight[:HEAD], bias)

    head.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward
