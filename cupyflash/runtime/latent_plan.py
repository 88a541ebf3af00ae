"""Launches of the Hopper kernel of latent attention, from bounds alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any

from .attention_params import ATTENTION_PARAMS
from .decode_tile import DECODE_PARAMS
from .device import DeviceInfo
from .divisors import log2
from .dtypes import ScalarType
from .latent_params import LATENT_PARAMS
from .plan import LARGEST_WORKSPACE, Plan
from .problem import AttentionProblem
from .spans import ANY_ROWS, MOST_TILES, SpanMemory, SpanPointers, schedule_plan, span_memory
from .variant import Variant

__all__ = [
    "LatentPlan",
    "box_keys",
    "box_panels",
    "latent_plans",
    "latent_refusal",
    "latent_variant",
    "make_latent_plan",
]

_CAPABILITY = (9, 0)
_THREADS = 384
_ROWS, _KEYS, _STAGES = 64, 64, 3
_ROW_BYTES = (512 + 64) * 2  # of a cache row in shared memory
# Stages, the queries that registers do not hold, and LatentTiles::Rest.
_SMEM_BYTES = _STAGES * _KEYS * _ROW_BYTES + _ROWS * (128 + 32) + 1024
_LARGEST_SCAN = 1 << 15  # requests that every block adds up, in the memory of a stage
_SEGMENT_TILES = 4  # that a segment's beginning and end take as long as
_FEWEST_SHIFT = 1  # log2 of the tiles that are worth a span of their own
_MOST_SPANS = 160  # that LatentEnd merges


@dataclass(frozen=True, slots=True, eq=False)
class LatentPlan:
    """One launch, or two where the caller's workspace has counters to be set to 0.

    Attributes
    ----------
    attend, schedule : Plan
        ``schedule`` sets counters to 0.
    memory : SpanMemory
    side : int
        Blocks that take the row blocks of a segment side by side.
    numbers : dict of str to number
        Fields of ``DecodeParams`` that are not 0 and no addresses.
    """

    attend: Plan
    schedule: Plan
    memory: SpanMemory
    side: int
    numbers: dict[str, int]

    def pack(self, at: SpanPointers) -> bytes:
        """The `DecodeParams` of a launch, and of one before it."""
        fields: dict[str, Any] = dict.fromkeys(DECODE_PARAMS.names, 0)
        fields |= self.numbers
        fields.update(
            partial_out=at.partial_out, partial_state=at.partial_state, arrivals=at.arrivals
        )
        return DECODE_PARAMS.pack(*fields.values())


def box_keys(page_size: int | None) -> int:
    """Keys of a TMA box: of one block of the cache and one tile."""
    return _KEYS if page_size is None else gcd(page_size, _KEYS)


def box_panels(problem: AttentionProblem) -> int:
    """Panels of 128 bytes of the latent that a TMA box has: half a tile's if it can."""
    whole = box_keys(problem.page_size) == _KEYS and problem.head_dim_v % 64 == 0
    return 4 if whole else 1


