"""The second struct of latent attention's kernels, as kernels_cu/core/latent_params.cuh has it."""

from __future__ import annotations

from .params import ParamsLayout

__all__ = ["LATENT_PARAMS"]

LATENT_PARAMS = ParamsLayout(
    ("q_v", "ptr"),
    ("token_stride", "i64"),
    ("head_stride", "i64"),
    ("vectorised", "i32"),
    ("box_keys", "i32"),
    ("box_panels", "i32"),
    ("outside_page", "i32"),
    ("side", "i32"),
    ("page_inverse", "u32"),
)
"""The layout of ``core/latent_params.cuh``."""
