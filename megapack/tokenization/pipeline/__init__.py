"""Shards -> one dataset.

- config: what is asked for; plan: what is done, decided before the first shard, the same value for
  every worker; run: ``preview`` and ``build``
- worker: a shard becomes a dataset of its own here, with a record (record) that says it is whole;
  who does it: ``megapack.executors``; background: threads that read, encode and write at once
- workspace: where shards lie, and whose they are; space: whether the disk holds them
- assemble: the shards become the dataset here
"""
