"""The benchmark: cases, floors and roofs, timing, and peers where they are installed."""

from .case import BenchCase
from .cases import bench_cases
from .record import cells, columns, header, table, write_csv, write_json
from .roofs import H200, Roofs, floor_seconds
from .run import run_bench

__all__ = [
    "H200",
    "BenchCase",
    "Roofs",
    "bench_cases",
    "cells",
    "columns",
    "floor_seconds",
    "header",
    "run_bench",
    "table",
    "write_csv",
    "write_json",
]
