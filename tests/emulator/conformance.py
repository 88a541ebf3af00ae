"""Small kernels, one instruction each, whose results a real GPU decides.

``python conformance.py goldens.npz`` runs those without a golden on the GPU through CuPy (compute
capability 9.0) and stores all results; a test replays them on the emulator.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Case", "MapSpec", "all_cases", "hashed", "run_case", "summary"]

GOLDENS = Path(__file__).resolve().parent / "goldens" / "conformance_sm90.npz"
PREFIX = """
typedef unsigned char u8; typedef signed char s8; typedef unsigned short u16; typedef short s16;
typedef unsigned int u32; typedef unsigned long long u64; typedef long long s64;
struct alignas(64) TensorMap { u64 opaque[16]; };
__device__ inline u32 saddr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
"""
MAX_FAILURES = 20  # of a run on the GPU: each costs a process
KEEP = 1024  # bytes of a result that are stored as they are, beside its checksum


@dataclass(frozen=True)
class MapSpec:
    """A tensor map over input ``array`` (or "out")."""

    array: int | str
    element_type: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    fill: int = 0
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """``body`` sees ``in0``, ``in1``... and ``out`` as ``u8*``, ``map0``... as tensor maps.

    ``compare``: "exact", or (dtype, relative tolerance, absolute tolerance).
    """

    name: str
    body: str
    inputs: tuple[np.ndarray, ...]
    out_bytes: int
    threads: int = 32
    smem: int = 0
    maps: tuple[MapSpec, ...] = ()
    compare: Any = "exact"
    helpers: str = ""
    initial: np.ndarray | None = field(default=None)
    cluster: int = 1  # CTAs, all of one cluster

    @property
    def source(self) -> str:
        args = [f"const __grid_constant__ TensorMap map{i}" for i in range(len(self.maps))]
        args += [f"const u8* in{i}" for i in range(len(self.inputs))] + ["u8* out"]
        head = f'{self.helpers}\nextern "C" __global__ void __launch_bounds__({self.threads}, 1)\n'
        if self.cluster > 1:
            head += f"__cluster_dims__({self.cluster}, 1, 1)\n"
        smem = "extern __shared__ __align__(1024) u8 smem[]; const int t = threadIdx.x; (void)t;"
        return f"{PREFIX}{head}k({', '.join(args)}) {{\n{smem}\n{self.body}\n}}\n"


def hashed(count: int, dtype: Any, salt: int = 1) -> np.ndarray:
    """Pseudo-random bits that depend on no library's generator."""
    dtype = np.dtype(dtype)
    words = -(-count * dtype.itemsize // 4)
    x = (np.arange(words, dtype=np.uint64) * 2654435761 + np.uint64(salt) * 40503) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return x.astype(np.uint32).view(np.uint8)[: count * dtype.itemsize].copy().view(dtype)


def all_cases() -> list[Case]:
    try:
        from . import (
            conformance_cluster,
            conformance_kernels,
            conformance_scalar,
            conformance_tensor,
            conformance_wgmma,
        )
    except ImportError:  # run as a script
        import conformance_cluster
        import conformance_kernels
        import conformance_scalar
        import conformance_tensor
        import conformance_wgmma
    groups = (conformance_scalar, conformance_wgmma, conformance_cluster, conformance_tensor)
    groups += (conformance_kernels,)
    return [case for group in groups for case in group.cases()]


Runner = Callable[[Case, list[np.ndarray], np.ndarray], np.ndarray]


def run_case(case: Case, runner: Runner) -> np.ndarray:
    out = np.zeros(case.out_bytes, np.uint8)
    if case.initial is not None:
        out[: case.initial.nbytes] = case.initial.view(np.uint8).ravel()
    return runner(case, [np.ascontiguousarray(x) for x in case.inputs], out)


def summary(out: np.ndarray) -> np.ndarray:
    """The head of a result and the checksum of all of it, as bytes."""
    crc = np.array([zlib.crc32(out.tobytes())], np.uint32).view(np.uint8)
    return np.concatenate([out[:KEEP], crc]) if out.size > KEEP else out


# ---- on a GPU
def gpu_runner() -> Runner:
    import cupy
    from cupy.cuda import nvrtc

    driver = ctypes.CDLL("libcuda.so.1")

    def encode(spec: MapSpec, pointer: int) -> np.ndarray:
        rank = len(spec.shape)
        raw = np.zeros(192, np.uint8)
        out = raw[-raw.ctypes.data % 64 :][:128]

        def words(values: Sequence[int], kind: Any) -> Any:
            return (kind * max(len(values), 1))(*values)

        status = driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(out.ctypes.data),
            spec.element_type,
            rank,
            ctypes.c_void_p(pointer),
            words(spec.shape, ctypes.c_uint64),
            words(spec.strides, ctypes.c_uint64),
            words(spec.box, ctypes.c_uint32),
            words(spec.steps or [1] * rank, ctypes.c_uint32),
            0,
            spec.swizzle,
            0,
            spec.fill,
        )
        if status:
            raise RuntimeError(f"cuTensorMapEncodeTiled: {status} for {spec}")
        return out.view(np.dtype([("bytes", np.void, 128)])).reshape(())

    def run(case: Case, inputs: list[np.ndarray], out: np.ndarray) -> np.ndarray:
        program = nvrtc.createProgram(case.source, f"{case.name}.cu", [], [])
        try:
            nvrtc.compileProgram(program, ["-arch=sm_90a", "-std=c++17", "-default-device"])
        except nvrtc.NVRTCError as e:
            raise RuntimeError(nvrtc.getProgramLog(program)) from e
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(nvrtc.getCUBIN(program))
            file.flush()
            kernel = cupy.RawModule(path=file.name).get_function("k")
        if case.smem:
            kernel.max_dynamic_shared_size_bytes = case.smem
        device = [cupy.asarray(x.view(np.uint8).ravel()) for x in inputs]
        result = cupy.asarray(out)
        where = {**dict(enumerate(device)), "out": result}
        maps = [encode(m, where[m.array].data.ptr) for m in case.maps]
        kernel((case.cluster,), (case.threads,), (*maps, *device, result), shared_mem=case.smem)
        cupy.cuda.runtime.deviceSynchronize()
        return cupy.asnumpy(result)

    return run


