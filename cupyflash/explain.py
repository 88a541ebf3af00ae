"""What a call would do and what it would cost at least, without doing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import describe_call
from .cpu.tiles import key_block, tile_rows
from .fa_version import current_capability, resolve_version
from .families import FAMILIES
from .runtime.arrays import AttentionArrays
from .runtime.call import Call
from .runtime.device import DeviceInfo, device_for
from .runtime.plan import Plan
from .runtime.problem import AttentionProblem
from .runtime.roofs import roofs_of
from .support import need_of, unsupported_reason, versions

__all__ = ["Explanation", "explain"]

_REFERENCE = DeviceInfo("NVIDIA H200", 0, (9, 0), 132, 232448, 60 << 20)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    Attributes
    ----------
    problem : AttentionProblem
        The call as it was understood.
    version : int or None
        The kernels that run it; None = computed with NumPy on the CPU.
    unsupported : dict of int to str
        Why each of the other versions would not run it on ``device``.
    device : DeviceInfo
        The GPU that versions and roof are about: that of the arrays, else the current one, else an
        H200.
    kernels : str
        Which kernels of the version serve the call if its rows start at multiples of 16 bytes, and
        why not faster ones.
    plans : tuple of Plan
        The launches that calls within its bounds may take, the likeliest first; empty on the CPU.
    tile : (int, int) or None
        Rows and keys of a step on the CPU.
    workspace_bytes : int
    lengths_known : bool
        True: bytes and FLOPs are exact. False: the lengths are on a GPU and were not read; they
        are upper bounds from ``max_seqlen_k``, queries spread evenly.
    bytes_moved : int
        Every query, and key that is seen, read once a request; every output written once.
    flops : int
        Two a multiply-add of q·k, q_v·v and p·v, over the pairs that the mask keeps.
    roof_seconds : float or None
        No run on ``device`` is much faster; None where its roofs were not measured.
    """

    problem: AttentionProblem
    version: int | None
    unsupported: dict[int, str]
    device: DeviceInfo
    kernels: str
    plans: tuple[Plan, ...]
    tile: tuple[int, int] | None
    workspace_bytes: int
    lengths_known: bool
    bytes_moved: int
    flops: int
    roof_seconds: float | None

    def __str__(self) -> str:
        p, bound = self.problem, "" if self.lengths_known else "at most "
        layout = f"pages of {p.page_size}" if p.page_size else "packed keys"
        side = f"version {self.version}" if self.version else "NumPy on the CPU"
        lines = [
            f"runs on      {side}",
            f"kernels      {self.kernels}",
            f"problem      {p.batch} requests, {p.total_q} queries of at most {p.max_seqlen_q}, "
            f"keys of at most {p.max_seqlen_k}, {layout}",
            f"heads        {p.num_heads_q} on {p.num_heads_kv} of size {p.head_dim}"
            f"{'' if p.head_dim == p.head_dim_v else f' and {p.head_dim_v}'}; q {p.q_type.name}, "
            f"k and v {p.kv_type.name}, out {p.out_type.name}",
        ]
        if self.tile:
            lines.append(f"tile         {self.tile[0]} rows x {self.tile[1]} keys")
        lines += [
            f"launch       {plan.variant.symbol} ({plan.variant.arch}), grid {plan.grid}, block "
            f"{plan.block}, {plan.smem_bytes} bytes shared"
            for plan in self.plans
        ]
        lines += [f"not {version}        {why}" for version, why in self.unsupported.items()]
        lines += [
            f"workspace    {self.workspace_bytes} bytes",
            f"moves        {bound}{self.bytes_moved / 1e6:.3f} MB",
            f"computes     {bound}{self.flops / 1e9:.3f} GFLOP",
        ]
        if self.roof_seconds is not None:
            roof = f"{bound}{self.roof_seconds * 1e6:.2f} µs"
            lines.append(f"roof         {roof} on {self.device.name}")
        return "\n".join(lines)


