"""Build the shards of a dataset and join them.

- plan: the options (BuildConfig) and all decisions that follow from them, the same for all workers
- workspace: the directory of the shards, its locks and records; checks of disk space
- worker: builds one shard (datasets with a record); ``megapack.executors`` runs workers
- run: ``preview`` and ``build``; joins the shards
"""
