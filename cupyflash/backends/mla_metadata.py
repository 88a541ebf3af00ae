"""What every layer of latent attention reads of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["MLAContext", "MLADecode", "MLAMetadata", "MLAPrefill", "MLARanks"]

Array = Any  # NumPy or CuPy


@dataclass(frozen=True, kw_only=True, slots=True)
class MLARanks:
    """Contexts that are dealt over ranks; new tokens attend to each other beside them.

    Attributes
    ----------
    group : Communicator or None
    context_lens : array [R], int32
        Tokens of each context on this rank.
    max_context_len : int
        Their bound on any rank.
    combine : str
        As `cupyflash.distributed.combine_states`.
    """

    group: Any
    context_lens: Array
    max_context_len: int
    combine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MLADecode:
    """The first requests of a step, which are computed over the cache as it is.

    Attributes
    ----------
    num_tokens : int
        Query tokens of them; they come first.
    query_start_loc : array [R + 1], int32
    seq_lens : array [R], int32
    block_table : array [R, max_blocks], int32
    max_query_len, max_seq_len : int
    ranks : MLARanks or None
        Where contexts are dealt over ranks.
    """

    num_tokens: int
    query_start_loc: Array
    seq_lens: Array
    block_table: Array
    max_query_len: int
    max_seq_len: int
    ranks: MLARanks | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAContext:
    """A chunk of what the prefill requests have in the cache.

    Attributes
    ----------
    cu_seqlens : array [R + 1], int32
        Where each request's tokens go in the chunk.
    starts : array [R], int32
        The first of them in the request.
    num_tokens, max_len : int
        Tokens of the chunk, and of the longest request in it.
    """

    cu_seqlens: Array
    starts: Array
    num_tokens: int
    max_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAPrefill:
    """The other requests, whose keys and values are expanded to heads.

    Attributes
    ----------
    query_start_loc : array [R + 1], int32
        From 0.
    block_table : array [R, max_blocks], int32
    max_query_len : int
    context : tuple of MLAContext
        Empty where no request has a context.
    """

    query_start_loc: Array
    block_table: Array
    max_query_len: int
    context: tuple[MLAContext, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAMetadata:
    """One step of latent attention.

    Attributes
    ----------
    num_actual_tokens : int
    slot_mapping : array, int32 or int64
    decode : MLADecode or None
    prefill : MLAPrefill or None
    causal, batch_invariant : bool
    """

    num_actual_tokens: int
    slot_mapping: Array
    decode: MLADecode | None
    prefill: MLAPrefill | None
    causal: bool = True
    batch_invariant: bool = False
