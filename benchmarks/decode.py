"""Decode attention to a paged cache: what a thread reads and computes, and what it could.

python benchmarks/decode.py [seconds]

Calls take turns with requests, so that 70 MB to 150 MB of cache pass before a row is read again. The
yardsticks are a sum over a large array, and torch's float32 matrix product.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rates import best_seconds, float32_product

from prefold.attention.backend import HeadRows
from prefold.attention.gqa import HeadForm
from prefold.attention.native_backend import NativeBackend
from prefold.kernels import fp8, rows
from prefold.kernels.fp8 import FP8Rows
from prefold.kernels.rows import BlockRows, RowHeads
from prefold.workspace import Workspace

BLOCK_SIZE, NUM_HEADS, CACHE_TOKENS = 16, 16, 1 << 17


@dataclass(frozen=True)
class Rows:
    """Rows of a model's cache. `fp8_rows`: how they are stored if not in bfloat16."""

    name: str
    dim: int
    v_dim: int
    width: int
    heads: RowHeads
    fp8_rows: FP8Rows | None = None

    def cache(self) -> torch.Tensor:
        elements = torch.randn(CACHE_TOKENS, self.width)
        if self.fp8_rows is None:
            return elements.bfloat16()
        stored = torch.empty(CACHE_TOKENS, -(-self.fp8_rows.num_bytes // 16) * 16, dtype=torch.uint8)
        fp8.encode(self.fp8_rows, elements, stored)
        return stored

    def num_bytes(self) -> int:
        return 2 * self.width if self.fp8_rows is None else self.fp8_rows.num_bytes


def all_rows() -> list[Rows]:
    grouped = HeadForm(HeadRows(4, 64, None), NativeBackend(Workspace())).row_heads
    return [
        Rows("latent 576/512 bfloat16", 576, 512, 576, RowHeads()),
        Rows("latent 576/512 FP8", 576, 512, 576, RowHeads(), FP8Rows(1, 512, 64)),
        Rows("4 KV heads of 64, bfloat16", 64, 64, 512, grouped),
        Rows("4 KV heads of 64, FP8", 64, 64, 512, grouped, FP8Rows(8, 64, 0)),
    ]


def decode_of(one: Rows, cache: torch.Tensor, batch: int, context: int) -> Callable[[], None]:
    """A call attends the next `batch` requests of `context` tokens each, whose blocks lie anywhere."""
    num_requests, num_blocks = CACHE_TOKENS // context, context // BLOCK_SIZE
    blocks = torch.randperm(CACHE_TOKENS // BLOCK_SIZE).view(num_requests, num_blocks)
    q = torch.randn(batch, NUM_HEADS, one.dim)
    out, lse = torch.empty(batch, NUM_HEADS, one.v_dim), torch.empty(batch, NUM_HEADS)
    turns = itertools.count(step=batch)

    def attend() -> None:
        tables = (torch.arange(batch) + next(turns)) % num_requests
        keys = BlockRows(blocks, tables, torch.full((batch,), context), BLOCK_SIZE)
        rows.attend(q, keys, cache, one.dim**-0.5, out, lse, one.heads, one.fp8_rows)

    return attend


def main(seconds: float = 20.0) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    product, product_flops = float32_product()
    parts = torch.randn(64 << 20).split(1 << 20)
    turns = itertools.count()
    tasks: dict[str, Callable[[], object]] = {
        "product": product,
        "read": lambda: parts[next(turns) % len(parts)].sum(),
    }
    counts = {}
    for one in all_rows():
        cache = one.cache()
        for batch, context in ((1, 1024), (1, 8192), (16, 1024), (16, 8192)):
            name = f"{one.name}, {batch} x {context}"
            tasks[name] = decode_of(one, cache, batch, context)
            num_keys = batch * context
            counts[name] = num_keys * one.num_bytes(), 2.0 * num_keys * NUM_HEADS * (one.dim + one.v_dim)
    best = best_seconds(tasks, seconds)
    product_rate, read_rate = product_flops / best["product"], 4 * (1 << 20) / best["read"]
    print(f"{NUM_HEADS} heads; read {read_rate / 1e9:.1f} GB/s, product {product_rate / 1e9:.0f} GFLOP/s")
    for name, (num_bytes, flops) in counts.items():
        byte_rate, rate = num_bytes / best[name], flops / best[name]
        print(
            f"{name:40} {best[name] * 1e3:8.3f} ms {byte_rate / 1e9:6.2f} GB/s ({byte_rate / read_rate:4.0%})"
            f" {rate / 1e9:6.1f} GFLOP/s ({rate / product_rate:4.0%})"
        )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
