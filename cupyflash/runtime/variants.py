"""The kernels that can be asked for on an architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from .attention_plan import attention_variants
from .decode_tile import decode_variants
from .merge_plan import merge_variants
from .mla_plan import mla_variants
from .prefill_plan import prefill_variants
from .prefill_tile import prefill_fp8_cache_variants, prefill_ones_variants
from .prefix_search import prefix_variants
from .quantize_plan import quantize_variants
from .shared_tile import share_prefixes_variant, shared_fp8_variants, shared_variants
from .variant import Variant
from .write_plan import write_variants

__all__ = ["FAMILIES", "all_variants", "every_variant"]

# Each takes an architecture without a suffix ("sm_90"); one with a dialect for sm_90a names it.
FAMILIES: tuple[Callable[[str], Iterator[Variant]], ...] = (
    merge_variants,
    write_variants,
    attention_variants,
    decode_variants,
    prefill_variants,
    mla_variants,
    quantize_variants,
    shared_variants,
    prefix_variants,
)


def all_variants(arch: str) -> tuple[Variant, ...]:
    """The variants for an architecture such as ``"sm_90"``."""
    return tuple(variant for family in FAMILIES for variant in family(arch))


def every_variant(arch: str) -> tuple[Variant, ...]:
    """Those, and what a batch over an 8-bit cache or a step that searches asks for besides."""
    more: Iterator[Variant] = iter(())
    if arch == "sm_90":
        more = chain(shared_fp8_variants(), prefill_fp8_cache_variants())
        more = chain(more, prefill_ones_variants(), (share_prefixes_variant(),))
    return (*all_variants(arch), *more)
