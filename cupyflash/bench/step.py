"""A step of a layer around its attention: what a schedule of shared prefixes is hidden behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .case import STEP_FEATURES
from .inputs import BenchInputs

__all__ = ["step"]

_BLOCKS_PER_SM, _THREADS = 1, 512  # a product of matrices leaves room for as much
_READ = """extern "C" __global__ void read(const uint4 *from, long long count, unsigned *to) {
  unsigned sum = 0;
  const long long all = gridDim.x * 512ll;
  #pragma unroll 1
  for (long long i = blockIdx.x * 512ll + threadIdx.x; i < count; i += 8 * all) {
    uint4 v[8];
    #pragma unroll
    for (int n = 0; n < 8; ++n) v[n] = i + n * all < count ? from[i + n * all] : uint4{0, 0, 0, 0};
    #pragma unroll
    for (int n = 0; n < 8; ++n) sum += v[n].x ^ v[n].y ^ v[n].z ^ v[n].w;
  }
  if (sum == 12345) *to = sum;
}"""


@cache
def _reader() -> Any:
    import cupy as cp

    return cp.RawKernel(_READ, "read")


def step(
    inputs: BenchInputs, cf: Any, attention: Callable[[], Any], make: Callable[[Any], Any] | None
) -> Callable[[], Any]:
    """A callable of a projection, the cache write and an attention, on the current stream.

    The projection is what it takes at least: its weights, of the queries, keys and values of all
    heads, are read.

    Parameters
    ----------
    inputs : BenchInputs
    cf : module
    attention : callable
    make : callable, optional
        Queues what the attention needs on a stream, beside the projection.
    """
    key, slots = _new_keys(inputs)
    project = _projection(inputs)

    def run() -> None:
        side = None if make is None else cf.SideStream(inputs.seqused_k)
        if make is not None:
            make(side)
        project()
        if side is not None:
            side.join()
        cf.reshape_and_cache_flash(key, key, inputs.k, inputs.v, slots, "auto", 1.0, 1.0)
        attention()

    return run


def _projection(inputs: BenchInputs) -> Callable[[], None]:
    if inputs.xp is np:
        return lambda: None
    import cupy as cp

    case = inputs.case
    heads = case.num_heads_q + 2 * case.num_heads_kv
    weights = cp.ones(STEP_FEATURES * heads * case.head_dim // 2, np.uint32)
    nothing = cp.zeros(1, np.uint32)
    grid = (_BLOCKS_PER_SM * cp.cuda.Device().attributes["MultiProcessorCount"],)
    args = (weights, np.int64(weights.nbytes // 16), nothing)
    return lambda: _reader()(grid, (_THREADS,), args)


def _new_keys(inputs: BenchInputs) -> tuple[Any, Any]:
    """Keys of one token a request, and the slots of the last tokens."""
    case, page, xp = inputs.case, inputs.case.page_size or 1, inputs.xp
    last = xp.asarray(np.array(case.k_lens) - 1)
    blocks = inputs.block_table[xp.arange(inputs.batch), last // page]
    key = xp.zeros((inputs.batch, case.num_heads_kv, case.head_dim), inputs.k.dtype)
    return key, blocks.astype(np.int64) * page + last % page
