"""megatron-core and Megatron-LM, 0.16 to main: dataset, storage, batches, attention, launcher.

``python -m megapack.integrations.hosts.megatron pretrain_gpt.py ...`` runs a script on packed rows;
``install()`` does the same inside a script. See docs/guides/megatron.md.

Each name is imported on first use, and only its own module with it. So a Megatron release may lack
something that only another module needs.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {  # module -> its public names
    "attention": ("PackedCoreAttention", "with_packed_attention"),
    "batch": ("flatten_rows", "forward_step", "get_batch", "to_packed_seq_params"),
    "dataset": ("PackedDatasetBuilder", "PackedGPTDataset"),
    "storage": ("IndexedDataset", "IndexedDatasetBuilder", "rebind_storage"),
    "swap": ("install", "install_bridge", "uninstall"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
