"""A benchmark case, and the fewest FLOPs and bytes that it needs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STEP_FEATURES", "BenchCase"]

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
