"""Shards built by many processes or machines, whatever a shard is: tokenize and pack stand on it.

``work`` says what a worker is; ``processes`` are those of this machine, ``ray_cluster`` those of a
Ray cluster. Both give the records in the order of the shards and call ``report`` as work goes on.
"""
