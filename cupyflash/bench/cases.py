"""The benchmark cases."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from .case import BenchCase

__all__ = ["bench_cases"]


def _skewed(n: int, low: int, high: int, seed: int = 0) -> tuple[int, ...]:
    """Many short lengths, few long ones; the same ones every time."""
    rng = random.Random(seed)
    return tuple(int(low * (high / low) ** (rng.random() ** 2)) for _ in range(n))


def _prefill() -> list[BenchCase]:
    """16k tokens in all at hidden size 2048: the sweep of the FlashAttention papers."""
    found = []
    for head_dim, heads in ((64, 32), (128, 16), (256, 8)):
        for length in (512, 2048, 8192, 16384):
            for causal in (False, True):
                lens = (length,) * (16384 // length)
                shape: dict[str, Any] = {
                    "num_heads_q": heads,
                    "num_heads_kv": heads,
                    "page_size": None,
                }
                mask = "causal" if causal else "full"
                name = f"d{head_dim}/{mask}/s{length}"
                case = BenchCase(
                    f"prefill/{name}",
                    "attention",
                    lens,
                    lens,
                    **shape,
                    head_dim=head_dim,
                    head_dim_v=head_dim,
                    causal=causal,
                )
                found.append(case)
                if head_dim > 64 and length in (2048, 16384):
                    found.append(
                        BenchCase(
                            f"prefill-fp8/{name}",
                            "attention",
                            lens,
                            lens,
                            **shape,
                            head_dim=head_dim,
                            head_dim_v=head_dim,
                            causal=causal,
                            q_type="e4m3",
                            kv_type="e4m3",
                        )
                    )
    return found


def _paged_prefill() -> list[BenchCase]:
    found = []
    for page in (16, 64, 256):
        for length in (2048, 8192):
            lens = (length,) * (16384 // length)
            name = f"paged-prefill/p{page}/s{length}"
            found.append(BenchCase(name, q_lens=lens, k_lens=lens, page_size=page))
    ragged = _skewed(32, 64, 4096)
    long = (16384,)
    window, twice = (1023, 0), (8192, 8192)
    eight: dict[str, Any] = {"q_type": "e4m3", "kv_type": "e4m3"}
    return [
        *found,
        BenchCase("chunked-prefill/q512-k8192", q_lens=(512,) * 8, k_lens=(8192,) * 8),
        BenchCase("chunked-prefill/q2048-k32768", q_lens=(2048,), k_lens=(32768,)),
        BenchCase("window-prefill/w1024/s16384", q_lens=long, k_lens=long, window=window),
        BenchCase("softcap-prefill/s8192", q_lens=twice, k_lens=twice, softcap=50.0),
        BenchCase("ragged-prefill/32req", q_lens=ragged, k_lens=ragged),
        BenchCase("prefill-fp8/paged/p16/s8192", q_lens=twice, k_lens=twice, **eight),
        BenchCase("prefill-fp8/paged/q512-k8192", q_lens=(512,) * 8, k_lens=(8192,) * 8, **eight),
        BenchCase("prefill-fp8kv/s8192", q_lens=twice, k_lens=twice, kv_type="e4m3"),
        BenchCase(
            "prefill-fp8kv/q512-k8192", q_lens=(512,) * 8, k_lens=(8192,) * 8, kv_type="e4m3"
        ),
        BenchCase(
            "prefill/d192-128/causal/s8192",
            q_lens=twice,
            k_lens=twice,
            page_size=None,
            num_heads_q=16,
            num_heads_kv=16,
            head_dim=192,
            head_dim_v=128,
        ),
    ]


def _decode_case(name: str, batch: int, length: int, **options: Any) -> BenchCase:
    fields: dict[str, Any] = {"q_lens": (1,) * batch, "k_lens": (length,) * batch, **options}
    return BenchCase(f"decode/{name}/b{batch}/s{length}", **fields)


def _decode() -> list[BenchCase]:
    lone = ((1, 8192), (1, 131072), (1, 1 << 20))
    shapes = (*lone, (8, 8192), (32, 4096), (64, 8192), (128, 1024), (256, 2048))
    found = [_decode_case("gqa32-8", *shape) for shape in shapes]
    fp8: dict[str, Any] = {"q_type": "e4m3", "kv_type": "e4m3"}
    for batch, length in ((1, 32768), (64, 8192)):
        found += [
            _decode_case("gqa8-1", batch, length, num_heads_q=8, num_heads_kv=1),
            _decode_case("mha32", batch, length // 2, num_heads_kv=32),
            _decode_case("fp8kv/gqa32-8", batch, length, **fp8),
        ]
    wide: dict[str, Any] = {"head_dim": 256, "head_dim_v": 256, "num_heads_q": 16}
    narrow: dict[str, Any] = {"head_dim": 64, "head_dim_v": 64, "num_heads_q": 64}
    ragged: dict[str, Any] = {"q_lens": (1,) * 128, "k_lens": _skewed(128, 256, 65536)}
    mixed_k = (*_skewed(64, 512, 16384, 1), 4096, 2048)
    return [
        *found,
        _decode_case("d64/gqa64-8", 64, 8192, **narrow),
        _decode_case("d256/gqa16-8", 64, 4096, **wide),
        BenchCase("decode/ragged/b128", **ragged),
        _decode_case("spec4", 64, 4096, q_lens=(4,) * 64),
        BenchCase("mixed/64dec+2pre", q_lens=(1,) * 64 + (2048, 2048), k_lens=mixed_k),
    ]


def _shared() -> list[BenchCase]:
    found = []
    for batch, shared, own in ((64, 8192, 256), (256, 4096, 512), (16, 32768, 128), (8, 2048, 512)):
        found.append(
            BenchCase(
                f"shared-prefix/b{batch}/p{shared}+s{own}",
                q_lens=(1,) * batch,
                k_lens=(shared + own,) * batch,
                prefix_levels=((shared, batch),),
            )
        )
    tree = ((2048, 128), (1024, 16))
    keys = (2048 + 1024 + 256,) * 128
    found.append(
        BenchCase(
            "shared-prefix/b128/p2048+p1024+s256",
            q_lens=(1,) * 128,
            k_lens=keys,
            prefix_levels=tree,
        )
    )
    plain = list(found)
    found += [replace(case, name=f"{case.name}/inside", scheduled=False) for case in plain]
    for step in ("step", "hidden"):
        found += [replace(case, name=f"{case.name}/{step}", step=step) for case in plain]
    found += [
        replace(
            case,
            name=case.name.replace("prefix/", "prefix/fp8kv/"),
            q_type="e4m3",
            kv_type="e4m3",
        )
        for case in plain
    ]
    found.append(BenchCase("shared-prefix/b64/p0+s256", q_lens=(1,) * 64, k_lens=(256,) * 64))
    return found


def _other() -> list[BenchCase]:
    latent: dict[str, Any] = {
        "num_heads_kv": 1,
        "head_dim": 576,
        "head_dim_v": 512,
        "page_size": 64,
    }
    found = []
    for batch, length, heads in (
        (1, 16384, 128),
        (64, 4096, 128),
        (128, 8192, 16),
        (128, 4096, 128),
    ):
        found.append(
            BenchCase(
                f"mla/h{heads}/b{batch}/s{length}",
                "mla",
                (1,) * batch,
                (length,) * batch,
                num_heads_q=heads,
                **latent,
            )
        )
    lengths = tuple(range(1000, 7112, 97))
    found.append(BenchCase("mla/h128/ragged", "mla", (1,) * 64, lengths, num_heads_q=128, **latent))
    tokens = (8192,)
    return [
        *found,
        BenchCase("write/8192tok", "write", tokens, tokens),
        BenchCase("merge/8192tok", "merge", tokens, tokens),
    ]


def bench_cases(only: str = "") -> list[BenchCase]:
    """All cases, or those whose name holds one of the comma-separated parts of ``only``."""
    parts = [part for part in only.split(",") if part]
    everything = [*_prefill(), *_paged_prefill(), *_decode(), *_shared(), *_other()]
    return [c for c in everything if not parts or any(part in c.name for part in parts)]
