"""What a property test of attention needs: oracle, baseline, bound, and ragged poisoned batches.

Everything but `cupyflash.testing.strategies` works with NumPy and ml_dtypes alone; the strategies
need hypothesis (``pip install cupyflash[test]``). See docs/testing.md.
"""

from .baseline import attention_baseline, merge_baseline, varlen_baseline
from .case import Case, Inputs
from .compare import assert_within
from .expect import Expected, expect_attention, expect_merge
from .oracle import attention_oracle, merge_oracle, varlen_oracle, visible, write_oracle
from .patterns import PATTERNS
from .poison import LAYOUTS, POISON_INDEX, Placed, place
from .precision import weight_precision
from .rounding import DTYPES, round_to, saturate

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "PATTERNS",
    "POISON_INDEX",
    "Case",
    "Expected",
    "Inputs",
    "Placed",
    "assert_within",
    "attention_baseline",
    "attention_oracle",
    "expect_attention",
    "expect_merge",
    "merge_baseline",
    "merge_oracle",
    "place",
    "round_to",
    "saturate",
    "varlen_baseline",
    "varlen_oracle",
    "visible",
    "weight_precision",
    "write_oracle",
]
