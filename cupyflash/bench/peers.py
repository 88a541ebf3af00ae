"""Peers to time beside cupyflash, each used where it is installed.

The peers are torch extensions, so this file alone may load torch, and only when a peer is asked
for; arrays cross by DLPack without a copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import lzma
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .case import BenchCase
from .cudnn_fp8 import cudnn_fp8
from .flashinfer import flashinfer
from .inputs import BenchInputs
from .providers import NoKernelError
from .timing import Prepared, calls_a_replay

__all__ = ["PEERS", "fa3_forward", "peer_path", "prepare_peer"]

_libraries: dict[str, Any] = {}


def peer_path(folder: Path | None, name: str) -> Path:
    """The shared object of a peer: ``NAME.so``, or ``NAME.so.xz`` unpacked beside other scratch."""
    if folder is None:
        raise NoKernelError("no folder of peers was given")
    plain, packed = folder / f"{name}.so", folder / f"{name}.so.xz"
    if plain.exists():
        return plain
    if not packed.exists():
        raise NoKernelError(f"{plain} is not there")
    target = Path(tempfile.gettempdir()) / f"{name}.so"
    if not target.exists():
        target.write_bytes(lzma.decompress(packed.read_bytes()))
    return target


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise NoKernelError("torch is not installed")
    return importlib.import_module("torch")


def _operators(folder: Path | None, name: str, namespace: str) -> Any:
    torch = _torch()
    if name not in _libraries:
        torch.ops.load_library(str(peer_path(folder, name)))
        _libraries[name] = getattr(torch.ops, namespace)
    return _libraries[name]


def _tensor(array: Any, fp8: bool = False) -> Any:
    torch = _torch()
    if array is None:
        return None
    found = torch.from_dlpack(array)
    return found.view(torch.float8_e4m3fn) if fp8 else found


def prepare_peer(calls: Sequence[Callable[[], Any]]) -> Prepared:
    """A CUDA graph of torch calls, captured by torch so that its allocator keeps their memory."""
    torch = _torch()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    count = calls_a_replay(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            calls[i % len(calls)]()
    return Prepared(graph.replay, count, calls)


def fa3(inputs: BenchInputs, folder: Path | None) -> Callable[[], Any]:
    """vLLM's FlashAttention-3; its schedule is made once, outside the timed call."""
    case = inputs.case
    if case.kind not in ("attention", "mla"):
        raise NoKernelError("no such operation")
    if case.q_type != case.kv_type:
        raise NoKernelError("q, k and v of one type only")
    ops = _operators(folder, "fa3", "_vllm_fa3_C")
    torch = _torch()
    fp8 = case.q_type == "e4m3"
    scale = torch.ones(inputs.batch, case.num_heads_kv, device="cuda") if fp8 else None
    q, k, v, q_v = _tensor(inputs.q, fp8), _tensor(inputs.k, fp8), None, None
    if case.kind == "mla":
        q, q_v = q[..., 512:].contiguous(), q[..., :512].contiguous()
        k, v = k[..., 512:], k[..., :512]
    else:
        v = _tensor(inputs.v, fp8)
    paged = case.page_size is not None
    cu_q, table = _tensor(inputs.cu_seqlens_q), _tensor(inputs.block_table)
    cu_k = None if paged else _tensor(inputs.cu_seqlens_k)
    used = _tensor(inputs.seqused_k) if paged else None
    out, left, right = _tensor(inputs.out), *case.window
    longest = inputs.max_seqlen_q, inputs.max_seqlen_k
    schedule = ops.get_scheduler_metadata(
        inputs.batch,
        *longest,
        case.num_heads_q,
        case.num_heads_kv,
        q.shape[-1],
        v.shape[-1],
        q.dtype,
        _tensor(inputs.seqused_k),
        cu_q,
        cu_k,
        None,
        None,
        None,
        case.page_size,
        0,
        case.causal,
        left,
        right,
        case.softcap > 0,
        0,
        None,
        0,
    )

    def call() -> None:
        ops.fwd(
            q,
            k,
            v,
            None,
            None,
            q_v,
            out,
            cu_q,
            cu_k,
            None,
            None,
            used,
            *longest,
            table,
            None,
            None,
            None,
            None,
            None,
            scale,
            scale,
            scale,
            inputs.softmax_scale,
            case.causal,
            left,
            right,
            case.softcap,
            True,
            schedule,
            0,
            None,
            0,
            None,
            1,
            0,
            None,
        )

    return call


