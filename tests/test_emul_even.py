"""block/even_span.cuh finds what block/spans.cuh finds, for batches that it may be used for."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import device_array
from hypothesis import given
from hypothesis import strategies as st
from spans import Rules, SpanProbe

from cupyflash.runtime.attention_plan import ATTENTION_PARAMS
from cupyflash.runtime.even import NOT_EVEN, Even, even_cut
from cupyflash.runtime.kernel_source import kernel_source
from cupyflash.runtime.variant import Variant

KERNEL = """
#include "core/variant.cuh"
#include "block/even_span.cuh"

struct Found { i32 *of_spans; };  // [spans, 6]

extern "C" __global__ void __launch_bounds__(32) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d,
    const __grid_constant__ Found found) {
  EvenSpan even;
  even.look(p, d, blockIdx.x);
  if (threadIdx.x) return;
  i32 *const to = found.of_spans + blockIdx.x * 6;
  to[0] = even.there, to[1] = even.request.index, to[2] = even.unit;
  to[3] = even.begin, to[4] = even.end, to[5] = even.request.kv_len;
}
"""


class Probe(SpanProbe):
    """Runs that kernel too."""

    def __init__(self, folder):
        super().__init__(folder, "sm_90a")
        (folder / "even.cu").write_text(KERNEL)
        variant = Variant(
            "even.cu", "even", "sm_90a", (("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),)
        )
        source, options = kernel_source(variant, folder)
        self.even = self.device.compile_source(source, options, "even.cu").program("even")

    def find(self, rules: Rules, even: Even) -> np.ndarray:
        rules.even_pieces, rules.even_inverse, rules.unit_inverse = even[:3]
        rules.even_least, rules.even_most = even[3:]
        arrays, attention = self._batch(rules)
        out = device_array(rules.spans * 6, np.int32)
        values = (attention, self._decode(rules, 0), np.array([out.ctypes.data], "<u8"))
        self.device.run(self.even, (rules.spans,), (32,), 0, values, [*arrays, out])
        return out.reshape(-1, 6)


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    return Probe(tmp_path_factory.mktemp("even"))


@given(
    batch=st.sampled_from([1, 2, 3, 8, 31, 32, 33, 64, 66]), units=st.integers(1, 8),
    length=st.sampled_from([1, 17, 300, 1000, 4100]), spans=st.sampled_from([2, 17, 132, 264]),
    other=st.sampled_from([0, 0, 1, 16, -1]), at=st.integers(0, 65),
    fewest_shift=st.sampled_from([0, 2]), align_most=st.sampled_from([500, 1 << 30]),
    q_len=st.sampled_from([1, 3]), right=st.sampled_from([-1, 0]),
)  # fmt: skip
def test_even_spans_are_those_of_any_batch(probe, batch, length, other, at, q_len, right, **rules):
    lengths = [length] * batch
    lengths[at % batch] += other
    rules = Rules([q_len] * batch, lengths, window=(-1, right), **rules)
    even = even_cut(batch, rules.units, rules.spans, rules.fewest_shift, rules.align_most)
    if not even.pieces:
        return
    begins = probe.run(rules).begins
    segments = rules.segments()
    alike = len(segments) == batch * rules.units and len({tiles for _, tiles in segments}) == 1
    tiles = segments[0][1] if segments else 0
    for span, found in enumerate(probe.find(rules, even)):
        there, index, unit, begin, end, kv_len = found.tolist()
        assert there == (alike and even.least <= tiles <= even.most)
        if there:
            assert end - begin == begins[span + 1] - begins[span]
            if end > begin:
                assert (index * rules.units + unit) * tiles + begin == begins[span]
                assert kv_len == lengths[index]


def test_which_batches_may_be_even():
    assert even_cut(1, 8, 264, 2, 1 << 20).pieces == 33
    assert even_cut(1, 1, 132, 3, 1 << 20).pieces == 128
    assert even_cut(32, 8, 264, 2, 1 << 20).pieces == 1
    for batch, units, spans in [(20, 8, 264), (64, 8, 264), (0, 8, 264), (33, 8, 132)]:
        assert even_cut(batch, units, spans, 2, 1 << 20) is NOT_EVEN
