"""From a variant to a kernel: NVRTC, the cache on disk, and what is loaded already."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
import warnings
from pathlib import Path

from . import env
from .cubin_cache import cubin_cache, private_cache
from .device import Device, Kernel
from .errors import CaptureError, CompileError
from .kernel_source import kernel_source
from .nvrtc import compiler, load_nvrtc
from .variant import Variant

__all__ = [
    "compile_source",
    "compiled_file",
    "find_compiled",
    "kernel_source",
    "load_kernel",
    "native_arch",
]

_loading = threading.RLock()
_SERIALISED = "C7515"  # of ptxas, before 12.9, in the Hopper prefill


def native_arch(capability: tuple[int, int]) -> str:
    """``sm_90`` for capability 9.0; kernels that need its own features ask for ``sm_90a``."""
    return f"sm_{capability[0]}{capability[1]}"


def load_kernel(variant: Variant, device: Device, stream: int | None = None) -> Kernel:
    """The kernel of a variant, ready to launch; a dict hit after the first call.

    Raises
    ------
    CaptureError
        It is not loaded yet, and ``stream`` is being captured.
    CompileError
        It does not compile or load, or ``CUPYFLASH_NO_COMPILE`` is set and it is not in the cache.
    """
    kernel = device.kernels.get(variant)
    if kernel is not None:
        return kernel
    if device.is_capturing(stream):
        raise CaptureError(f"kernel {variant.symbol} would be compiled or loaded")
    with _loading:
        kernel = device.kernels.get(variant)
        if kernel is None:
            if env.debug():
                sys.stderr.write(f"cupyflash: {variant.symbol} for {variant.arch}\n")
            kernel = device.compile(variant)
            device.kernels[variant] = kernel
        return kernel


def compiled_file(variant: Variant) -> Path:
    """The compiled kernel on disk: a cubin, or PTX where NVRTC does not know the architecture.

    Raises
    ------
    CompileError
    """
    source, options, key, ending = _cached_as(variant)

    def make() -> bytes:
        if env.no_compile():
            raise CompileError(
                f"{variant.symbol} for {variant.arch} is not in {folder.folder}, and "
                "CUPYFLASH_NO_COMPILE is set; run `python -m cupyflash precompile` or unset it"
            )
        binary, log = compile_source(source, options, variant)
        if _SERIALISED in log:
            version = ".".join(map(str, compiler().version))
            warnings.warn(
                f"NVRTC {version} lets tensor core instructions wait for each other "
                f"({_SERIALISED}): right, but slow. Install nvidia-cuda-nvrtc 12.9 or later, and "
                "clear the cache",
                RuntimeWarning,
                stacklevel=2,
            )
        return binary

    folder = cubin_cache()
    try:
        return folder.find_or_make(key, ending, make)
    except OSError as error:  # full, or it became read-only
        reason = f"{folder.folder} cannot be written ({error})"
        return private_cache(reason).find_or_make(key, ending, make)


def find_compiled(variant: Variant) -> Path | None:
    """What `compiled_file` would return without compiling; None if it would compile."""
    _, _, key, ending = _cached_as(variant)
    return cubin_cache().find(key, ending)


def _cached_as(variant: Variant) -> tuple[str, tuple[str, ...], str, str]:
    """Source, options, and the key and ending of the file in the cache."""
    source, options = kernel_source(variant)
    options = _targeted(options)
    text = "\0".join((source, *options, *map(str, compiler().version)))
    key = f"{variant.symbol}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return source, options, key, ".cubin" if "=sm_" in options[0] else ".ptx"


def compile_source(source: str, options: tuple[str, ...], variant: Variant) -> tuple[bytes, str]:
    """Cubin (or PTX, if the architecture is a ``compute_`` one) and NVRTC's log.

    Raises
    ------
    CompileError
        With variant, command and log.
    """
    nvrtc = load_nvrtc()
    program = nvrtc.createProgram(source, variant.source, (), ())
    try:
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
        if "=sm_" in options[0]:
            # CuPy cuts the last byte off as if it ended a string; one too many does no harm.
            return bytes(nvrtc.getCUBIN(program)) + b"\0", log
        return bytes(nvrtc.getPTX(program)).rstrip(b"\0"), log
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(
            f"{error}\nvariant: {variant}\ncommand: nvrtc {' '.join(options)} {variant.source}\n"
            f"{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _targeted(options: tuple[str, ...]) -> tuple[str, ...]:
    """The options, with PTX of the nearest older architecture where NVRTC lacks the asked one."""
    found = re.fullmatch(r"--gpu-architecture=sm_(\d+)([af]?)", options[0])
    if found is None:
        raise CompileError(f"{options[0]}: say --gpu-architecture=sm_90 or the like")
    arch, exact = int(found[1]), bool(found[2])
    known = compiler().archs
    if arch in known:
        return options
    older = [a for a in known if a < arch]
    version = ".".join(map(str, compiler().version))
    if exact or not older:
        raise CompileError(
            f"NVRTC {version} cannot compile for sm_{found[1]}{found[2]}; it knows "
            f"{', '.join(map(str, known))}. Install another nvidia-cuda-nvrtc"
        )
    warnings.warn(
        f"NVRTC {version} does not know sm_{arch}; using PTX of compute_{older[-1]}, which the "
        "driver compiles. Install a newer nvidia-cuda-nvrtc for native code",
        RuntimeWarning,
        stacklevel=2,
    )
    return (f"--gpu-architecture=compute_{older[-1]}", *options[1:])
