"""Models, loss, engine, checkpoints and evaluation, in wings; each stands on those before it.

``model`` what is trained, its loss, what it costs; ``run`` processes, inputs, the engine, files;
``watch`` logs, signals, lost ranks; ``judge`` perplexity and comparisons.
"""
