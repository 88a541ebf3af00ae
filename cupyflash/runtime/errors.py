"""What can go wrong between a plan and its launch."""

from __future__ import annotations

__all__ = ["CaptureError", "CompileError"]


class CompileError(RuntimeError):
    """A kernel could not be compiled or loaded; the text holds variant, command and log."""


class CaptureError(RuntimeError):
    """A stream is being captured, and the call would compile, load or allocate."""

    def __init__(
        self,
        what: str,
        remedy: str = (
            "call cupyflash.warmup(...) with the bounds of this call before the capture, and pass "
            "outputs as arguments"
        ),
    ) -> None:
        super().__init__(f"{what} while the stream is being captured; {remedy}")
