"""Causal attention of one prompt by the native kernel: GFLOP/s of useful work beside torch's, and errors.

A prompt is walked in tiles, as prefill does: a square on the diagonal, then a rectangle below it. So that
runs are short, only the last tokens' rows of a long prompt are computed; --whole computes all.

Rates are printed with their share of the matrix product of the same dtype. `flash` is torch's kernel for
CPUs, with values padded to the keys' width where it must be. Errors are those of results in the dtype of the
inputs against float64: the largest, and the root of the mean square.

python benchmarks/dense.py [--prompt 16384] [--tokens 1024] [--heads 2] [--whole] [192/128 128/128 ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rates import best_seconds, product

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.native_backend import NativeBackend
from prefold.attention.torch_backend import TorchBackend
from prefold.kernels import dense, library
from prefold.workspace import Workspace

TILE = 1024
ERROR_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """Heads are multiplied by what --heads says; `tokens`: at most so many."""

    qk_dim: int
    v_dim: int
    heads: int = 1
    kv_heads: int = 1
    tokens: int | None = None
    shares_heads: bool = False


SHAPES = {
    "192/128": Shape(192, 128),
    "128/128": Shape(128, 128),
    "64/64 of 4": Shape(64, 64, 4, 1),
    "absorbed": Shape(576, 512, 2, 1, None, True),
    "absorbed, 64 tokens": Shape(576, 512, 8, 1, 64, True),
}

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def attend(backend: AttentionBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last len(q) tokens of as many as there are keys. q [n, heads, dim], k, v [kv_heads, keys, dim]."""
    (state,) = backend.start([Queries(q, k.shape[0], v.shape[2])], k.shape[2] ** -0.5)
    before = k.shape[1] - len(q)
    for start in (*range(0, before, TILE), *range(before, k.shape[1], TILE)):
        end = min(start + TILE, before if start < before else k.shape[1])
        keys = backend.keys(k.shape[0], end - start, k.shape[2])
        keys[..., : k.shape[2]].copy_(k[:, start:end])
        if v.data_ptr() == k.data_ptr():  # values are a part of the keys
            values = keys[..., : v.shape[2]]
        else:
            values = backend.values(k.shape[0], end - start, v.shape[2]).copy_(v[:, start:end])
        first = start - before
        if first >= 0:
            backend.attend_(state, slice(first, first + end - start), keys, values, True)
            first += end - start
        backend.attend_(state, slice(max(first, 0), len(q)), keys, values, False)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
    backend.finish(state, out)
    return out


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As `attend`, by torch's kernel; what comes before and the tokens themselves are not merged."""
    before, v_dim = k.shape[1] - len(q), v.shape[2]
    queries, keys = q.transpose(0, 1)[None], k[None]
    values = torch.nn.functional.pad(v, (0, k.shape[2] - v_dim))[None]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if before:
        kernel(queries, keys[:, :, :before], values[:, :, :before], 0.0, False)
    out, _ = kernel(queries, keys[:, :, before:], values[:, :, before:], 0.0, True)
    return out[0, ..., :v_dim].transpose(0, 1)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As `attend`, of as many tokens as keys, in float64."""
    group = q.shape[1] // k.shape[0]
    keys, values = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("thd,hnd->htn", q.double(), keys) * k.shape[2] ** -0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("htn,hnv->thv", weights, values)


def inputs(shape: Shape, heads: int, prompt: int, tokens: int, dtype: torch.dtype) -> Inputs:
    """Random q, k, v."""
    kv_heads = shape.kv_heads * (1 if shape.shares_heads else heads)
    q = torch.randn(tokens, shape.heads * heads, shape.qk_dim).to(dtype)
    k = torch.randn(kv_heads, prompt, shape.qk_dim).to(dtype)
    return (
        q,
        k,
        k[..., : shape.v_dim] if shape.shares_heads else torch.randn(kv_heads, prompt, shape.v_dim).to(dtype),
    )


def contenders(dtype: torch.dtype) -> dict[str, Callable[..., torch.Tensor]]:
    """What attends to inputs of this dtype."""
    sets = (
        [None] if dtype == torch.float32 else [library.instruction_sets()[-1], *dense.instruction_sets()[-1:]]
    )
    found: dict[str, Callable[..., torch.Tensor]] = {}
    for one in dict.fromkeys(sets):
        backend = NativeBackend(Workspace(), dtype, one)
        found["native" if one is None else f"native, {one}"] = lambda *x, b=backend: attend(b, *x)
    if dtype == torch.float32:
        plain = TorchBackend(Workspace(), torch.device("cpu"))
        found["torch's path"] = lambda *x: attend(plain, *x)
    return {**found, "flash": flash}


def report(name: str, shape: Shape, dtype: torch.dtype, heads: int, prompt: int, tokens: int) -> None:
    """Print the rates and errors of one shape and dtype."""
    tokens = min(tokens, shape.tokens or tokens)
    x = inputs(shape, heads, prompt, tokens, dtype)
    functions = contenders(dtype)
    multiply, product_flops = product(dtype)
    tasks = {one: lambda f=f: f(*x) for one, f in functions.items()}
    seconds = best_seconds({**tasks, "product": multiply})
    pairs = tokens * (prompt - tokens) + tokens * (tokens + 1) // 2
    flops = 2.0 * x[0].shape[1] * (shape.qk_dim + shape.v_dim) * pairs
    reference = product_flops / seconds["product"]
    small = inputs(shape, 1, ERROR_TOKENS, ERROR_TOKENS, dtype)
    expected = exact(*small)
    print(f"{name}: {x[0].shape[1]} heads on {len(x[1])}, the last {tokens} of {prompt} tokens, {dtype}")
    for one, function in functions.items():
        rate = flops / seconds[one]
        error = (function(*small).double() - expected).abs()
        faster = seconds["flash"] / seconds[one]
        print(
            f"  {one:20} {rate / 1e9:6.1f} GFLOP/s {rate / reference:6.1%} {faster:5.2f} x flash,"
            f" error {error.max():.1e} {error.square().mean().sqrt():.2e}"
        )
    print(f"  {'product':20} {reference / 1e9:6.1f} GFLOP/s", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="compute all tokens of the prompt")
    args = parser.parse_args()
    for name in args.shapes:
        for dtype in (torch.float32, torch.bfloat16):
            tokens = args.prompt if args.whole else args.tokens
            report(name, SHAPES[name], dtype, args.heads, args.prompt, tokens)


if __name__ == "__main__":
    main()
