"""Sliding windows, from tokens that a query sees to reach on either side."""

from __future__ import annotations

from cupyflash.backend import AttentionType

__all__ = ["UNCACHED", "sliding_window_of", "symmetrize_window"]

UNCACHED = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
"""Layers that attend to their own tokens without a cache."""


def sliding_window_of(sliding_window: int | None, attn_type: AttentionType) -> tuple[int, int]:
    """The inclusive reach of a layer that sees ``sliding_window`` tokens, the query's included.

    Parameters
    ----------
    sliding_window : int, optional
        None = all tokens.
    attn_type : AttentionType
        Encoder-only layers see as many tokens behind the query as before it.

    Returns
    -------
    (int, int)
        (left, right), -1 = open.

    Raises
    ------
    ValueError
        Less than 1: not even itself.
    """
    if sliding_window is None:
        return -1, -1
    if sliding_window < 1:
        raise ValueError(
            f"sliding_window={sliding_window}: a query sees itself at least, so 1 or more, or None"
        )
    reach = sliding_window - 1
    return reach, reach if attn_type is AttentionType.ENCODER_ONLY else 0


def symmetrize_window(window: tuple[int, int], causal: bool) -> tuple[int, int]:
    """A window to the left only, seen both ways where attention is not causal."""
    left, right = window
    return (left, left) if not causal and left >= 0 and right == 0 else (left, right)
