"""verl's actor on packed prefix trees: a prompt is computed once for its rollouts.

    VERL_USE_EXTERNAL_MODULES=megapack.integrations.hosts.verl_trees     # in all processes
    +actor_rollout_ref.model.override_config.attn_implementation=megapack
    trainer.balance_batch=False                # rollouts of a prompt stay on one rank

``install`` changes the FSDP engine of policies: log-probabilities of old and reference policy and
the update forward one tree per micro batch. Entropies, losses and metrics stay verl's, in its own
layout: nested tensors by sample. Critics are unchanged. With
``use_dynamic_bsz``, ``max_token_len_per_gpu`` limits the tokens of the tree, and samples that share
a prefix meet in one micro batch.

Three samples of 11 tokens are 6 tokens of a tree; the output of the last position of a sample,
which has no next token and which verl never reads, is that of the position before it:

    samples    5 6 7 8 | 5 6 9 | 5 6 7 4        tokens  5 6 7 4 8 9       outputs  by token
    log_probs  of 6 7 8 8 | 6 9 9 | 6 7 4 4

Tested with verl 0.9.1; see docs/guides/trees.md.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from megapack.attention import TreeSegments, register, tree_arguments
from megapack.errors import ConfigError
from megapack.integrations.host import Rebinding, bare_model, check_options
from megapack.integrations.hosts import verl
from megapack.integrations.hosts.trees import (
    check_tree_model,
    keep_predecessors,
    one_tree,
    rows_in_order,
)

_rebinding = Rebinding("verl")
_TREE = "megapack_tree"

# Settings of a micro batch that the engine reads for its outputs, and their defaults.
_SETTINGS = {
    "use_remove_padding": True,
    "use_fused_kernels": False,
    "calculate_entropy": False,
    "calculate_sum_pi_squared": False,
    "distillation_use_topk": False,
    "distillation_only": False,
}


def _prepare_inputs(stock: Any, engine: Any, micro_batch: Any) -> tuple[Any, Any]:
    """Return the tree of a micro batch as arguments of the model, and what the outputs need."""
    tu = importlib.import_module("verl.utils.tensordict_utils")
    settings = {name: tu.get_non_tensor_data(micro_batch, name, d) for name, d in _SETTINGS.items()}
    model_inputs, output_args = stock(engine, micro_batch=micro_batch)
    temperatures = output_args.get("temperature_rmpad", torch.ones(1))
    one = bool((temperatures == temperatures[0]).all())
    given = sorted(model_inputs.keys() - {"input_ids", "attention_mask", "position_ids"})
    rows = "prefix trees are rows of unique tokens"
    check_options({
        "use_remove_padding": (settings["use_remove_padding"], True, rows),
        "use_fused_kernels": (settings["use_fused_kernels"], False, "it has one label per state"),
        "distillation": (settings["distillation_use_topk"], False, "its teacher has flat rows"),
        "ulysses_sequence_parallel_size": (
            engine.ulysses_sequence_parallel_size, 1, "every rank computes whole trees"
        ),
        "pad_to_length": (engine.pad_to_length, False, "a tree has its own length"),
        "further inputs of the model": (given, [], "trees hold text"),
        "one temperature for all samples": (one, True, "samples share the logits of their prefix"),
    })  # fmt: skip
    ids = micro_batch["input_ids"]
    ends, positions = ids.offsets(), model_inputs["position_ids"]
    begins = ends[:-1].repeat_interleave(ends.diff())
    if not torch.equal(positions[0] + begins, torch.arange(len(begins), device=ids.device)):
        raise ConfigError(
            "position_ids of a sample do not count from 0: it has several documents or images, and "
            "a tree holds one text per sample; train it without trees"
        )
    _prepare_model(engine)
    batch = one_tree([row.cpu().numpy() for row in ids.unbind()]).to(ids.device)
    kept = batch["predecessors"].clamp(min=0)
    last = ids.offsets()[1:] - 1
    following = rows_in_order(batch)
    own = following[last]
    following = following.roll(-1).index_copy(0, last, own)
    arguments = tree_arguments(TreeSegments.of(batch))
    del arguments["use_cache"]  # the engine passes it, too
    tree_inputs = {
        "input_ids": batch["tokens"],
        "attention_mask": None,
        "position_ids": batch["position_ids"],
        "predecessors": kept,
        **arguments,
    }
    output_args |= {
        "input_ids_rmpad_rolled": batch["tokens"][0],
        "temperature_rmpad": temperatures[:1].expand(len(kept)),
        _TREE: (following, settings),
    }
    engine.tree_tokens = [
        total + new
        for total, new in zip(
            getattr(engine, "tree_tokens", [0, 0]), (len(kept), len(following)), strict=True
        )
    ]
    return tree_inputs, output_args


def _prepare_outputs(
    stock: Any, engine: Any, output: Any, output_args: Any, micro_batch: Any, processor: Any
) -> Any:
    """Return verl's outputs of the tree's tokens as nested tensors by sample."""
    tu = importlib.import_module("verl.utils.tensordict_utils")
    following, settings = output_args.pop(_TREE)
    tokens, offsets = output_args["input_ids_rmpad_rolled"], micro_batch["input_ids"].offsets()
    row = torch.nested.as_nested_tensor([tokens], layout=torch.jagged)
    settings |= {"pad_mode": tu.get_non_tensor_data(micro_batch, "pad_mode", "no_padding")}
    of_tree = tu.get_tensordict({"input_ids": row}, settings)
    made = stock(engine, output, output_args, of_tree, processor)
    return {
        name: torch.nested.nested_tensor_from_jagged(values.values()[following], offsets)
        for name, values in made.items()
    }


def _prepare_model(engine: Any) -> None:
    """Check the engine's model once, and let its head see one state per label."""
    if getattr(engine, "tree_model", None) is None:
        bare = bare_model(getattr(engine.module, "_fsdp_wrapped_module", engine.module))
        with torch.enable_grad():  # log-probabilities come first, without gradients
            check_tree_model(bare)
        keep_predecessors(bare.base_model)
        engine.tree_model = bare


