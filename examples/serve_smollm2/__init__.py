"""A small LLM server: continuous batching over a paged KV cache, attention by cupyflash."""

import os

# NumPy's BLAS waits for its threads by spinning: with one on every core, a busy machine is 17 times
# slower, while half of the cores lose little. It is read when NumPy is loaded, so it is set here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
