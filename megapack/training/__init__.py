"""Models, loss, engine, checkpoints and evaluation, in wings; each stands on those before it.

``model`` what is trained, its loss, what it costs; ``run`` processes, inputs, the engine, files;
``watch`` logs, signals, lost ranks; ``judge`` perplexity and comparisons.
"""

import importlib.util

_needed = ("torch", "transformers", "deepspeed")
_missing = [name for name in _needed if importlib.util.find_spec(name) is None]
if _missing:
    raise ModuleNotFoundError(
        f"training needs {', '.join(_missing)}, and this environment has only what data need: "
        "install megapack with its extra train (pip install 'FILE.whl[train]' or '.[train]'), on "
        "top of the torch build that you want"
    )
