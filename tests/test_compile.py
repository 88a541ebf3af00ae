"""The text of a kernel, its compilation, and the memory of loaded kernels."""

from __future__ import annotations

import importlib
import pickle
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from elf_image import image_end

from cupyflash.runtime.compile import compile_source, compiled_file, kernel_source, load_kernel
from cupyflash.runtime.cubin_cache import CubinCache
from cupyflash.runtime.dtypes import BF16, E4M3, FP32
from cupyflash.runtime.errors import CaptureError, CompileError
from cupyflash.runtime.merge_plan import MERGE_PARAMS, merge_variant
from cupyflash.runtime.nvrtc import compiler
from cupyflash.runtime.params import ParamsLayout
from cupyflash.runtime.variant import Variant
from cupyflash.runtime.variants import all_variants
from cupyflash.runtime.write_plan import write_variant

VARIANT = merge_variant("sm_90", BF16, BF16)
SOURCES = importlib.import_module("cupyflash.runtime.kernel_source")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUPYFLASH_NO_COMPILE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A copy of the kernels that a test may edit, in place of the package's own."""
    root = tmp_path / "kernels"
    shutil.copytree(SOURCES.kernel_root(), root)
    monkeypatch.setattr(SOURCES, "kernel_root", lambda: root)
    return root


class Device:
    """Counts what is asked of it; loads nothing."""

    def __init__(self):
        self.kernels = {}
        self.capturing = False
        self.asked = 0
        self.compiled = []

    def is_capturing(self, stream):
        self.asked += 1
        return self.capturing

    def compile(self, variant):
        self.compiled.append(variant)
        return object()


def test_the_source_is_one_text_that_needs_no_files():
    source, options = kernel_source(VARIANT)
    assert "#include" not in source
    assert source.startswith("#define KERNEL_NAME merge_attn_states_bf16_bf16\n")
    assert options[0] == "--gpu-architecture=sm_90"
    assert source.count("struct MergeParams {") == 1


def test_an_error_names_file_and_line_of_what_was_included(kernels):
    state = kernels / "core/state.cuh"
    line = len(state.read_text().splitlines()) + 1
    state.write_text(state.read_text() + "this is not C++;\n")
    source, options = kernel_source(VARIANT)
    with pytest.raises(CompileError, match=rf"core/state\.cuh\({line}\)") as error:
        compile_source(source, options, VARIANT)
    assert "command: nvrtc --gpu-architecture=sm_90" in str(error.value)
    assert "symbol='merge_attn_states_bf16_bf16'" in str(error.value)


def test_lines_after_an_include_keep_their_numbers(kernels):
    main = kernels / VARIANT.source
    lines = main.read_text().splitlines()
    main.write_text("\n".join([*lines, "this is not C++;"]))
    with pytest.raises(CompileError, match=rf"merge_attn_states\.cu\({len(lines) + 1}\)"):
        compile_source(*kernel_source(VARIANT), VARIANT)


@pytest.mark.parametrize(
    "include", ["<cuda_fp16.h>", '"../../pyproject.toml"', '"core/absent.cuh"', "MACRO"]
)
def test_kernels_include_their_own_files_only(kernels, include):
    (kernels / "core/state.cuh").write_text(f"#pragma once\n#include {include}\n")
    with pytest.raises(CompileError, match=r"core/state\.cuh:2: #include"):
        kernel_source(VARIANT)


def test_params_of_another_size_do_not_compile():
    defines = tuple((n, v + 8 * (n == "PARAMS_NBYTES")) for n, v in VARIANT.defines)
    wrong = Variant(VARIANT.source, VARIANT.symbol, VARIANT.arch, defines)
    with pytest.raises(CompileError, match="differs from the host's layout"):
        compile_source(*kernel_source(wrong), wrong)


def test_a_compiler_that_makes_slow_kernels_is_told(cache, monkeypatch):
    said = "ptxas info : (C7515) Potential Performance Loss: wgmma.mma_async is serialized"
    module = importlib.import_module("cupyflash.runtime.compile")
    monkeypatch.setattr(module, "compile_source", lambda *_: (b"cubin", said))
    with pytest.warns(RuntimeWarning, match=r"right, but slow. Install nvidia-cuda-nvrtc 12\.9"):
        assert compiled_file(VARIANT).is_file()


@pytest.mark.parametrize("variant", [VARIANT, write_variant("sm_80", FP32, E4M3)])
def test_the_text_has_the_same_bits_the_way_cupy_compiles_it(variant):
    source, options = kernel_source(variant)
    cupys = ("-ftz=true", f"-arch={variant.arch}", "--device-as-default-execution-space")
    ours = compile_source(source, options, variant)[0]
    assert compile_source(source, (*options, *cupys), variant)[0] == ours


def test_lineinfo_adds_source_lines(monkeypatch):
    monkeypatch.setenv("CUPYFLASH_LINEINFO", "1")
    source, options = kernel_source(VARIANT)
    assert b"debug_line" in compile_source(source, options, VARIANT)[0]


def test_a_compiled_file_is_a_whole_image(cache):
    path = compiled_file(VARIANT)
    assert path.suffix == ".cubin"
    content = path.read_bytes()
    body = content[: content.rindex(b"\n// sha256 ")]
    assert image_end(content) <= len(body)


