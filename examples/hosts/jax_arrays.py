"""Attention on JAX arrays, outside of jit: DLPack both ways, nothing is copied.

JAX arrays are immutable, so the KV cache that is written in place is CuPy's (on a CPU NumPy's), and
JAX sees results, not memory that changes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from cupyflash import flash_attn_varlen_func, reshape_and_cache_flash

ON_GPU = jax.default_backend() == "gpu"
TOKENS, HEADS, KV_HEADS, DIM, BLOCK = 40, 8, 2, 64, 16

if ON_GPU:
    import cupy as xp
else:
    xp = np


def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of one request, by JAX itself."""
    group = HEADS // KV_HEADS
    k, v = (jnp.repeat(a.astype(jnp.float32), group, axis=1) for a in (k, v))
    scores = jnp.einsum("ihd,jhd->hij", q.astype(jnp.float32), k) * DIM**-0.5
    seen = jnp.arange(TOKENS)[None] <= jnp.arange(TOKENS)[:, None]
    return jnp.einsum("hij,jhd->ihd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)


def main() -> float:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (TOKENS, HEADS, DIM), jnp.bfloat16)
    k, v = (jax.random.normal(key, (TOKENS, KV_HEADS, DIM), jnp.bfloat16) for key in keys[1:])

    dtype = np.asarray(jnp.zeros(0, jnp.bfloat16)).dtype  # ml_dtypes.bfloat16
    caches = [xp.zeros((8, BLOCK, KV_HEADS, DIM), dtype) for _ in "kv"]
    slots = xp.arange(BLOCK, BLOCK + TOKENS)  # blocks 1, 2 and 3
    reshape_and_cache_flash(k, v, *caches, slots, "auto", 1.0, 1.0)
    # Named, so that JAX does not use their memory again before the call has read it.
    starts, used, table = jnp.array([0, TOKENS]), jnp.array([TOKENS]), jnp.array([[1, 2, 3]])
    out = flash_attn_varlen_func(
        q, *caches, TOKENS, starts, TOKENS, seqused_k=used, block_table=table, causal=True
    )
    result = jnp.from_dlpack(out) if ON_GPU else jnp.asarray(out)
    error = float(jnp.abs(result.astype(jnp.float32) - reference(q, k, v)).max())
    print(f"JAX on {jax.default_backend()}: out {result.shape} {result.dtype}, error {error:.4f}")
    return error


if __name__ == "__main__":
    assert main() < 0.02
