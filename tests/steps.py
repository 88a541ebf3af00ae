"""Steps of an engine, made: caches of NaN, padded requests, shuffled blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from batches import starts

from cupyflash.backend import BackendConfig, CommonAttentionMetadata, KVCacheSpec
from cupyflash.backends import FlashAttentionImpl, FlashAttentionMetadataBuilder
from cupyflash.backends.kv_layout import (
    empty_kv_cache,
    kv_cache_stride_order,
    packed_kv_cache_stride_order,
    split_kv_cache,
)
from cupyflash.testing import DTYPES, POISON_INDEX, expect_attention, round_to, weight_precision

GRAPHS = {"full_cuda_graphs": True, "max_cudagraph_capture_size": 64}


class Made:
    """A case's arrays, layer and metadata builder on a path."""

    def __init__(self, path, case, builder_cls=FlashAttentionMetadataBuilder, **config):
        if path.name != "numpy" and case.dtype == "fp32":
            case = case.replace(dtype="fp16")
        self.path, self.case = path, case
        self.rng = rng = np.random.default_rng(case.seed)
        shape = (case.num_kv_heads, case.head_size)
        shared = rng.standard_normal((2, case.prefix, *shape))
        self.keys, self.values = ([], [])
        for length in case.kv_lens:
            kv = rng.standard_normal((2, length, *shape))
            kv[:, : case.prefix] = shared[:, :length]
            for operand, own in zip((self.keys, self.values), kv, strict=True):
                operand.append(round_to(own, DTYPES[case.dtype]))
        self.table, self.num_blocks = self._table()
        self.cache = self._cache()
        self.layer = self._layer()
        self.slopes = rng.uniform(0, 0.5, case.num_heads) if case.alibi else None
        self.sinks = rng.standard_normal(case.num_heads).astype(np.float32) if case.sink else None
        self.impl = self.make_impl()
        spec = KVCacheSpec(
            case.block_size,
            case.num_kv_heads,
            case.head_size,
            case.dtype,
            case.kv_cache_dtype,
            config.pop("attention_chunk_size", None),
        )
        self.config = BackendConfig(
            max_num_seqs=len(case.lengths) + case.pad_reqs, layers={"layer": self.impl}, **config
        )
        self.builder = builder_cls(spec, ["layer"], self.config)
        self.common = self._common()
        rows = sum(case.q_lens) + case.pad_tokens
        query = rng.standard_normal((rows, case.num_heads, case.head_size))
        kind = DTYPES["e4m3" if case.q_fp8 else case.dtype]
        query = round_to(query, kind)
        self.query = path.array(query.view(np.uint8) if case.q_fp8 else query)
        self.output = path.array(np.full(query.shape, np.nan, DTYPES[case.dtype]))

    def make_impl(self, **options):
        case = self.case
        given: dict[str, Any] = {
            "num_heads": case.num_heads,
            "head_size": case.head_size,
            "scale": 0.2,
            "num_kv_heads": case.num_kv_heads,
            "alibi_slopes": None if self.slopes is None else self.slopes.tolist(),
            "sliding_window": case.window,
            "kv_cache_dtype": case.kv_cache_dtype,
            "logits_soft_cap": case.softcap,
            "sinks": None if self.sinks is None else self.path.array(self.sinks),
        }
        return FlashAttentionImpl(**{**given, **options})

    def _table(self):
        """Blocks in random order; block 0 is nobody's, the tail of a row is poison."""
        case, size = self.case, self.case.block_size
        shared = case.prefix // size
        counts = [-(-n // size) for n in case.kv_lens]
        total = shared + sum(max(0, count - shared) for count in counts)
        free = iter((self.rng.permutation(total) + 1).tolist())
        common = [next(free) for _ in range(shared)]
        width = max([*counts, 1]) + 1
        table = np.full((len(counts) + case.pad_reqs, width), POISON_INDEX, np.int32)
        table[len(counts) :] = 0
        for row, count in zip(table, counts, strict=False):
            row[:count] = [*common, *(next(free) for _ in range(count - shared))][:count]
        return table, total + 1

    def _cache(self):
        case, blocks = self.case, self.num_blocks
        fp8 = case.kv_cache_dtype != "auto"
        kind = np.dtype(np.uint8) if fp8 else DTYPES[case.dtype]
        heads, dim = case.num_kv_heads, case.head_size
        if case.layout.startswith("packed"):
            shape = (3, blocks, heads, case.block_size, 2 * dim)  # of three layers the second
            order = packed_kv_cache_stride_order(case.layout.partition("-")[2])
        else:
            shape = (2, blocks, case.block_size, heads, dim)
            order = kv_cache_stride_order(case.layout)
        cache = empty_kv_cache(shape, order, kind, self.path.xp)
        cache[...] = 0x7F if fp8 else np.nan
        return cache[1] if case.layout.startswith("packed") else cache

    def _layer(self):
        make = {
            "number": lambda x: float(x[0]),
            "one": lambda x: self.path.array(x[:1], np.float32).reshape(()),
            "head": lambda x: self.path.array(x, np.float32),
        }[self.case.scales]
        drawn = self.rng.uniform(0.5, 2, (3, self.case.num_kv_heads)).astype(np.float32)
        return SimpleNamespace(
            **{f"_{n}_scale": make(scale) for n, scale in zip("qkv", drawn, strict=True)}
        )

    def _common(self, **more):
        case, array, pads = self.case, self.path.array, self.case.pad_reqs
        tokens = sum(case.q_lens) + case.pad_tokens
        begin = np.pad(starts(case.q_lens), (0, pads), "edge")
        kv_lens = np.array([*case.kv_lens, *[0] * pads], np.int32)
        slots = self.slots(new=True)
        return CommonAttentionMetadata(
            query_start_loc=array(begin),
            seq_lens=array(kv_lens),
            num_reqs=len(kv_lens),
            num_actual_tokens=tokens,
            max_query_len=max(case.q_lens),
            max_seq_len=max(case.kv_lens) + 5,
            block_table_tensor=array(self.table),
            slot_mapping=array(np.pad(slots, (0, case.pad_tokens), constant_values=-1)),
            causal=case.causal,
            query_start_loc_cpu=begin,
            seq_lens_cpu=kv_lens,
            **more,
        )

    def slots(self, new):
        """Slots of this step's tokens, or of those of earlier steps; shared ones written once."""
        size, found = self.case.block_size, []
        for request, (q_len, context) in enumerate(self.case.lengths):
            at = np.arange(context, context + q_len) if new else np.arange(context)
            slots = self.table[request][at // size].astype(np.int64) * size + at % size
            found.append(np.where((at < self.case.prefix) & (request > 0), -1, slots))
        return np.concatenate(found)

    def tokens(self, operand, new):
        pairs = zip(operand, self.case.lengths, strict=True)
        rows = np.concatenate(
            [own[context:] if new else own[:context] for own, (_, context) in pairs]
        )
        pad = self.case.pad_tokens if new else 0
        return self.path.array(np.pad(rows, ((0, pad), (0, 0), (0, 0)), constant_values=np.nan))

    def write(self, new, slots=None):
        slots = self.path.array(self.slots(new)) if slots is None else slots
        key, value = self.tokens(self.keys, new), self.tokens(self.values, new)
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots)
        return key, value

    def run(self, metadata, impl=None):
        """Write earlier tokens, then this step's, then attend; the output's live rows."""
        self.write(new=False)
        key, value = self.write(True, metadata.slot_mapping)
        (impl or self.impl).forward(
            self.layer, self.query, key, value, self.cache, metadata, self.output
        )
        return self.live()

    def live(self):
        """Rows of requests; asserts that padding is as it was."""
        output, tokens = self.path.host(self.output), sum(self.case.q_lens)
        assert np.isnan(output[tokens:].astype(np.float32)).all()
        return output[:tokens]

    def arguments(self):
        """The call whose answer the step must have, on the host."""
        case, host = self.case, self.path.host
        caches = [host(c) for c in split_kv_cache(self.cache, case.num_kv_heads, case.head_size)]
        requests, tokens = len(case.lengths), sum(case.q_lens)
        args = {
            "q": host(self.query)[:tokens],
            "k": caches[0],
            "v": caches[1],
            "cu_seqlens_q": starts(case.q_lens),
            "seqused_k": np.array(case.kv_lens, np.int32),
            "block_table": self.table[:requests],
            "softmax_scale": 0.2,
            "causal": case.causal,
            "window_size": self._window(),
            "softcap": case.softcap or 0.0,
            "s_aux": self.sinks,
            "alibi_slopes": None if self.slopes is None else self.slopes.astype(np.float32),
        }
        if case.q_fp8:
            args.update(q_descale=self._scale("q"), q_fp8_dtype="e4m3")
        if case.kv_cache_dtype != "auto":
            args.update(
                k_descale=self._scale("k"),
                v_descale=self._scale("v"),
                fp8_dtype="e5m2" if "e5m2" in case.kv_cache_dtype else "e4m3",
            )
        return args

    def _scale(self, name):
        scale = getattr(self.layer, f"_{name}_scale")
        scale = np.asarray(scale if isinstance(scale, float) else self.path.host(scale), np.float32)
        return np.broadcast_to(scale.reshape(-1), (len(self.case.lengths), self.case.num_kv_heads))

    def _window(self):
        """Tokens before a query that a layer of W sees are W - 1; both ways if not causal."""
        if self.case.window is None:
            return (-1, -1)
        reach = self.case.window - 1
        return (reach, 0) if self.case.causal else (reach, reach)

    def expected(self, **changes):
        args = {**self.arguments(), **changes}
        precision = self.precision(args, max(self.case.q_lens), max(self.case.kv_lens))
        return expect_attention(**args, out_dtype=self.case.dtype, **precision)

    def precision(self, args, max_seqlen_q, max_seqlen_k):
        """That of the weights in the kernels which serve a call."""
        there = {n: self.path.array(a) if isinstance(a, np.ndarray) else a for n, a in args.items()}
        return weight_precision(**there, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def address(path, array):
    return array.data.ptr if path.name == "gpu" else array.__array_interface__["data"][0]
