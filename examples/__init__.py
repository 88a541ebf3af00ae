"""Examples; run them from a checkout, for instance ``python -m examples.serve_smollm2``."""
