"""The struct that attention kernels are passed, as kernels_cu/core/attention_params.cuh has it."""

from __future__ import annotations

from .params import ParamsLayout

__all__ = ["ATTENTION_PARAMS"]

_POINTERS = (
    *("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"),
    *("alibi_slopes", "sink", "q_descale", "k_descale", "v_descale"),
    *("partial_out", "partial_lse"),
)
_STRIDES = (
    *("q_token", "q_head", "k_block", "k_token", "k_head", "v_block", "v_token", "v_head"),
    *("out_token", "out_head", "lse_head", "lse_token", "table_row"),
    *("alibi_batch", "alibi_head", "sink", "q_descale_batch", "q_descale_head"),
    *("k_descale_batch", "k_descale_head", "v_descale_batch", "v_descale_head"),
)
_NUMBERS = (
    *("batch", "total_q", "heads_q", "heads_kv", "group", "head_dim", "head_dim_v", "page_size"),
    *("window_left", "window_right", "chunk", "blocks_a_request", "row_block"),
    *("q_type", "out_type", "sink_type"),
    *("q_vectorised", "k_vectorised", "v_vectorised", "out_vectorised"),
)
ATTENTION_PARAMS = ParamsLayout(
    *((name, "ptr") for name in _POINTERS),
    *((f"{name}_stride", "i64") for name in _STRIDES),
    *((name, "i32") for name in _NUMBERS),
    *((name, "f32") for name in ("softmax_scale", "v_scale", "softcap")),
    ("skipped_rows", "i32"),
)
