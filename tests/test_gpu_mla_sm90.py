"""The Hopper kernel of multi-head latent attention on a GPU of compute capability 9.0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latent import hopper_latent
from repeats import check_repeats
from test_emul_mla_sm90 import ANY_HEADS
from test_mla import CASE

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.fa_version import current_capability

pytestmark = pytest.mark.gpu
EXAMPLES = int(os.environ.get("CUPYFLASH_GPU_EXAMPLES", "200"))

_PROBE = """
import cupy
from latent import hopper_latent
from test_mla import CASE
from cupyflash.attention import flash_attn_varlen_func
with hopper_latent():
    for tokens, heads in ((0, 64), (64, 64), (700, 64), (700, 128)):
        case = CASE.replace(lengths=((1, tokens), (2, 3)), group_size=heads, page_size=64)
        for num_splits in (0, 1):
            case.make(cupy).check(flash_attn_varlen_func, fa_version=3, num_splits=num_splits)
print("came back")
"""


@pytest.fixture(scope="module", autouse=True)
def comes_back():
    """A kernel that waits for ever would hold up every other test of the process."""
    if current_capability()[0] != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], cwd=here, capture_output=True, text=True, timeout=40,
        env={**os.environ, "PYTHONPATH": f"{here.parent}:{here}"}, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "came back", done.stderr[-2000:]
    with hopper_latent():
        yield


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("num_splits", [0, 1, 2, 5])
@settings(max_examples=max(1, EXAMPLES // 8))
@given(case=ANY_HEADS, batch_invariant=st.booleans())
def test_any_case(kind, num_splits, case, batch_invariant):
    import cupy

    inputs = case.replace(q_type=kind, kv_type=kind).make(cupy)
    options = {"num_splits": num_splits, "batch_invariant": batch_invariant, "fa_version": 3}
    check_repeats(inputs, flash_attn_varlen_func, **options)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 4])
def test_long_sequences(heads, q_len):
    import cupy

    lengths = tuple((q_len, n) for n in (2100, 1, 2047, 3000, 63, 64))
    inputs = CASE.replace(lengths=lengths, group_size=heads, page_size=64).make(cupy)
    check_repeats(inputs, flash_attn_varlen_func, times=50, fa_version=3)
