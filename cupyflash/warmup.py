"""Before the first call: scratch memory sizes, and compiling, loading and allocating ahead."""

from __future__ import annotations

from .bounds import AttentionBounds
from .fa_version import current_capability, resolve_version
from .families import FAMILIES
from .runtime.device import Device, active_device
from .runtime.plan import Plan
from .runtime.shared_plan import shared_plans

__all__ = ["warmup", "workspace_size"]


def workspace_size(bounds: AttentionBounds, *, fa_version: int | None = None) -> int:
    """Bytes of scratch memory that a call within these bounds needs on the current GPU.

    Parameters
    ----------
    bounds : AttentionBounds
    fa_version : int, optional
        As the calls will pass it.

    Returns
    -------
    int
        0 where there is no NVIDIA GPU: NumPy arrays need none.

    Raises
    ------
    ValueError
        The version asked for cannot run this.
    NotImplementedError
        No version can.
    """
    device = _current_device()
    plans = [] if device is None else _plans(bounds, device, fa_version)
    return max((plan.workspace_bytes for plan in plans), default=0)


def warmup(bounds: AttentionBounds, *, fa_version: int | None = None) -> None:
    """Compile, load and allocate all that calls within these bounds need on the current GPU.

    Those are attention, `merge_attn_states` of its outputs, for a paged cache writing to it, and,
    where the bounds say so, shared prefixes.
    Afterwards they can be captured into a graph on the current stream. Without an NVIDIA GPU
    there is nothing to do.

    Parameters
    ----------
    bounds : AttentionBounds
    fa_version : int, optional
        As the calls will pass it.

    Raises
    ------
    ValueError
        The version asked for cannot run this.
    NotImplementedError
        No version can.
    """
    from .runtime.launch import prepare

    device = _current_device()
    if device is not None:
        prepare(device, _plans(bounds, device, fa_version) + _small_plans(bounds, device))


def _current_device() -> Device | None:
    device = active_device()
    if device is not None:
        return device
    if current_capability()[0] is None:
        return None
    import cupy

    from .runtime.cupy_device import cupy_device

    return cupy_device(cupy.cuda.Device().id)


def _plans(bounds: AttentionBounds, device: Device, fa_version: int | None) -> list[Plan]:
    problem = bounds.problem()
    version = resolve_version(problem, device.info.capability, fa_version)
    plans = FAMILIES[version].plans(problem, device.info)
    return plans + shared_plans(problem, device.info, bounds.prefix_levels) * (version == 3)


def _small_plans(bounds: AttentionBounds, device: Device) -> list[Plan]:
    """Writing the cache and merging states, of the types that the bounds imply."""
    from .runtime.compile import native_arch
    from .runtime.merge_plan import make_merge_plan
    from .runtime.write_plan import make_write_plan

    problem, arch = bounds.problem(), native_arch(device.info.capability)
    states = problem.out_type
    shape = (problem.total_q, problem.num_heads_q, problem.head_dim_v, False)
    plans = [make_merge_plan(arch, states, states, *shape)]
    if problem.page_size is not None:
        shape = (problem.total_q, problem.num_heads_kv, problem.head_dim, False)
        plans.append(make_write_plan(arch, states, problem.kv_type, *shape))
    return plans
