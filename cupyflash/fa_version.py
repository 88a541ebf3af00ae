"""Which kernels serve a call: 2 = portable (compute capability 8.0 and later), 3 = Hopper.

The version is that of the argument, else of the surrounding ``with fa_version(n):``, else of
``CUPYFLASH_FA_VERSION``, else the best that serves the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np

from .runtime import env
from .runtime.cupy_import import load_cupy
from .runtime.device import active_device, device_for
from .runtime.dtypes import BF16, E4M3, FP16, parse_fp8
from .runtime.problem import AttentionProblem
from .support import Capability, Need, need_of, unsupported_reason, versions

__all__ = [
    "capability_of",
    "current_capability",
    "fa_version",
    "fa_version_unsupported_reason",
    "flash_attn_supports_fp8",
    "get_flash_attn_version",
    "get_fp8_dtype_for_flashattn",
    "is_fa_version_supported",
    "known_version",
    "resolve_need",
    "resolve_version",
    "version_in_block",
]

_override: ContextVar[int | None] = ContextVar("cupyflash_fa_version", default=None)


version_in_block: Callable[[], int | None] = _override.get
"""What `fa_version` has set; None for nothing."""


@contextmanager
def fa_version(version: int) -> Iterator[None]:
    """Use one version for the calls of a block that name none themselves.

    It is for arrays on a GPU; NumPy arrays are computed on the CPU whatever it says. It holds in
    this thread (or asynchronous task) only.

    Parameters
    ----------
    version : int
        2 or 3.

    Raises
    ------
    ValueError
        There is no such version.
    """
    token = _override.set(known_version(version))
    try:
        yield
    finally:
        _override.reset(token)


def known_version(version: Any, source: str = "fa_version") -> int:
    """A version that exists, or a ValueError that names those that do."""
    if type(version) is int and version in versions():
        return version
    raise ValueError(f"{source}={version!r}: the versions are {', '.join(map(str, versions()))}")


def _asked(argument: int | None) -> tuple[int, str] | None:
    """The version asked for, and by what."""
    if argument is not None:
        return known_version(argument), "the fa_version argument"
    block = _override.get()
    if block is not None:
        return block, "the fa_version block"
    setting = env.fa_version()
    if setting is None:
        return None
    value = int(setting) if setting.isdigit() else setting
    return known_version(value, "CUPYFLASH_FA_VERSION"), "CUPYFLASH_FA_VERSION"


def resolve_version(
    problem: AttentionProblem, capability: Capability, argument: int | None = None
) -> int:
    """The version that runs; ``argument`` is the call's own ``fa_version``.

    Raises
    ------
    ValueError
        The version asked for does not exist, or cannot run this.
    NotImplementedError
        None was asked for, and none can run this; has the reason of each.
    """
    return _resolve_problem(problem, capability, _asked(argument))


@lru_cache(maxsize=4096)
def _resolve_problem(
    problem: AttentionProblem, capability: Capability, asked: tuple[int, str] | None
) -> int:
    return _resolve(need_of(problem), capability, asked)


def resolve_need(need: Need, capability: Capability, argument: int | None = None) -> int:
    """As `resolve_version`, for what a problem asks of a kernel."""
    return _resolve(need, capability, _asked(argument))


@lru_cache(maxsize=1024)
def _resolve(need: Need, capability: Capability, asked: tuple[int, str] | None) -> int:
    reasons = {v: unsupported_reason(v, need, capability) for v in versions()}
    running = [v for v, reason in reasons.items() if reason is None]
    if asked is not None:
        version, source = asked
        if reasons[version] is not None:
            other = f"; use {running[0]}" if running else ""
            raise ValueError(f"version {version} (from {source}): {reasons[version]}{other}")
        return version
    if not running:
        listed = "; ".join(f"version {v}: {reason}" for v, reason in reasons.items())
        raise NotImplementedError(f"no version can run this: {listed}")
    return running[0]


def capability_of(array: Any) -> Capability:
    """Of the active device, or the GPU that holds the array."""
    return device_for(array).info.capability


@lru_cache(maxsize=64)
def _capability_of_ordinal(ordinal: int) -> Capability:
    import cupy

    text = cupy.cuda.Device(ordinal).compute_capability
    return int(text[:-1]), int(text[-1])


def current_capability() -> tuple[Capability | None, str]:
    """Of the active device or the current GPU; else None and the reason."""
    device = active_device()
    if device is not None:
        return device.info.capability, ""
    otherwise = "NumPy arrays are computed on the CPU"
    try:
        cupy = load_cupy()
    except ImportError:
        return None, f"CuPy is not installed, so no GPU can be used; {otherwise}"
    if cupy.cuda.runtime.is_hip:
        return None, f"CuPy was built for ROCm, and the kernels are CUDA; {otherwise}"
    if not cupy.is_available():
        return None, f"CuPy finds no NVIDIA GPU; {otherwise}"
    return _capability_of_ordinal(cupy.cuda.Device().id), ""


def _need(
    requires_alibi: bool,
    head_size: int | None,
    head_size_v: int | None,
    has_sinks: bool,
    kv_cache_dtype: str,
) -> Need:
    plain = {"auto": BF16, "bfloat16": BF16, "float16": FP16, "half": FP16}
    kv = plain.get(kv_cache_dtype) or parse_fp8(kv_cache_dtype, "kv_cache_dtype")
    q = kv if not kv.is_fp8 else BF16
    return Need(head_size, head_size_v, q, kv, requires_alibi, has_sinks)


def get_flash_attn_version(
    requires_alibi: bool = False,
    head_size: int | None = None,
    head_size_v: int | None = None,
    has_sinks: bool = False,
    kv_cache_dtype: str = "auto",
) -> int | None:
    """The version that such a problem gets on the current GPU.

    Parameters
    ----------
    requires_alibi : bool
    head_size, head_size_v : int, optional
        Of q and k, of v; None = any that a version takes.
    has_sinks : bool
    kv_cache_dtype : str
        ``"auto"``, ``"bfloat16"``, ``"float16"`` or an fp8 spelling.

    Returns
    -------
    int or None
        None where there is no NVIDIA GPU, or no version that runs it;
        `fa_version_unsupported_reason` with the same arguments says why.

    Raises
    ------
    ValueError
        An unknown spelling; or the version of the surrounding block or of
        ``CUPYFLASH_FA_VERSION`` does not exist or cannot run this.
    """
    need = _need(requires_alibi, head_size, head_size_v, has_sinks, kv_cache_dtype)
    capability, _ = current_capability()
    if capability is None:
        return None
    try:
        return _resolve(need, capability, _asked(None))
    except NotImplementedError:
        return None


def fa_version_unsupported_reason(
    version: int,
    requires_alibi: bool = False,
    head_size: int | None = None,
    head_size_v: int | None = None,
    has_sinks: bool = False,
    kv_cache_dtype: str = "auto",
) -> str | None:
    """Why a version cannot run on the current GPU; None when it can.

    Parameters
    ----------
    version : int
    requires_alibi, head_size, head_size_v, has_sinks, kv_cache_dtype
        As `get_flash_attn_version`; the least demanding problem if left out.

    Returns
    -------
    str or None

    Raises
    ------
    ValueError
        There is no such version, or an unknown spelling.
    """
    known_version(version)
    need = _need(requires_alibi, head_size, head_size_v, has_sinks, kv_cache_dtype)
    capability, reason = current_capability()
    return reason if capability is None else unsupported_reason(version, need, capability)


def is_fa_version_supported(version: int) -> bool:
    """Whether a version runs on the current GPU, at least for the least demanding problem.

    Parameters
    ----------
    version : int

    Returns
    -------
    bool

    Raises
    ------
    ValueError
        There is no such version.
    """
    return fa_version_unsupported_reason(version) is None


def flash_attn_supports_fp8() -> bool:
    """Whether a kernel reads 8-bit keys and values on the current GPU.

    Returns
    -------
    bool
    """
    capability, _ = current_capability()
    if capability is None:
        return False
    need = Need(kv_type=E4M3)
    return any(unsupported_reason(version, need, capability) is None for version in versions())


def get_fp8_dtype_for_flashattn(kv_cache_dtype: str) -> np.dtype[Any]:
    """The NumPy dtype (of ml_dtypes) behind the spelling of an fp8 cache.

    Parameters
    ----------
    kv_cache_dtype : str
        ``"fp8"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ...

    Returns
    -------
    numpy.dtype

    Raises
    ------
    ValueError
        The spelling is not an fp8 format.
    """
    return parse_fp8(kv_cache_dtype, "kv_cache_dtype").numpy
