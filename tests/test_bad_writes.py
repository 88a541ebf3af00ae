"""Writes to the cache refuse bad input: the value, the rule and what would work; none is made."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupyflash

BF16 = np.dtype(ml_dtypes.bfloat16)


def write_args():
    key = np.ones((3, 2, 8), np.float16)
    cache = np.full((2, 4, 4, 2, 8), 7, np.float16)
    return {
        "key": key, "value": key, "key_cache": cache[0], "value_cache": cache[1],
        "slot_mapping": np.array([1, 2, -1]), "kv_cache_dtype": "auto", "k_scale": 1.0,
        "v_scale": 1.0,
    }  # fmt: skip


WRITE = [
    ("key", None, TypeError, "key is None"),
    ("key", lambda k: k[:2], ValueError, "3 slots, but key and value have 2 tokens"),
    ("key", lambda k: k.astype(np.float64), TypeError, "key is float64 and value float16"),
    ("key", lambda k: k[:, :1], ValueError, r"\[Hk, D\] is \[1, 8\] in key"),
    ("key_cache", lambda c: c[..., ::2], ValueError, "key_cache .* contiguous"),
    ("key_cache", lambda c: c[:3], ValueError, r"\[num_blocks, block_size\] \[3, 4\]"),
    ("key_cache", lambda c: c.astype(BF16), TypeError, "key_cache is bfloat16 and value_cache"),
    ("key_cache", lambda c: np.broadcast_to(c[:1], c.shape), ValueError, "slots share memory"),
    ("slot_mapping", lambda s: s.astype(np.int16), TypeError, "int16; it must be int32 or int64"),
    ("slot_mapping", lambda s: s[None], ValueError, r"it must be contiguous \[tokens\]"),
    (
        "slot_mapping",
        np.array([1, 16, 2]),
        ValueError,
        r"slot_mapping\[1\]=16 must be less than 16",
    ),
    ("kv_cache_dtype", "fp4", ValueError, "kv_cache_dtype='fp4' is not an fp8 format"),
    ("kv_cache_dtype", "fp8", TypeError, "but the cache is float16; use uint8 or float8_e4m3fn"),
    ("kv_cache_dtype", "bfloat16", TypeError, 'but the cache is float16; use "auto"'),
    ("k_scale", 2.0, ValueError, "k_scale=2.0: a cache in fp16 takes no scale; use 1.0"),
    ("k_scale", 0.0, ValueError, "k_scale=0.0 must be positive"),
    ("k_scale", float("nan"), ValueError, "k_scale=nan must be finite"),
    ("v_scale", np.ones(3, "f4"), ValueError, r"v_scale has shape \(3,\); it must be \[2\], \[1\]"),
    ("v_scale", np.ones(2), TypeError, "v_scale is float64; it must be float32"),
    ("stream", 0, ValueError, "stream given, but NumPy arrays"),
]


@pytest.mark.parametrize(("name", "change", "error", "words"), WRITE)
def test_writes(name, change, error, words):
    args = write_args()
    caches = args["key_cache"], args["value_cache"]
    args[name] = change(args[name]) if callable(change) else change
    with pytest.raises(error, match=words):
        cupyflash.reshape_and_cache_flash(**args)
    assert all((cache == 7).all() for cache in caches)


def test_writes_to_bytes_need_a_format_that_is_known():
    args = write_args()
    args["key_cache"], args["value_cache"] = np.zeros((2, 4, 4, 2, 8), np.uint8)
    with pytest.raises(
        TypeError, match=r"'auto', but the cache is uint8; name its format \(fp8_e4m3"
    ):
        cupyflash.reshape_and_cache_flash(**args)


def test_writes_change_one_16_bit_type_to_another_only_if_asked():
    args = write_args()
    args["key_cache"], args["value_cache"] = np.zeros((2, 4, 4, 2, 8), BF16)
    words = "key is fp16 and the cache bf16; use a fp16 cache, or .* kv_cache_dtype='bfloat16'"
    with pytest.raises(TypeError, match=words):
        cupyflash.reshape_and_cache_flash(**args)
    cupyflash.reshape_and_cache_flash(**{**args, "kv_cache_dtype": "bfloat16"})
    assert (args["key_cache"][0, 1] == 1).all()
    args.update(key=args["key"].astype("f4") * 2, value=args["value"].astype("f4"))
    cupyflash.reshape_and_cache_flash(**args)
    assert (args["key_cache"][0, 1] == 2).all()


def test_writes_do_not_widen():
    args = write_args()
    args["key_cache"], args["value_cache"] = np.zeros((2, 4, 4, 2, 8), np.float32)
    for spelling in ("auto", "float32"):
        with pytest.raises(TypeError, match=r"key is fp16 and the cache fp32; use a fp16 cache$"):
            cupyflash.reshape_and_cache_flash(**{**args, "kv_cache_dtype": spelling})
