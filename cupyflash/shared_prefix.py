"""Attention that reads shared keys once: one launch where the kernel serves a call."""

from __future__ import annotations

from typing import Any

from .fa_version import capability_of, resolve_version
from .prefix_tree import PrefixTree
from .runtime.call import Call
from .runtime.device import Device, device_for
from .runtime.launch import stream_handle
from .runtime.shared_launch import Sharing, attend_shared, shared_layout_refusal
from .runtime.shared_plan import make_shared_plan, shared_refusal

__all__ = ["attend_once", "sharing_of_tree"]


def sharing_of_tree(tree: PrefixTree) -> Sharing:
    """What a launch is told of a tree."""
    return Sharing(tree.levels, 0, 0, tree.order, tree.nodes)


def attend_once(
    call: Call, sharing: Sharing, fa_version: int | None, stream: Any, workspace: Any = None
) -> str:
    """Queue attention of a call in which each shared key is read once.

    Parameters
    ----------
    call : Call
        On a GPU; its lengths are without ``sharing.added_keys``, its bounds with them.
    sharing : Sharing
    fa_version : int, optional
    stream : int or stream, optional
    workspace : array [nbytes], uint8, optional

    Returns
    -------
    str
        Empty; or why the kernel does not serve the call, and then nothing was queued.

    Raises
    ------
    ValueError, NotImplementedError
        As `resolve_version`.
    CaptureError, CompileError
        As `compile.load_kernel`; or memory would be allocated during a capture.
    """
    if resolve_version(call.problem, capability_of(call.arrays.q), fa_version) != 3:
        return "version 2 has no kernel for it"
    device = device_for(call.arrays.q)
    refused = _refusal(call, device, sharing.levels)
    if refused:
        return refused
    plan = make_shared_plan(call.problem, device.info, sharing.levels)
    if workspace is not None and workspace.nbytes < plan.attend.workspace_bytes:
        return f"a workspace of {workspace.nbytes} bytes; {plan.attend.workspace_bytes} are needed"
    given = stream_handle(stream)
    queue = device.current_stream() if given is None else given
    attend_shared(call, plan, sharing, device, workspace, queue)
    return ""


def _refusal(call: Call, device: Device, levels: int) -> str:
    layout, arrays, at = call.layout, call.arrays, device.pointer
    starts = tuple(at(array) % 16 for array in (arrays.q, arrays.k, arrays.v))
    key = ("shared", device.info, levels, starts)
    found: str | None = layout.kept.get(key)
    if found is None:
        found = layout.keep(
            key,
            lambda: (
                shared_refusal(call.problem, device.info, levels)
                or shared_layout_refusal(layout, starts)
            ),
        )
    return found
