"""The kernel families of this release: how each version launches, schedules and plans.

A version is a key here exactly where a row of it in the support table is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from . import hopper
from .portable import attend, attention_plans
from .runtime.call import Call
from .runtime.device import DeviceInfo
from .runtime.plan import Plan
from .runtime.problem import AttentionProblem

__all__ = ["FAMILIES", "Family"]


class Launch(Protocol):
    def __call__(
        self, call: Call, scheduler_metadata: Any, workspace: Any, stream: Any
    ) -> tuple[Any, Any]:
        """Queue the kernels of a call; out, and lse or None."""


class Schedule(Protocol):
    def __call__(
        self, bounds: Any, seqused_k: Any, cu_seqlens_q: Any, out: Any, stream: Any
    ) -> Any:
        """The int32 buffer of a schedule for ``ScheduleBounds``, in ``out`` where it is given."""


class Plans(Protocol):
    def __call__(self, problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
        """Every launch that a call within the problem's bounds may need."""


class Note(Protocol):
    def __call__(self, problem: AttentionProblem, info: DeviceInfo) -> str:
        """Which kernels of the family serve a problem, and why not the faster ones."""


@dataclass(frozen=True, slots=True)
class Family:
    """What a version adds to the public functions."""

    launch: Launch
    schedule: Schedule
    plans: Plans
    note: Note


# A schedule is the same for both: it may be made for one version and used by the other.
FAMILIES: dict[int, Family] = {
    2: Family(attend, hopper.write_schedule, attention_plans, lambda problem, info: "portable"),
    3: Family(hopper.attend, hopper.write_schedule, hopper.attention_plans, hopper.kernel_note),
}
