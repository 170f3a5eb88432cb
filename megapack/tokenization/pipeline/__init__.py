"""Shards -> one dataset.

- plan: what is asked for (BuildConfig), and what is done: decided before the first shard, the same
  value for every worker
- workspace: where shards lie, and whose they are; whether the disk holds them
- worker: a shard becomes a dataset of its own here, with a record that says it is whole; who does
  it: ``megapack.executors``
- run: ``preview`` and ``build``; the shards become the dataset here
"""
