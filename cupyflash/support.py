"""The support table: which kernels there are, and what each of them takes.

Every message about versions is made from this table, so a kernel is announced in one place only:
its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .runtime.dtypes import BF16, E4M3, E5M2, FP16, ScalarType
from .runtime.problem import AttentionProblem

__all__ = ["SUPPORT", "Capability", "Need", "Row", "need_of", "unsupported_reason", "versions"]

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Need:
    """What a problem asks of a kernel; the defaults ask for the least.

    Attributes
    ----------
    head_dim, head_dim_v : int or None
        None = any that the kernel takes.
    q_type, kv_type : ScalarType
    alibi, sink : bool
    latent : bool
        Queries have a part that meets v (``q_v``).
    """

    head_dim: int | None = None
    head_dim_v: int | None = None
    q_type: ScalarType = BF16
    kv_type: ScalarType = BF16
    alibi: bool = False
    sink: bool = False
    latent: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One family of kernels.

    Attributes
    ----------
    version : int
    name : str
    first, last : (int, int)
        Compute capabilities that it runs on, both included.
    q_types, kv_types : tuple of ScalarType
    head_dim_step, head_dim_step_8bit, largest_head_dim : int
        Head sizes are multiples of the step; of the second one where q or k and v are 8-bit.
    largest_head_dim_v : int or None
        Of v; None = as that of q and k.
    alibi, sink : bool
    latent : bool
        Whether queries have a part that meets v; such kernels take no others.
    built : bool
        It is in this release. A row that is not says what is to come.
    """

    version: int
    name: str
    first: Capability
    last: Capability
    q_types: tuple[ScalarType, ...]
    kv_types: tuple[ScalarType, ...]
    head_dim_step: int = 8
    head_dim_step_8bit: int = 8
    largest_head_dim: int = 256
    largest_head_dim_v: int | None = None
    alibi: bool = True
    sink: bool = True
    latent: bool = False
    built: bool = False


_TYPES = (FP16, BF16, E4M3, E5M2)

SUPPORT: tuple[Row, ...] = (
    Row(2, "portable", (8, 0), (99, 9), _TYPES, _TYPES, built=True),
    Row(
        2,
        "portable latent",
        (8, 0),
        (99, 9),
        (FP16, BF16),
        (FP16, BF16, E4M3),
        largest_head_dim=64,
        largest_head_dim_v=512,
        latent=True,
        built=True,
    ),
    Row(3, "Hopper", (9, 0), (9, 0), _TYPES, _TYPES, head_dim_step_8bit=16, built=True),
    Row(
        3,
        "Hopper latent",
        (9, 0),
        (9, 0),
        (FP16, BF16),
        (FP16, BF16),
        largest_head_dim=64,
        largest_head_dim_v=512,
        latent=True,
        built=True,
    ),
)


def versions() -> tuple[int, ...]:
    """The versions that the table knows, the best first."""
    return tuple(sorted({row.version for row in SUPPORT}, reverse=True))


def need_of(problem: AttentionProblem) -> Need:
    """What a problem asks of a kernel."""
    return Need(
        problem.head_dim,
        problem.head_dim_v,
        problem.q_type,
        problem.kv_type,
        problem.has_alibi,
        problem.has_sink,
        problem.has_q_v,
    )


def unsupported_reason(version: int, need: Need, capability: Capability) -> str | None:
    """Why no row of a version serves the need; None where one does.

    Of several rows, the one that comes nearest to serving it is quoted.
    """
    nearest, text = -1, None
    for row in SUPPORT:
        if row.version != version:
            continue
        refusals = enumerate(_refusals(row, need, capability))
        failed = next(((i, why) for i, why in refusals if why), None)
        if failed is None:
            return None
        if failed[0] > nearest:
            nearest, text = failed
    return text


def _refusals(row: Row, need: Need, capability: Capability) -> Iterator[str]:
    """One entry a condition, in a fixed order: empty where it holds, else what is wrong."""
    cc, about = ".".join(map(str, capability)), f"the {row.name} kernels"
    wanted = "q_v (latent attention)" if need.latent else "calls without q_v"
    yield "" if row.latent == need.latent else f"{about} do not take {wanted}"
    if row.first == row.last:
        wanted = f"{row.first[0]}.{row.first[1]}"
    else:
        wanted = f"{row.first[0]}.{row.first[1]} or later"
    inside = row.first <= capability <= row.last
    yield "" if inside else f"this GPU has compute capability {cc}, {about} need {wanted}"
    for name, kind, taken in (
        ("q", need.q_type, row.q_types),
        ("k, v", need.kv_type, row.kv_types),
    ):
        names = ", ".join(t.name for t in taken)
        yield "" if kind in taken else f"{name} in {kind.name}, {about} take {names}"
    eight_bit = need.q_type.is_fp8 or need.kv_type.is_fp8
    step = row.head_dim_step_8bit if eight_bit else row.head_dim_step
    largest_v = row.largest_head_dim_v or row.largest_head_dim
    for size, largest in ((need.head_dim, row.largest_head_dim), (need.head_dim_v, largest_v)):
        fits = size is None or (size % step == 0 and 0 < size <= largest)
        rule = f"multiples of {step} up to {largest}"
        where = f"head size {size} in {'8' if eight_bit else '16'} bit"
        yield "" if fits else f"{where}, {about} take {rule}"
    yield "" if row.alibi or not need.alibi else f"ALiBi is not in {about}"
    yield "" if row.sink or not need.sink else f"sinks are not in {about}"
    unbuilt = f"{about} are not in this release; NumPy arrays are computed on the CPU"
    yield "" if row.built else unbuilt
