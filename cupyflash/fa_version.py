"""Which kernels serve a problem on a device: the support table and everything said from it.

Version 2 is the portable family (compute capability 8.0 and later), version 3 the Hopper family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from .runtime import env
from .runtime.dtypes import BF16, E4M3, FP16, ScalarType, parse_fp8
from .runtime.problem import AttentionProblem

__all__ = [
    "SUPPORT",
    "Need",
    "fa_version",
    "fa_version_unsupported_reason",
    "flash_attn_supports_fp8",
    "get_flash_attn_version",
    "get_fp8_dtype_for_flashattn",
    "is_fa_version_supported",
    "need_of",
    "resolve_version",
]

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Need:
    """What a kernel must be able to do; the defaults ask for the least.

    Attributes
    ----------
    head_dim, head_dim_v : int or None
        None = not known yet.
    q_type, kv_type : ScalarType
    alibi, sink, softcap, window, paged : bool
    """

    head_dim: int | None = None
    head_dim_v: int | None = None
    q_type: ScalarType = BF16
    kv_type: ScalarType = BF16
    alibi: bool = False
    sink: bool = False
    softcap: bool = False
    window: bool = False
    paged: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition of a version. ``reason`` is what a user reads where it does not hold."""

    holds: Callable[[Need, Capability], bool]
    reason: Callable[[Need, Capability], str]


def _name(capability: Capability) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"


def _head_dims(need: Need) -> tuple[int, ...]:
    return tuple(d for d in (need.head_dim, need.head_dim_v) if d is not None)


_BUILT: dict[int, bool] = {2: False, 3: False}
"""Whether a version's attention kernels are in this release."""


def _built(version: int) -> Rule:
    return Rule(
        lambda need, cc: _BUILT[version],
        lambda need, cc: (
            f"the attention kernels of version {version} are not built in this release; "
            "NumPy arrays run on the CPU"
        ),
    )


_HEAD_DIM = Rule(
    lambda need, cc: all(d % 8 == 0 and 0 < d <= 256 for d in _head_dims(need)),
    lambda need, cc: f"head sizes {_head_dims(need)}: kernels take multiples of 8 up to 256",
)
_TYPES = Rule(
    lambda need, cc: need.q_type in (FP16, BF16) or need.q_type.is_fp8,
    lambda need, cc: f"q is {need.q_type.name}; kernels take fp16, bf16 and fp8",
)

SUPPORT: dict[int, tuple[Rule, ...]] = {
    2: (
        Rule(
            lambda need, cc: cc >= (8, 0),
            lambda need, cc: f"{_name(cc)}: version 2 needs 8.0 (Ampere) or later",
        ),
        _TYPES,
        _HEAD_DIM,
        _built(2),
    ),
    3: (
        Rule(
            lambda need, cc: cc[0] == 9,
            lambda need, cc: f"{_name(cc)}: version 3 needs 9.0 (Hopper); use fa_version=2",
        ),
        _TYPES,
        _HEAD_DIM,
        Rule(
            lambda need, cc: not need.q_type.is_fp8 or all(d % 16 == 0 for d in _head_dims(need)),
            lambda need, cc: (
                f"head sizes {_head_dims(need)} in 8 bit: version 3 takes multiples of 16; "
                "use fa_version=2"
            ),
        ),
        _built(3),
    ),
}
"""The rules of each version, in the order in which a reason is looked for."""

_override: ContextVar[int | None] = ContextVar("cupyflash_fa_version", default=None)


@contextmanager
def fa_version(version: int) -> Iterator[None]:
    """Use one version for the calls of a block that name none themselves.

    Parameters
    ----------
    version : int
        2 or 3.

    Raises
    ------
    ValueError
        There is no such version.
    """
    token = _override.set(_known(version, "fa_version"))
    try:
        yield
    finally:
        _override.reset(token)


def _known(version: object, source: str) -> int:
    if isinstance(version, int) and version in SUPPORT:
        return version
    raise ValueError(f"{source}={version!r}: there are versions {', '.join(map(str, SUPPORT))}")


def _asked(argument: int | None) -> tuple[int, str] | None:
    """The version asked for and by what: argument, then block, then environment."""
    if argument is not None:
        return _known(argument, "fa_version"), "fa_version argument"
    block = _override.get()
    if block is not None:
        return block, "fa_version block"
    setting = env.fa_version()
    if setting is not None:
        value = int(setting) if setting.isdigit() else setting
        return _known(value, "CUPYFLASH_FA_VERSION"), "CUPYFLASH_FA_VERSION"
    return None


