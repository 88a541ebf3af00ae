"""What an engine says of one step; every metadata builder starts from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .runtime.arrays import array_module

__all__ = ["CommonAttentionMetadata"]

Array = Any  # NumPy or CuPy


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonAttentionMetadata:
    """One step of an engine: R requests (padded ones included) with T query tokens in all.

    A padded request has no query: ``query_start_loc`` repeats its last value, ``seq_lens`` is 0,
    its row of the block table may hold anything; ``slot_mapping`` of a padded token is -1.

    Attributes
    ----------
    query_start_loc : array [R + 1], int32
        Where each request's query tokens start; the last entry is where they end.
    seq_lens : array [R], int32
        Keys of each request, the new ones included.
    num_reqs, num_actual_tokens : int
        R and T; both may be padded counts.
    max_query_len, max_seq_len : int
        Upper bounds over the requests.
    block_table_tensor : array [R, max_blocks], int32
        Blocks of each request; entries past the used ones may hold anything.
    slot_mapping : array [T], int32 or int64
        Where each new token goes in the cache; negative = nowhere.
    causal : bool
    query_start_loc_cpu, seq_lens_cpu : ndarray, int32, optional
        Host copies; NumPy arrays are their own.
    encoder_seq_lens : array [R], int32, optional
        Encoder tokens that each request attends to (cross attention).
    encoder_seq_lens_cpu : ndarray [R], int32, optional
    """

    query_start_loc: Array
    seq_lens: Array
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Array
    slot_mapping: Array
    causal: bool = True
    query_start_loc_cpu: np.ndarray[Any, Any] | None = None
    seq_lens_cpu: np.ndarray[Any, Any] | None = None
    encoder_seq_lens: Array = None
    encoder_seq_lens_cpu: np.ndarray[Any, Any] | None = None

    def __post_init__(self) -> None:
        rows = {
            "query_start_loc": (self.query_start_loc, self.num_reqs + 1),
            "seq_lens": (self.seq_lens, self.num_reqs),
            "block_table_tensor": (self.block_table_tensor, self.num_reqs),
        }
        if self.encoder_seq_lens is not None:
            rows["encoder_seq_lens"] = (self.encoder_seq_lens, self.num_reqs)
        for name, (array, size) in rows.items():
            kind = getattr(array, "dtype", type(array).__name__)
            if kind != np.int32:
                raise TypeError(f"{name} is {kind}; it must be an array of int32")
            if array.shape[:1] != (size,):
                raise ValueError(
                    f"{name} has shape {array.shape}; num_reqs={self.num_reqs} makes it {size} long"
                )
        hosts = {
            "query_start_loc_cpu": (self.query_start_loc_cpu, self.num_reqs + 1),
            "seq_lens_cpu": (self.seq_lens_cpu, self.num_reqs),
            "encoder_seq_lens_cpu": (self.encoder_seq_lens_cpu, self.num_reqs),
        }
        for name, (copy, size) in hosts.items():
            if copy is not None and (not isinstance(copy, np.ndarray) or copy.shape != (size,)):
                raise ValueError(f"{name} must be a NumPy array [{size}]")
        if not isinstance(self.causal, (bool, np.bool_)):
            raise NotImplementedError(
                f"causal is {type(self.causal).__name__}: one mask a step; put causal and "
                "bidirectional requests into two steps"
            )

    @property
    def xp(self) -> Any:
        """The array module of the step: ``numpy`` or ``cupy``."""
        return array_module(self.seq_lens)

    def on_host(self, name: str) -> np.ndarray[Any, Any]:
        """A field's host copy; never one that would synchronise.

        Parameters
        ----------
        name : {"query_start_loc", "seq_lens", "encoder_seq_lens"}

        Raises
        ------
        ValueError
            The field is on a GPU and the engine gave no copy.
        """
        array, copy = getattr(self, name), getattr(self, f"{name}_cpu")
        found = array if copy is None else copy
        if not isinstance(found, np.ndarray):
            raise ValueError(f"{name} is needed on the host: pass {name}_cpu, a NumPy copy of it")
        return found

    def compute_num_computed_tokens(self) -> Array:
        """Keys of each request that an earlier step wrote: array [R], int32."""
        return self.seq_lens - (self.query_start_loc[1:] - self.query_start_loc[:-1])

    def unpadded(self, num_actual_tokens: int, num_actual_reqs: int) -> CommonAttentionMetadata:
        """The step without its padding: the first requests and tokens, as views."""
        reqs = slice(0, num_actual_reqs)

        def rows(array: Array) -> Array:
            return None if array is None else array[reqs]

        starts = self.query_start_loc_cpu
        return replace(
            self,
            query_start_loc=self.query_start_loc[: num_actual_reqs + 1],
            seq_lens=self.seq_lens[reqs],
            num_reqs=num_actual_reqs,
            num_actual_tokens=num_actual_tokens,
            block_table_tensor=self.block_table_tensor[reqs],
            slot_mapping=self.slot_mapping[:num_actual_tokens],
            query_start_loc_cpu=None if starts is None else starts[: num_actual_reqs + 1],
            seq_lens_cpu=rows(self.seq_lens_cpu),
            encoder_seq_lens=rows(self.encoder_seq_lens),
            encoder_seq_lens_cpu=rows(self.encoder_seq_lens_cpu),
        )
