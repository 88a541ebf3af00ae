"""Attention inside of jax.jit, between JAX's own operations, as a custom call of XLA."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax_ffi import FfiFunction

from cupyflash import flash_attn_varlen_func

PLATFORM = "CUDA" if jax.default_backend() == "gpu" else "cpu"


@cache
def _target(max_seqlen_q: int, max_seqlen_k: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """One custom call for each set of options; arrays and their shapes come with the call."""

    def run(stream: Any, arguments: list[Any], results: list[Any]) -> None:
        q, k, v, starts_q, starts_k = arguments
        flash_attn_varlen_func(
            q, k, v, max_seqlen_q, starts_q, max_seqlen_k, starts_k, out=results[0], lse=results[1],
            stream=stream, **dict(options),
        )  # fmt: skip

    return FfiFunction(f"cupyflash_{_target.cache_info().currsize}", run, PLATFORM)


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, starts_q: jax.Array, starts_k: jax.Array,
    max_seqlen_q: int, max_seqlen_k: int, **options: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`cupyflash.flash_attn_varlen_func` of packed keys; out and the log-sum-exp."""
    target = _target(max_seqlen_q, max_seqlen_k, tuple(sorted(options.items())))
    shapes = (
        jax.ShapeDtypeStruct((*q.shape[:2], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct((q.shape[1], q.shape[0]), jnp.float32),
    )
    return target(shapes, q, k, v, starts_q, starts_k)


@jax.jit
def layer(x: jax.Array, weights: jax.Array, starts: jax.Array) -> jax.Array:
    """A projection, attention over it, and a sum: one compiled program."""
    q, k, v = (x @ weights).reshape(len(x), 3, 4, 64).transpose(1, 0, 2, 3)
    out, _ = attention(q, k, v, starts, starts, 32, 32, causal=True)
    return x + out.reshape(x.shape)


@jax.jit
def reference(x: jax.Array, weights: jax.Array, starts: jax.Array) -> jax.Array:
    q, k, v = (x @ weights).reshape(len(x), 3, 4, 64).transpose(1, 0, 2, 3).astype(jnp.float32)
    request = jnp.searchsorted(starts, jnp.arange(len(x)), side="right")
    token = jnp.arange(len(x))
    seen = (request[:, None] == request) & (token <= token[:, None])
    scores = jnp.einsum("ihd,jhd->hij", q, k) / 8
    weights_ = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return x + jnp.einsum("hij,jhd->ihd", weights_, v).reshape(x.shape)


def main() -> float:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (57, 256), jnp.float16)
    weights = jax.random.normal(keys[1], (256, 768), jnp.float16) / 16
    starts = jnp.array([0, 25, 57], jnp.int32)
    error = 0.0
    for _ in range(3):
        difference = layer(x, weights, starts).astype(jnp.float32) - reference(x, weights, starts)
        error = max(error, float(jnp.abs(difference).max()))
    print(f"jax.jit on {PLATFORM}: error {error:.4f} over three runs")
    return error


if __name__ == "__main__":
    assert main() < 0.02
