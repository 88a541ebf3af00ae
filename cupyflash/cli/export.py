"""``export``: one call with its kernels, for a host without Python to launch."""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cupyflash
from cupyflash.runtime.compile import compile_source, kernel_source
from cupyflash.runtime.variant import Variant

from .call_header import call_header
from .call_options import GPUS, add_call_options, call_arguments, gpu_of, laid_out
from .recorded_call import Launch, RecordedCall, Struct, TensorMap, record
from .terminal import CommandError

__all__ = ["add", "described_call", "run"]

_HEADER, _INDEX = "cupyflash_call.h", "call.json"


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "export", help="a call with its kernels, for hosts without Python"
    )  # fmt: skip
    add_call_options(parser)
    parser.add_argument("--blocks", type=int, metavar="N", help="of the paged cache; as few as do")
    parser.add_argument(
        "--gpu", choices=("here", *GPUS), help="the current one or an H200 if left out"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", required=True)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the cubins of a call's launches, ``call.json``, and a C header that launches them."""
    info = gpu_of(options.gpu)
    assert info is not None
    arguments = call_arguments(options)
    if options.blocks is not None:
        _resize(arguments, options.blocks)
    try:
        call = record(info, arguments)
    except TypeError as error:  # a type that cannot be
        raise CommandError(str(error)) from error
    if not call.launches:
        raise CommandError("nothing is launched for no requests")
    options.out.mkdir(parents=True, exist_ok=True)
    variants = list(dict.fromkeys(launch.plan.variant for launch in call.launches))
    with ThreadPoolExecutor() as pool:
        files = dict(pool.map(lambda variant: _write(variant, options.out), variants))
    title = _title(options, info.name)
    index = {"call": title, **described_call(call, files)}
    (options.out / _INDEX).write_text(json.dumps(index, indent=1) + "\n")
    (options.out / _HEADER).write_text(call_header(title, call, files))
    print(f"{len(call.launches)} launches of {len(files)} kernels are in {options.out}")
    return 0


def _resize(arguments: dict[str, Any], blocks: int) -> None:
    if "block_table" not in arguments:
        raise CommandError("--blocks is of a paged cache; give --page-size too")
    for name in "kv":
        array = arguments[name]
        arguments[name] = laid_out((blocks, *array.shape[1:]), array.dtype)


def _title(options: argparse.Namespace, gpu: str) -> str:
    layout = f"pages of {options.page_size}" if options.page_size else "packed keys"
    dim = str(options.head_dim) + (f"/{options.head_dim_v}" if options.head_dim_v else "")
    return (
        f"{options.batch} requests, at most {options.q_len} query tokens and {options.kv_len} keys "
        f"each, {layout}; {options.heads} heads on {options.kv_heads} of size {dim}, for {gpu}"
    )


def _write(variant: Variant, folder: Path) -> tuple[str, str]:
    cubin, _ = compile_source(*kernel_source(variant), variant)
    file = f"{variant.symbol}.cubin"
    (folder / file).write_bytes(cubin)
    return variant.symbol, file


def described_call(call: RecordedCall, files: dict[str, str]) -> dict[str, Any]:
    """A recorded call as plain values.

    Parameters
    ----------
    call : RecordedCall
    files : dict of str to str
        Where the kernel of a symbol lies.
    """
    return {
        "cupyflash": cupyflash.__version__,
        "gpu": call.info.name,
        "arrays": {
            name: {
                "type": array.dtype.name,
                "shape": list(array.shape),
                "nbytes": array.nbytes,
                "zero_at_first": name == "counters",
            }
            for name, array in call.arrays.items()
        },
        "launches": [_launch(launch, files) for launch in call.launches],
    }


def _launch(launch: Launch, files: dict[str, str]) -> dict[str, Any]:
    plan = launch.plan
    return {
        "symbol": plan.variant.symbol,
        "file": files[plan.variant.symbol],
        "grid": list(plan.grid),
        "block": list(plan.block),
        "dynamic_smem_bytes": plan.smem_bytes,
        # It may start while the kernel before it runs (an attribute of cuLaunchKernelEx).
        "programmatic": plan.programmatic,
        "params": [_param(param) for param in launch.params],
    }


def _param(param: Struct | TensorMap) -> dict[str, Any]:
    if isinstance(param, TensorMap):
        return {"tensor_map": {name: getattr(param, name) for name in TensorMap.__match_args__}}
    addresses = [
        {"offset": address.offset, "array": address.array, "plus": address.plus}
        for address in param.addresses
    ]
    return {
        "nbytes": len(param.image),
        "image": param.image.hex(),
        "addresses": addresses,
    }
