"""A rank: sets up threads and groups, then runs steps.

In one process (used directly) or as a process of its own (`python -m prefold.worker.main`).
"""

from __future__ import annotations

import os

import torch

from prefold.config import EngineConfig
from prefold.distributed.group import Group, init_distributed, make_groups
from prefold.distributed.mesh import Mesh
from prefold.kernels import dense, library
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.worker.info import WorkerInfo
from prefold.worker.model_runner import ModelRunner


class Worker:
    """One rank of an engine.

    Args:
        config: resolved configuration.
        groups: this rank's groups.
        rank: its global rank.
    """

    def __init__(self, config: EngineConfig, groups: dict[str, Group], rank: int) -> None:
        self.config = config
        self.rank = rank
        torch.set_num_threads(config.runtime.threads_per_rank)
        self.runner = ModelRunner(config, groups)

    def info(self) -> WorkerInfo:
        cores = sorted(os.sched_getaffinity(0))
        runtime = self.config.runtime
        on_cpu = runtime.device == "cpu"
        return WorkerInfo(
            rank=self.rank,
            pid=os.getpid(),
            digest=self.config.digest(),
            cores=cores,
            weight_bytes=self.runner.weight_bytes,
            kernels=dense.describe(getattr(torch, runtime.compute_dtype)) if on_cpu else "torch",
            kernels_problem=library.problem() if on_cpu else "",
        )

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """See ModelRunner.execute."""
        return self.runner.execute(step)


def start_worker(config: EngineConfig, rank: int, rendezvous: str | None) -> Worker:
    """Meet the other ranks and load the model. All ranks call this; a world of 1 meets nobody.

    Args:
        config: resolved configuration, equal on all ranks.
        rank: global rank.
        rendezvous: where the ranks meet; see init_distributed.
    """
    parallel, runtime = config.parallel, config.runtime
    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device='cuda': torch {torch.__version__} sees no GPU here")
    mesh = Mesh.of(parallel)
    backend = "nccl" if runtime.device == "cuda" else "gloo"
    timeout_s = runtime.collective_timeout_s
    store = init_distributed(rank, mesh.world_size, rendezvous or "", backend, timeout_s)
    transport = "gloo" if runtime.device == "cuda" else runtime.transport
    groups = make_groups(mesh, rank, transport, timeout_s, store, nnodes=parallel.nnodes)
    if runtime.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return Worker(config, groups, rank)
