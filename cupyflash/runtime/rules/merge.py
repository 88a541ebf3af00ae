"""What ``merge_attn_states`` takes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from cupyflash.runtime.arrays import ArraySpec
from cupyflash.runtime.dtypes import E4M3, ScalarType, scalar_type

from .operands import check_operand, check_result
from .score import check_sink

__all__ = ["MERGE_ARRAYS", "check_merge"]

MERGE_ARRAYS = (
    *("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse"),
    *("output_lse", "s_aux", "output_scale"),
)


@lru_cache(maxsize=1024)
def check_merge(given: tuple[tuple[Any, ...] | None, ...], scale: float | None) -> ScalarType:
    """The type of the output, once all arrays fit each other.

    ``given`` are the specs of `MERGE_ARRAYS`, those absent None; ``scale`` is a number if it is not
    an array.
    """
    specs = {
        name: None if spec is None else ArraySpec(*spec)
        for name, spec in zip(MERGE_ARRAYS, given, strict=True)
    }
    output = specs["output"]
    shape = check_operand("output", output, "[tokens, Hq, D]")
    assert output is not None
    check_result("output", output, shape)
    for name in ("prefix_output", "suffix_output"):
        _check_shape(name, specs[name], shape, "of the output")
        check_operand(name, specs[name], "[tokens, Hq, D]")
    for name in ("prefix_lse", "suffix_lse", "output_lse"):
        spec = specs[name]
        if spec is None and name == "output_lse":
            continue
        _check_shape(name, spec, shape[1::-1], "[Hq, tokens]")
        assert spec is not None
        if spec.dtype != np.float32:
            raise TypeError(f"{name} is {spec.dtype}; it must be float32")
    output_lse = specs["output_lse"]
    if output_lse is not None and output_lse.overlaps:
        raise ValueError(f"output_lse has strides {output_lse.strides}: its elements share memory")
    check_sink(specs["s_aux"], shape[1])
    on_array = specs["output_scale"]
    return _output_type(output, _state_type(specs), scale if on_array is None else on_array)


def _check_shape(name: str, spec: ArraySpec | None, shape: tuple[int, ...], meaning: str) -> None:
    if spec is None:
        raise TypeError(f"{name} is None; it must be an array {list(shape)}")
    if spec.shape != shape:
        raise ValueError(f"{name} has shape {spec.shape}; it must be {list(shape)}, {meaning}")


def _state_type(specs: dict[str, ArraySpec | None]) -> ScalarType:
    first, second = specs["prefix_output"], specs["suffix_output"]
    assert first is not None
    assert second is not None
    kind = scalar_type(first.dtype)
    if kind is None or kind.is_fp8 or scalar_type(second.dtype) is not kind:
        raise TypeError(
            f"prefix_output is {first.dtype} and suffix_output {second.dtype}; use one of float32, "
            "float16 and bfloat16 for both"
        )
    return kind


def _output_type(
    output: ArraySpec, source: ScalarType, scale: float | ArraySpec | None
) -> ScalarType:
    kind = E4M3 if output.dtype == np.uint8 else scalar_type(output.dtype)
    if kind is not E4M3:
        if kind is not source:
            raise TypeError(
                f"output is {output.dtype}; for states in {source.name} use the same, or e4m3"
            )
        if scale is not None:
            raise ValueError(f"output_scale belongs to an e4m3 output, not {kind.name}; drop it")
        return kind
    if scale is None:
        raise ValueError("output is e4m3 and needs output_scale, a number or float32 [1]")
    if isinstance(scale, float):
        if scale <= 0:
            raise ValueError(f"output_scale={scale} must be positive")
    elif scale.dtype != np.float32 or scale.shape not in ((), (1,)):
        raise TypeError(f"output_scale is {scale.dtype} {scale.shape}; it must be float32 [1]")
    return E4M3
