"""Bugs planted in the library's kernels: patterns in their text, and a case that meets them.

Those of the Hopper kernels are here, others in planted_*.py.
"""

# ruff: noqa: E501  (a bug a line)

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import dataclass, replace
from typing import Any

from cupyflash.attention import flash_attn_varlen_func
from cupyflash.runtime.compile import kernel_source
from cupyflash.runtime.device import active_device, use_device
from cupyflash.runtime.workspace import scratch_of
from cupyflash.testing import Case
from cupyflash.testing.case import Inputs
from cupyflash.testing.expect import Expected

from .device import EmulatedDevice
from .loader import LoadedModule
from .report import EmulatorError
from .switches import SWITCH, switched

__all__ = ["PLANTED", "Planted"]


_answers: dict[Any, Expected] = {}


def check(inputs: Inputs, attention: Any, *pages: Any, **options: Any) -> None:
    """``inputs.check``; orders of warps and bugs that share a case share its right answer.

    ``pages``: what the inputs depend on besides their case.
    """
    device = active_device()
    key = (inputs.case, *pages, *options.items(), device.info.capability, device.info.num_sms)
    if key not in _answers:
        if len(_answers) == 16:
            _answers.clear()
        _answers[key] = inputs.expected(**inputs.precision(**options))
    out, lse = inputs.call(attention, **options)
    _answers[key].check(out, lse if options.get("return_softmax_lse", True) else None)


class _Changed(EmulatedDevice):
    """A device whose compiler changes one file's text.

    Bugs that have a switch share a text; ``chosen`` is which of them is there.
    """

    def __init__(self, bug: Planted) -> None:
        super().__init__("sm_90a", num_sms=bug.num_sms, max_idle=1_000_000)
        self.bug, self.changes = bug, 0
        self.on, self.switches = True, list[tuple[ctypes.c_uint32, int]]()

    def compile(self, variant: Any) -> Any:
        if variant.source != self.bug.source or not self.bug.pattern:
            return super().compile(variant)
        if variant not in self.kernels:
            text, options = kernel_source(variant)
            shared, numbers = _with_switches(text, variant.source)
            number = numbers.get(self.bug.change, 0) if self.bug.switch else 0
            if number:
                module = _module(shared, options, variant)
                switch = ctypes.c_uint32.from_address(module.addresses[SWITCH])
                self.switches.append((switch, number))
                self.changes += 1
            else:
                text, count = re.subn(*self.bug.change, text)
                self.changes += count
                module = self.compile_source(text, options, variant.source)
            self.kernels[variant] = module.program(variant.symbol)
            self.turn(self.on)
        return self.kernels[variant]

    def turn(self, on: bool) -> None:
        self.on = on
        for switch, number in self.switches:
            switch.value = number * on


@functools.cache
def _module(text: str, options: tuple[str, ...], variant: Any) -> LoadedModule:
    return EmulatedDevice("sm_90a").compile_source(text, options, variant.source)


_changes: dict[str, list[tuple[str, str]]] = {}  # of each file, in the order in which they came


@functools.cache
def _with_switches(text: str, source: str) -> tuple[str, dict[tuple[str, str], int]]:
    """The text with all bugs of the file that can have a switch, and their numbers."""
    shared, numbers = switched(text, _changes.get(source, []))
    return shared, {_changes[source][i - 1]: i for i in numbers}


@dataclass(frozen=True)
class Planted:
    """``pattern`` (a regular expression) is replaced; calls share what they leave behind, but differ
    in their numbers."""

    name: str
    source: str
    pattern: str
    replacement: str
    case: Case
    num_sms: int = 2
    calls: int = 1
    version: int = 3
    always: bool = True  # whether every order of warps gives it away, or most do
    switch: bool = True  # whether it may share a text: not where that makes much more code of it
    wants_lse: bool = True

    def __post_init__(self) -> None:
        if self.pattern and self.switch and self.change not in _changes.setdefault(self.source, []):
            _changes[self.source].append(self.change)

    @property
    def change(self) -> tuple[str, str]:
        return self.pattern, self.replacement

    def device(self) -> _Changed:
        return _Changed(self)

    def attend(self) -> None:
        options = {} if self.wants_lse else {"return_softmax_lse": False}
        check(self.case.make(), flash_attn_varlen_func, fa_version=self.version, **options)

    def caught(self, device: _Changed, seed: int, on: bool = True) -> str | None:
        """What gave the bug away, if anything did; the device keeps its compiled kernels.

        ``on``: whether the bug is there, if it has a switch.
        """
        device.seed = seed
        device.turn(on)
        try:
            with use_device(device):
                for call in range(self.calls):
                    replace(self, case=self.case.replace(seed=self.case.seed + call)).attend()
                with scratch_of(device, None) as scratch:
                    if scratch.counters is not None and scratch.counters.any():
                        raise AssertionError("memory is not back to 0")
        except EmulatorError as e:
            found = str(e)
        except AssertionError as e:
            found = f"wrong: {e}"
        else:
            found = None
        if self.pattern and not device.changes:
            raise LookupError(f"{self.name}: nothing in {self.source} matches {self.pattern}")
        return found


