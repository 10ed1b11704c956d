"""The machine's matrix-multiplication rate, for as many processes and threads as the engines use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from statistics import median
from typing import Any, NamedTuple

from prefold.benchmark.side import Side

DTYPES = ("float32", "bfloat16")
SECONDS = 0.4
"""How long one measurement takes."""


class Shape(NamedTuple):
    """`processes` side by side with `threads` each."""

    processes: int
    threads: int


class MatmulRates:
    """Sides that multiply matrices, and what they measured.

    Args:
        shapes: (processes, threads) to measure; one process alone is added for each number of threads,
            so that the gain from going side by side can be told.
    """

    def __init__(self, shapes: Iterable[tuple[int, int]]) -> None:
        wanted = {Shape(*shape) for shape in shapes}
        self._shapes = sorted(wanted | {Shape(1, shape.threads) for shape in wanted})
        self._samples: dict[tuple[Shape, str], list[float]] = {}
        self._stack = ExitStack()
        self._sides: dict[int, list[Side]] = {}
        for processes, threads in self._shapes:
            sides = self._sides.setdefault(threads, [])
            while len(sides) < processes:
                setup = {"threads": threads, "index": len(sides)}
                side = Side(f"matrix multiplication {setup}", "prefold.benchmark.matmul_side", setup)
                sides.append(self._stack.enter_context(closing(side)))
        for sides in self._sides.values():
            for side in sides:
                side.receive()

    def measure(self, keep: bool = True) -> None:
        """Measure every shape in every dtype once; `keep` False is for warming up."""
        for shape in self._shapes:
            for dtype in DTYPES:
                sides = self._sides[shape.threads][: shape.processes]
                for side in sides:
                    side.send({"dtype": dtype, "seconds": SECONDS})
                total = sum(side.receive()["flops_per_s"] for side in sides)
                if keep:
                    self._samples.setdefault((shape, dtype), []).append(total)

    def median(self, processes: int, threads: int, dtype: str) -> float:
        """FLOP/s of all processes together."""
        return median(self._samples[Shape(processes, threads), dtype])

    def report(self) -> list[dict[str, Any]]:
        return [
            {
                "processes": shape.processes,
                "threads": shape.threads,
                "dtype": dtype,
                "flops_per_s": median(samples),
                "gain_over_one_process": median(samples) / self.median(1, shape.threads, dtype),
            }
            for (shape, dtype), samples in self._samples.items()
        ]

    def close(self) -> None:
        self._stack.close()
