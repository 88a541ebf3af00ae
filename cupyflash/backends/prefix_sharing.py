"""Shared prefixes of a builder's layers: whether one pays, and its schedule for a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyflash.backend import BackendConfig, CommonAttentionMetadata, KVCacheSpec
from cupyflash.bounds import AttentionBounds
from cupyflash.cascade_policy import shared_prefix_pays, use_cascade_attention
from cupyflash.fa_version import current_capability
from cupyflash.runtime.device import device_for
from cupyflash.runtime.shared_plan import shared_refusal
from cupyflash.shared_prefix import PrefixSchedule, get_prefix_schedule
from cupyflash.side_stream import SideStream

from .flash_attn_metadata import FlashAttentionMetadata
from .layer_group import LayerGroup

__all__ = ["PrefixSharing"]

_HOPPER = (9, 0)


@dataclass(frozen=True)
class PrefixSharing:
    """What the layers of one builder do with a prefix that all requests share."""

    spec: KVCacheSpec
    group: LayerGroup
    config: BackendConfig
    scheduled: bool

    def may_pay(self, prefix: int, query_lens: Sequence[int], *rule: Any) -> bool:
        """For `use_cascade_attention` of a builder: the lengths of the requests are not known.

        ``rule`` are the arguments of `cupyflash.use_cascade_attention` after ``query_lens``.
        """
        if self.group.no_cascade:
            return False
        if self.config.cascade_policy == "vllm" or current_capability()[0] != _HOPPER:
            return use_cascade_attention(prefix, query_lens, *rule)
        if any(rule[2:5]) or rule[6] > 1:
            return False
        keys = prefix + np.asarray(query_lens)
        return self._wins(prefix, query_lens, keys, rule[5])

    def pays(self, prefix: int, common: CommonAttentionMetadata) -> bool:
        """Whether a step is faster with its prefix read once; by the policy of the config."""
        if self.config.cascade_policy == "vllm" or common.xp is np:
            return True
        info = device_for(common.seq_lens).info
        queries, keys = np.diff(common.on_host("query_start_loc")), common.on_host("seq_lens")
        if info.capability != _HOPPER or shared_refusal(self._problem(common), info):
            return True
        return self._wins(prefix, queries, keys, info.num_sms)

    def schedule(
        self, step: FlashAttentionMetadata, prefix: int, tokens: int
    ) -> PrefixSchedule | None:
        """One for all layers, where they are served by one launch each.

        Beside the launches in front of the first attention, which waits for it.
        """
        spec = self.spec
        return get_prefix_schedule(
            step.seq_lens.shape[0],
            tokens,
            step.max_query_len,
            step.max_seq_len,
            self.group.num_heads_q,
            spec.num_kv_heads,
            spec.head_size,
            step.suffix_kv_lens,
            spec.storage_type.name,
            step.query_start_loc,
            spec.block_size,
            common_prefix_len=prefix,
            num_splits=step.max_num_splits,
            stream=SideStream(step.seq_lens),
        )

    def _wins(self, prefix: int, queries: Any, keys: Any, num_sms: int) -> bool:
        spec = self.spec
        return shared_prefix_pays(
            prefix, queries, keys, self.group.num_heads_q, spec.num_kv_heads, spec.head_size,
            num_sms=num_sms, scheduled=self.scheduled,
            cache_itemsize=1 if spec.storage_type.is_fp8 else 2,
        )  # fmt: skip

    def _problem(self, common: CommonAttentionMetadata) -> Any:
        spec = self.spec
        return AttentionBounds(
            batch_size=common.num_reqs,
            total_q=common.num_actual_tokens,
            max_seqlen_q=common.max_query_len,
            max_seqlen_k=common.max_seq_len,
            num_heads_q=self.group.num_heads_q,
            num_heads_kv=spec.num_kv_heads,
            headdim=spec.head_size,
            dtype=spec.storage_type.name if not spec.storage_type.is_fp8 else "bfloat16",
            kv_dtype=spec.storage_type.name,
            page_size=spec.block_size,
            causal=True,
        ).problem()