def fa3_forward(
    folder: Path | None, q: Any, k: Any, v: Any, starts: Sequence[Any], scales: Sequence[float],
    out: Any,
) -> None:  # fmt: skip
    """One call of FA3 on packed 8-bit arrays, with one descale each; `out` is written."""
    ops, torch = _operators(folder, "fa3", "_vllm_fa3_C"), _torch()
    starts = [_tensor(each) for each in starts]
    shape = len(starts[0]) - 1, k.shape[1]
    given = [torch.full(shape, scale, device="cuda") for scale in scales]
    found = _tensor(out)
    ops.fwd(
        *(_tensor(x, True) for x in (q, k, v)), *[None] * 3, found, *starts, *[None] * 3,
        len(q), len(k), *[None] * 6, *given, q.shape[2] ** -0.5, False, -1, -1, 0.0, True, None,
        0, None, 0, None, 1, 0, None,
    )  # fmt: skip


def flashmla(inputs: BenchInputs, folder: Path | None) -> Callable[[], Any]:
    """FlashMLA's dense decode."""
    case = inputs.case
    if case.kind != "mla":
        raise NoKernelError("latent attention only")
    ops = _operators(folder, "flashmla", "_flashmla_C")
    kv, used, table = (_tensor(a) for a in (inputs.k, inputs.seqused_k, inputs.block_table))
    heads = case.num_heads_q
    q = _tensor(inputs.q).view(inputs.batch, 1, heads, 576)
    out = _tensor(inputs.out).view(inputs.batch, 1, heads, 512)
    state: list[Any] = [None, None]

    def call() -> None:
        _, _, *state[:] = ops.dense_decode_fwd(
            q, kv, 512, used, table, inputs.softmax_scale, case.causal, *state, out
        )

    call()
    return call


def _sdpa(inputs: BenchInputs, backend: str) -> Callable[[], Any]:
    case = inputs.case
    if not _is_plain(case):
        raise NoKernelError("equal dense lengths in bf16 only")
    torch = _torch()
    attention = torch.nn.attention
    length = case.q_lens[0]

    def heads_first(array: Any) -> Any:
        return _tensor(array).view(inputs.batch, length, *array.shape[1:]).transpose(1, 2)

    q, k, v = heads_first(inputs.q), heads_first(inputs.k), heads_first(inputs.v)
    chosen = getattr(attention.SDPBackend, backend)

    def call() -> None:
        with attention.sdpa_kernel(chosen):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    return call


def _is_plain(case: BenchCase) -> bool:
    plain = case.kind == "attention" and case.page_size is None and case.q_type == "bf16"
    masks = case.window == (-1, -1) and not case.softcap
    return plain and masks and case.q_lens == case.k_lens and len(set(case.q_lens)) == 1


def cudnn(inputs: BenchInputs, folder: Path | None) -> Callable[[], Any]:
    """cuDNN through torch's SDPA; its FP8 graph through ``nvidia-cudnn-frontend``."""
    if inputs.case.q_type == "e4m3":
        return cudnn_fp8(inputs, _torch())
    return _sdpa(inputs, "CUDNN_ATTENTION")


def fa2(inputs: BenchInputs, folder: Path | None) -> Callable[[], Any]:
    """FlashAttention-2 through torch's SDPA."""
    return _sdpa(inputs, "FLASH_ATTENTION")


PEERS: dict[str, Callable[[BenchInputs, Path | None], Callable[[], Any]]] = {
    "fa3": fa3,
    "cudnn": cudnn,
    "fa2": fa2,
    "flashmla": flashmla,
    "flashinfer": lambda inputs, folder: flashinfer(inputs, _torch()),
}
