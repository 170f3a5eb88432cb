"""Other trainers (hosts): one adapter each, which passes packed rows in the host's format.

``probe(forward, batch)`` checks a host's real model and batch; see ``megapack.attention.probe``.
"""

from megapack.attention.probe import probe

__all__ = ["probe"]
