"""The layout of ``core/decode_params.cuh``."""

from __future__ import annotations

from .params import ParamsLayout

__all__ = ["DECODE_PARAMS", "LARGEST_SCAN", "PREFIX_EXTRA"]

DECODE_PARAMS = ParamsLayout(
    *((name, "ptr") for name in ("partial_out", "partial_lse", "arrivals", "prefix")),
    *(
        (name, "i32")
        for name in (
            *("spans", "tile_shift", "row_block", "units", "unit", "fewest_tiles", "align_most"),
            *("most_pieces", "most_rows", "stages", "box_rows", "k_panels", "v_panels"),
            *("whole_boxes", "columns", "out_wide"),
        )
    ),
)

LARGEST_SCAN = 512
"""Requests that every block adds up for itself: 128 threads, 4 each."""

PREFIX_EXTRA = 3
"""int32 words of the table of schedule.cu besides one a request."""
