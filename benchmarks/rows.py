"""Attention to selected rows of a paged cache (576/512): GFLOP/s of the kernel, torch, a matrix product.

python benchmarks/rows.py [heads] [history] [topk] [queries]
"""

from __future__ import annotations

import sys

import torch
from rates import best_seconds, float32_product

from prefold.attention.row_format import PlainFormat
from prefold.attention.selected import attend_selected
from prefold.kernels import library, rows
from prefold.workspace import Workspace

DIM, V_DIM, WIDTH = 576, 512, 704


def main(heads: int = 8, history: int = 32768, topk: int = 2048, num_queries: int = 8) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cache = torch.randn(history, WIDTH).bfloat16()[:, :DIM]
    q = torch.randn(num_queries, heads, DIM)
    slots = torch.stack([torch.randperm(history)[:topk].sort().values for _ in range(num_queries)])
    out, lse = torch.empty(num_queries, heads, V_DIM), torch.empty(num_queries, heads)
    workspace = Workspace()

    def kernel() -> None:
        rows.attend(q, slots, cache, DIM**-0.5, out, lse)

    def plain_torch() -> None:
        library_is_available, library.is_available = library.is_available, lambda: False
        attend_selected(
            q[:1], slots[:1], cache, PlainFormat(DIM, cache.dtype), DIM**-0.5, out[:1], lse[:1], workspace
        )
        library.is_available = library_is_available

    product, product_flops = float32_product()
    seconds = best_seconds({"kernel": kernel, "torch": plain_torch, "product": product})
    per_query = 2.0 * topk * heads * (DIM + V_DIM)
    rate = num_queries * topk * DIM * 2 / seconds["kernel"] / 1e9
    print(f"{heads} heads of {DIM}/{V_DIM}, {topk} of {history} rows of bfloat16")
    print(f"kernel   {per_query * num_queries / seconds['kernel'] / 1e9:7.1f} GFLOP/s, {rate:.2f} GB/s")
    print(f"torch    {per_query / seconds['torch'] / 1e9:7.1f} GFLOP/s")
    print(f"product  {product_flops / seconds['product'] / 1e9:7.1f} GFLOP/s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
