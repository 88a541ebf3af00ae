"""Calls as files: recorded launches repeated over other arrays, and the C header that does it."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, expected, paged, random_batch, starts
from conftest import Path as Where

from cupyflash.cli import main
from cupyflash.cli.export import described_call
from cupyflash.cli.recorded_call import Struct, record
from cupyflash.fa_version import is_fa_version_supported
from cupyflash.runtime.compile import load_kernel
from cupyflash.runtime.device import active_device
from cupyflash.runtime.params import KernelArgs

ROOT = Path(__file__).parents[1]
BF16 = np.dtype(ml_dtypes.bfloat16)
SIZES = {"heads": 4, "kv_heads": 2, "dim": 64, "dtype": BF16}
LENGTHS = {
    "decode": ([1] * 5, [300, 70, 16, 200, 1]),
    "large batch": ([1] * 520, [20] * 520),
    "prompts": ([40, 70], [90, 70]),
    "mixed": ([1, 60, 1, 1], [100, 90, 16, 40]),
}


def repeat(device, call, arrays):
    """What a host without Python does: addresses put in, tensor maps made, kernels launched."""
    at = {name: array.ctypes.data for name, array in arrays.items()}
    for launch in call.launches:
        values = []
        for param in launch.params:
            if isinstance(param, Struct):
                image = bytearray(param.image)
                for place in param.addresses:
                    value = at[place.array] + place.plus
                    image[place.offset : place.offset + 8] = value.to_bytes(8, "little")
                values.append(bytes(image))
            else:
                values.append(
                    device.encode_tensor_map(
                        arrays[param.array], param.element_type, at[param.array] + param.plus,
                        param.shape, param.strides_bytes, param.box, param.swizzle,
                        param.l2_promotion, param.oob_fill,
                    )
                )  # fmt: skip
        kernel = load_kernel(launch.plan.variant, device)
        args = KernelArgs(tuple(values), tuple(arrays.values()))
        device.launch(kernel, launch.plan, args, None)


@pytest.fixture(params=["emulator-sm_80", "emulator-sm_90"])
def path(request):
    where = Where(request.param)
    with where.active():
        yield where


def bounded(path, q_lens, kv_lens, page_size, **options):
    """Arguments of the largest batch within the bounds of one: every request at its longest."""
    longest = max(kv_lens)
    largest = arguments(
        path, *random_batch(q_lens, [longest] * len(q_lens), **SIZES), q_lens,
        [longest] * len(q_lens), page_size, **options,
    )  # fmt: skip
    return {**largest, "return_softmax_lse": True}


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("sizes", LENGTHS)
def test_a_recorded_call_is_right_for_another_batch(path, sizes, page_size):
    q_lens, kv_lens = LENGTHS[sizes]
    options = {"causal": True, "num_splits": 3 if sizes == "decode" else 0}
    if sizes == "prompts":
        options |= {"softcap": 5.0, "window_size": (50, 0)}
        options["alibi_slopes"] = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
        options["s_aux"] = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    bounds = bounded(path, q_lens, kv_lens, page_size, **options)
    device = active_device()
    call = record(device.info, bounds)
    assert device.launches == 0
    other = arguments(
        path, *random_batch(q_lens, kv_lens, seed=3, **SIZES), q_lens, kv_lens, page_size,
        **options,
    )  # fmt: skip
    arrays = {}
    for name, array in call.arrays.items():
        arrays[name] = device.empty(array.shape, array.dtype, None)
        given = other.get(name)
        if name == "counters":
            arrays[name][...] = 0
        elif given is not None:  # fewer pages and tokens than the bounds have
            arrays[name][tuple(map(slice, given.shape))] = given
    repeat(device, call, arrays)
    assert not arrays.get("counters", np.zeros(1)).any()
    repeat(device, call, arrays)  # and again, with what the first left in the workspace
    right = expected(path, {**other, "max_seqlen_k": max(kv_lens)})
    right.check(arrays["out"], arrays["lse"])


CALL = [
    "--batch",
    "8",
    "--kv-len",
    "500",
    "--page-size",
    "16",
    "--lse",
    "--dtype",
    "fp16",
]  # as in C


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    pytest.importorskip("cupy")
    folder = tmp_path_factory.mktemp("call")
    command = ["export", *CALL, "--blocks", "300", "--gpu", "h200", "--out", str(folder)]
    assert main(command) == 0
    return folder


def test_files_of_an_exported_call(exported):
    found = json.loads((exported / "call.json").read_text())
    (launch,) = found["launches"]
    assert (exported / launch["file"]).read_bytes().startswith(b"\x7fELF")
    assert launch["symbol"].startswith("attention_decode_sm90_fp16")
    assert found["arrays"]["k"]["shape"] == [300, 16, 8, 128]
    assert found["arrays"]["counters"]["zero_at_first"]
    kinds = ["map" if "tensor_map" in param else "struct" for param in launch["params"]]
    assert kinds == ["struct", "struct", "map", "map"]
    assert launch["params"][2]["tensor_map"]["shape"][-1] == 300


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-len", "9", "--blocks", "4"], "--blocks is of a paged cache"),
        (["--kv-len", "9", "--batch", "0"], "nothing is launched"),
        (["--kv-len", "9", "--dtype", "fp32"], "NumPy arrays only"),
    ],
)
def test_what_cannot_be_exported_is_said(options, words, tmp_path, capsys):
    assert main(["export", "--gpu", "h200", *options, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def cuda_include():
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        for header in Path(folder).glob("*/include/cuda.h"):
            return header.parent
    return None


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
needs_cuda_h = pytest.mark.skipif(cuda_include() is None, reason="cuda.h is not installed")
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")


def compiled(*command, **options):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_cc
@needs_cuda_h
def test_c_puts_in_what_python_does(exported, tmp_path):
    """Linked with a driver that prints what it is passed, array ``i`` at address ``i * 2^32``."""
    program = tmp_path / "launch"
    sources = [str(ROOT / "tests" / "stub_cuda" / name) for name in ("launch.c", "print.c")]
    includes = (f"-I{exported}", "-isystem", str(cuda_include()))
    compiled("cc", *WARNINGS, *includes, *sources, "-o", str(program))
    found = json.loads((exported / "call.json").read_text())
    (launch,) = found["launches"]
    sizes = [param.get("nbytes", 128) for param in launch["params"]]
    printed = compiled(str(program), str(exported), env={"SIZES": " ".join(map(str, sizes))})
    names = list(found["arrays"])
    lines = printed.split("\n")
    assert lines[0] == f"module {exported}/{launch['file']}"
    assert lines[1] == f"function {launch['symbol']}"
    assert lines[2] == f"smem {launch['dynamic_smem_bytes']}"
    wanted = []
    for param in launch["params"]:
        if "tensor_map" in param:
            m = param["tensor_map"]
            numbers = (m["element_type"], len(m["shape"]), address(names, m["array"], m["plus"]))
            rest = (*m["shape"], *m["strides_bytes"], *m["box"], *[1] * len(m["shape"]))
            last = (0, m["swizzle"], m["l2_promotion"], m["oob_fill"])
            wanted.append("map " + " ".join(map(str, (*numbers, *rest, *last))))
    assert lines[3 : 3 + len(wanted)] == wanted
    numbers = (*launch["grid"], *launch["block"], launch["dynamic_smem_bytes"])
    assert lines[3 + len(wanted)] == "launch " + " ".join(map(str, numbers))
    for param, line in zip(launch["params"], lines[4 + len(wanted) :], strict=False):
        if "image" in param:
            image = bytearray(bytes.fromhex(param["image"]))
            for at in param["addresses"]:
                value = address(names, at["array"], at["plus"]).to_bytes(8, "little")
                image[at["offset"] : at["offset"] + 8] = value
            assert line == image.hex()


def address(names, name, plus):
    return (names.index(name) + 1 << 32) + plus


@needs_cc
@needs_cuda_h
def test_the_c_example_compiles(exported, tmp_path):
    example = str(ROOT / "examples" / "hosts" / "driver_attention.c")
    includes = (f"-I{exported}", "-isystem", str(cuda_include()))
    compiled("cc", *WARNINGS, *includes, "-fsyntax-only", example)


@pytest.mark.gpu
@needs_cc
@pytest.mark.parametrize("version", ["2", "3"])
def test_the_c_example_runs(version, tmp_path):
    if version == "3" and not is_fa_version_supported(3):
        pytest.skip("version 3 needs compute capability 9.0")
    folder = tmp_path / "call"
    assert main(["export", *CALL, "--fa-version", version, "--out", str(folder)]) == 0
    program = linked_with_the_driver("driver_attention.c", folder, tmp_path)
    assert compiled(program, str(folder)) == "0 values are wrong\n"


@pytest.mark.gpu
@needs_cc
def test_the_merge_example_runs(tmp_path):
    symbol = "merge_attn_states_fp32_fp32"
    options = ["--arch", "sm_80", "--only", symbol, "--ptx", "--out", str(tmp_path)]
    assert main(["precompile", *options]) == 0
    program = linked_with_the_driver("driver_api.c", tmp_path, tmp_path)
    assert compiled(program, str(tmp_path / f"{symbol}.ptx")).startswith("0 of ")


def linked_with_the_driver(example, include, folder):
    """The program of an example, with this machine's libcuda."""
    header = cuda_include() or Path("/usr/local/cuda/include")
    if not (header / "cuda.h").exists():
        pytest.skip("cuda.h is not installed")
    ctypes.CDLL("libcuda.so.1")
    (driver, *_) = re.findall(r"(/\S*libcuda\.so\S*)", Path("/proc/self/maps").read_text())
    program = folder / "program"
    compiled(
        "cc", "-std=c11", f"-I{include}", "-isystem", str(header),
        str(ROOT / "examples" / "hosts" / example), "-o", str(program), driver, "-lm",
    )  # fmt: skip
    return str(program)


def test_descriptions_are_plain_values():
    from cupyflash.cli.call_options import GPUS

    where = Where("emulator-sm_90")
    arrays, table = paged(random_batch([], [40, 9], **SIZES)[1:], [40, 9], 16)
    call = record(
        GPUS["a100"],
        {
            "q": np.zeros((2, 4, 64), BF16), "k": arrays[0], "v": arrays[1], "max_seqlen_q": 1,
            "cu_seqlens_q": starts([1, 1]), "max_seqlen_k": 40, "block_table": table,
            "seqused_k": where.array([40, 9], np.int32),
        },
    )  # fmt: skip
    files = {launch.plan.variant.symbol: "file" for launch in call.launches}
    described = json.loads(json.dumps(described_call(call, files)))
    assert described["gpu"] == "NVIDIA A100"
    assert described["arrays"]["q"] == {
        "type": "bfloat16", "shape": [2, 4, 64], "nbytes": 1024, "zero_at_first": False,
    }  # fmt: skip