def _body(function: str) -> str:
    """The body of an instruction's wrapper."""
    return rf"(\bvoid {function}\([^)]*\)) \{{[^}}]*\}}"


PREFILL, DECODE = "attention_fwd_sm90.cu", "attention_decode_sm90.cu"
_TILES = Case(lengths=((140, 200),), num_heads_kv=1, group_size=2, head_dim=64, causal=True,
              q_type="bf16", kv_type="bf16")  # fmt: skip
_RING = _TILES.replace(lengths=((140, 900),))  # each stage of keys is filled more than once
_STEP = Case(lengths=((1, 400), (1, 90)), num_heads_kv=2, group_size=2, head_dim=64, page_size=16,
             causal=True, q_type="bf16", kv_type="bf16")  # fmt: skip
_MIXED = _STEP.replace(lengths=((1, 250), (20, 60), (1, 40), (17, 0)))
_LONG = _STEP.replace(lengths=((1, 2500),), num_heads_kv=1, group_size=8)
_SHARED = _LONG.replace(lengths=((1, 9000), (1, 90)))  # a merge of many


def _wait(barrier: str) -> str:
    return (
        rf"(mbarrier_wait\(shared_address\(&[\w.()]*{barrier}\[\w\.slot\]\), \w\.parity)( \^ 1)?\);"
    )


PLANTED = [
    Planted("prefill: nothing", PREFILL, "", "", _TILES),
    Planted("prefill: no wait for keys", PREFILL, _wait("key_full"), ";", _TILES),
    Planted("prefill: keys waited for in the wrong phase", PREFILL, _wait("key_full"), r"\1 ^ 1);", _TILES),
    Planted("prefill: no wait for values", PREFILL, _wait("value_full"), ";", _TILES),
    Planted("prefill: no wait for an empty stage of keys", PREFILL, _wait("key_empty"), ";", _RING),
    Planted("prefill: too few bytes expected", PREFILL, r"S::kKeyBytes\);", "S::kKeyBytes - 128);", _TILES),
    Planted("prefill: one key too many is seen", PREFILL, r"bits_before\(high - column", "bits_before(high + 1 - column", _TILES),
    Planted("prefill: stage given back before its products are done", PREFILL, r"mbarrier_init\(shared_address\(&r\.key_empty\[i\]\), kComputeWarps\)", "mbarrier_init(shared_address(&r.key_empty[i]), 1)", _RING),
    Planted("prefill: no proxy fence after rows are cleared", PREFILL, _body("fence_async_proxy"), r"\1 {}", _TILES),
    Planted("prefill: no wait for products", PREFILL, r"wgmma\.wait_group\.sync\.aligned %0;", "", _TILES),
    Planted("prefill: no fence before products", PREFILL, _body("wgmma_fence"), r"\1 {}", _TILES),
    Planted("prefill: counter not back to zero", PREFILL, r"atomicInc\((\w\.counter), [^;]*\)\)", r"atomicAdd(\1, 1))", _TILES, calls=2),
    Planted("prefill beside decoding: counter not back to zero", PREFILL, r"atomicInc\((\w\.counter), [^;]*\)\)", r"atomicAdd(\1, 1))", _MIXED, calls=2),
    Planted("decode: nothing", DECODE, "", "", _STEP),
    Planted("decode: no wait for a tile", DECODE, r"mbarrier_wait\(barrier \+ stage \* 8, parity\);", ";", _STEP),
    Planted("decode: half of the rows of a tile", DECODE, r"return count <= 8;", "return true;", _STEP.replace(group_size=16)),
    Planted("decode: warps of a row counted as rows", DECODE, r"max\(0, kWarpsShift - split\)", "kWarpsShift", _STEP),
    Planted("decode: a span more than there are, beside a prefill", DECODE, r"return min\(max\(left, 1\), d\.spans\);", "return d.spans + 1;", _MIXED),
    Planted("decode: wrong phase", DECODE, r"(mbarrier_wait\(barrier \+ stage \* 8, parity)\);", r"\1 ^ 1);", _STEP),
    Planted("decode: too few bytes expected", DECODE, r"panels \* 128\);", "panels * 128 - 128);", _STEP),
    Planted("decode: no fence after barriers are initialised", DECODE, _body("mbarrier_init_fence"), r"\1 {}", _STEP),
    Planted("decode: one key too many is seen", DECODE, r"at >= high\) score", "at > high) score", _STEP),
    Planted("decode: refilled before all lanes have read", DECODE, r"__syncwarp\(\);(\s*ask\(stage, )", r"\1", _LONG),
    Planted("decode: counter without order", DECODE, r"atom\.acq_rel\.gpu\.global\.inc", "atom.relaxed.gpu.global.inc", _STEP),
    Planted("decode: read of the counter without order", DECODE, r"ld\.acquire\.gpu\.global", "ld.relaxed.gpu.global", _SHARED, num_sms=40),
    Planted("decode: a merge of many without a bug", DECODE, "", "", _SHARED, num_sms=40),
    Planted("decode: counter not back to zero", DECODE, r"atom\.acq_rel\.gpu\.global\.inc\.u32 %0, \[%1\], %2;", "atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;", _STEP, calls=2),
]  # fmt: skip
