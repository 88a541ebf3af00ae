"""What the layers of one KV cache group have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyflash.backend import AttentionType, BackendConfig

from .window import UNCACHED

__all__ = ["LayerGroup"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers that share a step's metadata.

    Attributes
    ----------
    num_heads_q : int
    sliding_window : (int, int)
        Of the first layer.
    has_softcap : bool
        Of the first layer.
    one_schedule : bool
        All layers read the same keys of the cache in the same way, so one schedule serves them.
    no_cascade : str
        Why they cannot read a shared prefix once; empty if they can.
    sharded : bool
        Their cache is dealt over the ranks of context parallelism. Layers that count positions
        (windows, ALiBi) have all of it on every rank instead, and so do those without a cache.
    """

    num_heads_q: int
    sliding_window: tuple[int, int]
    has_softcap: bool
    one_schedule: bool
    no_cascade: str
    sharded: bool

    @classmethod
    def of(cls, layers: Sequence[Any], config: BackendConfig) -> LayerGroup:
        """The group of some `FlashAttentionImpl`.

        Raises
        ------
        ValueError
            No layers, layers that differ in their number of heads, or some whose cache is dealt
            over ranks beside others.
        """
        heads = {layer.num_heads for layer in layers}
        if len(heads) != 1:
            raise ValueError(
                f"layers of one group have {sorted(heads)} query heads; they must have one number"
            )
        scored = {(layer.sliding_window, layer.logits_soft_cap > 0) for layer in layers}
        cached = not any(layer.attn_type in UNCACHED for layer in layers)
        window, softcap = layers[0].sliding_window, layers[0].logits_soft_cap > 0
        return cls(
            heads.pop(),
            window,
            softcap,
            len(scored) == 1 and cached,
            _refusal(layers, config),
            _sharded(layers, config),
        )


def _refusal(layers: Sequence[Any], config: BackendConfig) -> str:
    if config.dcp_world_size > 1:
        return f"dcp_world_size={config.dcp_world_size}"
    if config.batch_invariant:
        return "batch_invariant is set"
    for layer in layers:
        if layer.attn_type in UNCACHED:
            return f"{layer.attn_type.value} layers have no cache"
        if layer.alibi_slopes is not None:
            return "a layer has ALiBi"
        if tuple(layer.sliding_window) != (-1, -1):
            return f"a layer has the window {tuple(layer.sliding_window)}"
    return ""


def _sharded(layers: Sequence[Any], config: BackendConfig) -> bool:
    if config.dcp_world_size == 1:
        return False
    whole = {
        layer.attn_type is not AttentionType.DECODER
        or layer.alibi_slopes is not None
        or tuple(layer.sliding_window) != (-1, -1)
        for layer in layers
    }
    if len(whole) > 1:
        raise ValueError(
            f"dcp_world_size={config.dcp_world_size}: layers with a window, ALiBi or an encoder "
            "have their whole cache on every rank; put them into a group of their own"
        )
    return whole == {False}