def test_a_second_call_compiles_nothing(cache, monkeypatch):
    first = compiled_file(VARIANT)
    monkeypatch.setenv("CUPYFLASH_NO_COMPILE", "1")
    assert compiled_file(VARIANT) == first


def test_an_edited_include_is_another_file(cache, kernels):
    first = compiled_file(VARIANT)
    state = kernels / "core/state.cuh"
    state.write_text(state.read_text().replace("0.f", "0.5f"))
    second = compiled_file(VARIANT)
    assert first != second
    assert first.read_bytes() != second.read_bytes()


def test_no_compile_refuses_what_is_not_there(cache, monkeypatch):
    monkeypatch.setenv("CUPYFLASH_NO_COMPILE", "1")
    with pytest.raises(CompileError, match=r"merge_attn_states_bf16_bf16.*CUPYFLASH_NO_COMPILE"):
        compiled_file(VARIANT)


def test_a_newer_architecture_gets_ptx_of_the_nearest(cache):
    newer = merge_variant("sm_990", BF16, BF16)
    nearest = max(compiler().archs)
    with pytest.warns(RuntimeWarning, match=f"PTX of compute_{nearest}"):
        path = compiled_file(newer)
    assert path.suffix == ".ptx"
    assert f".target sm_{nearest}" in path.read_text()


def test_an_exact_architecture_has_no_substitute(cache):
    with pytest.raises(CompileError, match="cannot compile for sm_990a; it knows 75"):
        compiled_file(merge_variant("sm_990a", BF16, BF16))


def test_a_kernel_is_loaded_once_by_many_threads():
    device = Device()
    barrier = threading.Barrier(8)

    def load(_):
        barrier.wait()
        return load_kernel(VARIANT, device)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(load, range(8)))) == 1
    assert device.compiled == [VARIANT]


def test_a_capture_refuses_to_load_but_not_to_use():
    device = Device()
    device.capturing = True
    with pytest.raises(CaptureError, match=r"merge_attn_states_bf16_bf16.*cupyflash\.warmup"):
        load_kernel(VARIANT, device)
    assert not device.compiled
    device.capturing = False
    kernel = load_kernel(VARIANT, device)
    device.capturing = True
    asked = device.asked
    assert load_kernel(VARIANT, device) is kernel
    assert device.asked == asked


def test_a_variant_keeps_its_hash_across_processes():
    again = pickle.loads(pickle.dumps(VARIANT))
    assert again == VARIANT
    assert hash(again) == hash(VARIANT)
    assert merge_variant("sm_90", BF16, E4M3) != again


def test_params_layout_is_that_of_cplusplus():
    layout = ParamsLayout(("a", "ptr"), ("b", "i32"), ("c", "f32"), ("d", "i64"), ("e", "i32"))
    assert layout.nbytes == 32
    packed = layout.pack(1, -2, 0.5, 2**40, 7)
    assert layout.unpack(packed) == {"a": 1, "b": -2, "c": 0.5, "d": 2**40, "e": 7}
    assert len(packed) == 32
    for cut in range(1, 5):
        values = (1, -2, 0.5, 2**40, 7)
        assert layout.pack_head(layout.pack_tail(*values[cut:]), *values[:cut]) == packed
    with pytest.raises(AssertionError, match="b is not aligned"):
        ParamsLayout(("a", "i32"), ("b", "i64"))


def test_the_layout_of_merge_has_a_name_for_each_value():
    values = list(range(len(MERGE_PARAMS.names)))
    assert list(MERGE_PARAMS.unpack(MERGE_PARAMS.pack(*values)).values()) == values
    assert len(MERGE_PARAMS.pack(*values)) == MERGE_PARAMS.nbytes


def test_files_and_clear(cache):
    path = compiled_file(VARIANT)
    kept = CubinCache(cache)
    assert kept.files() == [path]
    assert kept.clear() == 1
    assert not kept.files()


INCLUDES = {
    "core": {"core"},
    "arch": {"core", "arch"},
    "block": {"core", "block"},
    "mainloop": {"core", "arch", "block", "mainloop"},
}


def test_the_direction_of_includes():
    root = SOURCES.kernel_root()
    for path in root.glob("*/*.cuh"):
        folder = path.parent.name
        for line in path.read_text().splitlines():
            if found := re.match(r'#include "(?:(\w+)/)?\w+\.cuh"', line):
                assert (found[1] or folder) in INCLUDES[folder], f"{path.name}: {line}"


def test_macros_are_read_in_one_file_only():
    root = SOURCES.kernel_root()
    names = {name for variant in all_variants("sm_90") for name, _ in variant.defines}
    for path in [*root.glob("*.cu"), *root.glob("*/*.cuh")]:
        if path.name != "variant.cuh":
            text = re.sub(r"//.*", "", path.read_text())
            assert not set(re.findall(r"\b[A-Z][A-Z_]+\b", text)) & names, path.name
            assert not re.search(r"^\s*#\s*(if|ifdef|ifndef|elif)\b", text, re.M), path.name
