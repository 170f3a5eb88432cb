"""JAX without torch: a small transformer whose attention mask comes from the segmentation.

python examples/jax_loop.py text text.samples --row-tokens 1024
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megapack import PackedDataset, Schedule
from megapack.integrations.hosts.jax import PackedSteps

WIDTH, HEADS, DEPTH = 64, 4, 2
Parameters = Any  # nested dicts and lists of arrays


def initialize(vocab_size: int, longest: int) -> Parameters:
    """Return the parameters of a decoder with learned positions and tied embeddings."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 0.02, shape), jnp.float32)

    layers = [
        {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH),
        }
        for _ in range(DEPTH)
    ]
    return {
        "tokens": normal(vocab_size, WIDTH),
        "positions": normal(longest, WIDTH),
        "layers": layers,
    }


def normalize(x: jax.Array) -> jax.Array:
    """Return x with mean square 1 (RMSNorm without weights)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def forward(
    parameters: Parameters, tokens: jax.Array, positions: jax.Array, segmentation: jax.Array
) -> jax.Array:
    """Return logits, float32 ``(rows, R, vocab_size)``, of int32 arrays ``(rows, R)``."""
    rows, length = tokens.shape
    same_segment = segmentation[:, :, None] == segmentation[:, None, :]
    mask = (same_segment & jnp.tri(length, dtype=bool))[:, None]
    x = parameters["tokens"][tokens] + parameters["positions"][positions]
    for layer in parameters["layers"]:
        qkv = (normalize(x) @ layer["qkv"]).reshape(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = (qkv[:, :, i] for i in range(3))
        attended = jax.nn.dot_product_attention(q, k, v, mask=mask)
        x = x + attended.reshape(rows, length, WIDTH) @ layer["out"]
        x = x + jax.nn.gelu(normalize(x) @ layer["up"]) @ layer["down"]
    return normalize(x) @ parameters["tokens"].T


def loss_of(parameters: Parameters, batch: dict[str, jax.Array]) -> jax.Array:
    """Return the mean loss over all labels of the batch."""
    places = batch["inputs_position"], batch["inputs_segmentation"]
    log_probs = jax.nn.log_softmax(forward(parameters, batch["inputs"], *places))
    losses = -jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    has_label = batch["targets_segmentation"] != 0
    return jnp.sum(losses * has_label) / jnp.maximum(jnp.sum(has_label), 1)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(
    parameters: Parameters, moments: Any, step: int, batch: dict[str, jax.Array]
) -> tuple[Parameters, Any, jax.Array]:
    """Take one step of Adam; return parameters, moments and the loss before the step."""
    loss, gradients = jax.value_and_grad(loss_of)(parameters, batch)
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second, gradients)
    scale = 1e-3 * jnp.sqrt(1 - 0.99**step) / (1 - 0.9**step)
    parameters = jax.tree.map(
        lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8), parameters, first, second
    )
    return parameters, (first, second), loss


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; return the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix")
    parser.add_argument("samples")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)

    dataset = PackedDataset(args.prefix, args.samples, framework="numpy")
    schedule = Schedule(dataset, tokens_per_step=args.tokens_per_step, row_tokens=args.row_tokens)
    steps = PackedSteps(
        dataset,
        schedule,
        data_parallel_rank=jax.process_index(),
        data_parallel_size=jax.process_count(),
        num_steps=args.steps,
    )
    parameters = initialize(args.vocab_size, dataset.longest_position(args.row_tokens))
    moments = (jax.tree.map(jnp.zeros_like, parameters),) * 2
    moments = jax.tree.map(jnp.copy, moments)  # donated buffers must differ
    losses: list[float] = []
    for step, batch in enumerate(steps, 1):
        parameters, moments, loss = train_step(parameters, moments, step, batch)
        losses.append(float(loss))
        print(f"step {step - 1}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
