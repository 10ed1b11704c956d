"""What a step costs besides layers and head: planning it, telling the ranks, sampling, taking in what came.

    python benchmarks/host_overhead.py [--seqs 64] [--pcp 1] [--tp 1] [--dcp 1] [--context 1000]
        [--sample greedy|top-p|penalty|logprobs] [--cold-mb 64]

Median and least CPU time over steps that decode, in this process: one line per part, and where it runs.
The runner of a tiny model is the first rank; its layers and head are left out, and its collectives wait for
nobody. Ranks do their parts at the same time. Where layers and head would read weights, so many MB are read:
then nothing of Python is left in the caches. With 0 one sees what the same takes in a loop. Run it on an
idle machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from prefold import SamplingParams
from prefold.attention.context_parallel import ContextParallelAttention
from prefold.distributed.group import GROUP_NAMES, Group
from prefold.distributed.mesh import Mesh
from prefold.engine.args import EngineArgs
from prefold.engine.core import EngineCore
from prefold.engine.core_messages import CoreOutputs, CoreRequest
from prefold.engine.observer import EngineObserver
from prefold.engine.output_processor import OutputProcessor
from prefold.engine.scheduler import Scheduler
from prefold.sampling.sampler import Sampler
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.testing.checkpoints import make_checkpoint
from prefold.worker import model_runner
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.model_runner import ModelRunner
from prefold.worker.pcp_manager import InputBatch, PCPManager
from prefold.worker.request_states import RequestStates
from prefold.worker.step_clock import StepClock
from prefold.worker.step_sampler import StepSampler, WantedTokens

MODEL, VOCAB = "DeepseekV3ForCausalLM", 32_000

SAMPLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
    "penalty": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
}
"""What requests ask for."""

PARTS: list[tuple[Any, str, str]] = [
    (Scheduler, "schedule", "engine: schedule"),
    (Scheduler, "update_from_output", "engine: update"),
    (EngineObserver, "on_scheduled", "engine: observe"),
    (EngineObserver, "on_done", "engine: observe"),
    (EngineCore, "step", "engine: the rest of a step"),
    (OutputProcessor, "apply", "server: take the news in"),
    (ModelRunner, "execute", "rank: the rest of a step"),
    (RequestStates, "apply", "rank: request states"),
    (GlobalBatch, "build", "rank: global batch"),
    (PCPManager, "partition", "rank: partition"),
    (WantedTokens, "of", "rank: wanted tokens"),
    (model_runner, "plan_checksum", "rank: check plan"),
    (model_runner, "check_plan", "rank: check plan"),
    (InputBatch, "build", "rank: step plan"),
    (ContextParallelAttention, "begin_step", "rank: attention's plan"),
    (PCPManager, "exchange", "rank: exchange"),
    (StepSampler, "__call__", "rank: sample"),
    (Sampler, "__call__", "rank: choose tokens"),
    (StepClock, "stats", "rank: statistics"),
]
"""(owner, function, part): several functions may be one part."""


class Clock:
    """CPU seconds by part and step, without those of the parts within."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._within: list[float] = [0.0]

    def begin_step(self) -> None:
        self.steps.append(defaultdict(float))

    @contextmanager
    def time(self, part: str | None):
        """`part` None: of no interest."""
        self._within.append(0.0)
        started = time.thread_time()
        try:
            yield
        finally:
            seconds = time.thread_time() - started
            if self.steps and part is not None:
                self.steps[-1][part] += seconds - self._within[-1]
            self._within.pop()
            self._within[-1] += seconds

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time a function of a class or module from now on."""
        function = getattr(owner, name)  # of a class method: bound

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.time(part):
                return function(*args, **kwargs)

        setattr(owner, name, staticmethod(timed) if isinstance(vars(owner)[name], classmethod) else timed)


class Alone:
    """Collectives whose other ranks have sent the same, and do not let one wait."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.expand_as(out))

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x[0])

    def broadcast(self, x: torch.Tensor, src: int) -> None: ...

    def barrier(self) -> None: ...

    def gather_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype)

    def start_all_gather(self, x: torch.Tensor) -> Received:
        return Received([x] * self._size)

    def start_all_to_all(
        self, x: torch.Tensor, send_counts: Sequence[int], capacity: int, receive_counts: Sequence[int] | None
    ) -> Received:
        return Received(list(x.split(list(send_counts))))

    def send(self, x: torch.Tensor, dst: int) -> None: ...

    def recv(self, out: torch.Tensor, src: int) -> None: ...