# ---- on the emulator
def emulator_runner(seed: int = 0) -> Runner:
    from .device import EmulatedDevice, device_array
    from .tensor_map import encode_tiled

    device = EmulatedDevice("sm_90a")

    def run(case: Case, inputs: list[np.ndarray], out: np.ndarray) -> np.ndarray:
        module = device.compile_source(case.source, ["-default-device"], f"{case.name}.cu")
        arrays = [device_array(x.nbytes, np.uint8, x.view(np.uint8).ravel()) for x in inputs]
        result = device_array(out.nbytes, np.uint8, out)
        where = {**dict(enumerate(arrays)), "out": result}
        maps = [
            encode_tiled(
                m.element_type,
                where[m.array].ctypes.data,
                m.shape,
                m.strides,
                m.box,
                m.steps or None,
                swizzle=m.swizzle,
                oob_fill=m.fill,
            )
            for m in case.maps
        ]
        pointers = [np.uint64(a.ctypes.data) for a in (*arrays, result)]
        device.run(
            module.program("k"),
            (case.cluster,),
            (case.threads,),
            case.smem,
            [*maps, *pointers],
            [*arrays, result],
            seed=seed,
        )
        return result

    return run


def child(folder: Path, names: Sequence[str]) -> None:
    """Runs cases one after the other, each result a file of its own."""
    cases = {case.name: case for case in all_cases()}
    runner = gpu_runner()
    for name in names:
        (folder / "running").write_text(name)
        np.save(folder / f"{name}.npy", summary(run_case(cases[name], runner)))


def run_apart(names: Sequence[str]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Results by name, and the cases that failed; after a failure a new process goes on."""
    left, failed = list(names), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        while left and len(failed) <= MAX_FAILURES:
            batch = left[:40]
            command = [sys.executable, __file__, "--child", scratch, *batch]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=30)
                error = done.stderr
            except subprocess.TimeoutExpired:
                error = "no answer for 30 s"
            finished = {p.stem for p in folder.glob("*.npy")}
            left = [name for name in left if name not in finished]
            if any(name not in finished for name in batch):
                running = folder / "running"
                bad = running.read_text() if running.exists() else left[0]
                failed.append(bad)
                sys.stderr.write(f"{bad}: {error.strip()[-400:]}\n")
                left = [name for name in left if name != bad]
        return {p.stem: np.load(p) for p in sorted(folder.glob("*.npy"))}, failed


def main() -> int:
    """Runs on the GPU what has no golden yet (``--all``: everything); writes all goldens."""
    everything = "--all" in sys.argv
    paths = [a for a in sys.argv[1:] if not a.startswith("-")]
    target = Path(paths[0]) if paths else GOLDENS
    target.parent.mkdir(parents=True, exist_ok=True)
    names = [case.name for case in all_cases()]
    stored: dict[str, np.ndarray] = {}
    if GOLDENS.exists() and not everything:
        with np.load(GOLDENS) as goldens:
            stored = {name: goldens[name] for name in goldens if name in names}
    found, failed = run_apart([name for name in names if name not in stored])
    np.savez_compressed(target, **dict(sorted({**stored, **found}.items())))
    size = target.stat().st_size
    sys.stdout.write(f"{len(found)} new cases, {len(stored)} kept, {size} bytes in {target}\n")
    sys.stdout.write(f"failed: {failed}\n")
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
