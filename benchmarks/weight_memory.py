"""Weights that stay quantised against expanded ones: prefill and decode of a layer, by turns in one process.

    python benchmarks/weight_memory.py [--hidden 1024 --out 4096 --seconds 3]

For each format and number of rows, the time of x @ weight.T over as many matrices as exceed the caches: with
bfloat16 weights (what expanded ones are), and kept as they are stored. One thread; activations in float32.
Times are of this thread on a processor; the best of several counts.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, cast

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from rates import best_seconds

from prefold.kernels.quantized import QuantizedMatrix
from prefold.layers.bands import Band
from prefold.layers.linear import Env, multiply, prepared
from prefold.workspace import Workspace

KINDS = ("fp8", "nvfp4", "q8_0", "q4_k", "q6_k")
ROWS = (1, 4, 15, 128, 512, 1024, 2048)
WEIGHTS_BYTES = 256 << 20
"""Of the bfloat16 matrices together, for decode; prefill takes a few of them."""


def make(kind: str, rows: int, columns: int) -> QuantizedMatrix:
    """Any codes, with scales of about 0.01."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    dtype, shape = torch.bfloat16, (rows, columns)
    if kind == "fp8":
        scales = torch.rand(-(-rows // 128), -(-columns // 128)) / 100
        found = codes(rows, columns)
        found.masked_fill_((found & 127) == 127, 0)
        return QuantizedMatrix(kind, shape, dtype, found, scales, None, (128, 128))
    if kind == "nvfp4":
        scales = torch.rand(256) / 100
        return QuantizedMatrix(
            kind, shape, dtype, codes(rows, columns // 2), scales, codes(rows, columns // 16)
        )
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    blocks = codes(rows, columns // block, size)
    for at in (208,) if kind == "q6_k" else (0, 2) if kind == "q4_k" else (0,):
        blocks[:, :, at : at + 2] = (torch.rand(rows, columns // block, 1) / 100).half().view(torch.uint8)
    return QuantizedMatrix(kind, shape, dtype, blocks.flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--out", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3.0, help="per line")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    env = Env(cast(Any, None), Workspace(), torch.bfloat16, torch.float32, "cpu")
    many = max(2, WEIGHTS_BYTES // (2 * args.out * args.hidden))
    dense: list[Band] = [torch.randn(args.out, args.hidden).bfloat16() for _ in range(many)]
    print(
        f"x [rows, {args.hidden}] by [{args.out}, {args.hidden}]; ms per matrix; {many} matrices for few rows"
    )
    for kind in args.kinds:
        kept: list[Band] = [make(kind, args.out, args.hidden) for _ in range(many)]
        for rows in args.rows:
            x, out = torch.randn(rows, args.hidden), torch.empty(rows, args.out)
            count = many if rows < 64 else 2
            tasks = {
                "bfloat16": partial(multiply_all, x, dense[:count], out, env),
                "kept": partial(multiply_all, x, kept[:count], out, env),
            }
            best = {name: took / count * 1e3 for name, took in best_seconds(tasks, args.seconds).items()}
            print(
                f"{kind:6} {rows:5} rows  bfloat16 {best['bfloat16']:8.3f}  kept {best['kept']:8.3f}  "
                f"ratio {best['kept'] / best['bfloat16']:.2f}",
                flush=True,
            )


def multiply_all(x: torch.Tensor, matrices: list[Band], out: torch.Tensor, env: Env) -> None:
    """x by one after the other."""
    for matrix in matrices:
        multiply(x, prepared([matrix], len(x), "weight", env), out, env)


if __name__ == "__main__":
    main()
