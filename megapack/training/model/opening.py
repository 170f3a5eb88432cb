"""The model of a run: an architecture from transformers, our attention, our loss.

``open_model`` chooses the attention, tries the architecture and builds, which is ``build_model``;
``tile_mlps`` computes the MLPs of long rows a chunk of tokens at a time, by DeepSpeed's TiledMLP:
the activations between an MLP's two projections are its widest, and in chunks only those of one
chunk exist at once, and are computed again in the backward (Bekman et al., *Arctic Long Sequence
Training*, 2025). The gradients of a weight over the chunks are added up in the weight's dtype.

    num_chunks(10, 4)  # -> 3 chunks, of 4, 4 and 2 tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from megapack.attention import (
    ATTENTION_NAME,
    Choice,
    alibi_slopes,
    check_architecture,
    check_positions,
    check_sequence_parallel,
    choose_backend,
    over_ranks,
    register,
)
from megapack.errors import ConfigError
from megapack.training.config import EngineConfig, ModelConfig
from megapack.training.model.architecture import (
    attention_needs,
    check_checkpoint,
    register_architectures,
)
from megapack.training.model.sharding import in_shares
from megapack.training.model.training_model import TrainingModel


def num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Equal chunks (the last may be shorter) of at most so many tokens: how many ``torch.chunk``
    really makes, which is fewer than it is asked for where they would not come out."""
    size = -(-num_tokens // -(-num_tokens // chunk_tokens))
    return -(-num_tokens // size)


def tile_mlps(layers: nn.ModuleList, chunk_tokens: int) -> None:
    """Compute the MLP of every layer in chunks of tokens.

    Args:
        layers: decoder layers with an ``mlp`` each; changed.
        chunk_tokens: the most of a chunk.

    Raises:
        ConfigError: an MLP is none of dense layers alone: where a chunk does not reach a weight (a
            mixture of experts), its gradient would be lost, and dropout would not be drawn again.
    """
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if problem := _problem(mlp):
            raise ConfigError(
                f"engine.mlp_chunk_tokens is {chunk_tokens}, and {type(layer).__name__} {problem}; "
                "set it to null"
            )
        assert mlp is not None
        mlp.forward = partial(_in_chunks, mlp, mlp.forward, chunk_tokens)


def _problem(mlp: nn.Module | None) -> str | None:
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415

    if mlp is None:
        return "has no mlp"
    for module in mlp.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return f"has dropout {module.p} in its {type(mlp).__name__}"
        own = next(module.parameters(recurse=False), None)
        if isinstance(module, nn.ModuleList) or not (
            own is None or isinstance(module, (nn.Linear, Conv1D))
        ):
            return f"has a {type(module).__name__} in its {type(mlp).__name__}"
    return None


def _in_chunks(
    mlp: nn.Module, forward: Callable[[Tensor], Tensor], chunk_tokens: int, hidden: Tensor
) -> Tensor:
    """``forward(hidden)`` of ``[..., tokens, width]``."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # noqa: PLC0415

    chunks = num_chunks(hidden.shape[-2], chunk_tokens)
    if chunks == 1:
        return forward(hidden)
    kind = hidden.device.type
    # The backward, which computes it again, runs outside of the forward's autocast.
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else None

    def chunk(_: Any, part: Tensor) -> Tensor:
        if not autocast:
            return forward(part)
        with torch.autocast(kind, dtype=dtype):
            return forward(part)

    result: Tensor = TiledMLP.apply(chunk, mlp, hidden, chunks, list(mlp.parameters()))
    return result


def open_model(
    config: ModelConfig,
    engine: EngineConfig,
    architecture: Any,
    *,
    device: torch.device,
    seed: int = 0,
    empty: bool = False,
    zero_3: Mapping[str, Any] | None = None,
    sequence_group: Any = None,
    progress: Callable[[], object] = lambda: None,
) -> tuple[TrainingModel, Choice]:
    """The model of a run in float32, and the attention that was chosen for it; with ``zero_3``
    collective, and in the dtype it will compute in; with ``sequence_group`` collective, too.

    Args:
        config: which weights and which attention.
        engine: in which precision it will compute, and how its loss and its MLPs are cut.
        architecture: of ``model_configuration``.
        device: where it will compute.
        seed: of weights from scratch.
        empty: shapes without numbers (the meta device), for an estimate.
        zero_3: DeepSpeed's configuration, where ZeRO-3 is to divide parameters as they are made.
        sequence_group: process group of the ranks that share long samples.
        progress: called for every tensor that is loaded, but with ``zero_3``, where nobody tells.

    Raises:
        ConfigError: no attention can serve it, packed rows would train it wrongly, or its MLPs
            cannot be cut.
    """
    dtype = compute_dtype(engine)
    choice = choose_backend(attention_needs(architecture, device, dtype), config.attention_backend)
    try_model(architecture, backend=choice.name, device=device, dtype=dtype)
    if sequence_group is not None:
        try_slices(
            architecture, backend=choice.name, group=sequence_group, device=device, dtype=dtype
        )
    with torch.device("meta") if empty else device:
        model = build_model(
            config,
            architecture,
            backend="eager" if empty else choice.name,
            seed=seed,
            chunk_tokens=engine.loss_chunk_tokens,
            fused_loss=engine.compile,
            zero_3=zero_3,
            sequence_group=sequence_group,
            progress=progress,
        )
    if engine.mlp_chunk_tokens is not None:
        tile_mlps(model.layers, engine.mlp_chunk_tokens)
    # DeepSpeed casts a model, and not one that is divided already.
    return (model if zero_3 is None else model.cast(dtype)), choice


def compute_dtype(engine: EngineConfig) -> torch.dtype:
    """The dtype of activations, which decides the attention backend."""
    return torch.bfloat16 if engine.precision == "bf16" else torch.float32


def try_model(
    configuration: Any, *, backend: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse an architecture that packed rows would train wrongly; see ``check_architecture``.

    Raises:
        ConfigError: naming the architecture, the layer and the difference.
    """
    register_architectures()
    register(backend)
    check_architecture(
        configuration,
        attention=ATTENTION_NAME,
        build=_from_scratch,
        device=device,
        dtype=dtype,
        loss=_summed_loss,
        longest=0,
    )


def try_positions(configuration: Any, longest: int) -> None:
    """Refuse a model in which a document depends on longer ones of its row (``check_positions``).

    Args:
        configuration: of the transformers model.
        longest: most positions of a document or of padding, tokens.

    Raises:
        ConfigError: naming the architecture, the field and its value.
    """
    register_architectures()
    register("eager")
    check_positions(configuration, attention=ATTENTION_NAME, build=_from_scratch, longest=longest)


def try_slices(
    configuration: Any, *, backend: str, group: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse an architecture that would not learn from slices; see ``check_sequence_parallel``.

    Raises:
        ConfigError: naming the architecture and the difference.
    """
    check_sequence_parallel(
        configuration,
        backend=backend,
        group=group,
        build=lambda tiny: _from_scratch(tiny, ATTENTION_NAME),
        loss=partial(_summed_loss, group=group),
        device=device,
        dtype=dtype,
    )


def _summed_loss(
    model: Any, row: Any, sequence_parallel_size: int = 1, *, group: Any = None
) -> Tensor:
    """The loss of a row of documents as a run computes it."""
    wrapped, size = (
        TrainingModel(model, chunk_tokens=32, sequence_group=group),
        sequence_parallel_size,
    )
    *tensors, longest = row
    result: Tensor = wrapped(*tensors, max_seqlen=longest, sequence_parallel_size=size)[0]
    return result


def _from_scratch(configuration: Any, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    if configuration.model_type == "gpt2_alibi":  # that of the model check has fewer heads
        configuration.alibi_slopes = alibi_slopes(configuration.n_head).tolist()
    model = AutoModelForCausalLM.from_config(
        configuration, attn_implementation=implementation, dtype=torch.float32
    )
    return _with_slopes(model)


def build_model(
    config: ModelConfig,
    configuration: Any,
    *,
    backend: str,
    seed: int,
    chunk_tokens: int = 2048,
    fused_loss: bool = False,
    zero_3: Mapping[str, Any] | None = None,
    sequence_group: Any = None,
    progress: Callable[[], object] = lambda: None,
) -> TrainingModel:
    """The model in float32 on the current default device, divided by ZeRO-3 if asked to.

    From scratch, the weights are a function of ``seed``, the architecture and the kind of device.

    Raises:
        ConfigError: the checkpoint is not of this model; see ``check_checkpoint``.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    register_architectures()
    shared = None if sequence_group is None else over_ranks(configuration, sequence_group)
    register(backend, shared)
    check_checkpoint(config, configuration)
    empty = torch.get_default_device().type == "meta"
    # The generators of this process's device only: the others' would be initialised for it.
    mine = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=mine):
        torch.manual_seed(seed)
        if config.pretrained is None:
            with in_shares(zero_3):
                model = _from_scratch(configuration, ATTENTION_NAME)
        else:
            with in_shares(zero_3, loaded=True), _telling(progress):
                model = AutoModelForCausalLM.from_pretrained(
                    config.pretrained,
                    config=configuration,
                    dtype=torch.float32,
                    attn_implementation=ATTENTION_NAME,
                    ignore_mismatched_sizes=bool(config.allow_missing),
                    device_map="meta" if empty else None,
                )
            model = _with_slopes(model)
            if not empty:  # only numbers tell whether a head is the embedding
                _check_tied(model, config)
    # from_pretrained gives a model in evaluation mode, which would not checkpoint activations.
    return TrainingModel(
        model,
        chunk_tokens=chunk_tokens,
        fused_loss=fused_loss,
        z_loss=config.z_loss,
        sequence_group=sequence_group,
    ).train()


@contextmanager
def _telling(progress: Callable[[], object]) -> Iterator[None]:
    """Of every item for which transformers moves a progress bar."""
    from transformers.utils import logging  # noqa: PLC0415

    def told(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            progress()
            yield item

    def bar(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if args:
            options = {"total": length_hint(args[0]) or None, **options}
            args = (told(args[0]), *args[1:])
        return make(*args, **options)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _check_tied(model: Any, config: ModelConfig) -> None:
    """Refuse a head that would be trained apart from an embedding it is to be one with: saved as
    the configuration says, it would be lost."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embedding.weight:
        raise ConfigError(
            f"model: checkpoint {config.pretrained!r} has a head of its own, and its "
            "tie_word_embeddings is true; set model.overrides.tie_word_embeddings to false"
        )


def _with_slopes(model: Any) -> Any:
    """ALiBi's slopes in every layer; after loading, which leaves buffers of no file empty."""
    if model.config.model_type == "gpt2_alibi":
        for block in model.transformer.h:
            values = torch.tensor(
                model.config.alibi_slopes,
                dtype=torch.float32,
                device=block.attn.c_attn.weight.device,
            )
            block.attn.register_buffer("alibi_slopes", values, persistent=False)
    return model
