"""Attention for LLM inference on CuPy and NumPy arrays."""

__version__ = "0.1.0"
