"""Bugs planted in the kernels of shared prefixes where caches have 8 bits."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from .planted_shared import KERNEL, PlantedShared
from .planted_shared import SHARED as _SHARED

__all__ = ["PLANTED_SHARED_FP8"]

_FULL = _SHARED.replace(
    lengths=((1, 470),) * 20, num_heads_kv=1, head_dim=64, kv_type="e4m3", descale=True
)  # two warpgroups
_WIDE = _FULL.replace(head_dim=128)
_LONG = _FULL.replace(lengths=((1, 1200),) * 20)  # more blocks than stages
_PAIR = _FULL.replace(lengths=((1, 620), (1, 560)))  # warpgroups in turns
_OWN = _FULL.replace(lengths=((1, 190), (1, 170)), head_dim=128, q_type="fp16")
_FLAT = _FULL.replace(descale=False, softcap=5.0)

PLANTED_SHARED_FP8 = [
    PlantedShared("shared, 8 bits: nothing", KERNEL, "", "", _FULL),
    PlantedShared("shared, 8 bits: nothing, head size 128", KERNEL, "", "", _WIDE),
    PlantedShared("shared, 8 bits: nothing, long", KERNEL, "", "", _LONG, keys=1152),
    PlantedShared("shared, 8 bits: nothing, in turns", KERNEL, "", "", _PAIR, keys=512),
    PlantedShared("shared, 8 bits: nothing, soft cap", KERNEL, "", "", _FLAT),
    PlantedShared("shared, 8 bits: no wait for what is widened", KERNEL, r"mbarrier_wait\(raw_full, raw_phase\);", ";", _FULL),
    PlantedShared("shared, 8 bits: widened over what is multiplied", KERNEL, r"mbarrier_wait\(full \+ 8 \* V::kStages, wide_phase \^ 1\);", ";", _LONG, keys=1152),
    PlantedShared("shared, 8 bits: copies over what is widened", KERNEL, r"mbarrier_wait\(base \+ S::kLoadedValueEmpty \+ 8 \* stage, phase \^ 1\);", ";", _LONG, keys=1152),
    PlantedShared("shared, 8 bits: no proxy fence after widening", KERNEL, r"fence_async_proxy\(\);(\s*__syncwarp\(\);\s*if \(threadIdx\.x % 32 == 0\) \{\s*mbarrier_arrive\(raw_full)", r"\1", _FULL),
    PlantedShared("shared, 8 bits: told before all lanes have widened", KERNEL, r"(fence_async_proxy\(\);)\s*__syncwarp\(\);(\s*if \(threadIdx\.x % 32 == 0\) \{\s*mbarrier_arrive\(raw_full)", r"\1\2", _FULL),
    PlantedShared("shared, 8 bits: one warp's part is enough", KERNEL, r"kFillers = V::kWiden \? kWidenWarps : 1", "kFillers = 1", _FULL),
    PlantedShared("shared, 8 bits: eights of rows are left out", KERNEL, r"octet \+ first >= kOctets", "octet + first >= kOctets - 1", _FULL),
    PlantedShared("shared, 8 bits: both sides are dealt alike", KERNEL, r"first = kWidenWarps - 1 - first;", "first = first == 2 ? 0 : first;", _FULL),
    PlantedShared("shared, 8 bits: halves of rows are exchanged", KERNEL, r"step % kParts \* panel_bytes", "(1 - step % kParts) * panel_bytes", _WIDE),
    PlantedShared("shared, 8 bits: without the swizzle", KERNEL, r"row \* 128 \+ \(\(chunk \^ row\) << 4\)", "row * 128 + (chunk << 4)", _FULL),
    PlantedShared("shared, 8 bits: the phase does not change", KERNEL, r"raw = 0, raw_phase \^= 1", "raw = 0", _LONG, keys=1152),
    PlantedShared("shared, 8 bits: descales of the first request for all", KERNEL, r"factor = score_scale\(p, of\.z, walk\.head\)", "factor = score_scale(p, 0, walk.head)", _FULL),
    PlantedShared("shared, 8 bits: values of the first request's descale", KERNEL, r"of_values = value_scale\(p, of\.z, walk\.head\)", "of_values = value_scale(p, 0, walk.head)", _FULL),
    PlantedShared("shared, 8 bits: scores of another row's scale", KERNEL, r"lane / 4 \+ 8 \* h;(\s*return __uint_as_float)", r"lane / 4;\1", _FULL),
    PlantedShared("shared, 8 bits: scales are read before they are there", KERNEL, r"fence_async_proxy\(\);\s*named_barrier_sync\(2 \+ group, 128\);(\s*#pragma unroll\s*for \(int h = 0; h < 2; \+\+h\) scale)", r"fence_async_proxy();\1", _FULL),
    PlantedShared("shared, 8 bits: narrowed rows are not widened again", KERNEL, r"power_of_two\(exponent\) \* factor", "factor", _FULL),
    PlantedShared("shared, 8 bits: capped scores keep their scale twice", KERNEL, r"V::kAlibi \|\| p\.softcap > 0\.f \? 1\.f : scale\[h\]", "scale[h]", _FLAT),
    PlantedShared("shared, 8 bits: own values without their descale", KERNEL, r"V::kWiden \? value_scale\(p, of\.request, head\) : 1\.f", "1.f", _OWN, keys=64),
    PlantedShared("shared, 8 bits: columns of own values as of 16 bits", KERNEL, r"kApart = V::kWiden \? 1 : 8", "kApart = 8", _OWN, keys=64),
]  # fmt: skip
