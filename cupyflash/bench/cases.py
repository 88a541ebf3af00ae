"""The benchmark cases, and the fewest FLOPs and bytes that each needs."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["STEP_FEATURES", "BenchCase", "bench_cases"]

STEP_FEATURES = 4096
"""Of a token, in front of the projection of a case that has one."""


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One workload.

    Attributes
    ----------
    name : str
        ``family/shape``; filters match any part of it.
    kind : str
        ``attention``, ``mla``, ``merge`` or ``write``.
    q_lens, k_lens : tuple of int
        Tokens of each request: queries, and keys in all.
    num_heads_q, num_heads_kv, head_dim, head_dim_v : int
    page_size : int or None
        None for packed K and V.
    causal : bool
    window : tuple of int
    softcap : float
    q_type, kv_type : str
        ``bf16`` or ``e4m3``.
    prefix_levels : tuple of (int, int)
        Shared prefixes, outermost first: (tokens of the level, requests that share it).
    scheduled : bool
        Whether their schedule is made ahead; else every call makes it.
    step : str
        ``step``: the weights of a projection are read and the keys of the step written in front of
        the attention; ``hidden``: and meanwhile the prefixes are found and their schedule is made.
    """

    name: str
    kind: str = "attention"
    q_lens: tuple[int, ...] = ()
    k_lens: tuple[int, ...] = ()
    num_heads_q: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128
    head_dim_v: int = 128
    page_size: int | None = 16
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    q_type: str = "bf16"
    kv_type: str = "bf16"
    prefix_levels: tuple[tuple[int, int], ...] = ()
    scheduled: bool = True
    step: str = ""

    @property
    def total_q(self) -> int:
        return sum(self.q_lens)

    @property
    def total_k(self) -> int:
        return sum(self.k_lens)

    @property
    def distinct_k(self) -> int:
        """Keys in memory: those of a shared prefix count once a group."""
        saved = sum(
            tokens * (len(self.k_lens) - -(-len(self.k_lens) // sharers))
            for tokens, sharers in self.prefix_levels
        )
        return self.total_k - saved

    @property
    def prefix_groups(self) -> list[tuple[range, int]]:
        """Requests of each group, and how many tokens they share from the beginning on."""
        found, keys = [], 0
        for tokens, sharers in self.prefix_levels:
            keys += tokens
            starts = range(0, len(self.k_lens), sharers)
            found += [(range(i, min(i + sharers, len(self.k_lens))), keys) for i in starts]
        return found

    @property
    def pairs(self) -> int:
        """Query-key pairs that the mask keeps, over all requests, for one head."""
        return sum(_pairs(q, k, self.causal, self.window) for q, k in self._requests())

    @property
    def flops(self) -> int:
        """Two FLOPs a multiply-add of Q·Kᵀ and P·V over the kept pairs."""
        if self.kind in ("merge", "write"):
            return 0
        return 2 * self.pairs * self.num_heads_q * (self.head_dim + self.head_dim_v)

    @property
    def bytes_moved(self) -> int:
        """Each input read once, each output written once."""
        heads, tokens = self.num_heads_q, self.total_q
        if self.kind == "merge":
            return 3 * tokens * heads * (self.head_dim * 2 + 4)
        if self.kind == "write":
            return 2 * 2 * tokens * self.num_heads_kv * self.head_dim * 2
        if self.kind == "mla":
            return self.total_k * 576 * 2 + tokens * heads * (576 + 512) * 2
        width = self.head_dim + self.head_dim_v
        q_bytes = 1 if self.q_type == "e4m3" else 2
        kv_bytes = 1 if self.kv_type == "e4m3" else 2
        kv = self.distinct_k * self.num_heads_kv * width * kv_bytes
        if self.step:
            kv += STEP_FEATURES * (heads + 2 * self.num_heads_kv) * self.head_dim * 2
        return kv + tokens * heads * (self.head_dim * q_bytes + self.head_dim_v * 2)

    def _requests(self) -> list[tuple[int, int]]:
        return list(zip(self.q_lens, self.k_lens, strict=True))


def _pairs(q: int, k: int, causal: bool, window: tuple[int, int]) -> int:
    offset = k - q
    if window[0] < 0 and q > 64:
        return q * offset + q * (q + 1) // 2 if causal else q * k
    kept = 0
    for i in range(q):
        last = min(k - 1, i + offset) if causal else k - 1
        first = max(0, i + offset - window[0]) if window[0] >= 0 else 0
        kept += max(0, last - first + 1)
    return kept


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
