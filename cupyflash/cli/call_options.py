"""A call given by its sizes on the command line."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from cupyflash.fa_version import current_capability
from cupyflash.runtime.cupy_import import load_cupy
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.dry_device import reserved
from cupyflash.runtime.dtypes import parse_scalar_type

from .terminal import CommandError

__all__ = ["GPUS", "add_call_options", "call_arguments", "gpu_of", "laid_out"]

GPUS = {
    "a100": DeviceInfo("NVIDIA A100", 0, (8, 0), 108, 163 << 10, 40 << 20),
    "a10": DeviceInfo("NVIDIA A10", 0, (8, 6), 72, 99 << 10, 6 << 20),
    "l40s": DeviceInfo("NVIDIA L40S", 0, (8, 9), 142, 99 << 10, 96 << 20),
    "h100": DeviceInfo("NVIDIA H100", 0, (9, 0), 132, 227 << 10, 50 << 20),
    "h200": DeviceInfo("NVIDIA H200", 0, (9, 0), 132, 227 << 10, 60 << 20),
    "b200": DeviceInfo("NVIDIA B200", 0, (10, 0), 148, 227 << 10, 126 << 20),
    "rtx5090": DeviceInfo("NVIDIA RTX 5090", 0, (12, 0), 170, 99 << 10, 96 << 20),
}
"""Multiprocessors, bytes of shared memory a block can have, of the L2."""


def add_call_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `call_arguments` reads."""
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--batch", default=1, **number, help="requests")
    parser.add_argument("--q-len", default=1, **number, help="query tokens of each request")
    parser.add_argument("--kv-len", required=True, **number, help="keys of each request")
    parser.add_argument("--heads", default=32, **number)
    parser.add_argument("--kv-heads", default=8, **number)
    parser.add_argument("--head-dim", default=128, **number)
    parser.add_argument("--head-dim-v", **number)
    parser.add_argument("--page-size", **number, help="of a paged cache; packed keys without it")
    parser.add_argument("--dtype", default="bf16", help="of q: fp16, bf16, e4m3, e5m2, fp32")
    parser.add_argument("--kv-dtype", help="of k and v, if it differs")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument(
        "--window", nargs=2, type=int, default=(-1, -1), metavar=("LEFT", "RIGHT"),
        help="inclusive, -1 = open",
    )  # fmt: skip
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--alibi", action="store_true")
    parser.add_argument("--sink", action="store_true")
    parser.add_argument("--lse", action="store_true", help="return_softmax_lse=True")
    parser.add_argument("--num-splits", default=0, **number)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--fa-version", type=int, choices=(2, 3))


def gpu_of(name: str | None) -> DeviceInfo | None:
    """The GPU to plan for; None = NumPy arrays."""
    if name == "none":
        return None
    if name in GPUS:
        return GPUS[name]
    capability, without = current_capability()
    if capability is None:
        if name == "here":
            raise CommandError(f"--gpu here: {without}; name one of {', '.join(GPUS)}, or none")
        return GPUS["h200"]
    from cupyflash.runtime.cupy_device import cupy_device

    return cupy_device(load_cupy().cuda.Device().id).info


def laid_out(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array that takes no memory.

    Raises
    ------
    CommandError
        No process can have one of that size.
    """
    if min(shape) < 0:
        raise CommandError(f"an array of shape {shape}: a size is negative")
    try:
        return reserved(shape, dtype)
    except (OSError, OverflowError) as error:  # more than there are addresses
        raise CommandError(f"an array of shape {shape}: {error}") from error


_LENGTHS = ("batch", "q_len", "kv_len", "page_size", "heads", "kv_heads", "head_dim", "head_dim_v")


def _check_sizes(options: argparse.Namespace) -> None:
    for name in _LENGTHS:
        given = getattr(options, name)
        if given is not None and not 0 <= given < 1 << 31:
            rule = "is negative" if given < 0 else "must be below 2147483648"
            raise CommandError(f"--{name.replace('_', '-')} {given} {rule}")
    lengths = {"--q-len": options.q_len}
    if options.page_size is None:
        lengths["--kv-len"] = options.kv_len
    for name, length in lengths.items():
        if options.batch * length >= 1 << 31:
            raise CommandError(
                f"--batch {options.batch} times {name} {length} tokens: a packed batch is numbered "
                "in int32 and must have fewer than 2147483648"
            )


def call_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Of `flash_attn_varlen_func`; large arrays have no memory.

    Raises
    ------
    CommandError
        A size that no call can have.
    """
    _check_sizes(options)
    q_type = parse_scalar_type(options.dtype, "--dtype")
    kv_type = parse_scalar_type(options.kv_dtype or options.dtype, "--kv-dtype")
    dim_v = options.head_dim if options.head_dim_v is None else options.head_dim_v
    batch, q_len, kv_len = options.batch, options.q_len, options.kv_len
    found: dict[str, Any] = {
        "q": laid_out((batch * q_len, options.heads, options.head_dim), q_type.numpy),
        "max_seqlen_q": q_len,
        "max_seqlen_k": kv_len,
        "cu_seqlens_q": np.arange(batch + 1, dtype=np.int32) * np.int32(q_len),
        "causal": options.causal,
        "window_size": tuple(options.window),
        "softcap": options.softcap,
        "num_splits": options.num_splits,
        "fa_version": options.fa_version,
        "return_softmax_lse": options.lse,
        "batch_invariant": options.batch_invariant,
    }
    if options.page_size is None:
        tokens: tuple[int, ...] = (batch * kv_len,)
        found["cu_seqlens_k"] = np.arange(batch + 1, dtype=np.int32) * np.int32(kv_len)
    else:
        columns = -(-kv_len // max(1, options.page_size))
        tokens = (batch * columns, options.page_size)
        found["block_table"] = laid_out((batch, columns), np.int32)
        found["seqused_k"] = np.full(batch, kv_len, np.int32)
    found["k"] = laid_out((*tokens, options.kv_heads, options.head_dim), kv_type.numpy)
    found["v"] = laid_out((*tokens, options.kv_heads, dim_v), kv_type.numpy)
    if options.alibi:
        found["alibi_slopes"] = np.zeros(options.heads, np.float32)
    if options.sink:
        found["s_aux"] = np.zeros(options.heads, np.float32)
    return found