def explain(*args: Any, device: DeviceInfo | None = None, **kwargs: Any) -> Explanation:
    """What `flash_attn_varlen_func` would do with the same arguments; nothing is launched.

    Parameters
    ----------
    *args, **kwargs
        Those of `flash_attn_varlen_func`. Nothing is read from a GPU.
    device : DeviceInfo, optional
        The GPU that versions and roof are about; the arrays' own if None, without one an H200.

    Returns
    -------
    Explanation
        ``print`` shows it as a table.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        What the call itself would raise.

    Examples
    --------
    >>> import numpy as np
    >>> q = np.zeros((4, 8, 64), np.float16)
    >>> k = v = np.zeros((4, 2, 64), np.float16)
    >>> starts = np.array([0, 4], np.int32)
    >>> explain(q, k, v, 4, starts, 4, starts, causal=True).flops
    20480
    """
    call = describe_call(*args, **kwargs)
    problem = call.problem
    about = device or _device_of(call)
    need = need_of(problem)
    unsupported = {v: unsupported_reason(v, need, about.capability) for v in versions()}
    version, plans, tile, kernels = None, [], None, "NumPy"
    if call.on_host:
        rows = tile_rows(problem)
        tile = (rows, key_block(min(rows, problem.max_seqlen_q)))
    else:
        version = resolve_version(problem, about.capability, kwargs.get("fa_version"))
        family = FAMILIES[version]
        plans, kernels = family.plans(problem, about), family.note(problem, about)
    known, q_lens, k_lens = _lengths(problem, call.arrays)
    flops, nbytes = _cost(problem, q_lens, k_lens)
    roofs = roofs_of(about.name)
    eight_bit = problem.q_type.is_fp8
    return Explanation(
        problem=problem,
        version=version,
        unsupported={v: why for v, why in unsupported.items() if why is not None},
        device=about,
        kernels=kernels,
        plans=tuple(plans),
        tile=tile,
        workspace_bytes=max((plan.workspace_bytes for plan in plans), default=0),
        lengths_known=known,
        bytes_moved=nbytes,
        flops=flops,
        roof_seconds=None if roofs is None else roofs.seconds(nbytes, flops, eight_bit),
    )


def _device_of(call: Call) -> DeviceInfo:
    if not call.on_host:
        return device_for(call.arrays.q).info
    if current_capability()[0] is None:
        return _REFERENCE
    import cupy

    from .runtime.cupy_device import cupy_device

    return cupy_device(cupy.cuda.Device().id).info


def _lengths(problem: AttentionProblem, arrays: AttentionArrays) -> tuple[bool, Any, Any]:
    """Query and key counts of the requests, exact where they are NumPy arrays."""
    if isinstance(arrays.cu_seqlens_q, np.ndarray):
        keys = arrays.seqused_k if arrays.seqused_k is not None else np.diff(arrays.cu_seqlens_k)
        return True, np.diff(arrays.cu_seqlens_q).astype(np.int64), keys.astype(np.int64)
    q_lens = np.full(problem.batch, problem.total_q // max(1, problem.batch), np.int64)
    q_lens[: problem.total_q - q_lens.sum()] += 1
    return False, q_lens, np.full(problem.batch, problem.max_seqlen_k, np.int64)


def _cost(problem: AttentionProblem, q_lens: Any, k_lens: Any) -> tuple[int, int]:
    """FLOPs and bytes."""
    request = np.repeat(np.arange(problem.batch), q_lens)
    row = np.arange(len(request)) - np.repeat(np.cumsum(q_lens) - q_lens, q_lens)
    keys = k_lens[request]
    position = keys - q_lens[request] + row
    first, last = np.zeros_like(position), keys
    if problem.window_left >= 0:
        first = np.clip(position - problem.window_left, 0, keys)
    if problem.window_right >= 0:
        last = np.clip(position + problem.window_right + 1, 0, keys)
    pairs = int(np.maximum(0, last - first).sum())
    begin, end = np.full(problem.batch, np.iinfo(np.int64).max), np.zeros(problem.batch, np.int64)
    np.minimum.at(begin, request, first)
    np.maximum.at(end, request, last)
    seen = int(np.maximum(0, end - begin).sum())
    width, latent = problem.head_dim + problem.head_dim_v, problem.head_dim_v * problem.has_q_v
    flops = 2 * pairs * problem.num_heads_q * (width + latent)
    nbytes = seen * problem.num_heads_kv * width * problem.kv_type.itemsize
    per_row = (problem.head_dim + latent) * problem.q_type.itemsize
    per_row += problem.head_dim_v * problem.out_type.itemsize + 4 * problem.wants_lse
    return flops, nbytes + len(request) * problem.num_heads_q * per_row
