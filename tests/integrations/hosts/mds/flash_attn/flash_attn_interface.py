"""flash-attn's two functions, in plain torch."""

from tests.hosts.flash import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
