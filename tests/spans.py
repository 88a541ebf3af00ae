"""What block/spans.cuh should find, in plain Python; and a kernel that shows what it does find."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import numpy as np
from emulator import EmulatedDevice, device_array

from cupyflash.runtime.attention_plan import ATTENTION_PARAMS
from cupyflash.runtime.decode_tile import DECODE_PARAMS
from cupyflash.runtime.kernel_source import kernel_root, kernel_source
from cupyflash.runtime.spans import LARGEST_SCAN, PREFIX_EXTRA
from cupyflash.runtime.variant import Variant

KERNEL = """
#include "core/variant.cuh"
#include "block/spans.cuh"

// [spans + 1] begins; for every tile of the line its request, and the spans that have its segment.
struct Found { i32 *begins, *firsts, *counts, *requests, *table; };

extern "C" __global__ void __launch_bounds__(128) KERNEL_NAME(
    const __grid_constant__ AttentionParams p, const __grid_constant__ DecodeParams d,
    const __grid_constant__ Found found) {
  __shared__ i32 scratch[14], own[513];
  BatchTotals totals = {};
  const i32 *prefix = own;
  if (d.prefix) {
    prefix = d.prefix;
    const i32 *const more = prefix + p.batch;
    totals = {more[0], more[1], more[2], more[3], more[4] != 0, __int_as_float(more[5])};
  } else {
    totals = add_up<128>(p, d, 0, p.batch, totals, own, scratch);
  }
  const Spans spans(d, p.batch, prefix, totals);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i <= p.batch; i += 128) found.table[i] = prefix[i];
    if (threadIdx.x == 0) {
      i32 *const more = found.table + p.batch + 1;
      more[0] = totals.largest, more[1] = totals.first_tiles, more[2] = totals.first_segments;
      more[3] = totals.alike;
      reinterpret_cast<float *>(more)[4] = totals.pairs;
    }
    for (int i = threadIdx.x; i <= d.spans; i += 128) {
      const KeyRange tiles = spans.tiles_of(p, d, i);
      found.begins[i] = tiles.begin;
      if (i == d.spans) continue;
      const int next = spans.tiles_of(p, d, i + 1).begin;
      bool joined = next == tiles.end;
      // What a segment costs besides its keys is no span's, where segments end spans.
      if (!joined && next == tiles.end + d.segment_tiles) {
        const int r = next < totals.tiles ? spans.find(next) : 0;
        joined = next == totals.tiles || (next - prefix[r]) % request_work(p, d, r).tiles == 0;
      }
      if (!joined) found.begins[i] = -1;
    }
    for (int i = threadIdx.x; i < totals.tiles; i += 128) {
      const int request = spans.find(i);
      const RequestWork w = request_work(p, d, request);
      const int first = prefix[request] + (i - prefix[request]) / w.tiles * w.tiles;
      found.requests[i] = request;
      found.firsts[i] = found.counts[i] = 0;
      if (d.most_pieces != 1) {
        spans.owners(first, first + w.tiles, found.firsts[i], found.counts[i]);
      }
    }
  }
}
"""


@dataclass
class Rules:
    """A batch and how it is to be cut."""

    q_lens: list[int]
    kv_lens: list[int]
    window: tuple[int, int] = (-1, -1)
    group: int = 1
    units: int = 1
    spans: int = 8
    tile_shift: int = 4
    row_block: int = 8
    fewest_shift: int = 0
    align_most: int = 1 << 30
    most_pieces: int = 0
    most_rows: int = 1 << 30
    segment_tiles: int = 0
    tile_time: float = 0.0
    tile_floor: float = 0.0
    pair_time: float = 0.0
    counters: int = 0

    def segments(self):
        """(request, tiles) of every segment that has tiles, in the order of the line."""
        found = []
        for i, (q, kv) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            rows, (left, right) = q * self.group, self.window
            begin = max(0, kv - q - left) if left >= 0 else 0
            end = min(kv, kv + right) if right >= 0 else kv
            if not 0 < rows <= self.most_rows or end <= begin:
                continue
            tiles = ((end - 1) >> self.tile_shift) - (begin >> self.tile_shift) + 1
            tiles += self.segment_tiles
            found += [(i, tiles)] * (-(-rows // self.row_block) * self.units)
        return found


@dataclass
class Found:
    """What the kernel found: see ``KERNEL``."""

    begins: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    requests: np.ndarray
    table: np.ndarray


class SpanProbe:
    """Runs the kernel; a table of ``schedule.cu`` first if it is asked for.

    ``change`` (file, text, other text) is made in the sources first.
    """

    def __init__(self, folder, arch, change=None):
        shutil.copytree(kernel_root(), folder, dirs_exist_ok=True)
        (folder / "probe.cu").write_text(KERNEL)
        if change is not None:
            name, old, new = change
            text = (folder / name).read_text()
            if text.count(old) != 1:
                raise LookupError(f"{name} holds {old!r} {text.count(old)} times")
            (folder / name).write_text(text.replace(old, new))
        self.device = EmulatedDevice(arch)
        self.programs = {}
        size = (("PARAMS_NBYTES", ATTENTION_PARAMS.nbytes),)
        for source in ("probe.cu", "schedule.cu"):
            variant = Variant(source, source[:-3], arch, size)
            module = self.device.compile_source(*kernel_source(variant, folder), source)
            self.programs[source] = module.program(variant.symbol)

    def run(self, rules: Rules, with_table: bool = False) -> Found:
        batch = len(rules.q_lens)
        arrays, attention = self._batch(rules)
        table = device_array(batch + PREFIX_EXTRA, np.int32)
        arrays.append(table)
        use_table = with_table or batch > LARGEST_SCAN
        if use_table:
            self._schedule(rules, attention, arrays)
        total = sum(tiles for _, tiles in rules.segments())
        sizes = (rules.spans + 1, total, total, total, batch + PREFIX_EXTRA)
        out = [device_array(max(n, 1), np.int32) for n in sizes]
        pointers = np.array([tuple(a.ctypes.data for a in out)], "<5u8")
        decode = self._decode(rules, table.ctypes.data if use_table else 0)
        program = self.programs["probe.cu"]
        values = (attention, decode, pointers)
        self.device.run(program, (1,), (128,), 0, values, arrays + out)
        return Found(*(a[:n] for a, n in zip(out, sizes, strict=True)))

    def table(self, rules: Rules) -> list[int]:
        """Tiles before each request, and all of them, as ``schedule.cu`` counts them."""
        arrays, attention = self._batch(rules)
        table = device_array(len(rules.q_lens) + PREFIX_EXTRA, np.int32)
        self._schedule(rules, attention, [*arrays, table])
        return table[: len(rules.q_lens) + 1].tolist()

    def _batch(self, rules: Rules) -> tuple[list[np.ndarray], np.ndarray]:
        starts = np.cumsum([0, *rules.q_lens]).astype(np.int32)
        lengths = np.array(rules.kv_lens, np.int32)
        params = dict.fromkeys(ATTENTION_PARAMS.names, 0)
        params.update(
            cu_seqlens_q=starts.ctypes.data, seqused_k=lengths.ctypes.data,
            batch=len(rules.q_lens), group=rules.group, window_left=rules.window[0],
            window_right=rules.window[1],
        )  # fmt: skip
        return [starts, lengths], ATTENTION_PARAMS.pack(*params.values())

    def _schedule(self, rules: Rules, attention: np.ndarray, arrays: list[np.ndarray]) -> None:
        decode = self._decode(rules, arrays[-1].ctypes.data)
        program = self.programs["schedule.cu"]
        self.device.run(program, (1,), (1024,), 0, (attention, decode), arrays)

    def clear(self, arrivals: np.ndarray) -> None:
        """What ``schedule.cu`` does without a table."""
        rules = Rules([], [], counters=len(arrivals))
        decode = self._decode(rules, 0, arrivals.ctypes.data)
        attention = ATTENTION_PARAMS.pack(*[0] * len(ATTENTION_PARAMS.names))
        program = self.programs["schedule.cu"]
        self.device.run(program, (1,), (1024,), 0, (attention, decode), [arrivals])

    def _decode(self, rules: Rules, prefix: int, arrivals: int = 0) -> np.ndarray:
        values = dict.fromkeys(DECODE_PARAMS.names, 0)
        values.update({n: getattr(rules, n) for n in DECODE_PARAMS.names if hasattr(rules, n)})
        values.update(prefix=prefix, arrivals=arrivals)
        return DECODE_PARAMS.pack(*values.values())
