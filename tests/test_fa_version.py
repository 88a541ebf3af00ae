"""Which version runs: the table, the overrides, and what is said where none does."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_problem import paged, problem_of

import cupyflash
from cupyflash import support
from cupyflash.fa_version import resolve_need, resolve_version
from cupyflash.families import FAMILIES
from cupyflash.runtime.device import DeviceInfo, use_device
from cupyflash.runtime.dtypes import BF16, E4M3, FP32
from cupyflash.support import SUPPORT, Need, need_of, unsupported_reason, versions

BOUNDS = cupyflash.AttentionBounds(
    batch_size=2, max_seqlen_q=3, max_seqlen_k=20, num_heads_q=6, num_heads_kv=2, headdim=64,
)  # fmt: skip
CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def gpu(capability):
    """A device that can be asked what it is, and no more."""
    return use_device(SimpleNamespace(info=DeviceInfo("a GPU", 0, capability, 132, 232448)))


def _table_where(monkeypatch, built):
    from cupyflash.fa_version import _resolve, _resolve_problem

    def forget():
        _resolve.cache_clear()
        _resolve_problem.cache_clear()

    rows = tuple(replace(row, built=built) for row in SUPPORT)
    monkeypatch.setattr(support, "SUPPORT", rows)
    forget()
    yield rows
    forget()


@pytest.fixture
def built(monkeypatch):
    """The table as it will be once every row of it is built."""
    yield from _table_where(monkeypatch, True)


@pytest.fixture
def unbuilt(monkeypatch):
    """The table of a release without attention kernels."""
    yield from _table_where(monkeypatch, False)


def test_a_version_has_kernels_exactly_where_a_row_is_built():
    assert set(FAMILIES) == {row.version for row in SUPPORT if row.built}


def test_versions_are_2_and_3():
    assert versions() == (3, 2)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("kv", [BF16, E4M3])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_selection_runs_or_says_why(built, capability, head_dim, kv, alibi, sink):
    need = Need(head_dim, head_dim, BF16, kv, alibi, sink)
    if capability < (8, 0):
        with pytest.raises(NotImplementedError, match=r"7\.5.*need 9\.0; .*need 8\.0 or later"):
            resolve_need(need, capability)
        return
    version = resolve_need(need, capability)
    assert version == (3 if capability == (9, 0) else 2)
    assert unsupported_reason(version, need, capability) is None


def test_a_reason_quotes_the_table(built, monkeypatch):
    monkeypatch.setattr(support, "SUPPORT", tuple(replace(row, alibi=False) for row in built))
    alibi = Need(alibi=True)
    assert unsupported_reason(3, alibi, (9, 0)) == "ALiBi is not in the Hopper kernels"
    odd = Need(72, 72, BF16, E4M3)
    assert "head size 72 in 8 bit" in unsupported_reason(3, odd, (9, 0))
    assert "multiples of 16 up to 256" in unsupported_reason(3, odd, (9, 0))
    assert unsupported_reason(2, odd, (9, 0)) is None
    assert "q in fp32" in unsupported_reason(2, Need(q_type=FP32), (9, 0))
    assert "compute capability 12.0" in unsupported_reason(3, Need(), (12, 0))


def test_a_row_that_is_not_built_says_so_last(unbuilt):
    words = "the portable kernels are not in this release; NumPy arrays are computed on the CPU"
    assert unsupported_reason(2, Need(), (8, 0)) == words
    assert "8.0 or later" in unsupported_reason(2, Need(), (7, 5))
    with gpu((9, 0)):
        assert cupyflash.get_flash_attn_version() is None
        assert cupyflash.fa_version_unsupported_reason(2) == words


def test_of_several_rows_the_nearest_one_is_quoted(monkeypatch, built):
    far = replace(built[0], first=(11, 0))
    monkeypatch.setattr(support, "SUPPORT", (far, replace(built[0], sink=False)))
    assert unsupported_reason(2, Need(sink=True), (9, 0)) == "sinks are not in the portable kernels"
    assert unsupported_reason(2, Need(), (9, 0)) is None


def test_precedence_is_argument_block_environment(built, monkeypatch):
    problem = problem_of()
    monkeypatch.setenv("CUPYFLASH_FA_VERSION", "3")
    assert resolve_version(problem, (9, 0)) == 3
    with cupyflash.fa_version(2):
        assert resolve_version(problem, (9, 0)) == 2
        assert resolve_version(problem, (9, 0), 3) == 3
        with cupyflash.fa_version(3):
            assert resolve_version(problem, (9, 0)) == 3
        assert resolve_version(problem, (9, 0)) == 2
    monkeypatch.setenv("CUPYFLASH_FA_VERSION", "2")
    assert resolve_version(problem, (9, 0)) == 2


def test_a_block_ends_with_an_error_too(built):
    with pytest.raises(RuntimeError), cupyflash.fa_version(2):
        raise RuntimeError
    assert resolve_version(problem_of(), (9, 0)) == 3


def test_a_block_is_of_one_thread(built):
    found = []
    with cupyflash.fa_version(2):
        thread = threading.Thread(
            target=lambda: found.append(resolve_version(problem_of(), (9, 0)))
        )
        thread.start()
        thread.join()
    assert found == [3]


def test_a_version_that_cannot_run_is_refused_with_reason_source_and_another(built, monkeypatch):
    problem = problem_of(**paged(dims=(72, 72), dtype=np.uint8))
    with pytest.raises(
        ValueError, match=r"version 3 \(from the fa_version argument\): head size 72.*use 2"
    ):
        resolve_version(problem, (9, 0), 3)
    with (
        cupyflash.fa_version(3),
        pytest.raises(ValueError, match=r"from the fa_version block.*use 2"),
    ):
        resolve_version(problem, (9, 0))
    monkeypatch.setenv("CUPYFLASH_FA_VERSION", "3")
    with pytest.raises(ValueError, match=r"from CUPYFLASH_FA_VERSION.*8\.6.*need 9\.0; use 2"):
        resolve_version(problem, (8, 6))


@pytest.mark.parametrize("version", [1, 4, True, "3", 2.0])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(ValueError, match=r"fa_version=.*the versions are 3, 2"):
        resolve_version(problem_of(), (9, 0), version)
    with pytest.raises(ValueError, match="the versions are 3, 2"), cupyflash.fa_version(version):
        pass
    with pytest.raises(ValueError, match="the versions are 3, 2"):
        cupyflash.is_fa_version_supported(version)


@pytest.mark.parametrize("value", ["4", "two", "-2"])
def test_an_unknown_version_in_the_environment_is_refused(monkeypatch, value):
    monkeypatch.setenv("CUPYFLASH_FA_VERSION", value)
    with pytest.raises(ValueError, match="CUPYFLASH_FA_VERSION="):
        resolve_version(problem_of(), (9, 0))


def test_need_is_what_the_problem_asks():
    problem = problem_of(s_aux=np.ones(6, np.float32))
    assert need_of(problem) == Need(64, 64, problem.q_type, problem.kv_type, False, True)


def test_public_questions(built):
    with gpu((9, 0)):
        assert cupyflash.get_flash_attn_version() == 3
        assert cupyflash.get_flash_attn_version(requires_alibi=True) == 3
        assert cupyflash.get_flash_attn_version(head_size=72, kv_cache_dtype="fp8") == 2
        assert cupyflash.get_flash_attn_version(head_size=512) is None
        assert cupyflash.is_fa_version_supported(3)
        assert cupyflash.flash_attn_supports_fp8()
        assert "512" in cupyflash.fa_version_unsupported_reason(2, head_size=512)
        with cupyflash.fa_version(2):
            assert cupyflash.get_flash_attn_version() == 2
    with gpu((8, 6)):
        assert cupyflash.get_flash_attn_version() == 2
        assert not cupyflash.is_fa_version_supported(3)
        assert "8.6" in cupyflash.fa_version_unsupported_reason(3)
    with gpu((7, 5)):
        assert cupyflash.get_flash_attn_version() is None
        assert not cupyflash.flash_attn_supports_fp8()


def test_without_a_gpu_there_is_no_version(monkeypatch, built):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cupyflash.get_flash_attn_version() is None
    assert not cupyflash.flash_attn_supports_fp8()
    assert "CuPy is not installed" in cupyflash.fa_version_unsupported_reason(2)


def test_rocm_is_named(monkeypatch, built):
    import sys

    runtime = SimpleNamespace(is_hip=True)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert cupyflash.get_flash_attn_version() is None
    assert "ROCm" in cupyflash.fa_version_unsupported_reason(2)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("FP8_E5M2", "float8_e5m2")],
)
def test_fp8_dtype_of_a_cache(spelling, name):
    assert cupyflash.get_fp8_dtype_for_flashattn(spelling).name == name


def test_fp8_dtype_of_another_cache_is_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype='bfloat16' is not an fp8 format"):
        cupyflash.get_fp8_dtype_for_flashattn("bfloat16")
    with pytest.raises(ValueError, match="kv_cache_dtype='int4'"):
        cupyflash.get_flash_attn_version(kv_cache_dtype="int4")


def test_a_call_that_no_version_runs_says_why(unbuilt):
    calls = (
        lambda **more: cupyflash.flash_attn_varlen_func(**paged(), **more),
        lambda **more: cupyflash.explain(**paged(), **more),
        lambda **more: cupyflash.get_scheduler_metadata(
            2, 3, 20, 6, 2, 64, paged()["seqused_k"], "float16", page_size=16, **more
        ),
        lambda **more: cupyflash.workspace_size(BOUNDS, **more),
        lambda **more: cupyflash.warmup(BOUNDS, **more),
    )
    for call in calls:
        with gpu((9, 0)), pytest.raises(NotImplementedError, match=r"3: .*release.*2: .*release"):
            call()
        with gpu((9, 0)), pytest.raises(ValueError, match=r"version 2 \(from the fa_version arg"):
            call(fa_version=2)
