"""megatron-core and Megatron-LM, 0.16 to main: dataset, storage, batches, attention, launcher.

``python -m megapack.integrations.megatron pretrain_gpt.py ...`` is the whole swap; ``install()``
does the same from inside a script. docs/guides/megatron.md says what changes in a launch command.
"""

from megapack.integrations.megatron.attention import PackedCoreAttention, with_packed_attention
from megapack.integrations.megatron.batch import forward_step, get_batch
from megapack.integrations.megatron.builder import PackedDatasetBuilder
from megapack.integrations.megatron.dataset import PackedGPTDataset
from megapack.integrations.megatron.install import install, uninstall
from megapack.integrations.megatron.packed import flatten_rows, to_packed_seq_params
from megapack.integrations.megatron.storage import (
    IndexedDataset,
    IndexedDatasetBuilder,
    rebind_storage,
)

__all__ = [
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "PackedCoreAttention",
    "PackedDatasetBuilder",
    "PackedGPTDataset",
    "flatten_rows",
    "forward_step",
    "get_batch",
    "install",
    "rebind_storage",
    "to_packed_seq_params",
    "uninstall",
    "with_packed_attention",
]
