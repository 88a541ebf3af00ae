"""One step of the engine: who computes how much, as a batch, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyflash.backend import CommonAttentionMetadata

from .batch import Batch
from .request import Request

__all__ = ["Step", "Work", "make_batch"]


@dataclass(frozen=True, slots=True)
class Work:
    """A request's share of one step: its next ``count`` uncomputed tokens."""

    request: Request
    count: int

    @property
    def gives_token(self) -> bool:
        return self.count == self.request.pending

    @property
    def prompt_tokens(self) -> int:
        """How many of them belong to the prompt."""
        return min(max(self.request.prompt_length - self.request.computed, 0), self.count)


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computed.

    Attributes
    ----------
    prompt_tokens, decode_tokens : int
        Tokens computed; generated tokens that a preempted request computes again are decode.
    tokens : list of (Request, int)
        The requests that got a token, and which; a stop token is not part of the answer.
    """

    prompt_tokens: int
    decode_tokens: int
    tokens: list[tuple[Request, int]]


def make_batch(work: Sequence[Work], block_size: int, max_blocks: int) -> Batch:
    """The batch of some requests' shares, in NumPy arrays."""
    counts = np.array([item.count for item in work], np.int64)
    starts = np.array([item.request.computed for item in work], np.int64)
    cu_seqlens_q = np.concatenate([[0], np.cumsum(counts)])
    owner = np.repeat(np.arange(len(work)), counts)
    positions = np.arange(cu_seqlens_q[-1]) - cu_seqlens_q[owner] + starts[owner]
    table = np.full((len(work), max_blocks), -1, np.int32)
    tokens: list[int] = []
    for row, item in zip(table, work, strict=True):
        row[: len(item.request.blocks)] = item.request.blocks
        first = item.request.computed
        tokens += item.request.tokens[first : first + item.count]
    blocks = table[owner, positions // block_size].astype(np.int64)
    first_rows, ends = cu_seqlens_q.astype(np.int32), (starts + counts).astype(np.int32)
    return Batch(
        tokens=np.array(tokens, np.int64),
        positions=positions,
        logit_rows=cu_seqlens_q[1:][[item.gives_token for item in work]] - 1,
        common=CommonAttentionMetadata(
            query_start_loc=first_rows,
            query_start_loc_cpu=first_rows,
            seq_lens=ends,
            seq_lens_cpu=ends,
            num_reqs=len(work),
            num_actual_tokens=len(tokens),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table,
            slot_mapping=blocks * block_size + positions % block_size,
        ),
    )
