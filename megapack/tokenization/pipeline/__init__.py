"""Shards -> one dataset.

- plan: the options (BuildConfig) and all decisions that follow from them, the same for all workers
- workspace: the directory of the shards, its locks and records; disk space
- worker: builds one shard, a dataset with a record; ``megapack.executors`` runs workers
- run: ``preview`` and ``build``; joins the shards
"""
