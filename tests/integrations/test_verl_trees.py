"""verl's FSDP engine on prefix trees: log-probabilities and updates of its own forward and loss.

The engine is verl's class around a model that is not sharded: ``forward_backward_batch`` with
``ppo_loss``. ``MEGAPACK_VERL`` as in tests/integrations/test_verl.py.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.integrations.harness import run_ranks
from tests.integrations.test_planned import VOCABULARY, tiny_model
from tests.integrations.test_verl import VERL, needs_verl

STEPS, CAP = 3, 96


def _engine(trees: bool) -> Any:
    home: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    verl_f: Any = importlib.import_module("verl.utils.torch_functional")
    made = object.__new__(home.FSDPEngineWithLMHead)
    made.module = tiny_model()
    made.module.set_attn_implementation("megapack" if trees else "eager")
    chunks = {"entropy_checkpointing": False, "entropy_from_logits_with_chunking": False}
    made.engine_config = SimpleNamespace(**chunks)
    made.use_ulysses_sp, made.ulysses_sequence_parallel_size = False, 1
    made.pad_to_length, made._autocast_dtype = False, torch.float32
    made.compute_entropy_from_logits = verl_f.entropy_from_logits
    made.get_data_parallel_group = lambda: torch.distributed.group.WORLD
    made.get_data_parallel_size = lambda: 1
    return made


def _nested(rows: list[Any]) -> Any:
    return torch.nested.as_nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)


def _rollouts(seed: int) -> dict[str, Any]:
    """Four rollouts of each of four prompts."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, VOCABULARY, rng.integers(12, 30)).tolist() for _ in range(4)]
    prompts = [prompt for prompt in prompts for _ in range(4)]
    answers = [rng.integers(2, VOCABULARY, rng.integers(1, 16)).tolist() for _ in prompts]
    ones = _nested([[1] * len(answer) for answer in answers])
    advantages = [[float(rng.normal())] * len(answer) for answer in answers]
    whole = [a + b for a, b in zip(prompts, answers, strict=True)]
    rows = {"prompts": _nested(prompts), "responses": _nested(answers), "input_ids": _nested(whole)}
    rows |= {"position_ids": _nested([list(range(len(row))) for row in whole])}
    rows |= {"response_mask": ones, "loss_mask": ones, "advantages": _nested(advantages)}
    return {**rows, "temperature": torch.full((len(whole),), 0.7)}


def _train(rank: int, ranks: int, trees: bool) -> Any:
    from tests.hosts.launch_verl import use_cpu  # noqa: PLC0415

    importlib.import_module("sys").path.extend(str(VERL).split(os.pathsep))
    use_cpu()
    if trees:
        importlib.import_module("megapack.integrations.hosts.verl_trees").install("sdpa")
    tu: Any = importlib.import_module("verl.utils.tensordict_utils")
    loss: Any = importlib.import_module("verl.workers.utils.losses").ppo_loss
    actor: Any = importlib.import_module("verl.workers.config").ActorConfig
    sizes = {"rollout_n": 4, "ppo_micro_batch_size_per_gpu": 4, "entropy_coeff": 0.01}
    policy_loss = partial(loss, actor(strategy="fsdp", **sizes))
    engine = _engine(trees)
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.5)
    settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": CAP, "use_remove_padding": True}
    settings |= {"calculate_entropy": True, "pad_mode": "no_padding", "global_batch_size": 16}
    log_probs = []
    for step in range(STEPS):
        rows = _rollouts(step)
        batch = tu.get_tensordict(dict(rows), dict(settings))
        scored = engine.forward_backward_batch(batch, None, forward_only=True)
        lengths = rows["responses"].offsets().diff().tolist()
        of_samples = scored["model_output"]["log_probs"].unbind()
        parts = [row[-n - 1 : -1] for row, n in zip(of_samples, lengths, strict=True)]
        log_probs.append(torch.cat(parts).numpy())
        old = torch.nested.as_nested_tensor([part + 0.1 for part in parts], layout=torch.jagged)
        optimizer.zero_grad()
        batch = tu.get_tensordict({**rows, "old_log_probs": old}, dict(settings))
        engine.forward_backward_batch(batch, policy_loss)
        optimizer.step()
    parameters = {name: p.detach().numpy() for name, p in engine.module.named_parameters()}
    return np.concatenate(log_probs), parameters, getattr(engine, "tree_tokens", None)


@needs_verl
def test_verl_trains_on_trees_like_on_rows(free_port: int) -> None:
    [expected] = run_ranks(_train, 1, free_port, False)
    [found] = run_ranks(_train, 1, free_port, True)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    start = dict(tiny_model().named_parameters())
    for name, value in expected[1].items():
        assert np.abs(value - start[name].detach().numpy()).max() > 1e-4, name
        np.testing.assert_allclose(found[1][name], value, atol=1e-5, err_msg=name)
    forwarded, tokens = found[2]
    assert forwarded < 0.7 * tokens
