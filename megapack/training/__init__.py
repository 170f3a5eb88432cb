"""Training on DeepSpeed, in three packages, each of which imports only those before it.

``model``: architecture, loss, FLOPs, memory. ``engine``: ranks, inputs, DeepSpeed, checkpoints.
``monitoring``: log, signals, lost ranks. The commands ``pretrain``, ``evaluate`` and ``export`` use
all of them; ``validation`` measures perplexity, ``curves`` compares runs.
"""
