"""``probe``: changes tokens of some documents and compares the outputs of the others.

    documents    | a a a a | b b b | c c c c c |     X: changed tokens
    pass 1       | a a a a | b b b | c c c c c |
    pass 2       | a a a a | X X X | c c c c c |     a and c must not change
    pass 3       | X X X X | b b b | X X X X X |     b must not change
    pass 4       | a a a a | b b b | c c c c c |     equal to pass 1 up to rounding; else dropout
    pass 5       | X X X X | b b b | c c c c c |     after a leak: source, affected documents
    alone                            c c c c c       must equal c in its row

Pass 4 also takes gradients: outputs of some documents must have none at tokens of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapack.calls import checked_call
from megapack.probe.boundaries import Documents, alone, groups, read_documents, tokens_of
from megapack.probe.call import (
    call_target,
    changed_batch,
    counted_ends,
    is_compiled,
    modules_of,
    narrow_head,
    uncut_list,
)
from megapack.probe.layers import (
    TOLERANCE,
    Call,
    Gradients,
    Recorder,
    differ,
    is_shifted,
    kind_of,
    largest,
    largest_change,
    names_of,
    per_token,
    reduce,
    rounding_errors,
    scaled,
    tensors,
)
from megapack.probe.report import Leak, LeakError, Report, merge

NEAR = 8  # documents whose exact source is computed
FEW = 8  # tokens at a document's begin or end that a convolution or a target reaches


@checked_call
def probe(
    target: Any,
    batch: Mapping[str, Any],
    *,
    boundaries: Any = None,
    loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
    gradients: bool = True,
    call: Callable[[Any, Mapping[str, Any]], Any] | None = None,
) -> Report:
    """Find the documents of a batch that depend on others, and the layers where that begins.

    Runs at most five forward passes of the batch, and three of single documents. Restores random
    states and buffers, and leaves gradients alone. If torch.distributed is initialized, all ranks
    must call it; each gets the findings of all ranks. Raises LeakError if nothing can be compared:
    no boundaries, one document, outputs that are random, not finite or independent of the tokens.

    Args:
        target: module or function of the batch. Its output is a tensor of hidden states, logits or
            losses per token, or contains such tensors; None on a pipeline stage without output.
        batch: tensors, with tokens ``(rows, row)`` or ``(tokens,)``. Ranks that share documents
            have their own tokens and name the documents by ids.
        boundaries: name in the batch or value: cu_seqlens, positions that restart, ids, lengths or
            a mask; None: those that the batch has.
        loss: maps output and batch to a loss per token or of the batch, to check what it counts.
        gradients: whether to check gradients, too.
        call: calls the target with a batch; None: ``target(**batch)`` for a module, with the
            arguments that it takes, else (also if it takes none of them) ``target(batch)``.
    """
    began = time.perf_counter()
    run = Passes(target, batch, boundaries=boundaries, loss=loss, call=call)
    leaks = run.leaks(gradients=gradients)
    return Report(
        leaks=tuple(leaks),
        forwards=run.forwards,
        seconds=time.perf_counter() - began,
        noise=run.allowed,
        documents=len(run.numbers),
        notes=tuple(run.notes),
    )


class Run:
    """Outputs of one pass, reduced and unreduced, its loss, the calls of modules, and the graph."""

    def __init__(
        self, raw: list[Tensor], calls: list[Call], graph: Gradients, loss: Tensor | None
    ) -> None:
        self.raw, self.calls, self.graph, self.loss = raw, calls, graph, loss
        found = [per_token(value, graph.documents) for value in raw if value.is_floating_point()]
        self.outputs = [reduce(value).cpu() for value in found if value is not None]
        self.shifted = any(is_shifted(value, graph.documents) for value in raw)
        self.tokens = [value for value in found if value is not None and value.requires_grad]

    def difference(self, other: Run, places: Tensor | None = None) -> Tensor:
        """Return the largest difference of every token's outputs from those of ``other`` (at
        ``places``)."""
        theirs = other.outputs if places is None else [x[places] for x in other.outputs]
        parts = [largest_change(a, b) for a, b in zip(self.outputs, theirs, strict=True)]
        return torch.stack(parts).amax(dim=0) if parts else torch.zeros(0)


# Changed tokens of a pass, bool (tokens,); the pass; tokens with comparable outputs, True: all.
Change: TypeAlias = tuple[Tensor, Run, Tensor | bool]


class Passes:
    """Forward passes of one batch, and their findings."""

    def __init__(
        self,
        target: Any,
        batch: Mapping[str, Any],
        *,
        boundaries: Any = None,
        loss: Any = None,
        call: Any = None,
        name: str = "the target",
    ) -> None:
        self.name = name
        self.target, self.batch, self.loss = target, dict(batch), loss
        self.call = call or call_target
        documents = read_documents(batch, boundaries)
        # Number the documents of all ranks from 0, without gaps.
        self.numbers = sorted({n for numbers in share(documents.numbers) for n in numbers})
        of_token = torch.searchsorted(torch.tensor(self.numbers), documents.of_token)
        self.of_token = of_token.masked_fill(documents.of_token < 0, -1)
        self.documents = replace(documents, of_token=self.of_token)
        self.recorder = Recorder(self.documents)
        self.moved = self.allowed = 0.0
        self.forwards = 0
        self.notes: list[str] = []
        self.calls: list[Call] = []
        self.losses = False  # True if an output is a loss per token
        self.compared = self.of_token >= 0

    def leaks(self, *, gradients: bool) -> list[Leak]:
        """Run all passes and return the leaks of all ranks."""
        if len(self.numbers) < 2:
            raise LeakError(f"documents of the batch: {len(self.numbers)}; the probe needs two")
        with self.recorder:
            return self._leaks(gradients=gradients)

    def _leaks(self, *, gradients: bool) -> list[Leak]:
        plain, padding = self.run(self.batch), self.of_token < 0
        halves = [~padding & (self.of_token % 2 == odd) for odd in (1, 0)]
        changes = [(half, self.run(self.changed(half | padding)), True) for half in halves]
        again = self.run(self.batch, seed=1, gradients=gradients, eager=True)
        self.measure(plain, changes, again)
        # Compiled code calls no hooks, and a pipeline's first pass has more calls, to learn shapes.
        # In both cases, look for the begin of a leak in the last pass.
        same_calls = len(plain.calls) == len(again.calls)
        base = plain if same_calls and not is_compiled(self.target) else again
        found = [x for change in changes for x in self.affected(plain, *change)]
        found = merge(share(found))  # then all ranks take the same gradients
        if gradients and found:
            found = [self.with_source(leak, again) for leak in found[:NEAR]] + found[NEAR:]
        elif gradients:
            found = self.gradient_leaks(again)
        if found:
            found = self.exact(found, base)
        elif len(self.numbers) > 2:
            # Two documents may both have odd or even numbers, and a choice of experts has no
            # gradient.
            changed = groups(len(self.numbers))[0][self.of_token] & (self.of_token >= 0)
            run = self.run(self.changed(changed), eager=True)
            found = merge(share(self.affected(base, changed, run)))
        if dist_size() > 1:
            self.notes.append("documents alone are not compared, because ranks may share them")
        elif not found:
            found = self.alone_leaks(base)
        if not any(leak.kind == "loss_mask" for leak in found):
            found += merge(share(self.counted_leaks(again)))
        self.end_iteration()
        return found

    def end_iteration(self) -> None:
        """Reset FSDP2: after a pass without a backward pass, or with one that raised, it may free
        parameters that the next training pass needs."""
        modules: Iterable[Any] = self.target.modules() if isinstance(self.target, nn.Module) else ()
        for module in modules:
            if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:
                module.reset_iter_state()

    @property
    def rounding(self) -> float:
        """Return the change of an output that rounding explains."""
        return self.allowed * self.moved

    # ---- Passes

    def run(
        self,
        batch: dict[str, Any],
        *,
        seed: int = 0,
        gradients: bool = False,
        eager: bool = False,
        documents: Documents | None = None,
    ) -> Run:
        """Run the target once; ``eager``: without compiled code, so that hooks see all modules."""
        documents = documents or self.documents
        self.end_iteration()
        self.forwards += documents is self.documents
        cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = [torch.cuda.current_device()] if cuda else []
        compiled = is_compiled(self.target)
        stance = torch.compiler.set_stance("force_eager") if compiled and eager else nullcontext()
        no_sync = getattr(self.target, "no_sync", nullcontext) if gradients else nullcontext
        graph = Gradients(documents)
        if gradients and batch[name := tokens_of(batch)].is_floating_point():
            batch = {**batch, name: batch[name].detach().requires_grad_()}
            graph.leaves.append(batch[name])
        head = nullcontext(batch) if compiled or self.loss else narrow_head(self.target, batch)
        with torch.random.fork_rng(devices), stance, no_sync(), head as given:
            torch.manual_seed(seed)
            if compiled and not eager:
                # A hook would recompile everything in every pass; only buffers must be saved.
                self.recorder.save(modules_of(self.target))
                recording: Any = nullcontext([])
            else:
                recording = self.recorder.calls(documents, graph if gradients else None)
            with torch.set_grad_enabled(gradients), recording as calls:
                output = self.call(self.target, dict(given))
                loss = self.loss(output, given) if self.loss else getattr(output, "loss", None)
        fields = [output] if loss is None or loss.dim() == 0 else [output, loss]
        raw = list(tensors(fields))
        if output is not None and all(per_token(value, documents) is None for value in raw):
            raw += tensors(self.recorder.last)  # a fused loss returns no logits
        run = Run(raw, calls, graph, loss)
        self.recorder.dtypes |= {value.dtype for value in run.raw}
        if not gradients:
            run.raw = run.tokens = []
        return run

    def changed(self, changed: Tensor) -> dict[str, Any]:
        """Return the batch with other tokens in the changed documents."""
        return changed_batch(self.batch, changed, self.documents)

    def measure(self, plain: Run, changes: Sequence[Change], again: Run | None = None) -> None:
        """Compare noise with changes. Raises LeakError on all ranks if the outputs cannot
        be compared."""
        real = self.of_token >= 0
        differences = [(changed, run.difference(plain)) for changed, run, _ in changes]
        noise = (again or plain).difference(plain)
        finite = all(bool((d.isfinite() | ~real[: len(d)]).all()) for _, d in differences)
        facts = (
            max(largest(d, changed) for changed, d in differences),
            largest(noise, real),
            max(TOLERANCE.get(one, 1e-3) for one in {*self.recorder.dtypes, torch.float32}),
            not finite,
            len(plain.outputs),
        )
        ranks = [rank[0] for rank in share([facts])]
        moved, equal, tolerance, infinite, outputs = map(max, zip(*ranks, strict=True))
        if not outputs:
            raise LeakError(
                f"{self.name} returns no float tensor of {self.documents.rows} x "
                f"{self.documents.row} tokens, so there is nothing to compare; return losses, "
                "logits or hidden states of all tokens, in the order of the batch"
            )
        if infinite:
            raise LeakError(
                f"{self.name} gives outputs that are not finite; check its weights and precision"
            )
        if moved == 0:
            raise LeakError(
                f"{self.name} gives the same outputs when tokens change: they do not depend on the "
                "batch that the probe passes, so it cannot check anything"
            )
        if equal / moved > tolerance:
            raise LeakError(
                f"two equal passes differ by {equal / moved:.2g} of a change, but rounding "
                f"explains only {tolerance:.2g}: dropout or another random layer is on, or the "
                "model keeps a state between calls (a cache). Call eval(), set the probability to "
                "0, or clear the state in call="
            )
        losses = [output[real] for output in plain.outputs if output.shape[1] == 1]
        self.losses, mask = bool(losses), self.batch.get("loss_mask")
        whole = all(bool((loss != 0).all()) for loss in losses)
        if losses and whole and isinstance(mask, Tensor) and mask.numel() == len(real):
            # If a model masks no loss, its caller does so, as in Megatron.
            self.compared &= mask.flatten().cpu() != 0
        self.moved, self.allowed = moved, max(tolerance, 4 * equal / moved)
        # Ranks of a pipeline: those without outputs are earlier stages.
        self.is_pipeline = any(facts[-1] == 0 for facts in ranks)

    # ---- Findings

    def exact(self, found: list[Leak], base: Run) -> list[Leak]:
        """Change only the document from which the first leak may come, and compare with ``base``:
        then the source, the layer and the kind of its leaks are exact."""
        changed = self.of_token.eq(found[0].from_document or 0)
        run = self.run(self.changed(changed), eager=True)
        exact = merge(share(self.affected(base, changed, run)))
        if not exact and found[0].kind == "gradient":
            return [self.seen_forward(leak, base, run, changed) for leak in found]
        if not exact and bool((self.of_token < 0).any()):
            return [replace(leak, from_document=None) for leak in found]  # padding may be read
        if not exact:
            return found
        reached = {leak.to_document for leak in exact}
        rest = [x for x in found if x.to_document not in reached and x.kind != "gradient"]
        first = exact[0]
        rest = [x if x.layer else replace(x, layer=first.layer, kind=first.kind) for x in rest]
        return sorted(exact + rest, key=lambda leak: (leak.to_document, leak.rank or 0))

    def seen_forward(self, leak: Leak, base: Run, run: Run, changed: Tensor) -> Leak:
        """Return a leak of gradients; its kind is that of its layer if the forward pass leaks, too,
        even by so little that rounding could explain it (small effects in bfloat16)."""
        names = names_of(self.target, base.calls)
        call = next((x for x in base.calls if names.get(id(x.module)) == leak.layer), None)
        own = (self.of_token == leak.to_document) & ~changed
        if dist_size() > 1 or call is None or not largest(run.difference(base), own):
            return leak
        return replace(leak, kind=kind_of(call, leak.layer or ""))

    def affected(
        self, plain: Run, changed: Tensor, run: Run, same: Tensor | bool = True
    ) -> list[Leak]:
        """Return one leak per document whose outputs change at ``same`` tokens although its own
        tokens do not."""
        call, local = self.origin(plain, run, changed)
        # Ranks that share documents may hold no token of those that changed.
        every = share(sorted({*self.of_token[changed].tolist()}))
        sources = sorted({number for rank in every for number in rank})
        if not plain.outputs:  # a pipeline stage: only the last one knows the size
            return [] if call is None else [self.leak(call, -1, -1, 0, 0.0)]
        difference = run.difference(plain) / self.moved
        leaking = (difference > self.allowed) & ~changed & same & self.compared
        leaks = []
        for number in sorted({*self.of_token[leaking].tolist()}):
            places = (leaking & (self.of_token == number)).nonzero()[:, 0]
            earlier = [n for n in sources if n < number]
            later = [n for n in sources if n > number]
            # If only last tokens change, their labels or targets belong to the next document.
            last = int(self.documents.places(number)[-1])
            reach = min(FEW, len(self.documents.places(number)) // 2)
            at_end = bool(later) and int(places[0]) > last - reach
            source = min(later) if at_end or not earlier else earlier[-1]
            size = float(difference[places].max())
            position = int(places[0])
            leak = self.leak(call, source, number, position, size, local=local, at_end=at_end)
            leaks.append(leak)
        return leaks

    def leak(
        self,
        call: Call | None,
        source: int | None,
        to: int,
        position: int,
        size: float,
        *,
        kind: str = "",
        **effect: bool,
    ) -> Leak:
        """Return a leak of this rank that begins in a call of a module."""
        layer = None
        if call is not None:
            layer = names_of(self.target, self.calls).get(id(call.module), "")
        forward = source is None or source < to
        effect |= {"alone": source is None, "losses": self.losses}
        rank = dist.get_rank() if dist_size() > 1 else None
        return Leak(
            kind=kind or kind_of(call, layer or "", **effect),
            from_document=source,
            to_document=to,
            direction="forward" if forward else "backward",
            first_position=position,
            size=size,
            noise=self.allowed,
            layer=layer,
            rank=rank,
            stage=rank if self.is_pipeline else None,
        )

    def origin(self, plain: Run, run: Run, changed: Tensor) -> tuple[Call | None, bool]:
        """Return the first call of a module whose outputs leak while its inputs do not, and whether
        only first tokens of documents leak there."""
        kept = ~changed & (self.of_token >= 0)

        def leaking(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
            where = torch.zeros_like(kept)
            for a, b in zip(ours, theirs, strict=False):
                difference = largest_change(a.cpu(), b.cpu())
                scale = largest(difference, changed) or float(b.abs().max())
                where |= kept & (difference > self.allowed * scale)
            return where

        for ours, theirs in self.pairs(plain, run):
            where = leaking(ours.outputs, theirs.outputs)
            inputs = ours.inputs + ours.ids, theirs.inputs + theirs.ids
            if where.any() and not leaking(*inputs).any():
                places = [self.documents.places(n) for n in {*self.of_token[where].tolist()}]
                long = [p for p in places if len(p) > FEW]
                return ours, bool(long) and not any(where[p[FEW:]].any() for p in long)
        return None, False

    def pairs(self, plain: Run, run: Run) -> Iterator[tuple[Call, Call]]:
        """Yield the calls of ``run`` and those of ``plain``."""
        self.calls = plain.calls
        known = {(call.module, call.number): call for call in plain.calls}
        for call in run.calls:
            if other := known.get((call.module, call.number)):  # no call: an expert without tokens
                yield call, other

    def alone_leaks(self, base: Run) -> list[Leak]:
        """Compare documents alone with the same ones in their row: the shortest, the longest, and
        one inside a row, at a first position with few factors of two."""
        numbers = sorted(self.documents.numbers, key=lambda n: len(self.documents.places(n)))
        begins = {n: int(self.documents.places(n)[0]) % self.documents.row for n in numbers}
        # Sizes of chunks and windows are powers of two: odd first positions show them.
        inner = sorted(filter(begins.get, numbers), key=lambda n: begins[n] & -begins[n])
        leaks = []
        for number in dict.fromkeys([numbers[0], numbers[-1], *inner[:1]]):
            places = self.documents.places(number)
            one = Documents(torch.zeros(len(places), dtype=torch.int64), 1, len(places))
            try:
                batch = alone(self.batch, self.documents, places)
                run = self.run(batch, eager=True, documents=one)
                difference = run.difference(base, places) / self.moved
            except Exception as error:
                self.notes.append(
                    f"documents alone are not compared: {type(error).__name__}: {error}"
                )
                break
            compared, allowed = self.compared[places], self.allowed
            compared[-1] &= not run.shifted
            if bool((difference > allowed)[compared].any()):
                allowed = max(allowed, self.rounding_alone(run, batch, one))
            leaking = ((difference > allowed) & compared).nonzero()[:, 0]
            if not len(leaking):
                continue
            leak = partial(differ, places=places, allowed=allowed)

            # Integer inputs (positions) may differ; then the difference begins in their embedding.
            first = (
                (ours, theirs)
                for ours, theirs in self.pairs(base, run)
                if leak(ours.outputs, theirs.outputs) and not leak(ours.inputs, theirs.inputs)
            )
            call, other = next(first, (None, None))
            made, kept = (call, other) if call and other else (run, base)
            one_factor = scaled(made.outputs, [value[places] for value in kept.outputs])
            position, size = int(places[leaking[0]]), float(difference.max())
            leak_alone = self.leak(call, None, number, position, size, scaled=one_factor)
            uncut = [name for name in batch if uncut_list(batch[name], self.batch[name])]
            if leak_alone.kind == "expert_capacity":  # seen above unless rounding decides a tie
                self.notes.append(
                    f"document {number} gets other experts if it runs alone, in {leak_alone.layer}"
                )
            elif uncut:
                self.notes.append(
                    f"document {number} alone is not compared, because the probe cannot cut "
                    f"{', '.join(uncut)} to it; pass cu_seqlens, position ids, ids or lengths"
                )
            else:
                leaks.append(leak_alone)
        return leaks

    def rounding_alone(self, run: Run, batch: dict[str, Any], one: Documents) -> float:
        """Return the difference that rounding explains between a document and itself in a row.

        Kernels sum in another order in a row. In half precision, this may change a selection, such
        as the top k. So measure the effect of added rounding errors on the document alone.
        """
        if not self.recorder.dtypes & {torch.bfloat16, torch.float16}:
            return 0.0
        largest_error = 0.0
        for seed in range(2):
            with rounding_errors(seed):
                moved = self.run(batch, eager=True, documents=one).difference(run) / self.moved
            largest_error = max(largest_error, float(moved.max()))
        return 2 * largest_error

    def reached(self, again: Run, own: Tensor) -> Tensor:
        """Return the gradient of the outputs of ``own`` documents at the tokens of every other one,
        as a fraction of that at their own tokens, 0 if rounding explains it: both (documents,).

        All ranks must call it, also those without tokens of ``own``. Zeros if autograd raises.
        """
        size, error = torch.zeros(len(own)), None
        real = self.of_token >= 0
        try:
            if not again.tokens or not again.graph.leaves:
                raise LeakError(
                    "the outputs have no gradient at the embedded tokens; the target must consist "
                    "of modules, without no_grad, inference_mode or vmap"
                )
            sizes = again.graph.sizes(again.tokens, real & own[self.of_token], again.graph.leaves)
            of_token = torch.stack(sizes).amax(dim=0)
            size.scatter_reduce_(0, self.of_token[real], of_token[real], "amax")
            if not size.isfinite().all():
                raise LeakError("they are not finite, as they would be in training")
        except Exception as raised:
            name = "" if isinstance(raised, LeakError) else f"{type(raised).__name__}: "
            error = f"gradients are not checked: {name}{raised}"
        ranks = [rank[0] for rank in share([(error, size)])]
        errors = [error for error, _ in ranks if error]
        if errors:
            self.notes += [error for error in errors[:1] if error not in self.notes]
            return torch.zeros(len(own))
        size = torch.stack([size for _, size in ranks]).amax(dim=0)
        size /= largest(size, own) or 1.0
        return size.masked_fill(own | (size <= self.allowed), 0)

    def with_source(self, leak: Leak, again: Run) -> Leak:
        """Return the leak with its source: where the affected document's gradient is largest."""
        size = self.reached(again, torch.arange(len(self.numbers)) == leak.to_document)
        if not size.any():  # the dependence has no gradient: a choice of experts, a label
            return leak
        source = int(size.argmax())
        forward = source < leak.to_document
        return replace(leak, from_document=source, direction="forward" if forward else "backward")

    def gradient_leaks(self, again: Run) -> list[Leak]:
        """Return leaks that gradients show; all ranks take the same ones."""
        numbers = torch.arange(len(self.numbers))
        leaks: dict[tuple[int, int], Leak] = {}
        for own in groups(len(numbers)):
            size = self.reached(again, own)
            if not size.any():
                continue
            source, candidates = int(size.argmax()), numbers[own]
            while len(candidates) > 1:  # bisect the documents that depend on the source
                half = candidates[: len(candidates) // 2]
                half_depends = self.reached(again, torch.isin(numbers, half))[source]
                candidates = half if half_depends else candidates[len(half) :]
            to = int(candidates)
            size = self.reached(again, numbers == to)
            if size[source]:
                one, other = self.of_token == to, (self.of_token >= 0) & (self.of_token != to)
                module = again.graph.origin(again.tokens, one, other, self.allowed)
                self.calls = again.calls
                call = next((call for call in again.calls if call.module is module), None)
                place = next(iter(self.documents.places(to).tolist()), -1)
                leaks[source, to] = self.leak(
                    call, source, to, place, float(size[source]), kind="gradient"
                )
        # Ranks may hold parts of documents: each knows the place, the layer, both or neither.
        ranks = share(list(leaks.values()))
        return [
            replace(
                max(same, key=lambda leak: leak.first_position),
                layer=next((leak.layer for leak in same if leak.layer is not None), None),
            )
            for same in zip(*ranks, strict=True)
        ]

    def counted_leaks(self, again: Run) -> list[Leak]:
        """Return leaks of a loss that counts labels of another document."""
        labeled = self.loss is not None or self.batch.get("labels") is not None
        wrong = counted_ends(self.batch, self.documents, again, labeled=labeled)
        after = [(place, int(self.of_token[place + 1])) for place in wrong]
        return [
            self.leak(None, source, int(self.of_token[place]), place, 1.0, kind="loss_mask")
            for place, source in after
        ]


# ---- Ranks


def dist_size() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def share(value: list[Any]) -> list[list[Any]]:
    """Return the lists of all ranks."""
    if dist_size() == 1:
        return [value]
    every: list[Any] = [None] * dist_size()
    dist.all_gather_object(every, value)
    return every
