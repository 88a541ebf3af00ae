"""What is compiled: one kernel source, one symbol, one architecture, a closed set of macros."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel. Equal variants are the same binary, so the hash is a cache key.

    Attributes
    ----------
    source : str
        File in ``kernels_cu/``, with its ending: ``"merge_attn_states.cu"``.
    symbol : str
        The one ``extern "C"`` name in it, ``KERNEL_NAME``; readable in a profile.
    arch : str
        ``"sm_80"``, ``"sm_90a"``, ...
    defines : tuple of (str, int)
        Sorted macros for core/variant.cuh, ``PARAMS_NBYTES`` (size of the params struct) included.
    """

    source: str
    symbol: str
    arch: str
    defines: tuple[tuple[str, int], ...]
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Looked up on every launch; four fields and their tuples take longer than the launch table.
        fields = (self.source, self.symbol, self.arch, self.defines)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Variant], tuple[object, ...]]:
        return Variant, (self.source, self.symbol, self.arch, self.defines)
