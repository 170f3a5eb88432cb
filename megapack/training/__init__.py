"""Models, loss, engine, checkpoints and evaluation, in wings; each stands on those before it.

``model`` what is trained, its loss, what it costs; ``engine`` processes, inputs, DeepSpeed, files;
``monitoring`` logs, signals, lost ranks. The commands ``pretrain``, ``evaluate`` and ``export`` use
all of them; ``validation`` measures perplexity, ``curves`` compares runs.
"""
