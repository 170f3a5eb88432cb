"""Export of a trained model to a directory that ``from_pretrained`` loads, with its tokenizer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapack.data.documents import SourceDocuments, end_tokens
from megapack.errors import ConfigError
from megapack.storage.locks import FOLDER_MARK, make_own_folder, remove_own_folder
from megapack.training.config import ModelConfig
from megapack.training.engine.world import World

logger = logging.getLogger("megapack")

# Spaces, line breaks, digits, several scripts: texts on which tokenizers usually differ.
_PROBES = ("Two words", "  a  b\n\n\tc = 1234.5 ", "na\u00efve \u4e2d\u6587 \U0001f600")


def export_model(
    engine: Any, directory: Path, world: World, *, tokenizer: Any = None, end: int | None = None
) -> None:
    """Write the engine's model; collective, since ZeRO-3 gathers its parameters. The new model is
    written to a temporary directory, which then replaces ``directory``. ``generate`` stops at
    ``end``, the token that ends documents, and pads with it."""
    weights: dict[str, Tensor] | None = None  # None: the engine holds complete weights
    if engine.zero_optimization_stage() == 3:
        import deepspeed  # noqa: PLC0415

        weights = {}
        for name, parameter in engine.module.named_parameters():
            world.progress.inside(f"the export of {name}")
            with deepspeed.zero.GatheredParameters([parameter]):
                if world.is_first:
                    weights[name] = parameter.detach().cpu().clone()
    if world.is_first:
        partial = directory.with_name(f"{directory.name}.partial")
        directory.parent.mkdir(parents=True, exist_ok=True)
        remove_own_folder(partial)  # left behind by an export that was killed
        make_own_folder(partial)
        if end is not None:
            # Not ``config.pad_token_id``: the embedding would not train that row.
            model = engine.module.model
            model.config.eos_token_id = model.generation_config.eos_token_id = end
            if model.generation_config.pad_token_id is None:
                model.generation_config.pad_token_id = end
        if end is not None and tokenizer is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        with world.progress.while_written(partial, f"the export to {directory}"):
            engine.module.save(partial, weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        (partial / FOLDER_MARK).unlink()
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    dist.barrier()


def end_token(datasets: Sequence[SourceDocuments]) -> int | None:
    """Return the token that ends all datasets' documents, as in their meta files; None: unknown."""
    tokens = set(end_tokens(datasets))
    if len(tokens) > 1:
        logger.warning(
            "the datasets end their documents with different tokens (%s): no eos_token_id is set",
            tokens,
        )
    return tokens.pop() if len(tokens) == 1 else None


def tokenizer_of(config: ModelConfig) -> Any:
    """Return the tokenizer to export: the configured one, else the checkpoint's, else None. Raises
    ConfigError if the configured one cannot be loaded."""
    source = config.tokenizer or config.pretrained
    return source and open_tokenizer(source, required=source == config.tokenizer)


def open_tokenizer(source: str, *, required: bool) -> Any:
    """Open a tokenizer from a directory, a hub name, a tokenizer.json or a .model. If that fails,
    raise ConfigError if ``required``, else log the reason and return None."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    path = Path(source)
    try:
        if path.is_file() and path.suffix == ".json":
            return PreTrainedTokenizerFast(tokenizer_file=str(path))
        if path.is_file():
            return _from_sentencepiece(path)
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        if required:
            raise ConfigError(f"model: tokenizer {source!r} cannot be loaded: {reason}") from error
        logger.info("the model is exported without a tokenizer: %s", reason)
        return None


def _from_sentencepiece(path: Path) -> Any:
    """Return a transformers tokenizer with the same ids as a .model. Raises ValueError."""
    from sentencepiece import SentencePieceProcessor  # noqa: PLC0415
    from transformers import LlamaTokenizer  # noqa: PLC0415

    model = SentencePieceProcessor(model_file=str(path))
    with TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder) / "tokenizer.model")
        for add_prefix_space in (False, True):
            tokenizer = LlamaTokenizer.from_pretrained(folder, add_prefix_space=add_prefix_space)
            ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in _PROBES)
            if list(ids) == [model.encode(text) for text in _PROBES]:
                return tokenizer
    raise ValueError(
        "for this file, transformers and sentencepiece give different ids; set the directory of a "
        "transformers tokenizer instead"
    )
