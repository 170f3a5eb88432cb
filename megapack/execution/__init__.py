"""Shards built by many processes or machines, whatever a shard is: tokenize and pack stand on it.

``work`` says what a worker is; ``carry_out`` chooses between ``processes`` of this machine and
``ray_cluster``. Records come in the order of the shards; ``report`` is told as work goes on.
"""
