"""A recorded call as C: a header with its kernels, its arrays, and a function that launches it."""

from __future__ import annotations

from typing import Any

from .recorded_call import Launch, RecordedCall, Struct, TensorMap

__all__ = ["call_header"]

_HEAD = """\
/* {title}
 *
 * Right for every batch within these bounds: lengths, tables and contents may change between
 * launches. Arrays are contiguous, at addresses that are multiples of 256, as cuMemAlloc's are. */
#pragma once
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
"""

_ARRAY = """\
typedef struct { const char *name, *type, *shape; size_t nbytes; } cupyflash_array;
"""

_KERNEL = """\
typedef struct { const char *file, *symbol; int dynamic_smem; } cupyflash_kernel;
"""

_BODY = """\
/* Load all kernels from a folder; once a context. */
static inline CUresult cupyflash_load(const char *folder, CUfunction function[CUPYFLASH_KERNELS]) {
  for (int i = 0; i < CUPYFLASH_KERNELS; ++i) {
    const cupyflash_kernel *k = &cupyflash_kernels[i];
    char path[4096];
    CUmodule module;
    CUresult status = CUDA_ERROR_INVALID_VALUE;
    if (strlen(folder) + strlen(k->file) + 2 > sizeof path) return status;
    strcat(strcat(strcpy(path, folder), "/"), k->file);
    if ((status = cuModuleLoad(&module, path))) return status;
    if ((status = cuModuleGetFunction(&function[i], module, k->symbol))) return status;
    status = cuFuncSetAttribute(function[i], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                k->dynamic_smem);
    if (status) return status;
  }
  return CUDA_SUCCESS;
}

static inline void cupyflash_put(unsigned char *at, CUdeviceptr address) {
  uint64_t value = address;
  memcpy(at, &value, sizeof value);
}

/* Queue the call. Tensor maps are made each time: 2.5 us each. */
"""


def call_header(title: str, call: RecordedCall, files: dict[str, str]) -> str:
    """The text of the header.

    Parameters
    ----------
    title : str
        What was asked for.
    call : RecordedCall
    files : dict of str to str
        Where the kernel of a symbol lies.
    """
    symbols = list(files)
    parts = [
        _HEAD.format(title=title),
        _enum([*(f"CUPYFLASH_{name.upper()}" for name in call.arrays), "CUPYFLASH_ARRAYS"]),
        _ARRAY,
        "static const cupyflash_array cupyflash_arrays[] = {\n"
        + "".join(_array_line(name, array) for name, array in call.arrays.items())
        + "};\n",
        f"enum {{ CUPYFLASH_KERNELS = {len(symbols)} }};",
        _KERNEL,
        "static const cupyflash_kernel cupyflash_kernels[] = {\n"
        + "".join(f"  {_kernel(symbol, files[symbol], call)},\n" for symbol in symbols)
        + "};\n",
        _BODY
        + "static inline CUresult cupyflash_launch(const CUfunction function[CUPYFLASH_KERNELS],\n"
        "                                        const CUdeviceptr array[CUPYFLASH_ARRAYS],\n"
        "                                        CUstream stream) {\n"
        "  CUresult status = CUDA_SUCCESS;\n"
        + "".join(_launch(launch, symbols) for launch in call.launches)
        + "  return status;\n}",
    ]
    return "\n".join(parts) + "\n"


def _enum(names: list[str]) -> str:
    return "enum { " + ", ".join(names) + " };"


def _array_line(name: str, array: Any) -> str:
    shape = ", ".join(map(str, array.shape))
    return f'  {{"{name}", "{array.dtype.name}", "{shape}", {array.nbytes}}},\n'


def _kernel(symbol: str, file: str, call: RecordedCall) -> str:
    smem = max(x.plan.smem_bytes for x in call.launches if x.plan.variant.symbol == symbol)
    return f'{{"{file}", "{symbol}", {smem}}}'


def _launch(launch: Launch, symbols: list[str]) -> str:
    plan = launch.plan
    lines = [f"{{ /* {plan.variant.symbol} */"]
    for i, param in enumerate(launch.params):
        lines += _struct(i, param) if isinstance(param, Struct) else _map(i, param)
    pointers = ", ".join(f"&p{i}" for i in range(len(launch.params)))
    numbers = ", ".join(map(str, (*plan.grid, *plan.block, plan.smem_bytes)))
    index = symbols.index(plan.variant.symbol)
    lines += [
        f"  void *params[] = {{{pointers}}};",
        f"  status = cuLaunchKernel(function[{index}], {numbers}, stream, params, NULL);",
        "  if (status) return status;",
        "}",
    ]
    return "".join(f"  {line}\n" for line in lines)


def _struct(i: int, param: Struct) -> list[str]:
    rows = [param.image[start : start + 16] for start in range(0, len(param.image), 16)]
    return [
        f"  _Alignas(8) unsigned char p{i}[{len(param.image)}] = {{",
        *("    " + ", ".join(map(str, row)) + "," for row in rows),
        "  };",
        *(
            f"  cupyflash_put(p{i} + {at.offset}, {_address(at.array, at.plus)});"
            for at in param.addresses
        ),
    ]


def _map(i: int, param: TensorMap) -> list[str]:
    rank = len(param.shape)
    return [
        f"  CUtensorMap p{i};",
        "  {",
        _numbers("uint64_t", "shape", param.shape),
        _numbers("uint64_t", "strides", param.strides_bytes or (16,)),
        _numbers("uint32_t", "box", param.box),
        _numbers("uint32_t", "steps", (1,) * rank),
        f"    status = cuTensorMapEncodeTiled(&p{i}, (CUtensorMapDataType){param.element_type}, "
        f"{rank},",
        f"        (void *)(uintptr_t)({_address(param.array, param.plus)}), shape, strides, box, "
        "steps,",
        "        CU_TENSOR_MAP_INTERLEAVE_NONE, "
        f"(CUtensorMapSwizzle){param.swizzle}, (CUtensorMapL2promotion){param.l2_promotion},",
        f"        (CUtensorMapFloatOOBfill){param.oob_fill});",
        "    if (status) return status;",
        "  }",
    ]


def _numbers(kind: str, name: str, values: tuple[int, ...]) -> str:
    return f"    const {kind} {name}[] = {{{', '.join(map(str, values))}}};"


def _address(array: str, plus: int) -> str:
    name = f"array[CUPYFLASH_{array.upper()}]"
    return f"{name} + {plus}" if plus else name
