"""Causal attention of one prompt: GFLOP/s of the native kernel, of torch, and of matrix multiplication.

A prompt is walked in tiles, as prefill does: a square on the diagonal, then a rectangle below it. So that
runs are short, only the last tokens' rows of a long prompt are computed.

python benchmarks/dense.py [qk_dim] [v_dim] [heads] [kv_heads] [prompt] [tokens]
"""

from __future__ import annotations

import sys

import torch
from rates import best_seconds, float32_product

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.native_backend import NativeBackend
from prefold.attention.torch_backend import TorchBackend
from prefold.workspace import Workspace

TILE = 1024


def attend(backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The last len(q) tokens of as many as there are keys."""
    (state,) = backend.start([Queries(q, k.shape[0], v.shape[2])], k.shape[2] ** -0.5)
    before = k.shape[1] - len(q)
    for start in (*range(0, before, TILE), *range(before, k.shape[1], TILE)):
        end = min(start + TILE, before if start < before else k.shape[1])
        keys = backend.keys(k.shape[0], end - start, k.shape[2])
        keys[..., : k.shape[2]].copy_(k[:, start:end])
        values = backend.values(k.shape[0], end - start, v.shape[2]).copy_(v[:, start:end])
        first = start - before
        if first >= 0:
            backend.attend_(state, slice(first, first + end - start), keys, values, True)
            first += end - start
        backend.attend_(state, slice(max(first, 0), len(q)), keys, values, False)
    backend.finish(state, torch.empty(*q.shape[:2], v.shape[2]))


def main(
    qk_dim: int = 192,
    v_dim: int = 128,
    heads: int = 2,
    kv_heads: int = 0,
    prompt: int = 4096,
    tokens: int = 1024,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kv_heads = kv_heads or heads
    q = torch.randn(tokens, heads, qk_dim)
    k, v = torch.randn(kv_heads, prompt, qk_dim), torch.randn(kv_heads, prompt, v_dim)
    native, plain = NativeBackend(Workspace()), TorchBackend(Workspace(), torch.device("cpu"))
    product, product_flops = float32_product()
    tasks = {
        "native": lambda: attend(native, q, k, v),
        "torch": lambda: attend(plain, q, k, v),
        "product": product,
    }
    seconds = best_seconds(tasks)
    pairs = tokens * (prompt - tokens) + tokens * (tokens + 1) // 2
    flops = 2.0 * heads * (qk_dim + v_dim) * pairs
    print(f"{qk_dim}/{v_dim}, {heads} heads on {kv_heads}, the last {tokens} of {prompt} tokens")
    print(f"native   {flops / seconds['native'] / 1e9:7.1f} GFLOP/s")
    print(f"torch    {flops / seconds['torch'] / 1e9:7.1f} GFLOP/s")
    print(f"product  {product_flops / seconds['product'] / 1e9:7.1f} GFLOP/s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