def latent_variant(kind: ScalarType, side: int) -> Variant:
    """What is compiled: blocks that take row blocks side by side are a cluster."""
    return Variant(
        "mla_decode_sm90.cu",
        f"mla_decode_sm90_{kind.name}_m{side * _ROWS}",
        "sm_90a",
        (
            ("COMPUTE_TYPE", kind.code),
            ("KEY_STAGES", _STAGES),
            ("KEY_TILE", _KEYS),
            ("KV_TYPE", kind.code),
            ("LATENT_NBYTES", LATENT_PARAMS.nbytes),
            ("LATENT_ROWS", _ROWS),
            ("LATENT_SIDE", side),
            ("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),
            ("SMEM_NBYTES", _SMEM_BYTES),
        ),
    )


def latent_refusal(problem: AttentionProblem, info: DeviceInfo) -> str:
    """Why the kernel does not serve a problem; empty where it does."""
    if info.capability != _CAPABILITY:
        return "it is for compute capability 9.0"
    if problem.kv_type != problem.q_type:
        return f"a cache in {problem.kv_type.name}"
    if problem.softcap > 0 or problem.has_alibi:
        return "soft cap and ALiBi"
    if box_keys(problem.page_size) % 8:
        return f"pages of {problem.page_size} tokens, it takes multiples of 8"
    if not problem.batch or not problem.total_q:
        return "there are no queries"
    if problem.batch > _LARGEST_SCAN:
        return f"{problem.batch} requests, it takes {_LARGEST_SCAN}"
    if problem.page_size and problem.page_size * problem.max_seqlen_k >= 1 << 32:
        return f"{problem.max_seqlen_k} keys in pages of {problem.page_size}"
    row_blocks = -(-_rows(problem) // (_side(problem) * _ROWS))
    tiles = -(-problem.max_seqlen_k // _KEYS) + _SEGMENT_TILES
    tiles *= problem.batch * problem.num_heads_kv * row_blocks
    if tiles >= MOST_TILES:
        return f"{tiles} key tiles within the bounds, it counts to {MOST_TILES - 1}"
    return ""


def _rows(problem: AttentionProblem) -> int:
    """Of a request and KV head, at most."""
    return min(problem.max_seqlen_q, problem.total_q) * problem.group_size


def _side(problem: AttentionProblem) -> int:
    return 1 if _rows(problem) <= _ROWS else 2


@lru_cache(maxsize=1024)
def make_latent_plan(
    problem: AttentionProblem, info: DeviceInfo, workspace_limit: int | None = None
) -> LatentPlan:
    """The launches of a problem that is not refused; fewer spans fit a small workspace."""
    side = _side(problem)
    pieces = 1 if problem.batch_invariant else problem.num_splits
    most = max(1, min(info.num_sms, _MOST_SPANS) // side)
    slot_bytes = 2 * side * _ROWS * (problem.head_dim_v + 2) * 4
    limit = LARGEST_WORKSPACE if workspace_limit is None else workspace_limit
    spans = min(most, limit // (slot_bytes + 4 * side))
    if spans < 2:
        pieces, spans = 1, most
    rows = 2 * spans * side * _ROWS if pieces != 1 else 0
    memory = span_memory(rows, problem.head_dim_v, 0, spans * side)
    return LatentPlan(
        attend=Plan(
            latent_variant(problem.q_type, side),
            (spans * side, 1, 1),
            (_THREADS, 1, 1),
            _SMEM_BYTES,
            memory.nbytes,
            True,
        ),
        schedule=schedule_plan(problem.batch),
        memory=memory,
        side=side,
        numbers={
            "spans": spans,
            "counters": spans * side,
            "tile_shift": log2(_KEYS),
            "row_block": side * _ROWS,
            "units": problem.num_heads_kv,
            "fewest_shift": _FEWEST_SHIFT,
            "align_most": MOST_TILES - 1,
            "most_pieces": pieces,
            "most_rows": ANY_ROWS,
            "segment_tiles": _SEGMENT_TILES,
        },
    )


def latent_plans(problem: AttentionProblem, info: DeviceInfo) -> list[Plan]:
    """Every launch of the kernel that calls within a problem's bounds may need.

    Their workspace is enough for any of the calls.
    """
    if latent_refusal(replace(problem, max_seqlen_q=1), info):
        return []
    tokens = (problem.max_seqlen_q, max(1, _ROWS // problem.group_size), 1)
    found = [make_latent_plan(replace(problem, max_seqlen_q=n), info) for n in tokens]
    nbytes = max(plan.attend.workspace_bytes for plan in found)
    plans = {plan.attend.variant: plan.attend for plan in reversed(found)}
    return [replace(plan, workspace_bytes=nbytes) for plan in plans.values()]
