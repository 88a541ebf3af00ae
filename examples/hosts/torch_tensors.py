"""Attention on torch tensors: views of a fused projection, a stream of torch's, output in place."""

from __future__ import annotations

import torch

from cupyflash import flash_attn_varlen_func

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # NumPy knows no bfloat16 of torch
LENGTHS, HEADS, KV_HEADS, DIM = [40, 7, 90], 8, 2, 64


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    parts = (a.float().split(LENGTHS) for a in (q, k, v))
    found = []
    for q_i, k_i, v_i in zip(*parts, strict=True):
        heads = [a.transpose(0, 1) for a in (q_i, k_i, v_i)]
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                *(a[None] for a in heads), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(found)


def main() -> float:
    torch.manual_seed(0)
    total = sum(LENGTHS)
    fused = torch.randn(total, HEADS + 2 * KV_HEADS, DIM, dtype=DTYPE, device=DEVICE)
    q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)  # views with the strides of the whole
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    options = {}
    if DEVICE == "cuda":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        options["stream"] = stream.cuda_stream  # CuPy's current stream is another one
    longest = max(LENGTHS)
    given = flash_attn_varlen_func(
        q, k, v, longest, starts, longest, starts, causal=True, out=out, **options
    )
    assert given is out
    error = float((out.float() - reference(q, k, v)).abs().max())
    print(f"torch on {DEVICE}: out {tuple(out.shape)} {out.dtype}, error {error:.4f}")
    return error


if __name__ == "__main__":
    assert main() < 0.03
