"""Public reports on devices, memory and choices; docs/public_reports.md names them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, check_results, expected, random_batch, results

import cupyflash
from cupyflash import AttentionBounds, flash_attn_varlen_func
from cupyflash.fa_version import resolve_need
from cupyflash.families import FAMILIES
from cupyflash.runtime import cupy_device as devices
from cupyflash.runtime.compile import native_arch
from cupyflash.runtime.device import DeviceInfo
from cupyflash.runtime.prefill_tile import prefill_fp8_cache_variants, prefill_ones_variants
from cupyflash.runtime.variants import all_variants
from cupyflash.support import Need

BF16 = np.dtype(ml_dtypes.bfloat16)


class OnDevice:
    """What the library sees of a CuPy array on another device than the current one."""

    def __init__(self, array, ordinal=1):
        self.array, self.data = array, SimpleNamespace(device_id=ordinal, ptr=array.ctypes.data)

    def __getattr__(self, name):
        return getattr(self.array, name)


OnDevice.__module__ = "cupy"


def two_devices(monkeypatch):
    """Emulated devices 0 and 1, of which 0 is the current one."""
    from emulator import EmulatedDevice

    found = [EmulatedDevice("sm_80"), EmulatedDevice("sm_90")]
    for device in found:
        device.pointer = lambda array: getattr(array, "array", array).ctypes.data
        launch = device.launch
        device.launch = lambda kernel, plan, args, stream, launch=launch: launch(
            kernel, plan, SimpleNamespace(values=args.values, arrays=unwrapped(args)), stream
        )
    monkeypatch.setattr(devices, "cupy_device", found.__getitem__)
    return found


def unwrapped(args):
    return tuple(getattr(array, "array", array) for array in args.arrays)


def test_b80_arrays_decide_the_device(monkeypatch):
    from conftest import Path

    found, path = two_devices(monkeypatch), Path("emulator-sm_90")
    args = arguments(path, *random_batch([2], [30], dtype=BF16), [2], [30])
    for ordinal in (0, 1):
        out = np.full(args["q"].shape, np.nan, BF16)
        arrays = {**args, "out": out}
        call = {n: OnDevice(a, ordinal) if hasattr(a, "dtype") else a for n, a in arrays.items()}
        flash_attn_varlen_func(**call)
        expected(path, args).check(out)
        assert [device.launches for device in found] == [1, ordinal]
    assert all(variant.arch.startswith("sm_90") for variant in found[1].kernels)


def test_b80_arrays_on_two_devices_are_refused(monkeypatch):
    from conftest import Path

    found, path = two_devices(monkeypatch), Path("emulator-sm_90")
    args = arguments(path, *random_batch([2], [30], dtype=BF16), [2], [30])
    call = {n: OnDevice(a) if hasattr(a, "dtype") else a for n, a in args.items()}
    call["q"] = OnDevice(args["q"], 0)
    with pytest.raises(ValueError, match=r"several GPUs: q on 0, k on 1.*one GPU a call"):
        flash_attn_varlen_func(**call)
    assert [device.launches for device in found] == [0, 0]


@pytest.mark.gpu
def test_b80_a_second_gpu_after_the_first():
    import cupy as cp
    from conftest import Path

    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    path, found = Path("gpu"), []
    for ordinal in (0, 1):
        with cp.cuda.Device(ordinal):
            args = arguments(path, *random_batch([1], [300], 2, 1, 256), [1], [300], num_splits=4)
        found.append(flash_attn_varlen_func(**args))  # the current device is 0
        assert found[-1].device.id == ordinal
    assert found[0].get().tobytes() == found[1].get().tobytes()


@pytest.mark.parametrize("ask", ["get_flash_attn_version()", "runtime.nvrtc.load_nvrtc()"])
def test_b82_a_home_that_cupy_cannot_write(ask, tmp_path):
    pytest.importorskip("cupy")
    (tmp_path / "file").touch()
    environment = {k: v for k, v in os.environ.items() if k != "CUPY_CACHE_DIR"}
    code = f"import cupyflash, cupyflash.runtime.nvrtc\ncupyflash.{ask}"
    found = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False,
        env={**environment, "HOME": str(tmp_path / "file"), "PYTHONPATH": found},
    )  # fmt: skip
    assert done.returncode == 1
    assert "set CUPY_CACHE_DIR to a folder that can be written" in done.stderr


@pytest.mark.parametrize("short", [1, 1000, None])
def test_b85_a_workspace_that_is_too_small_is_never_overrun(path, short):
    """Keys are cut into as few pieces as fit it; what lies behind it stays as it is."""
    bounds = AttentionBounds(
        batch_size=1, max_seqlen_q=1, max_seqlen_k=600, num_heads_q=2, num_heads_kv=1, headdim=64,
        dtype="float16", num_splits=8, return_softmax_lse=True,
    )  # fmt: skip
    need = cupyflash.workspace_size(bounds)
    assert bool(need) == (path.name != "numpy")
    size = 0 if short is None else max(0, need - short)
    memory = path.array(np.full(size + 4096, 0xA5, np.uint8))
    args = arguments(path, *random_batch([1], [600], 2, 1), [1], [600], num_splits=8)
    written = results(path, args)
    flash_attn_varlen_func(**args, **written, workspace=memory[:size])
    check_results(path, args, written)
    assert (path.host(memory)[size:] == 0xA5).all()


SHAPES = [
    (q, k, heads, page)
    for q, k in ((1, 40), (1, 300), (5, 64), (17, 17), (2, 129))
    for heads in (2, 4)
    for page in (None, 16)
]


def test_b86_memory_does_not_grow_on_the_host():
    from conftest import Path

    path = Path("numpy")
    calls = [
        arguments(path, *random_batch([q], [k], heads, 2), [q], [k], page)
        for q, k, heads, page in SHAPES
    ]

    def rounds(count):
        for _ in range(count):
            for args in calls:
                flash_attn_varlen_func(**args)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = rounds(3)
        assert rounds(20) - first < 20_000
    finally:
        tracemalloc.stop()


@pytest.mark.gpu
def test_b86_memory_does_not_grow_on_a_gpu():
    import cupy as cp
    from conftest import Path

    path, pool = Path("gpu"), cp.get_default_memory_pool()
    calls = [
        arguments(path, *random_batch([q], [k], heads, 2), [q], [k], page)
        for q, k, heads, page in SHAPES
    ]
    for args in calls:
        flash_attn_varlen_func(**args)
    cp.cuda.Device().synchronize()
    before = pool.used_bytes(), pool.total_bytes()
    for _ in range(100):
        for args in calls:
            flash_attn_varlen_func(**args)
    cp.cuda.Device().synchronize()
    assert (pool.used_bytes(), pool.total_bytes()) == before


GPUS = {
    (7, 5): 64, (8, 0): 163, (8, 6): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99,
}  # fmt: skip


@pytest.mark.parametrize("option", ["sink", "alibi"])
@pytest.mark.parametrize("kv", ["bf16", "e4m3"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("capability", GPUS)
def test_b89_what_is_chosen_has_kernels_and_a_plan(capability, head_dim, kv, option):
    info = DeviceInfo("a GPU", 0, capability, 80, GPUS[capability] << 10)
    bounds = AttentionBounds(
        batch_size=3, max_seqlen_q=40, max_seqlen_k=900, num_heads_q=8, num_heads_kv=2,
        headdim=head_dim, kv_dtype=kv, page_size=16, max_blocks=60, causal=True, **{option: True},
    )  # fmt: skip
    problem = bounds.problem()
    need = Need(head_dim, head_dim, problem.q_type, problem.kv_type, **{option: True})
    if capability < (8, 0):
        with pytest.raises(NotImplementedError, match=r"compute capability 7\.5.*8\.0 or later"):
            resolve_need(need, capability)
        return
    version, known = resolve_need(need, capability), set(all_variants(native_arch(capability)))
    known |= {*prefill_fp8_cache_variants(), *prefill_ones_variants()}  # not compiled ahead
    for tokens, splits in product((1, 40), (0, 1, 8)):
        asked = replace(problem, max_seqlen_q=tokens, total_q=3 * tokens, num_splits=splits)
        plans = FAMILIES[version].plans(asked, info)
        assert plans
        for plan in plans:
            assert plan.variant in known
            assert plan.smem_bytes <= info.smem_optin
