"""Call a target with a batch: choose arguments, change tokens, compute few logits, find labels.

tokens   5 6 7 8 9      changed_batch: other ids in changed documents; labels that
labels   6 7 _ 9 _      repeat tokens change with them
counted  1 1 0 1 0      a counted label at the end of a document belongs to another one
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megapack.probe.boundaries import Documents, tokens_of
from megapack.probe.layers import per_token

HEAD = 256  # logits per token that are computed


def call_target(target: Any, batch: Mapping[str, Any]) -> Any:
    """Call a module with the arguments that it takes, or a function with the batch."""
    if not isinstance(target, nn.Module):
        return target(batch)
    takes = inspect.signature(unwrapped(target).forward).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in takes.values()):
        if not takes.keys() & batch.keys():
            return target(batch)
        batch = {name: value for name, value in batch.items() if name in takes}
    return target(**batch)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside of wrappers, which take any arguments: DDP, torch.compile."""
    while isinstance(
        inner := getattr(module, "module", getattr(module, "_orig_mod", None)), nn.Module
    ):
        module = inner
    return module


def is_compiled(target: Any) -> bool:
    """Return whether a part of the target is compiled."""
    modules = target.modules() if isinstance(target, nn.Module) else ()
    return hasattr(target, "_torchdynamo_orig_callable") or any(
        hasattr(one, "_orig_mod") or one._compiled_call_impl is not None for one in modules
    )


def modules_of(target: Any) -> list[nn.Module]:
    """Return the modules of a target; for a function, those that it refers to by name."""
    if isinstance(target, nn.Module):
        return list(target.modules())
    function = inspect.unwrap(getattr(target, "_torchdynamo_orig_callable", target))
    if not inspect.isfunction(function):
        return []
    named = inspect.getclosurevars(function)
    values = [*named.nonlocals.values(), *named.globals.values()]
    return [part for one in values if isinstance(one, nn.Module) for part in one.modules()]


