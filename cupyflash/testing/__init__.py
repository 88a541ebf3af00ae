"""The float64 oracle, the low-precision baseline and hypothesis strategies for property tests."""
