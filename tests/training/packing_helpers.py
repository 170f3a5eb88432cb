"""Small packed batches, for tests without a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from reference import fim as definition
from torch import Tensor, nn
from torch.nn import functional as F

from megapack.data.fim import Fim
from megapack.training.config import ModelConfig, PretrainConfig
from megapack.training.engine.inputs import Inputs
from megapack.training.model.architecture import model_configuration
from megapack.training.model.opening import build_model
from megapack.training.model.training_model import TrainingModel

VOCAB = 257


@dataclass(frozen=True)
class Packed:
    tokens: Tensor  # [1, T]
    labels: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    def arguments(self) -> dict[str, object]:
        return dict(vars(self))


def documents(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]


def pack_documents(docs: list[Tensor], padding: int = 0) -> Packed:
    """Return one stream; padding is the last segment, with token 0 and no labels."""
    pad = [torch.zeros(padding, dtype=torch.int64)] if padding else []
    pieces = docs + pad
    labels = [torch.cat([doc[1:], torch.tensor([-100])]) for doc in docs]
    labels += [torch.full((padding,), -100)] if padding else []
    lengths = [len(piece) for piece in pieces]
    return Packed(
        tokens=torch.cat(pieces).unsqueeze(0),
        labels=torch.cat(labels).unsqueeze(0),
        position_ids=torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen=max(lengths),
    )


def tiny_model(
    preset: str, *, backend: str = "sdpa", seed: int = 0, **more: object
) -> TrainingModel:
    config = ModelConfig(preset=preset, **more)  # type: ignore[arg-type]
    configuration = model_configuration(config, VOCAB)
    return build_model(config, configuration, backend=backend, seed=seed, chunk_tokens=32)


def plain(config: PretrainConfig) -> tuple[Inputs, TrainingModel]:
    """Return the inputs of a run and its initial model, with transformers' attention."""
    inputs = Inputs(config)
    architecture = model_configuration(config.model, inputs.vocab_size)
    model = build_model(config.model, architecture, backend="sdpa", seed=config.seed)
    model.model.set_attn_implementation("eager")
    return inputs, model


def check_gradients(
    ours: Mapping[str, Tensor], model: nn.Module, *, rel: float = 1e-3, least: float = 1e-6
) -> None:
    """Check gradients, relative to the largest value of each (at least ``least``)."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        scale = parameter.grad.abs().max().clamp(min=least)
        error = float((ours[name] - parameter.grad).abs().max() / scale)
        assert error < rel, f"{name}: {error:.1e}"


def losses_one_by_one(
    model: TrainingModel,
    inputs: Inputs,
    step: int,
    window: int = 10**9,
    z_loss: float = 0.0,
    weights: Sequence[NDArray[np.float32]] | None = None,
) -> list[tuple[int, Tensor, float]]:
    """Return (source, summed loss, labels) of every segment of a step, each computed alone.

    Uses a model of ``plain``, and not megapack's attention, loss or batches. Segments are cut at
    multiples of the window. With ``weights`` (of all tokens, by source) sums are weighted.
    Fill-in-the-middle follows the definition in ``reference``.
    """
    results = []
    samples = inputs.schedule.samples
    content = inputs.schedule.step(step)
    for place, sample in enumerate(content.sample_ids.tolist()):
        source, segments = samples.segments(sample, content.view)
        dataset = inputs.data.datasets[source].open(0)
        for document, begin, length in segments:
            offset, total = int(dataset.document_offsets[document]), len(dataset[document])
            whole = torch.tensor(dataset[document])
            room = samples.indices[source].fim_longest
            if content.view.epochs is not None and 1 < length == total <= room:
                key = definition.key_of(
                    inputs.schedule.config.seed, int(content.view.epochs[place]), document
                )
                if definition.unit(key, 0) < content.view.fim_rates[place]:
                    whole = _transform(whole, samples.fim, key)
                length = total = len(whole)  # noqa: PLW2901
            for at in range(begin, begin + length, window):
                # One more token if the document continues: the last label.
                end = min(at + window, begin + length) + 1
                tokens = whole[at : min(end, total)].long()
                if len(tokens) > 1:
                    inputs_of = tokens[:-1].unsqueeze(0)
                    logits = model.model(input_ids=inputs_of, use_cache=False).logits[0]
                    losses = F.cross_entropy(logits, tokens[1:], reduction="none")
                    losses = losses + z_loss * logits.exp().sum(1).log().square()
                    first = offset + at + 1
                    factors = torch.ones(len(losses))
                    if weights is not None:
                        token_weights = weights[source][first : first + len(losses)]
                        factors = torch.from_numpy(token_weights.copy())
                    loss = (losses * factors).sum()
                    results.append((source, loss, float(factors.double().sum())))
    return results


def _transform(tokens: Tensor, fim: Fim, key: int) -> Tensor:
    """Return a whole document after fill-in-the-middle, without an end sentinel."""
    rule = definition.Fim(fim.prefix, fim.suffix, fim.middle, None, None, fim.spm_rate)
    return torch.tensor(
        [token for token, *_ in definition.transform_document(tokens.tolist(), rule, key)]
    )
