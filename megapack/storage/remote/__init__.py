"""Datasets in object stores, read through a local cache that all processes of a node share.

- address: what is remote; client: one version of an object, read by ranges
- checksums: ``<prefix>.checksums``, which tells that a range is right
- cache: the directory; pool: threads that fetch; locks between processes; sparse: a file of which
  only some blocks are here; eviction: room in it
- tokens: a .bin as an array; opening: a dataset; upload: writing one
- copies: whole datasets, for what works on local files
"""

from megapack.storage.remote.address import is_remote

__all__ = ["is_remote"]
