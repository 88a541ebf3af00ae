"""cuDNN's FP8 attention graph, as a peer to time beside cupyflash."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from .inputs import BenchInputs
from .providers import NoKernelError

__all__ = ["cudnn_fp8"]

_SCALES = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")


def cudnn_fp8(inputs: BenchInputs, torch: Any) -> Callable[[], Any]:
    """A callable that runs the case once on torch's stream; scales are 1, the result is e4m3.

    Raises
    ------
    NoKernelError
        The frontend is not installed, or the lengths differ or are paged.
    """
    case = inputs.case
    if case.page_size is not None or len({*case.q_lens, *case.k_lens}) > 1:
        raise NoKernelError("equal dense lengths only")
    if importlib.util.find_spec("cudnn") is None:
        raise NoKernelError("nvidia-cudnn-frontend is not installed")
    cudnn = importlib.import_module("cudnn")
    shape = (inputs.batch, case.q_lens[0], case.num_heads_q, case.head_dim)

    def heads_first(array: Any) -> Any:
        found = torch.from_dlpack(array).view(torch.float8_e4m3fn)
        return found.view(*shape[:2], -1, case.head_dim).transpose(1, 2)

    arrays = {name: heads_first(getattr(inputs, name)) for name in "qkv"}
    out = torch.empty(*shape, device="cuda", dtype=torch.float8_e4m3fn).transpose(1, 2)
    graph, handle, ends = _graph(cudnn, inputs, arrays, out)
    one = torch.ones(1, device="cuda")
    given = [*arrays.values(), *([one] * len(_SCALES)), out, torch.zeros(1, device="cuda")]
    given.append(torch.zeros(1, device="cuda"))
    values = dict(zip(ends, given, strict=True))
    space = torch.empty(max(1, graph.get_workspace_size()), device="cuda", dtype=torch.uint8)

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        cudnn.set_stream(handle=handle, stream=stream)
        graph.execute(values, space, handle=handle)

    return call


def _graph(
    cudnn: Any, inputs: BenchInputs, arrays: dict[str, Any], out: Any
) -> tuple[Any, Any, list[Any]]:
    """The built graph, its handle, and its tensors: q, k, v, the scales, and three results."""
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle, one = cudnn.create_handle(), [1, 1, 1, 1]
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )
    operands = {
        name: graph.tensor(
            name=name, dim=list(array.shape), stride=list(array.stride()), data_type=e4m3
        )
        for name, array in arrays.items()
    }
    scales = {
        name: graph.tensor(name=name, dim=one, stride=one, data_type=fp32) for name in _SCALES
    }
    result, _, *largest = graph.sdpa_fp8(
        **operands,
        **scales,
        generate_stats=False,
        attn_scale=inputs.softmax_scale,
        use_causal_mask=inputs.case.causal,
        name="sdpa",
    )
    result.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
    result.set_data_type(e4m3)
    for each in largest:
        each.set_output(True).set_dim(one).set_stride(one).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, handle, [*operands.values(), *scales.values(), result, *largest]