def install(backend: str | None = None) -> None:
    """Make verl's FSDP engine compute policies on trees; a second call changes nothing.

    Also replaces verl's batch balancing (``megapack.integrations.hosts.verl``). Raises ConfigError
    if this release of verl lacks one of the functions.

    Args:
        backend: of megapack's attention (``megapack.attention.BACKENDS``), registered for models
            with ``attn_implementation=megapack``; None: flash2 with CUDA, else sdpa.
    """
    if _rebinding:
        return
    register(backend or ("flash2" if torch.cuda.is_available() else "sdpa"))
    verl.install(trees=True)
    home = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    policy = home.FSDPEngineWithLMHead
    stock_inputs, stock_outputs = policy.prepare_model_inputs, policy.prepare_model_outputs

    def prepare_model_inputs(engine: Any, micro_batch: Any) -> Any:
        # Critics inherit the inputs of policies, and have other outputs.
        if type(engine).prepare_model_outputs is not prepare_model_outputs:
            return stock_inputs(engine, micro_batch=micro_batch)
        return _prepare_inputs(stock_inputs, engine, micro_batch)

    def prepare_model_outputs(
        engine: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> Any:
        if _TREE not in output_args:
            return stock_outputs(engine, output, output_args, micro_batch, logits_processor_func)
        return _prepare_outputs(
            stock_outputs, engine, output, output_args, micro_batch, logits_processor_func
        )

    _rebinding.replace(policy, "prepare_model_inputs", prepare_model_inputs)
    _rebinding.replace(policy, "prepare_model_outputs", prepare_model_outputs)


def uninstall() -> None:
    """Restore verl's functions."""
    _rebinding.undo()
    verl.uninstall()


if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
    install()