class Received:
    """What has come."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        self._parts = parts

    def wait(self) -> list[torch.Tensor]:
        return self._parts

    def release(self) -> None: ...


class NoModel:
    """Stands for the layers and the head: reads so many bytes, and makes up the results."""

    def __init__(self, model: Any, clock: Clock, cold_bytes: int, num_tokens: int) -> None:
        self.config = model.config
        self._clock = clock
        self._weights = np.zeros(max(cold_bytes // 8, 1))
        self._hidden = torch.zeros(num_tokens, self.config.hidden_size, dtype=model.compute_dtype)
        self._logits = torch.rand(num_tokens, VOCAB)

    def read_weights(self, result: torch.Tensor, num_tokens: int) -> torch.Tensor:
        with self._clock.time(None):
            self._weights.sum()
            return result[:num_tokens]

    def __call__(self, input_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return self.read_weights(self._hidden, len(input_ids))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.read_weights(self._logits, len(hidden))


class FirstRank:
    """An executor: runs the first rank's part of each step in this process."""

    def __init__(self, runner: ModelRunner, clock: Clock) -> None:
        self._runner, self._clock = runner, clock
        self._step_decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self._decoder = msgspec.msgpack.Decoder(ModelRunnerOutput)
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[bytes] = []

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        with self._clock.time("engine: encode and decode messages"):
            self._pending.append(self._encoder.encode(step))

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        with self._clock.time("rank: decode and encode messages"):
            step = self._step_decoder.decode(self._pending.pop())
        output = self._runner.execute(step)
        assert output is not None
        with self._clock.time("rank: decode and encode messages"):
            body = self._encoder.encode(output)
        with self._clock.time("engine: encode and decode messages"):
            return 0, self._decoder.decode(body)

    def check_health(self) -> None: ...

    def wait(self, timeout_s: float) -> None: ...

    def shutdown(self) -> None: ...


def lonely_groups(mesh: Mesh) -> dict[str, Group]:
    """The first rank's."""
    groups = {}
    for name in GROUP_NAMES:
        ranks = mesh.group_of(name, 0)
        groups[name] = Group(name, ranks, 0, Alone(len(ranks)) if len(ranks) > 1 else None, "shm")
    return groups


def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """CPU seconds by part, of each step that decodes all sequences."""
    clock = Clock()
    max_model_len = args.context + args.steps + 2
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(MODEL, folder, num_hidden_layers=2, vocab_size=VOCAB, max_position_embeddings=100_000)
        config = EngineArgs(
            folder,
            prefill_context_parallel_size=args.pcp,
            tensor_parallel_size=args.tp,
            decode_context_parallel_size=args.dcp,
            max_model_len=max_model_len,
            max_num_seqs=args.seqs,
            num_blocks=args.seqs * -(-max_model_len // 16) + 16,
        ).resolve()
        runner = ModelRunner(config, lonely_groups(Mesh.of(config.parallel)))
    runner._model = model = NoModel(runner._model, clock, int(args.cold_mb * 2**20), 8192)  # type: ignore[assignment]
    runner._sampler._model = model  # type: ignore[assignment]
    core = EngineCore(config, FirstRank(runner, clock), EngineObserver(config))
    outputs = OutputProcessor(None)
    params = SamplingParams(max_tokens=args.steps, ignore_eos=True, **SAMPLES[args.sample])
    for i in range(args.seqs):
        prompt = [(i * 31 + k * k) % VOCAB for k in range(args.context)]
        sample_ids = outputs.add_request(str(i), None, prompt, params, 0.0)
        core.add_request(CoreRequest(str(i), sample_ids, prompt, params, 0.0))
    (scheduler,) = core.schedulers
    while any(request.is_prefill for request in scheduler.requests.values()):
        outputs.apply(core.step())
    for owner, name, part in PARTS:
        clock.watch(owner, name, part)
    while core.has_unfinished_requests and len(scheduler.running) == args.seqs:
        model.compute_logits(torch.empty(0))
        clock.begin_step()
        news = core.step()
        with clock.time("engine: encode and decode messages"):
            body = msgspec.msgpack.encode(news)
        with clock.time("server: decode the news"):
            news = msgspec.msgpack.Decoder(CoreOutputs).decode(body)
        outputs.apply(news)
    return clock.steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, default=64, help="sequences that decode")
    parser.add_argument("--pcp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dcp", type=int, default=1)
    parser.add_argument("--context", type=int, default=1000, help="tokens of every prompt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--sample", choices=SAMPLES, default="greedy")
    parser.add_argument("--cold-mb", type=float, default=64.0, help="what is read between two parts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = measure(args)
    for part in sorted(steps[0]):
        print_times(part, [step[part] for step in steps])
    for place in ("engine", "rank", "server"):
        sums = [sum(s for part, s in step.items() if part.startswith(place)) for step in steps]
        print_times(f"{place}: sum", sums)
    print_times("all", [sum(step.values()) for step in steps])


def print_times(name: str, seconds: list[float]) -> None:
    print(f"{name:40} {median(seconds) * 1e3:8.3f} ms {min(seconds) * 1e3:8.3f} ms")


if __name__ == "__main__":
    main()
