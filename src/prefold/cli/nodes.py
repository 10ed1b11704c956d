"""Commands on several machines: who runs the engine, and who only starts ranks for it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from prefold.cli.options import EngineOptions
from prefold.config import ParallelConfig

TORCHRUN_VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


def join_torchrun(options: EngineOptions, environment: Mapping[str, str] = os.environ) -> EngineOptions:
    """The options, with those about nodes taken from torchrun if it has started this process.

    torchrun's own store listens on MASTER_PORT, so the engine listens on the port after it.

    Raises:
        ValueError: torchrun has not started one process per rank, or the options name nodes as well.
    """
    if any(name not in environment for name in TORCHRUN_VARIABLES):
        return options
    if options.nnodes != 1 or options.node_rank != 0 or options.master_addr is not None:
        raise ValueError(
            "--nnodes, --node-rank and --master-addr go before `-m prefold`, where torchrun reads them"
        )
    started, world = int(environment["WORLD_SIZE"]), ParallelConfig.of(options).world_size
    if started != world:
        raise ValueError(
            f"torchrun has started {started} processes, but the layout is DP {options.data_parallel_size} x "
            f"PP {options.pipeline_parallel_size} x PCP {options.prefill_context_parallel_size} x "
            f"TP {options.tensor_parallel_size} = {world} ranks: it takes one process per rank"
        )
    local_size, rank = int(environment["LOCAL_WORLD_SIZE"]), int(environment["RANK"])
    if started % local_size or rank != int(environment["GROUP_RANK"]) * local_size + int(
        environment["LOCAL_RANK"]
    ):
        raise ValueError(
            f"torchrun must start equally many processes on every node, not {local_size} of {started}"
        )
    return dataclasses.replace(
        options,
        nnodes=started // local_size,
        node_rank=rank // local_size,
        nproc_per_node=local_size,
        local_rank=rank % local_size,
        master_addr=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]) + 1,
    )


def runs_engine(options: EngineOptions) -> bool:
    """Whether this process is the one of the engine, which prints; the others start ranks for it."""
    return options.node_rank == 0 and options.local_rank == 0


def run_as_node(options: dict[str, Any]) -> int:
    """Start ranks for the engine elsewhere, until it ends; returns the exit code.

    Args:
        options: of `LLM`, as the process of the engine has them.
    """
    from prefold.engine.errors import EngineDeadError, EngineFailedElsewhere
    from prefold.engine.node import run_node

    torchrun, first_of_node = options["nproc_per_node"] > 1, options["local_rank"] == 0
    try:
        run_node(note=_silence if torchrun else _print_note, **options)
    except (ValueError, EngineDeadError) as error:
        # Under torchrun one terminal shows all processes: once is enough.
        if first_of_node and not (torchrun and isinstance(error, EngineFailedElsewhere)):
            raise
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _print_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _silence(text: str) -> None:
    pass
