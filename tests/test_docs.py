"""What docs/ says is so: code runs, tables are those of the code, links and messages exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import docs_tables
import numpy as np
import pytest
from hypothesis import settings

import cupyflash
from cupyflash.cli import main
from cupyflash.testing import Case

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
GIVES_UP = ("CompileError", "CaptureError", "RuntimeError", "warnings.warn")


def names(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=names)
def test_links_of_a_page_exist(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_files_that_a_page_names_exist(page):
    text = page.read_text()
    for name in re.findall(r"`((?:examples|tests|docs|kernels_cu|cupyflash)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name


@cache
def sources():
    folders = ("cupyflash", "kernels_cu", "tests", "examples")
    return [f"/{path.relative_to(ROOT)}" for each in folders for path in (ROOT / each).rglob("*.*")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "kernels_cu/README.md"], ids=names)
def test_sources_that_a_page_names_by_the_end_of_their_path_exist(page):
    for name in re.findall(r"`([\w./]+\.(?:cuh|cu|py|cpp))`", page.read_text()):
        assert any(path.endswith(f"/{name}") for path in sources()), name


def code_of(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def given(page):
    """What the code of a page takes as there already."""
    if page.stem == "emulator":
        return given_emulator()
    if page.stem != "testing":
        return {}
    case = Case(lengths=((2, 30), (1, 5)), page_size=16, causal=True, q_type="fp16", kv_type="fp16")
    inputs = case.make()
    a = inputs.args
    out, lse = inputs.call(cupyflash.flash_attn_varlen_func)
    return {
        "my_attention": cupyflash.flash_attn_varlen_func, "out": out, "lse": lse,
        "q": a["q"], "k": a["k"], "v": a["v"], "max_q": a["max_seqlen_q"],
        "max_k": a["max_seqlen_k"], "cu_seqlens_q": a["cu_seqlens_q"],
        "lengths": a["seqused_k"], "table": a["block_table"],
    }  # fmt: skip


def given_emulator():
    pytest.importorskip("cupy")  # its NVRTC
    state, lse = np.ones((1, 1, 8), np.float32), np.zeros((1, 1), np.float32)
    every, array, it, may, touch = (np.zeros(64, np.float32) for _ in range(5))
    kernel = (
        "struct Params { float *out; }; struct alignas(64) Map { char bytes[128]; };"
        'extern "C" __global__ void my_kernel('
        "const __grid_constant__ Params p, const __grid_constant__ Map) { *p.out = TILE; }"
    )
    return {
        "merge_attn_states": lambda _: cupyflash.merge_attn_states(
            state.copy(), state, lse, state, lse
        ),
        "text": kernel, "grid": (1, 1, 1), "block": (1, 1, 1), "smem_bytes": 0,
        "params_struct": np.array([every.ctypes.data], np.uint64).tobytes(),
        "tensor_map": bytes(128), "every": every, "array": array, "it": it, "may": may,
        "touch": touch,
    }  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page)], ids=names)
def test_code_of_a_page_runs(page, capsys):
    space = {"__name__": page.stem, **given(page)}
    for block in code_of(page):
        exec(compile(block, page.name, "exec"), space)
    for name, value in space.items():
        if name.startswith("test_"):
            settings(max_examples=10)(value)()


@pytest.mark.parametrize("page", docs_tables.SECTIONS)
def test_tables_are_those_of_the_code(page):
    text = (ROOT / page).read_text()
    assert text == docs_tables.filled(page, text), "run python tests/docs_tables.py"


def test_every_command_is_described(capsys):
    text = (ROOT / "docs/command_line.md").read_text()
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    (\w+)\b", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) == 7
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(commands)
    for command in commands:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        (row,) = re.findall(rf"^\| `{command}` \|(.*)$", text, re.MULTILINE)
        assert set(re.findall(r"--[\w-]+", row)) <= known


@cache
def texts():
    """Every text in the package, placeholders as …"""
    found = []
    for path in ROOT.glob("cupyflash/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                found.append(template(node))
    return found


def template(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    if isinstance(node, ast.Constant):
        return re.sub(r"\s+", " ", node.value) if isinstance(node.value, str) else ""
    return "…"


def messages():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_a_message_of_troubleshooting_is_one_of_the_code(message):
    assert any(message in text for text in texts())


def raised():
    """Texts of the errors that no change of an argument cures."""
    for path in sorted(ROOT.glob("cupyflash/**/*.py")):
        if {"testing", "bench", "cli", "distributed"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in GIVES_UP:
                text = template(node.args[0])
                if text.strip(" …:"):
                    yield pytest.param(text, id=f"{path.stem}-{node.lineno}")


@pytest.mark.parametrize("text", list(raised()))
def test_every_error_that_no_argument_cures_has_its_cure(text):
    assert any(message in text for message in messages())


def test_the_changelog_names_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(cupyflash.__version__)}\b", text, re.MULTILINE)
