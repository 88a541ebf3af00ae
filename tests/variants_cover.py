"""A small set of variants in which every pair of macro values that occurs together occurs."""

from __future__ import annotations

from itertools import combinations

from cupyflash.runtime.variant import Variant


def pairs(variant: Variant) -> set[object]:
    items = [("source", variant.source), *variant.defines]
    return set(combinations(items, 2))


def pairwise_cover(variants: tuple[Variant, ...]) -> list[Variant]:
    left = set().union(*map(pairs, variants)) if variants else set()
    chosen = []
    while left:
        best = max(variants, key=lambda v: len(pairs(v) & left))
        left -= pairs(best)
        chosen.append(best)
    return chosen
