"""One attention layer in the shape of DeepSeek-V2-Lite, computed in both ways that there are.

The cache holds one latent of 512 and one rotated key of 64 numbers a token, for all heads. Prefill
*expands* latents to keys and values of heads; decoding *absorbs* the expansion into the query and
the output, and reads the cache as it is. Both are the same function: here they are held against
float64, and against each other. Weights are dice, shapes are the model's.

NumPy arrays; with CuPy arrays the same calls run kernels.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from cupyflash import concat_and_cache_mla, mla_decode, mla_prefill
from cupyflash.testing import assert_within, attention_oracle

HIDDEN, HEADS, LATENT, NOPE, ROPE, DIM_V = 2048, 16, 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
BLOCK, TYPE = 64, np.float16
LENGTHS = (70, 33, 128)  # tokens of each request, the last 2 of them decoded

rng = np.random.default_rng(0)


def weight(rows: int, columns: int) -> np.ndarray:
    return (rng.standard_normal((rows, columns)) * rows**-0.5).astype(TYPE)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(TYPE)


def rotated(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Rotary embedding of [tokens, ..., ROPE], pairs side by side."""
    angle = position[:, None] * 10000.0 ** -(np.arange(0, ROPE, 2) / ROPE)
    turn = np.exp(1j * angle).reshape(len(x), *[1] * (x.ndim - 2), -1)
    pairs = x.astype(np.float32).reshape(*x.shape[:-1], -1, 2)
    pairs = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape).astype(TYPE)


q_proj = weight(HIDDEN, HEADS * (NOPE + ROPE))
kv_a_proj = weight(HIDDEN, LATENT + ROPE)
kv_b_proj = weight(LATENT, HEADS * (NOPE + DIM_V))
by_head = kv_b_proj.reshape(LATENT, HEADS, NOPE + DIM_V)
absorb_keys = np.ascontiguousarray(by_head[..., :NOPE].transpose(1, 2, 0))
absorb_values = np.ascontiguousarray(by_head[..., NOPE:].transpose(1, 0, 2))

# What the layer makes of its input: queries, and a latent and a rotated key a token.
hidden = rng.standard_normal((sum(LENGTHS), HIDDEN)).astype(TYPE)
position = np.concatenate([np.arange(n) for n in LENGTHS])
q = product(hidden, q_proj).reshape(-1, HEADS, NOPE + ROPE)
q[..., NOPE:] = rotated(q[..., NOPE:], position)
compressed = product(hidden, kv_a_proj).astype(np.float32)
latent = compressed[:, :LATENT]
latent = (latent / np.sqrt((latent**2).mean(-1, keepdims=True) + 1e-6)).astype(TYPE)
rope = rotated(compressed[:, LATENT:].astype(TYPE), position)

# Expanded: keys and values of all heads, and plain attention.
both = product(latent, kv_b_proj).reshape(-1, HEADS, NOPE + DIM_V)
shared = np.broadcast_to(rope[:, None], (len(rope), HEADS, ROPE))
k, v = np.concatenate([both[..., :NOPE], shared], -1), both[..., NOPE:]
starts = np.cumsum([0, *LENGTHS]).astype(np.int32)
expanded = mla_prefill(q, k, v, starts, max(LENGTHS), softmax_scale=SCALE)

# Absorbed: the last two tokens of each request over the paged cache.
columns = [-(-n // BLOCK) for n in LENGTHS]
blocks = rng.permutation(sum(columns))
table = np.zeros((len(LENGTHS), max(columns)), np.int32)
slots = []
for i, count in enumerate(columns):
    table[i, :count], blocks = blocks[:count], blocks[count:]
    token = np.arange(LENGTHS[i])
    slots.append(table[i, token // BLOCK] * BLOCK + token % BLOCK)
cache = np.zeros((sum(columns), BLOCK, LATENT + ROPE), TYPE)
concat_and_cache_mla(latent, rope, cache, np.concatenate(slots), "auto", 1.0)
last = np.concatenate([starts[1:, None] - 2, starts[1:, None] - 1], 1).reshape(-1)
q_latent = product(q[last, :, :NOPE].transpose(1, 0, 2), absorb_keys).transpose(1, 0, 2)
found = mla_decode(
    q_latent,
    q[last, :, NOPE:],
    cache,
    table,
    np.array(LENGTHS, np.int32),
    cu_seqlens_q=np.arange(0, 2 * len(LENGTHS) + 1, 2, dtype=np.int32),
    max_seqlen_q=2,
    max_seqlen_k=max(LENGTHS),
    softmax_scale=SCALE,
)
absorbed = product(found.transpose(1, 0, 2), absorb_values).transpose(1, 0, 2)

# Both against float64; the error of the expanded way is the unit of the bound.
exact = np.einsum("tl,lhd->thd", latent.astype(np.float64), by_head.astype(np.float64))
right = np.concatenate(
    [
        attention_oracle(
            q[a:b],
            np.concatenate([exact[a:b, :, :NOPE], shared[a:b].astype(np.float64)], -1),
            exact[a:b, :, NOPE:],
            softmax_scale=SCALE,
            causal=True,
        )[0]
        for a, b in pairwise(starts)
    ]
)
assert_within(absorbed, right[last], expanded[last], name="absorbed")
apart = np.abs(absorbed.astype(np.float32) - expanded[last].astype(np.float32)).max()
width = cache.shape[-1] * cache.itemsize
full = HEADS * (NOPE + ROPE + DIM_V) * cache.itemsize
print(f"absorbed and expanded agree: largest difference {apart:.2g}, largest value "
      f"{np.abs(right[last]).max():.2g}")  # fmt: skip
print(f"the cache holds {width} bytes a token; keys and values of {HEADS} heads would be {full}")
