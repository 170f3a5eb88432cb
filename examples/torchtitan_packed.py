"""torchtitan's debug model, and any other configuration of its registries, on packed rows.

    PYTHONPATH=examples torchrun --nproc-per-node 2 -m torchtitan.train \
        --module torchtitan_packed --config packed_debugmodel \
        --dataloader.data_path corpus --training.num_tokens_per_train_step 65536

``corpus`` is a .bin/.idx prefix or a manifest; docs/guides/torchtitan.md.
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from megapack.integrations.hosts.torchtitan import PackedTitanTrainer, packed


def packed_debugmodel() -> PackedTitanTrainer.Config:
    """The debug model; the last hundredth of the documents is for validation."""
    return packed(llama3_debugmodel(), "corpus", train_fraction=0.99)
