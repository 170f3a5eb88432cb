"""verl's FSDP engine on prefix trees: log-probabilities and updates of its own forward and loss.

Runs examples/tree_verl.py with and without trees. ``MEGAPACK_VERL`` as in
tests/integrations/test_verl.py.
"""

from __future__ import annotations

import importlib
import os
import runpy
from pathlib import Path
from typing import Any

import numpy as np

from tests.integrations.harness import run_ranks
from tests.integrations.test_verl import VERL, needs_verl

EXAMPLE = Path(__file__).parents[2] / "examples" / "tree_verl.py"


def _train(rank: int, ranks: int, *words: str) -> Any:
    from tests.hosts.launch_verl import use_cpu  # noqa: PLC0415

    importlib.import_module("sys").path.extend(str(VERL).split(os.pathsep))
    use_cpu()
    log_probs, model, tokens = runpy.run_path(str(EXAMPLE))["main"](words)
    parameters = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return log_probs.numpy(), parameters, tokens


@needs_verl
def test_verl_trains_on_trees_like_on_rows(free_port: int) -> None:
    [expected] = run_ranks(_train, 1, free_port, "--no-trees")
    [start] = run_ranks(_train, 1, free_port, "--no-trees", "--steps", "1")
    [found] = run_ranks(_train, 1, free_port)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-5)
    for name, value in expected[1].items():
        assert np.abs(value - start[1][name]).max() > 1e-4, name
        np.testing.assert_allclose(found[1][name], value, atol=1e-5, err_msg=name)
    forwarded, tokens = found[2]
    assert forwarded < 0.7 * tokens and expected[2] == [tokens, tokens]
