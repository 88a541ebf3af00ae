"""How the benchmark calls cupyflash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .case import BenchCase
from .inputs import BenchInputs
from .step import step

__all__ = ["NoKernelError", "cupyflash"]


class NoKernelError(Exception):
    """A provider has no kernel for a case."""


def cupyflash(inputs: BenchInputs) -> Callable[[], Any]:
    """A callable that runs the case once on the current stream."""
    import cupyflash as cf

    case = inputs.case
    if case.kind == "merge":
        (a, b), (lse_a, lse_b) = inputs.states, inputs.lses
        return lambda: cf.merge_attn_states(inputs.out, a, lse_a, b, lse_b, inputs.lse_out)
    if case.kind == "write":
        return lambda: cf.reshape_and_cache_flash(
            inputs.key, inputs.value, inputs.k, inputs.v, inputs.slot_mapping, "auto", 1.0, 1.0
        )
    if case.kind == "mla":
        return _latent(inputs, cf)
    if case.prefix_levels:
        return _shared(inputs, cf)
    return _attention(inputs, cf)


def _latent(inputs: BenchInputs, cf: Any) -> Callable[[], Any]:
    case = inputs.case
    split = case.head_dim_v
    return lambda: cf.mla_decode(
        inputs.q[..., :split],
        inputs.q[..., split:],
        inputs.k,
        inputs.block_table,
        inputs.seqused_k,
        cu_seqlens_q=inputs.cu_seqlens_q,
        max_seqlen_q=inputs.max_seqlen_q,
        max_seqlen_k=inputs.max_seqlen_k,
        softmax_scale=inputs.softmax_scale,
        causal=case.causal,
        out=inputs.out,
    )


def _shared(inputs: BenchInputs, cf: Any) -> Callable[[], Any]:
    """Every shared key read once, by a schedule made ahead, in the call or beside a projection."""
    case = inputs.case
    host = cf.prefix_tree(case.prefix_groups, inputs.batch)
    tree = cf.PrefixTree(host.batch, host.levels, inputs.xp.asarray(host.buffer))

    def schedule_on(stream: Any = None, **more: Any) -> Any:
        return cf.get_prefix_schedule(
            inputs.batch, case.total_q, inputs.max_seqlen_q, inputs.max_seqlen_k, case.num_heads_q,
            case.num_heads_kv, case.head_dim, inputs.seqused_k, _cache_type(case),
            inputs.cu_seqlens_q, case.page_size, prefix_tree=tree, stream=stream, **more,
        )  # fmt: skip

    schedule = schedule_on() if case.scheduled else None
    memory = None if schedule is None else schedule.buffer

    scales = _descales(inputs)

    def attend() -> None:
        cf.cascade_attention(
            inputs.out, inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.max_seqlen_q,
            None, None, inputs.seqused_k, inputs.max_seqlen_k, inputs.softmax_scale, None,
            case.window, case.softcap, inputs.block_table, 0, 0, None, schedule, prefix_tree=tree,
            **scales,
        )  # fmt: skip

    def find_and_deal(side: Any) -> None:
        schedule_on(side, out=memory, block_table=inputs.block_table)

    if case.step:
        return step(inputs, cf, attend, find_and_deal if case.step == "hidden" else None)
    return attend


def _descales(inputs: BenchInputs) -> dict[str, Any]:
    """What an 8-bit case is called with besides."""
    case = inputs.case
    one = inputs.xp.ones((inputs.batch, case.num_heads_kv), "float32")
    kinds = {"q_descale": case.q_type, "k_descale": case.kv_type, "v_descale": case.kv_type}
    return {name: one for name, kind in kinds.items() if kind == "e4m3"}


def _cache_type(case: BenchCase) -> str:
    return "float8_e4m3" if case.kv_type == "e4m3" else "bfloat16"


def _attention(inputs: BenchInputs, cf: Any) -> Callable[[], Any]:
    case = inputs.case
    options: dict[str, Any] = {
        "softmax_scale": inputs.softmax_scale,
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "out": inputs.out,
    }
    if case.page_size:
        options |= {"block_table": inputs.block_table, "seqused_k": inputs.seqused_k}
    else:
        options["cu_seqlens_k"] = inputs.cu_seqlens_k
    options |= _descales(inputs)
    options["scheduler_metadata"] = cf.get_scheduler_metadata(
        inputs.batch,
        inputs.max_seqlen_q,
        inputs.max_seqlen_k,
        case.num_heads_q,
        case.num_heads_kv,
        case.head_dim,
        inputs.seqused_k,
        _cache_type(case),
        headdim_v=case.head_dim_v,
        cu_seqlens_q=inputs.cu_seqlens_q,
        page_size=case.page_size,
        causal=case.causal,
        window_size=case.window,
        has_softcap=case.softcap > 0,
    )
    lengths = (inputs.max_seqlen_q, inputs.cu_seqlens_q, inputs.max_seqlen_k)
    return lambda: cf.flash_attn_varlen_func(inputs.q, inputs.k, inputs.v, *lengths, **options)
