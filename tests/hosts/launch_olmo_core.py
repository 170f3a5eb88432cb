"""OLMo-core on the CPU: ``torchrun launch_olmo_core.py OPTIONS`` is examples/olmo_core_packed.py.

Without a GPU OLMo-core uses gloo and tensors on the CPU. The kernel of its flash-attention backend
is replaced, because its other backend ignores documents.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import torch
from flash import put_flash_attn
from recorder import LoaderRecorder, flat_gradient, print_one_by_one, print_validated
from torch import Tensor

from megapack.integrations.dialects import emit
from megapack.integrations.rows.rank_rows import RankRows
from tests.hosts.corpus import ROW

SABOTAGE = os.environ.get("HOST_SABOTAGE", "")


def flash_attention_on_cpu() -> None:
    """It is built as if there were a GPU, or OLMo-core takes its other backend."""
    attention: Any = importlib.import_module("olmo_core.nn.attention").Attention
    build = attention.__init__

    def built(*args: Any, **kwargs: Any) -> None:
        with unittest.mock.patch("torch.cuda.is_available", lambda: True):
            build(*args, **kwargs)

    attention.__init__ = built


def watch_model(recorder: LoaderRecorder) -> None:
    model: Any = importlib.import_module("olmo_core.nn.transformer").Transformer
    module: Any = importlib.import_module("olmo_core.train.train_module").TransformerTrainModule
    forward, train_batch = model.forward, module.train_batch

    def noted(self: Any, input_ids: Tensor, *, labels: Any = None, **kwargs: Any) -> Any:
        recorder.note_call(training=self.training, tokens=input_ids, position_ids=None)
        recorder.note_labels(labels)
        return forward(self, input_ids, labels=labels, **kwargs)

    def trained(self: Any, batch: Any, dry_run: bool = False) -> None:
        recorder.paused, begin = dry_run, len(recorder.calls)
        train_batch(self, batch, dry_run=dry_run)
        recorder.paused = False
        recorder.calls[begin:] = [one_call(recorder.calls[begin:])] if not dry_run else []

    model.forward, module.train_batch = noted, trained


def one_call(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The micro batches of a step, which OLMo-core cuts out of what a rank has read, as one."""
    sizes = [part["tokens"].numel() for part in parts]
    layers = []
    for bounds in zip(*(part["attention"] for part in parts), strict=True):
        shifted = [cut[1:] + sum(sizes[:k]) for k, (cut, _) in enumerate(bounds)]
        cut = torch.cat([torch.zeros(1, dtype=torch.int32), *shifted])
        layers.append((cut.to(torch.int32), max(longest for _, longest in bounds)))
    whole = {key: torch.cat([part[key] for part in parts]) for key in ("tokens", "labels")}
    whole["loss_mask"] = torch.cat([part["loss_mask"] for part in parts])
    return {**parts[0], **whole, "attention": layers}


def keep_gradient(folder: Path) -> None:
    """Save the optimizer's gradient of the first step: gradient.pt."""
    module: Any = importlib.import_module("olmo_core.train.train_module").TransformerTrainModule
    stock = module.optim_step

    def step(self: Any) -> None:
        torch.save(flat_gradient(self.model), folder / "gradient.pt")
        module.optim_step = stock
        stock(self)

    module.optim_step = step


def one_by_one(trainer: Any) -> None:
    module, ranks = trainer.train_module, trainer.data_loader.ranks
    told = emit(ranks.rows.micro_batch([ranks._block_of_short_documents(0)]), ranks.dialect)
    bounds = [0, *told["doc_lens"][0].cumsum(0).tolist()]

    def loss_of(**batch: Any) -> Tensor:
        loss: Tensor = module.model_forward(**batch, loss_reduction="sum").loss
        return loss

    print_one_by_one(module.model, told, bounds, loss_of)


def validated(trainer: Any, prefix: str) -> None:
    def losses_of(text: Tensor) -> Tensor:
        labels = torch.nn.functional.pad(text[None, 1:], (0, 1), value=-100)
        out = trainer.train_module.model_forward(text[None], labels=labels, loss_reduction="none")
        losses: Tensor = out.ce_loss[0, :-1]
        return losses

    (evaluator,) = trainer.callbacks["held out"].evaluators
    print_validated(float(evaluator.compute_metrics()["CE loss"]), prefix, losses_of)


def sabotage(ours: Any) -> None:
    """Inject a fault between the loader and the model, like a user's wrong change."""
    transformer: Any = importlib.import_module("olmo_core.nn.transformer").Transformer
    prepare, forward = transformer._prepare_inputs, transformer.forward
    iterate = ours.PackedOlmoLoader._iter_batches

    def prepared(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        cut = made[2]["cu_doc_lens"]
        if SABOTAGE == "no boundary":
            cut = torch.arange(0, int(cut[-1]) + 1, ROW, dtype=torch.int32)
        else:  # rotary embeddings end with a row, and no segment may vanish
            lengths = cut.diff()
            cut[1:-1] += (lengths[:-1] < ROW) & (lengths[1:] > 1)
        made[2].update(cu_doc_lens=cut, max_doc_len=int(cut.diff().max()))
        return made

    def moved(loader: Any) -> Any:
        for batch in iterate(loader):
            yield {**batch, "labels": batch["labels"].roll(1, dims=1)}

    def shifted(self: Any, tokens: Tensor, *, labels: Any = None, **kwargs: Any) -> Any:
        return forward(self, tokens, labels=labels.roll(1, dims=1), **kwargs)

    if "boundary" in SABOTAGE:
        transformer._prepare_inputs = prepared
    elif SABOTAGE == "loader":
        ours.PackedOlmoLoader._iter_batches = moved
    elif SABOTAGE == "labels":
        transformer.forward = shifted
    elif SABOTAGE == "mean of means":
        ours.PackedOlmoCallback.pre_step = lambda *_: None
    elif SABOTAGE == "no callback":
        ours.PackedOlmoCallback.post_attach = lambda *_: None


def main() -> None:
    torch.set_num_threads(1)
    recorder = LoaderRecorder()
    put_flash_attn(recorder.note_attention)
    flash_attention_on_cpu()
    ours: Any = importlib.import_module("megapack.integrations.hosts.olmo_core")
    recorder.watch_rank_rows(RankRows)
    watch_model(recorder)
    sabotage(ours)
    folder = Path(os.environ["HOST_RECORDS"])
    keep_gradient(folder)
    training: Any = importlib.import_module("olmo_core.train")
    fit = training.Trainer.fit

    def fitted(trainer: Any) -> None:
        fit(trainer)
        rank = trainer.data_loader.dp_rank
        recorder.save(folder, data=rank, tensor=0, pipeline=0)
        recorder.paused = True
        if os.environ.get("HOST_ONE_BY_ONE"):
            one_by_one(trainer)
        if prefix := os.environ.get("HOST_VALIDATED"):
            validated(trainer, prefix)

    training.Trainer.fit = fitted
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    importlib.import_module("olmo_core_packed").main()


if __name__ == "__main__":
    main()
