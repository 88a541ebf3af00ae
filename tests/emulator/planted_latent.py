"""Bugs planted in the kernels of latent attention."""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

from cupyflash.testing import Case

from .planted import Planted

__all__ = ["PLANTED_LATENT"]

LATENT = "mla_decode_sm90.cu"
PORTABLE = "mla_decode_sm80.cu"
_ONE = Case(lengths=((1, 400),), num_heads_kv=1, group_size=5, head_dim=64, head_dim_v=512,
            page_size=64, causal=True, q_v=True, q_type="bf16", kv_type="bf16")  # fmt: skip
_TWO = _ONE.replace(group_size=66)  # a cluster
_EIGHT = _ONE.replace(kv_type="e4m3")
_PIECES = _ONE.replace(lengths=((1, 200), (1, 130), (1, 90)))
_SPLIT = _ONE.replace(lengths=((1, 700),))

PLANTED_LATENT = [
    Planted("latent: nothing", LATENT, "", "", _TWO, num_sms=4, calls=2),
    Planted("latent: no wait for a tile", LATENT, r"if \(!landed\) mbarrier_wait\(shared_address\(&r\.full\[at\.stage\]\), at\.parity\);", "", _ONE),
    Planted("latent: a tile is taken for landed", LATENT, r"landed = tile \+ 1 < end &&[^;]*;", "landed = true;", _ONE),
    Planted("latent: weights without a proxy fence", LATENT, r"fence_async_proxy\(\);(\s*mbarrier_arrive\(shared_address\(&r\.weights)", r"\1", _ONE),
    Planted("latent: factors replaced before they are used", LATENT, r"mbarrier_wait\(shared_address\(&r\.done\[before\.stage\]\), before\.parity \^ 1\);", ";", _ONE),
    Planted("latent: loaded again while columns are read", LATENT, r"&r\.released\[i\]\), 8 \* kSide", "&r.released[i]), 4 * kSide", _TWO),
    Planted("latent: loaded again while the values of one block are read", LATENT, r"mbarrier_wait\(shared_address\(&r\.done\[at\.stage\]\), at\.parity\);(\s*load\.load)", r"\1", _ONE),
    Planted("latent: loaded again for one block", LATENT, r"\(1 << V::kSide\) - 1,", "1,", _TWO),
    Planted("latent: released in one block", LATENT, r"cluster_address\(released, lane\)", "released", _TWO),
    Planted("latent: released without order", LATENT, r"mbarrier\.arrive\.shared::cluster\.b64", "mbarrier.arrive.relaxed.cluster.shared::cluster.b64", _TWO),
    Planted("latent: cleared keys are released as keys that were read", LATENT, r"if \(writes\)", "if (false)", _TWO.replace(window_size=(300, 0))),
    Planted("latent: results replace factors in use", LATENT, r"mbarrier_wait\(shared_address\(&tiles\.rest\(\)\.done\[at\.stage\]\), at\.parity \^ 1\);(\s*LatentTiles::Results)", r"\1", _ONE),
    Planted("latent: keys land on outputs of the piece before", LATENT, r"third_is_free\(\);(\s*if \(warp == 2\) load)", r"\1", _PIECES, num_sms=1),
    Planted("latent: queries before they are copied", LATENT, r"meanwhile\(\);\s*cp_async_wait<0>\(\);", "meanwhile();", _ONE),
    Planted("latent: weights of another row of parts", LATENT, r"i \* kEach \+ j\)", "j)", _SPLIT.replace(group_size=20), num_sms=3),
    Planted("latent: parts before they are copied", LATENT, r"cp_async_wait<0>\(\);(\s*named_barrier_sync\(kValuesOnly, 256\);)", r"\1", _SPLIT.replace(lengths=((1, 1200),)), num_sms=9),
    Planted("latent: keys behind the last tile of a segment", LATENT, r"min\(last, cursor\.end\)", "min(next, cursor.end)", _PIECES),
    Planted("latent: weights where keys are still read", LATENT, r"named_barrier_sync\(kScoresOnly, 128\);  // no warp reads", "// no warp reads", _ONE),
    Planted("latent: one key too many is seen", LATENT, r"column >= high\) x", "column > high) x", _ONE.replace(lengths=((2, 390),))),
    Planted("latent: rows behind the last key are not cleared", LATENT, r"row < low \|\| row >= high", "false", _ONE),
    Planted("latent: arrivals without order", LATENT, r"atom\.acq_rel\.gpu\.global\.inc", "atom.relaxed.gpu.global.inc", _SPLIT),
    Planted("latent: wrong slots are merged", LATENT, r"\(2 \* part - 1\) \* side", "2 * part * side", _SPLIT),
    Planted("latent: products before all of a tile is widened", PORTABLE, r"(at = shared_address\(smem\);)\s*__syncthreads\(\);", r"\1", _EIGHT, version=2),
    Planted("latent: a tile is widened before it has landed", PORTABLE, r"cp_async_wait<kStages - 2>", "cp_async_wait<kStages - 1>", _EIGHT, version=2),
]  # fmt: skip
