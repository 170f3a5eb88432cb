"""Other people's trainers: one adapter per host, which maps its names. Stands on data.

``probe(forward, batch)`` tries a host's real path: ``megapack.attention.probe``.
"""

from megapack.attention.probe import probe

__all__ = ["probe"]
