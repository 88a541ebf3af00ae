"""Who imports whom, and what `import cupyflash` needs and costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupyflash"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each layer may import itself and those before it.
LAYERS = ("runtime", "cpu", "public", "testing", "top")
TOP = {"backends", "backend", "bench", "cli", "__main__", "distributed"}
WITH_CUPY = {
    "compile",
    "nvrtc",
    "launch",
    "device",
    "cupy_device",
    "cupy_import",
    "tensor_map",
    "workspace",
    "arrays",
}


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
    head = [*module.split("."), ""][1]
    if head in ("runtime", "cpu", "testing"):
        return head
    return "top" if head.partition("_")[0] in TOP or head in TOP else "public"


def imports_of(path):
    """(module, whether it runs when the file is imported) of every import in a file."""
    module, tree = module_of(path), ast.parse(path.read_text())
    at_import = {id(node) for node in ast.walk(tree)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            at_import -= {id(inner) for inner in ast.walk(node)}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in at_import
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            found = ".".join([*base, node.module or ""]).strip(".") if node.level else node.module
            yield found, id(node) in at_import


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_down(path):
    module = module_of(path)
    if module == "cupyflash":
        return
    own = LAYERS.index(layer_of(module))
    for imported, _ in imports_of(path):
        if imported.split(".")[0] == "cupyflash" and imported != "cupyflash":
            assert LAYERS.index(layer_of(imported)) <= own, f"{module} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_torch_is_never_imported_and_cupy_only_lazily(path):
    for imported, at_import in imports_of(path):
        assert imported.split(".")[0] != "torch"
        if imported.split(".")[0] in ("cupy", "cupyx", "cupy_backends"):
            assert not at_import, f"{module_of(path)} imports {imported} at once"
            if layer_of(module_of(path)) == "runtime":
                assert path.stem in WITH_CUPY
            assert layer_of(module_of(path)) != "cpu"


def test_only_env_reads_the_environment():
    for path in FILES:
        if path.name != "env.py":
            assert "CUPYFLASH_" not in "".join(
                ast.unparse(node) for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and "environ" in ast.unparse(node.func)
            )  # fmt: skip


def python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy_and_ml_dtypes_are_enough():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cupy", "cupyx", "torch", "hypothesis", "pytest"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import numpy as np
import cupyflash
q = np.ones((1, 1, 8), np.float32)
starts = np.array([0, 1], np.int32)
print(cupyflash.flash_attn_varlen_func(q, q, q, 1, starts, 1, starts).sum())
print(cupyflash.get_flash_attn_version(), cupyflash.workspace_size(cupyflash.AttentionBounds(
    batch_size=1, max_seqlen_q=1, max_seqlen_k=1, num_heads_q=1, num_heads_kv=1, headdim=8)))
known = {"numpy", "ml_dtypes", "cupyflash"} | set(sys.stdlib_module_names)
print({name.split(".")[0] for name in sys.modules} - known)
"""
    lines = python(code).splitlines()
    assert lines[:2] == ["8.0", "None 0"]
    assert {n for n in ast.literal_eval(lines[2]) if not n.startswith("_")} <= {"cython_runtime"}


def test_import_takes_at_most_300_ms():
    """Processor time, so that other work on the machine does not count."""
    code = """
import time
start = time.process_time()
import cupyflash
print(time.process_time() - start)
"""
    assert min(float(python(code)) for _ in range(5)) <= 0.3


def test_every_public_name_is_documented():
    import cupyflash

    for name in cupyflash.__all__:
        text = getattr(cupyflash, name).__doc__
        assert text, name
        assert "Parameters" in text or "Attributes" in text or "Returns" in text, name


def test_examples_in_docstrings_are_right():
    import doctest
    import importlib

    for module in ("attention", "kv_cache", "latent_cache", "merge", "mla", "explain"):
        found = doctest.testmod(importlib.import_module(f"cupyflash.{module}"))
        assert (found.failed, found.attempted > 0) == (0, True), module