@contextmanager
def narrow_head(target: Any, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Let the head of a language model compute only its first logits, and give it no labels."""
    modules = target.modules() if isinstance(target, nn.Module) else ()
    getters = [getattr(one, "get_output_embeddings", None) for one in modules]
    heads = [get() for get in getters if callable(get)]
    head = next((one for one in heads if type(one) is nn.Linear), None)
    if head is None or head.out_features <= HEAD:
        yield batch
        return

    def forward(x: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias[:HEAD]
        return nn.functional.linear(x, head.weight[:HEAD], bias)

    vars(head)["forward"] = forward
    try:
        yield {name: value for name, value in batch.items() if "labels" not in name}
    finally:
        del vars(head)["forward"]


# ---- Tokens and labels


def changed_batch(
    batch: Mapping[str, Any], changed: Tensor, documents: Documents
) -> dict[str, Any]:
    """Return the batch with other tokens where ``changed``, bool (tokens,), and matching labels."""
    name = tokens_of(batch)
    tokens = batch[name]
    where = changed.to(tokens.device).view(tokens.shape[: 1 if tokens.dim() == 1 else 2])
    if tokens.is_floating_point():
        return {**batch, name: torch.where(where.unsqueeze(-1), -tokens, tokens)}
    new = torch.where(where, other_tokens(tokens, documents), tokens)
    result = {**batch, name: new}
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == tokens.shape:
        shift = label_shift(tokens, labels)
        old = tokens.roll(-shift, dims=-1)
        result["labels"] = torch.where(labels == old, new.roll(-shift, dims=-1), labels)
    return result


def other_tokens(tokens: Tensor, documents: Documents) -> Tensor:
    """Return a different id for each token, within the range of ids that occur (plus a neighbor if
    only one occurs). Ids with which all documents begin or end stay, and stay unique: a model may
    take boundaries from them."""
    low, high = int(tokens.min()), int(tokens.max())
    if low == high:
        low, high = (0, 1) if low <= 1 else (low - 1, low)

    def following(ids: Tensor) -> Tensor:
        return low + (ids - low + 1) % (high - low + 1)

    of_token = documents.of_token
    lengths = of_token[of_token >= 0].unique(return_counts=True)[1].tolist()  # type: ignore[no-untyped-call]
    if not lengths:  # a rank that has only padding
        return following(tokens)
    # One sort for all documents: a search for each would cost documents x tokens.
    by_document = of_token.argsort(stable=True)[len(of_token) - sum(lengths) :]
    every = torch.split(tokens.flatten()[by_document.to(tokens.device)], lengths)
    both = [torch.stack([part[end] for part in every]) for end in (0, -1)]
    same = [ids[:1] for ids in both if bool((ids == ids[0]).all())]
    kept = torch.cat(same or [both[0][:0]]).unique()  # type: ignore[no-untyped-call]
    if high - low <= len(kept) or any(bool(torch.isin(part, kept).all()) for part in every):
        return following(tokens)  # no other id is left, or a document has none that may change
    others = following(tokens)
    for _ in kept:
        others = torch.where(torch.isin(others, kept), following(others), others)
    return torch.where(torch.isin(tokens, kept), tokens, others)


def label_shift(tokens: Tensor, labels: Tensor) -> int:
    """Return 1 if labels are the next tokens, 0 if they are the tokens, which the model shifts."""
    same = int((labels == tokens).sum())
    return int(int((labels[..., :-1] == tokens[..., 1:]).sum()) > same)


def counted_ends(
    batch: Mapping[str, Any], documents: Documents, run: Any, *, labeled: bool
) -> list[int]:
    """Return the last tokens of documents that have a loss although another document follows in the
    row. The gradient of a loss of the whole batch shows them, or else the labels. ``labeled``: the
    loss has labels even if its gradients do not show them."""
    of_token, row, ids = documents.of_token, documents.row, batch[tokens_of(batch)]
    ends = torch.zeros(len(of_token), dtype=torch.bool)
    ends[:-1] = (of_token[1:] != of_token[:-1]) & (of_token[1:] >= 0) & (of_token[:-1] >= 0)
    ends[row - 1 :: row] = False
    raw = [x for x in run.raw if x.requires_grad and per_token(x, documents) is not None]
    if run.loss is not None and run.loss.dim() == 0 and run.loss.requires_grad and raw:
        grads = torch.autograd.grad(run.loss, raw, retain_graph=True, allow_unused=True)
        for grad in grads:
            tokens = None if grad is None else per_token(grad, documents)
            if tokens is not None and bool((tokens != 0).any()):
                counted = (tokens != 0).any(dim=1).cpu()
                if not ids.is_floating_point():
                    # The gradient of cross entropy is lowest at the label. If it is not lowest at
                    # the next token, the end has an auxiliary loss or another label. Hidden states
                    # have no labels.
                    follows = tokens.argmin(dim=1).cpu() == ids.flatten().roll(-1).cpu()
                    inside = counted & ~ends
                    if 2 * int((inside & follows).sum()) > int(inside.sum()):
                        counted &= follows
                    elif not labeled:
                        return []  # such as an auxiliary loss
                return (counted & ends).nonzero()[:, 0].tolist()
    tokens, labels = ids, batch.get("labels")
    if not isinstance(labels, Tensor) or labels.shape != tokens.shape or tokens.is_floating_point():
        return []
    counted = labels >= 0
    if isinstance(batch.get("loss_mask"), Tensor) and batch["loss_mask"].shape == labels.shape:
        counted &= batch["loss_mask"] != 0
    shift = label_shift(tokens, labels)
    counted &= labels == tokens.roll(-shift, dims=-1)
    flat = counted.flatten().cpu()
    flat = flat if shift else flat.roll(-1)
    return (flat & ends).nonzero()[:, 0].tolist()


def uncut_list(value: Any, before: Any) -> bool:
    """Return whether an entry of a single document is the whole list or tensor of the batch."""
    several = hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0 and len(value) > 1
    return value is before and several and not isinstance(value, str)
