"""Tools for tests of Prefold and of programs that use it: tiny checkpoints, ranks, oracles."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# At once: a submodule of the same name would take the function's place when somebody imports it.
from prefold.testing.run_ranks import run_ranks

if TYPE_CHECKING:
    from prefold.testing.checkpoints import (
        make_benchmark_checkpoint,
        make_checkpoint,
        make_dsa_benchmark_checkpoint,
        make_gqa_benchmark_checkpoint,
        make_long_prompt_checkpoint,
        make_sparse_long_prompt_checkpoint,
    )
    from prefold.testing.dense import DenseContext
    from prefold.testing.quantized import dequantized_checkpoint, quantize_checkpoint
    from prefold.testing.threads import run_mesh_threads, run_threads

__all__ = [
    "DenseContext",
    "dequantized_checkpoint",
    "make_benchmark_checkpoint",
    "make_checkpoint",
    "make_dsa_benchmark_checkpoint",
    "make_gqa_benchmark_checkpoint",
    "make_long_prompt_checkpoint",
    "make_sparse_long_prompt_checkpoint",
    "quantize_checkpoint",
    "run_mesh_threads",
    "run_ranks",
    "run_threads",
]

_HOME = {
    "DenseContext": "prefold.testing.dense",
    "dequantized_checkpoint": "prefold.testing.quantized",
    "make_benchmark_checkpoint": "prefold.testing.checkpoints",
    "make_checkpoint": "prefold.testing.checkpoints",
    "make_dsa_benchmark_checkpoint": "prefold.testing.checkpoints",
    "make_gqa_benchmark_checkpoint": "prefold.testing.checkpoints",
    "make_long_prompt_checkpoint": "prefold.testing.checkpoints",
    "make_sparse_long_prompt_checkpoint": "prefold.testing.checkpoints",
    "quantize_checkpoint": "prefold.testing.quantized",
    "run_mesh_threads": "prefold.testing.threads",
    "run_threads": "prefold.testing.threads",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a rank that `run_ranks` starts should not wait for all of it."""
    if name not in _HOME:
        raise AttributeError(f"module 'prefold.testing' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
