"""Ragged batches with hand-chosen values, on any path."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from cupyflash import flash_attn_varlen_func
from cupyflash.testing import POISON_INDEX, expect_attention, weight_precision

BF16 = np.dtype(ml_dtypes.bfloat16)


def starts(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def mean_batch(q_lens, kv_lens, heads=1, kv_heads=1, dim=64, dtype=np.float32):
    """q = 0 and v[j] = j: out is the mean of the visible key indices, lse = ln(count)."""
    rng = np.random.default_rng(1)
    q = np.zeros((sum(q_lens), heads, dim), dtype)
    k = rng.standard_normal((sum(kv_lens), kv_heads, dim)).astype(dtype)
    index = np.concatenate([np.arange(n) for n in kv_lens])
    v = np.repeat(index, kv_heads * dim).reshape(k.shape).astype(dtype)
    return q, k, v


def random_batch(q_lens, kv_lens, heads=1, kv_heads=1, dim=64, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((sum(q_lens), heads), (sum(kv_lens), kv_heads), (sum(kv_lens), kv_heads))
    return tuple(rng.standard_normal((*shape, dim)).astype(dtype) for shape in shapes)


def arguments(path, q, k, v, q_lens, kv_lens, page_size=None, seed=0, **options) -> dict[str, Any]:
    """Arguments of a call; with ``page_size``, k and v go to shuffled pages among poisoned ones.

    float32 is for NumPy alone: elsewhere it becomes float16.
    """
    if path.name != "numpy":
        q, k, v = (a.astype(np.float16) if a.dtype == np.float32 else a for a in (q, k, v))
    args = {
        "q": path.array(q),
        "max_seqlen_q": max(q_lens, default=0),
        "cu_seqlens_q": path.array(starts(q_lens)),
        "max_seqlen_k": max(kv_lens, default=0),
    }
    if page_size is None:
        args.update(k=path.array(k), v=path.array(v), cu_seqlens_k=path.array(starts(kv_lens)))
    else:
        caches, table = paged((k, v), kv_lens, page_size, seed)
        args.update(k=path.array(caches[0]), v=path.array(caches[1]))
        args.update(block_table=path.array(table), seqused_k=path.array(kv_lens, np.int32))
    for name, option in options.items():
        args[name] = path.array(option) if isinstance(option, np.ndarray) else option
    return args


def rounding(path):
    """What storing a result may cost relatively: float32 on NumPy, else float16."""
    return 1e-6 if path.name == "numpy" else 2.0**-11


def paged(operands, kv_lens, page_size, seed=0, spare=2):
    """Caches of NaN with the tokens in shuffled pages, and the table with a poisoned tail."""
    counts = [-(-n // page_size) for n in kv_lens]
    blocks = np.random.default_rng(seed).permutation(sum(counts) + spare)
    table = np.full((len(kv_lens), max(counts, default=0) + 1), POISON_INDEX, np.int32)
    caches = []
    for operand in operands:
        empty = 0x7F if operand.dtype == np.uint8 else np.nan
        shape = (len(blocks), page_size, *operand.shape[1:])
        caches.append(np.full(shape, empty, operand.dtype))
    first, taken = starts(kv_lens), 0
    for request, count in enumerate(counts):
        own = blocks[taken : taken + count]
        table[request, :count] = own
        taken += count
        token = np.arange(kv_lens[request])
        for cache, operand in zip(caches, operands, strict=True):
            cache[own[token // page_size], token % page_size] = operand[first[request] + token]
    return caches, table


def attend(path, *batch, **options):
    """out and lse of a call as float64, both poisoned beforehand."""
    return run(path, arguments(path, *batch, **options))


def results(path, args):
    """out and lse to write, poisoned, as arguments."""
    q, v = args["q"], args["v"]
    kind = BF16 if q.dtype.itemsize == 1 else q.dtype
    out = path.array(np.full((*q.shape[:2], v.shape[-1]), np.nan, kind))
    return {"out": out, "lse": path.array(np.full((q.shape[1], len(q)), np.nan, np.float32))}


def run(path, args):
    written = results(path, args)
    flash_attn_varlen_func(**args, **written)
    return tuple(path.host(written[name]).astype(np.float64) for name in ("out", "lse"))


def expected(path, args, **precision):
    """What the call must return; the arguments may lie on a GPU."""
    precision = weight_precision(**args) | precision
    host = {n: path.host(a) if hasattr(a, "dtype") else a for n, a in args.items()}
    return expect_attention(**host, **precision)


def check_results(path, args, written):
    expected(path, args).check(path.host(written["out"]), path.host(written["lse"]))


def check(path, args, **precision):
    """Call, hold the result against the oracle, and return it."""
    out, lse = run(path, args)
    kind = BF16 if args["q"].dtype.itemsize == 1 else args["q"].dtype
    expected(path, args, **precision).check(out.astype(kind), lse.astype(np.float32))
    return out, lse
