"""The NumPy path: the same semantics as the kernels, no GPU needed.

These functions take arguments that the public modules have validated; they check the values that
only a read can tell (lengths, table entries, slots) before they write anything.
"""

from .attention import attention
from .cache import write_cache
from .convert import round_to_fp8
from .merge import merge_states

__all__ = ["attention", "merge_states", "round_to_fp8", "write_cache"]
