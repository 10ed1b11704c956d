"""What `prefold doctor` finds: the facts of a machine, what it can do, and what to change. No torch.

Two processes are started, which torch is imported into: the first measures alone, then both exchange data
as ranks do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Any

from prefold.benchmark.doctor_facts import (
    advise,
    dtype_reason,
    gather,
    measured_advice,
    steal_ticks,
)
from prefold.benchmark.side import Side
from prefold.hardware import cores_of_ranks

SECONDS, QUICK_SECONDS = 0.35, 0.05
"""How long one thing is measured."""

OF_SOFTWARE = ("kernel_problem", "kernel_threads", "torch_has_cuda", "sees_gpu")
"""Facts that a process with torch has to tell."""

WHAT = {"matmul": "FLOP/s", "attention": "FLOP/s", "decode row": "B/s", "memory": "B/s"}
"""What is measured alone, and its unit."""


def examine(quick: bool, note: Callable[[str], None]) -> dict[str, Any]:
    """A report as JSON can hold it.

    Args:
        note: told what comes next.

    Raises:
        SideError: a measuring process failed.
    """
    facts, before = gather(), steal_ticks()
    num_cores = len(facts.cores)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prefold-doctor-"))
        note("starting two processes")
        setup = {
            "rendezvous": f"file://{folder}/rendezvous",
            "seconds": QUICK_SECONDS if quick else SECONDS,
            "threads": num_cores,
            "compute_dtype": facts.compute_dtype,
        }
        sides = [
            stack.enter_context(
                closing(Side(f"rank {rank}", "prefold.benchmark.doctor_side", {"rank": rank, **setup}))
            )
            for rank in range(2)
        ]
        software, _ = (side.receive() for side in sides)
        facts = replace(facts, **{name: software.pop(name) for name in OF_SOFTWARE})
        rates = []
        for what, unit in WHAT.items():
            for threads in sorted({1, num_cores}):
                note(f"{what}, {threads} thread{'s' if threads > 1 else ''}")
                found = sides[0].ask({"what": what, "threads": threads})["results"]
                rates += [
                    {"what": what, "of": of, "threads": threads, "unit": unit, **result}
                    for of, result in found.items()
                ]
        note("exchange between two ranks")
        for side in sides:
            side.send({"what": "collectives"})
        collectives, _ = (side.receive()["results"] for side in sides)
    advice = [*advise(facts), *measured_advice(_stolen(before), max(rate["noise"] for rate in rates))]
    return {
        "machine": {
            **asdict(facts),
            "cores_of_ranks": {
                str(n): cores_of_ranks(facts.cores, n, num_cores // n) for n in (1, 2, 4, 8) if n <= num_cores
            },
        },
        "software": {**software, "compute_dtype_reason": dtype_reason(facts)},
        "rates": rates,
        "collectives": collectives,
        "advice": [each._asdict() for each in advice],
    }


def _stolen(before: tuple[int, int] | None) -> float | None:
    """Share of all processors' time since `before` that a hypervisor kept."""
    after = steal_ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])
