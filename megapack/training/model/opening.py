"""Model of a run: an architecture from transformers, with megapack's attention and loss.

``open_model`` chooses the attention, checks the architecture and builds the model; with ZeRO-3, no
rank ever holds the whole model. ``tile_mlps`` computes the MLPs of long rows in chunks of tokens
with DeepSpeed's TiledMLP, so that an MLP's largest activations, those between its two projections,
exist for one chunk at a time; the backward pass recomputes them (Bekman et al., *Arctic Long
Sequence Training*, 2025), and adds a weight's gradients over the chunks in the weight's dtype.

    num_chunks(10, 4)  # -> 3 chunks, of 4, 4 and 2 tokens
"""

from __future__ import annotations

import copy
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
    check_replay,
    check_sequence_parallel,
    choose_backend,
    over_ranks,
    register,
    routes_shape,
)
from megapack.attention.routes import COLUMN
from megapack.errors import ConfigError
from megapack.training.config import DistillConfig, EngineConfig, ModelConfig
from megapack.training.model.architecture import (
    attention_needs,
    check_checkpoint,
    register_architectures,
)
from megapack.training.model.training_model import TrainingModel


def num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Return the number of chunks that ``torch.chunk`` makes: at most ``chunk_tokens`` each, all
    equal except the last."""
    size = -(-num_tokens // -(-num_tokens // chunk_tokens))
    return -(-num_tokens // size)


def tile_mlps(layers: nn.ModuleList, chunk_tokens: int) -> None:
    """Compute the MLP of every layer in chunks of at most ``chunk_tokens`` tokens. Raises
    ConfigError if an MLP contains anything but dense layers: a chunk may leave an expert unused and
    lose its gradient, and recomputation would draw another dropout mask."""
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
        weight = next(module.parameters(recurse=False), None)
        if isinstance(module, nn.ModuleList) or not (
            weight is None or isinstance(module, (nn.Linear, Conv1D))
        ):
            return f"has a {type(module).__name__} in its {type(mlp).__name__}"
    return None


def _in_chunks(
    mlp: nn.Module, forward: Callable[[Tensor], Tensor], chunk_tokens: int, hidden: Tensor
) -> Tensor:
    """Return ``forward(hidden)`` of ``[..., tokens, width]``, computed in chunks of tokens."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP  # noqa: PLC0415

    chunks = num_chunks(hidden.shape[-2], chunk_tokens)
    if chunks == 1:
        return forward(hidden)
    kind = hidden.device.type
    # The backward pass recomputes outside the autocast of the forward pass.
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
    trees: bool = False,
    zero_3: Mapping[str, Any] | None = None,
    distill: DistillConfig | None = None,
    sequence_group: Any = None,
    progress: Callable[[], object] = lambda: None,
) -> tuple[TrainingModel, Choice]:
    """Build the model of a run in float32, and choose its attention.

    Collective with ``zero_3`` (the model then has the dtype of the run) and with
    ``sequence_group``. Raises ConfigError if no attention supports the model, packed rows would
    train it wrongly, or its MLPs cannot be computed in chunks.

    Args:
        architecture: result of ``model_configuration``.
        empty: build on the meta device, for an estimate.
        trees: the run trains on prefix trees.
        zero_3: DeepSpeed's configuration, if ZeRO-3 divides parameters; else None.
        sequence_group: process group of the ranks that share long samples.
        progress: called for every loaded tensor (not with ``zero_3``).
    """
    dtype = compute_dtype(engine)
    choice = choose_backend(attention_needs(architecture, device, dtype), config.attention_backend)
    check_packed_rows(architecture, backend=choice.name, device=device, dtype=dtype, trees=trees)
    if sequence_group is not None:
        check_slices(
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
            distill=distill,
            sequence_group=sequence_group,
            progress=progress,
        )
    if engine.mlp_chunk_tokens is not None:
        tile_mlps(model.layers, engine.mlp_chunk_tokens)
    # DeepSpeed casts a whole model, but not one that is divided already.
    return (model if zero_3 is None else model.cast(dtype)), choice


def compute_dtype(engine: EngineConfig) -> torch.dtype:
    """Return the dtype of activations; the choice of the attention backend depends on it."""
    return torch.bfloat16 if engine.precision == "bf16" else torch.float32


def check_packed_rows(
    configuration: Any,
    *,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    trees: bool = False,
) -> None:
    """Check with ``check_architecture`` that packed rows train an architecture correctly."""
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
        trees=trees,
    )


def check_document_positions(configuration: Any, longest: int) -> None:
    """Check with ``check_positions`` that no document depends on longer documents in its row;
    ``longest``: largest number of positions of a document or of padding."""
    register_architectures()
    register("eager")
    check_positions(configuration, attention=ATTENTION_NAME, build=_from_scratch, longest=longest)


def check_routes(configuration: Any, columns: Mapping[str, Any]) -> None:
    """Check that an architecture can replay routes, and that batches carry routes of its shape;
    ``columns``: their types. Raises ConfigError."""
    register_architectures()
    check_replay(configuration, _from_scratch)
    with torch.device("meta"):
        shape = routes_shape(_from_scratch(copy.deepcopy(configuration), "eager"))
    column = columns.get(COLUMN)
    if column is None:
        raise ConfigError(
            f"model.replay_routes is true, and batches have no column {COLUMN!r}: set "
            f"data.columns=[{COLUMN}] (for a blend, columns in its manifest)"
        )
    if column.of != "token" or "int" not in column.dtype or tuple(column.shape) != shape:
        raise ConfigError(
            f"column {COLUMN!r} is {column.dtype} {list(column.shape)} of {column.of}; "
            f"{configuration.model_type!r} needs int16 {list(shape)} (layers with experts, experts "
            "per token) of token: record it with this architecture"
        )