def _reason(version: int, need: Need, capability: Capability) -> str | None:
    for rule in SUPPORT[version]:
        if not rule.holds(need, capability):
            return rule.reason(need, capability)
    return None


def resolve_version(need: Need, capability: Capability, argument: int | None = None) -> int:
    """The version that runs, or an error with the reason of each that cannot.

    Parameters
    ----------
    need : Need
    capability : tuple of int
        Compute capability of the device.
    argument : int, optional
        The call's own ``fa_version``; wins over block and environment.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        The version that was asked for does not exist or cannot serve this here.
    NotImplementedError
        None was asked for and none can serve this here.
    """
    asked = _asked(argument)
    if asked is not None:
        version, source = asked
        reason = _reason(version, need, capability)
        if reason is not None:
            raise ValueError(f"version {version} (from the {source}) cannot run this: {reason}")
        return version
    reasons = {}
    for version in sorted(SUPPORT, reverse=True):
        found = _reason(version, need, capability)
        if found is None:
            return version
        reasons[version] = found
    listed = "; ".join(f"version {version}: {text}" for version, text in reasons.items())
    raise NotImplementedError(f"no version can run this: {listed}")


def need_of(problem: AttentionProblem) -> Need:
    """What a problem asks of a kernel."""
    return Need(
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        q_type=problem.q_type,
        kv_type=problem.kv_type,
        alibi=problem.has_alibi,
        sink=problem.has_sink,
        softcap=problem.softcap > 0,
        window=problem.window_left >= 0 or problem.window_right > 0,
        paged=problem.page_size is not None,
    )


def _current_capability() -> Capability | None:
    """Of the active device or the current GPU; None where there is no NVIDIA GPU."""
    from .runtime.device import active_device

    device = active_device()
    if device is not None:
        return device.info.capability
    try:
        import cupy
    except ImportError:
        return None
    if not cupy.is_available() or cupy.cuda.runtime.is_hip:
        return None
    text = cupy.cuda.Device().compute_capability
    return int(text[:-1]), int(text[-1])


def get_flash_attn_version(
    requires_alibi: bool = False,
    head_size: int | None = None,
    head_size_v: int | None = None,
    has_sinks: bool = False,
    kv_cache_dtype: str = "auto",
) -> int | None:
    """The version that a problem would get on the current GPU.

    Parameters
    ----------
    requires_alibi : bool
    head_size, head_size_v : int, optional
        None = any that a version takes.
    has_sinks : bool
    kv_cache_dtype : str
        ``"auto"`` or 16-bit names, or an fp8 spelling.

    Returns
    -------
    int or None
        None when there is no NVIDIA GPU (NumPy arrays still work), or no version can serve it;
        `fa_version_unsupported_reason` says why.

    Raises
    ------
    ValueError
        ``CUPYFLASH_FA_VERSION`` or the surrounding `fa_version` block asks for a version that
        cannot serve this here.
    """
    capability = _current_capability()
    if capability is None:
        return None
    kv = BF16
    if kv_cache_dtype not in ("auto", "bfloat16", "float16", "half"):
        kv = parse_fp8(kv_cache_dtype, "kv_cache_dtype")
    need = Need(head_size, head_size_v, kv_type=kv, alibi=requires_alibi, sink=has_sinks)
    try:
        return resolve_version(need, capability)
    except NotImplementedError:
        return None


def fa_version_unsupported_reason(version: int, need: Need | None = None) -> str | None:
    """Why a version cannot run on the current GPU; None when it can.

    Raises
    ------
    ValueError
        There is no such version.
    """
    _known(version, "fa_version")
    capability = _current_capability()
    if capability is None:
        return "there is no NVIDIA GPU that CuPy can use; NumPy arrays run on the CPU"
    return _reason(version, need or Need(), capability)


def is_fa_version_supported(version: int) -> bool:
    """Whether a version runs on the current GPU.

    Raises
    ------
    ValueError
        There is no such version.
    """
    return fa_version_unsupported_reason(version) is None


def flash_attn_supports_fp8() -> bool:
    """Whether a kernel on the current GPU reads an 8-bit KV cache."""
    capability = _current_capability()
    if capability is None:
        return False
    need = Need(kv_type=E4M3)
    return any(_reason(version, need, capability) is None for version in SUPPORT)


def get_fp8_dtype_for_flashattn(kv_cache_dtype: str) -> object:
    """The NumPy dtype behind an fp8 cache spelling.

    Raises
    ------
    ValueError
        The spelling is not an fp8 format.
    """
    return parse_fp8(kv_cache_dtype, "kv_cache_dtype").numpy
