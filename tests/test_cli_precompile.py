"""Kernels as files: what is written, that its launch rules hold, and a C host that follows them."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from batches import arguments, check, random_batch
from conftest import Path as Where

import cupyflash
from cupyflash.cli import main
from cupyflash.cli.kernel_description import DESCRIPTIONS, described
from cupyflash.runtime.variants import every_variant
from cupyflash.testing import expect_merge, write_oracle

ROOT = Path(__file__).parents[1]
MERGE = "merge_attn_states_fp32_fp32"
HOPPER = "attention_decode_sm90_bf16_bf16_d64_r8"
BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    pytest.importorskip("cupy")
    folder = tmp_path_factory.mktemp("kernels")
    only = f"{MERGE},reshape_and_cache_bf16_bf16,attention_fwd_sm80_bf16_bf16_d64_m64,{HOPPER}"
    assert main(["precompile", "--arch", "sm_90a", "--only", only, "--out", str(folder)]) == 0
    return folder


def test_each_kernel_has_a_cubin_and_a_description(exported):
    index = json.loads((exported / "kernels.json").read_text())
    assert index["cupyflash"] == cupyflash.__version__
    assert HOPPER in index["kernels"]
    assert {name for name in index["kernels"] if not name.startswith(HOPPER)} == {
        MERGE, "reshape_and_cache_bf16_bf16", "attention_fwd_sm80_bf16_bf16_d64_m64",
        "attention_fwd_sm80_bf16_bf16_d64_m64_mod",
    }  # fmt: skip
    for symbol, name in index["kernels"].items():
        found = json.loads((exported / name).read_text())
        assert found["symbol"] == symbol
        cubin = (exported / found["file"]).read_bytes()
        assert cubin.startswith(b"\x7fELF")
        assert symbol.encode() in cubin


def test_ptx_names_its_entry(tmp_path):
    pytest.importorskip("cupy")
    options = ["--arch", "8.0", "--only", MERGE, "--ptx", "--out", str(tmp_path)]
    assert main(["precompile", *options]) == 0
    assert f".entry {MERGE}" in (tmp_path / f"{MERGE}.ptx").read_text()
    assert json.loads((tmp_path / f"{MERGE}.json").read_text())["file"] == f"{MERGE}.ptx"


def test_without_a_folder_the_cache_is_filled(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cupy")
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["precompile", "--arch", "sm_80", "--only", MERGE]) == 0
    assert "1 kernels are in" in capsys.readouterr().out
    monkeypatch.setenv("CUPYFLASH_NO_COMPILE", "1")
    assert main(["precompile", "--arch", "sm_80", "--only", MERGE]) == 0
    assert main(["precompile", "--arch", "sm_90", "--only", MERGE]) == 2
    assert "is not in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--arch", "sm_75"], "say sm_80"),
        (["--arch", "volta"], "say sm_80"),
        (["--arch", "sm_80", "--ptx"], "--ptx needs --out"),
        (["--arch", "sm_80", "--only", "nothing"], "no kernel has that in its name"),
    ],
)
def test_what_cannot_be_is_said(options, words, capsys):
    assert main(["precompile", *options]) == 2
    assert words in capsys.readouterr().err


def test_every_kernel_is_described():
    variants = every_variant("sm_90")
    assert set(DESCRIPTIONS) < {v.source for v in variants}
    for variant in variants:
        found = described(variant, "file")
        assert found["symbol"] == variant.symbol
        if variant.source in DESCRIPTIONS:
            assert found["params"]["nbytes"] == dict(variant.defines)["PARAMS_NBYTES"]


def rule(text, names):
    functions = {"min": min, "max": max, "ceil_div": lambda a, b: -(-a // b)}
    return eval(text.replace(" / ", " // "), functions, names)


def by_the_rules(plan, args):
    """The plan that a host without Python makes of the same params."""
    found = DESCRIPTIONS[plan.variant.source](plan.variant)
    names = found.layout.unpack(args.values[0])
    for name, text in found.where.items():
        names[name] = rule(text, names)
    grid, block = (tuple(rule(t, names) for t in texts) for texts in (found.grid, found.block))
    return replace(plan, grid=grid, block=block, smem_bytes=rule(found.smem_bytes, names))


@pytest.fixture
def ruled():
    """The emulator, launching by the rules; and what it launched."""
    launched = []
    path = Where("emulator-sm_90")
    with path.active() as device:
        launch = device.launch

        def by_rules(kernel, plan, args, stream):
            launched.append((plan, by_the_rules(plan, args)))
            launch(kernel, launched[-1][1], args, stream)

        device.launch = by_rules
        yield path, launched


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(37, 4, 64), (1, 3, 40), (5, 2, 7), (300, 1, 256)])
def test_merges_by_the_rules(ruled, shape, kind):
    dtype = {"fp32": np.float32, "bf16": BF16}[kind]
    rng = np.random.default_rng(0)
    states = [
        (rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape[1::-1], np.float32))
        for _ in range(2)
    ]
    out, lse = np.full(shape, np.nan, dtype), np.full(shape[1::-1], np.nan, np.float32)
    cupyflash.merge_attn_states(out, *states[0], *states[1], lse)
    expect_merge(*states, out_dtype=kind).check(out, lse)
    assert len(ruled[1]) == 1


@pytest.mark.parametrize("shape", [(21, 2, 64), (1, 5, 40), (7, 1, 256)])
@pytest.mark.parametrize("cache_type", [BF16, np.uint8])
def test_cache_writes_by_the_rules(ruled, shape, cache_type):
    rng = np.random.default_rng(0)
    key = rng.standard_normal(shape).astype(BF16)
    caches = [np.zeros((4, 16, *shape[1:]), cache_type) for _ in "kv"]
    before, slots = caches[0].copy(), rng.permutation(64)[: shape[0]]
    name = "auto" if cache_type == BF16 else "fp8"
    cupyflash.reshape_and_cache_flash(key, key, *caches, slots, name, 1.0, 1.0)
    right = write_oracle(key, before, slots)
    for cache in caches:
        assert cache.tobytes() == right.tobytes()
    assert len(ruled[1]) == 1


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("q_len", [40, 100])
def test_attention_by_the_rules(ruled, q_len, page_size):
    path, launched = ruled
    lengths = [q_len] * 3
    batch = random_batch(lengths, [120] * 3, 4, 2, dtype=BF16)
    check(path, arguments(path, *batch, lengths, [120] * 3, page_size, num_splits=1, fa_version=2))
    ((plan, ruled_plan),) = launched
    assert ruled_plan == replace(plan, workspace_bytes=0)


def test_attention_notes_are_the_plan():
    """Rows of a block and the chunk of an unsplit call, as the notes say them."""
    from cupyflash.runtime.attention_plan import make_attention_plans
    from cupyflash.runtime.device import DeviceInfo

    bounds = cupyflash.AttentionBounds(
        batch_size=3, max_seqlen_q=40, max_seqlen_k=99, num_heads_q=8, num_heads_kv=2, headdim=64,
        num_splits=1,
    )  # fmt: skip
    (plan,) = make_attention_plans(bounds.problem(), DeviceInfo("", 0, (9, 0), 132, 227 << 10))
    found = DESCRIPTIONS[plan.forward.variant.source](plan.forward.variant)
    assert found.fixed == {
        "row_block": plan.row_block, "chunk": plan.chunk, "skipped_rows": plan.skipped_rows,
    }  # fmt: skip
    assert plan.blocks_a_request == -(-40 * 4 // plan.row_block)
    assert found.smem_bytes == str(plan.forward.smem_bytes)


def compiled(folder, *command):
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")
EXAMPLE = str(ROOT / "examples" / "hosts" / "driver_api.c")


@needs_cc
def test_the_c_example_launches_as_the_library_plans(exported, tmp_path):
    """Built against a driver that merges on the CPU and prints the launch."""
    stub = ROOT / "tests" / "stub_cuda"
    includes = (f"-I{exported}", f"-I{stub}")
    library = tmp_path / "libcuda.so"
    compiled(
        tmp_path, "cc", *WARNINGS, "-shared", "-fPIC", *includes, str(stub / "libcuda.c"), "-o",
        str(library), "-lm",
    )  # fmt: skip
    program = tmp_path / "example"
    compiled(
        tmp_path, "cc", *WARNINGS, *includes, EXAMPLE, "-o", str(program), str(library), "-lm",
    )  # fmt: skip
    launch, verdict = compiled(
        tmp_path, str(program), str(exported / f"{MERGE}.cubin")
    ).splitlines()
    assert verdict == f"0 of {37 * 4 * 65} values are wrong"
    described = json.loads((exported / f"{MERGE}.json").read_text())
    names = {"tokens": 37, "heads": 4, "head_dim": 64, "vectorised": 1}
    for name, text in described["where"].items():
        names[name] = rule(text, names)
    texts = (*described["grid"], *described["block"], described["dynamic_smem_bytes"])
    assert launch == " ".join(str(rule(text, names)) for text in texts)
    failed = subprocess.run([program, "absent"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "file not found" in failed.stderr


@needs_cc
def test_the_c_example_compiles_with_cudas_own_header(exported, tmp_path):
    from importlib.util import find_spec

    spec = find_spec("nvidia")
    found = [
        header.parent
        for folder in (spec.submodule_search_locations if spec else ())
        for header in Path(folder).glob("*/include/cuda.h")
    ]
    if not found:
        pytest.skip("cuda.h is not installed")
    includes = (f"-I{exported}", "-isystem", str(found[0]))
    compiled(tmp_path, "cc", *WARNINGS, "-fsyntax-only", *includes, EXAMPLE)


@needs_cc
def test_the_struct_in_the_header_is_laid_out_as_described(exported, tmp_path):
    lines = ["#include <stddef.h>", '#include "cupyflash_kernels.h"']
    for name in json.loads((exported / "kernels.json").read_text())["kernels"].values():
        params = json.loads((exported / name).read_text()).get("params", {"fields": []})
        lines += [
            f'_Static_assert(offsetof({params["struct"]}, {f["name"]}) == {f["offset"]}, "");'
            for f in params["fields"]
        ]
    source = tmp_path / "offsets.c"
    source.write_text("\n".join(lines) + "\n")
    compiled(tmp_path, "cc", "-std=c11", "-fsyntax-only", f"-I{exported}", str(source))
    assert len(lines) > 50
