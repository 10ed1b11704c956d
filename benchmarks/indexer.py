"""Index scores and top-k of sparse attention: GFLOP/s of the kernel, of torch, and of matrix multiplication.

python benchmarks/indexer.py [history] [queries]
"""

from __future__ import annotations

import sys

import torch
from rates import best_seconds, float32_product

from prefold.attention.selection import ranked
from prefold.kernels import indexer

HEADS, DIM, TOPK, TILE = 32, 128, 2048, 2048


def main(history: int = 65536, num_queries: int = 64) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, weights = torch.randn(num_queries, HEADS, DIM), torch.rand(num_queries, HEADS)
    cache = torch.randn(history, DIM + 576).bfloat16()
    keys = cache[:, 576:]
    limits = torch.full((num_queries,), history)
    candidates = torch.empty(2, num_queries, indexer.capacity(TOPK), dtype=torch.int32)

    def kernel() -> None:
        best = indexer.TopKeys(q, weights, limits, TOPK, candidates)
        for first in range(0, history, TILE):
            best.add(keys[first : first + TILE], first)
        best.finish()

    some = min(num_queries, 4)

    def plain_torch() -> None:
        best = torch.empty((some, 0), dtype=torch.int64)
        for first in range(0, history, TILE):
            k = keys[first : first + TILE].float()
            by_head = (q[:some].view(-1, DIM) @ k.t()).view(some, HEADS, -1).relu_()
            scores = torch.bmm(weights[:some, None], by_head)[:, 0]
            best = (
                torch.cat((best, ranked(scores, torch.arange(first, first + TILE))), dim=1)
                .topk(TOPK, dim=1, sorted=False)
                .values
            )

    product, product_flops = float32_product()
    seconds = best_seconds({"kernel": kernel, "torch": plain_torch, "product": product})
    per_query = 2.0 * history * HEADS * (DIM + 1)
    print(f"history {history}, {num_queries} queries, {HEADS} heads of {DIM}, top {TOPK}")
    print(f"kernel   {per_query * num_queries / seconds['kernel'] / 1e9:7.1f} GFLOP/s")
    print(f"torch    {per_query * some / seconds['torch'] / 1e9:7.1f} GFLOP/s")
    print(f"product  {product_flops / seconds['product'] / 1e9:7.1f} GFLOP/s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