def check_slices(
    configuration: Any, *, backend: str, group: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Check with ``check_sequence_parallel`` that an architecture trains correctly on slices."""
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
    # The loss of a row of documents, as a run computes it.
    wrapped = TrainingModel(model, chunk_tokens=32, sequence_group=group)
    *tensors, longest = row
    result: Tensor = wrapped(
        *tensors, max_seqlen=longest, sequence_parallel_size=sequence_parallel_size
    )[0]
    return result


def _from_scratch(configuration: Any, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    if configuration.model_type == "gpt2_alibi":  # the model check uses fewer heads
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
    distill: DistillConfig | None = None,
    sequence_group: Any = None,
    progress: Callable[[], object] = lambda: None,
) -> TrainingModel:
    """Build the model in float32 on the current default device; divide it under ZeRO-3. Weights
    from scratch are a function of ``seed``, the architecture and the kind of device."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    register_architectures()
    shared = None if sequence_group is None else over_ranks(configuration, sequence_group)
    register(backend, shared)
    check_checkpoint(config, configuration)
    empty = torch.get_default_device().type == "meta"
    # Fork only this device's generator: forking the others would initialize their devices.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        if config.pretrained is None:
            with divided_by_zero_3(zero_3):
                model = _from_scratch(configuration, ATTENTION_NAME)
        else:
            with divided_by_zero_3(zero_3, loaded=True), _reporting(progress):
                model = AutoModelForCausalLM.from_pretrained(
                    config.pretrained,
                    config=configuration,
                    dtype=torch.float32,
                    attn_implementation=ATTENTION_NAME,
                    ignore_mismatched_sizes=bool(config.allow_missing),
                    device_map="meta" if empty else None,
                )
            model = _with_slopes(model)
            if not empty:  # the check compares storages
                _check_tied(model, config)
    # from_pretrained returns a model in evaluation mode, which does not checkpoint activations.
    return TrainingModel(
        model,
        chunk_tokens=chunk_tokens,
        fused_loss=fused_loss,
        z_loss=config.z_loss,
        distill=distill,
        sequence_group=sequence_group,
        replays=config.replay_routes,
    ).train()


# From scratch, ZeRO-3 divides the same weights as an undivided model has with the same seed: every
# module is created and initialized whole, on all ranks in one order, from equal random numbers.


@contextmanager
def divided_by_zero_3(zero_3: Mapping[str, Any] | None, *, loaded: bool = False) -> Iterator[None]:
    """Divide the transformers modules that the block creates among all ranks; None: divide nothing.
    ``loaded``: ``from_pretrained`` creates them; the first rank reads the files."""
    if zero_3 is None:
        yield
    elif loaded:
        from transformers.integrations import HfDeepSpeedConfig  # noqa: PLC0415

        # transformers finds the configuration as long as this object exists.
        active = HfDeepSpeedConfig(dict(zero_3))
        yield
        del active
    else:
        import deepspeed  # noqa: PLC0415

        # Without overrides of new tensors: they would round RoPE's frequencies to bfloat16.
        divided = deepspeed.zero.Init(config_dict_or_path=dict(zero_3), tensor_overrides=[])
        with _initialized_whole(), divided:
            yield


@contextmanager
def _initialized_whole() -> Iterator[None]:
    """Gather the parameters of a module while transformers initializes it."""
    import deepspeed  # noqa: PLC0415
    from transformers import PreTrainedModel  # noqa: PLC0415

    original = PreTrainedModel._initialize_weights

    def initialize(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # An initialization may also change the children's parameters, as GPT-2's does.
        children = (m for m in module.children() if not isinstance(m, PreTrainedModel))
        reached = [p for m in (module, *children) for p in m.parameters(recurse=False)]
        with deepspeed.zero.GatheredParameters(reached, modifier_rank=0):
            original(self, module, *args, **kwargs)

    PreTrainedModel._initialize_weights = initialize
    try:
        yield
    finally:
        PreTrainedModel._initialize_weights = original


@contextmanager
def _reporting(progress: Callable[[], object]) -> Iterator[None]:
    """Call ``progress`` each time transformers advances a progress bar."""
    from transformers.utils import logging  # noqa: PLC0415

    def reported(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            progress()
            yield item

    def bar(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if args:
            options = {"total": length_hint(args[0]) or None, **options}
            args = (reported(args[0]), *args[1:])
        return make(*args, **options)

    former = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(former)


def _check_tied(model: Any, config: ModelConfig) -> None:
    # Such a head would be trained separately from its embedding, but not saved.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embedding.weight:
        raise ConfigError(
            f"model: checkpoint {config.pretrained!r} has a head that differs from its embedding, "
            "and its tie_word_embeddings is true; set model.overrides.tie_word_embeddings to false"
        )


def _with_slopes(model: Any) -> Any:
    """Set ALiBi's slopes in every layer. Call it after loading, which leaves buffers empty."""
    if model.config.model_type == "gpt2_alibi":
        for block in model.transformer.h:
            values = torch.tensor(
                model.config.alibi_slopes,
                dtype=torch.float32,
                device=block.attn.c_attn.weight.device,
            )
            block.attn.register_buffer("alibi_slopes", values, persistent=False)
    return model
