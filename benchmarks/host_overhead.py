"""What a step costs besides the forward: planning it, telling the ranks, batching, and taking in what came.

    python benchmarks/host_overhead.py [--seqs 256] [--pcp 8] [--dcp 1] [--context 2000]

Median and least CPU time over decode steps in this process, with no rank running: one line per part, and
where it runs. The parts of the ranks run on all ranks at the same time. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import msgspec
import torch

from prefold.attention.context_ways import ContextWays
from prefold.config import (
    CacheConfig,
    EngineConfig,
    MLAConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
)
from prefold.distributed.pcp_layout import partition
from prefold.engine.core import EngineCore
from prefold.engine.core_messages import CoreOutputs, CoreRequest
from prefold.engine.observer import EngineObserver
from prefold.engine.output_processor import OutputProcessor
from prefold.kv_ownership import KVOwnership
from prefold.request import SamplingParams
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats
from prefold.testing.model_config import mla_model_config
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.pcp_manager import InputBatch
from prefold.worker.request_states import RequestStates
from prefold.worker.step_plan import RankPlace

MODEL = mla_model_config(
    vocab_size=100_000,
    num_heads=16,
    mla=MLAConfig(None, 512, 128, 64, 128),
    max_position_embeddings=100_000,
)


class Clock:
    """Seconds by part, one entry per step."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.seconds[part].append(time.thread_time() - started)

    def run(self, part: str, function: Callable, *args: object):
        with self.time(part):
            return function(*args)


class Rank:
    """The first rank's part of a step, without its forward."""

    def __init__(self, config: EngineConfig, clock: Clock) -> None:
        parallel, cache = config.parallel, config.cache
        self._clock = clock
        self._ownership = KVOwnership(
            cache.block_size, parallel.decode_context_parallel_size, parallel.cp_kv_cache_interleave_size
        )
        pcp = parallel.prefill_context_parallel_size
        self._place = RankPlace(0, pcp, 0, self._ownership)
        limits = config.scheduler
        self._states = RequestStates(
            limits.max_num_seqs, limits.max_model_len, self._ownership.virtual_block_size
        )
        self._ways = ContextWays.of(config)
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self._min_split_tokens = config.runtime.min_split_tokens

    def run(self, message: bytes) -> None:
        clock, states, place = self._clock, self._states, self._place
        step = clock.run("rank: decode the step", self._decoder.decode, message)
        clock.run("rank: request states", states.apply, step)
        batch = clock.run("rank: global batch", GlobalBatch.build, states, step, self._ownership, place.dcp)
        with clock.time("rank: partition"):
            parts = partition(
                batch.num_computed,
                batch.num_scheduled,
                batch.is_prefill,
                size=place.pcp_size,
                min_split_tokens=self._min_split_tokens,
                decode_unit=place.unit,
            )
        device = torch.device("cpu")
        clock.run("rank: step plan", InputBatch.build, batch, parts, states, place, self._ways, device)


class Ranks:
    """An executor: batches of the first rank, and a token for everybody."""

    def __init__(self, rank: Rank, clock: Clock, num_prompt_tokens: int) -> None:
        self._rank, self._clock = rank, clock
        self._num_prompt_tokens = num_prompt_tokens
        self._decoder = msgspec.msgpack.Decoder(ModelRunnerOutput)
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[ModelRunnerOutput] = []

    def submit(self, replica: int, step: SchedulerOutput) -> None:
        message = self._clock.run("engine: encode the step", self._encoder.encode, step)
        self._rank.run(message)
        computed = {r.request_id: r.num_computed_tokens for r in (*step.new_requests, *step.cached_requests)}
        sampled = {
            request_id: [7]
            for request_id, num_tokens in step.num_scheduled_tokens.items()
            if computed[request_id] + num_tokens >= self._num_prompt_tokens
        }
        self._pending.append(ModelRunnerOutput(step.step_id, sampled, {}, {}, StepStats([1], [1])))

    def receive(self) -> tuple[int, ModelRunnerOutput]:
        body = msgspec.msgpack.encode(self._pending.pop())
        return 0, self._clock.run("engine: decode the output", self._decoder.decode, body)

    def check_health(self) -> None: ...

    def wait(self, timeout_s: float) -> None: ...

    def shutdown(self) -> None: ...


def watch(clock: Clock, part: str, function: Callable) -> Callable:
    """The function, timed."""
    return lambda *args: clock.run(part, function, *args)


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds by part, over steps that decode all sequences."""
    parallel = ParallelConfig(prefill_context_parallel_size=args.pcp, decode_context_parallel_size=args.dcp)
    num_blocks = args.seqs * -(-(args.context + args.steps + 2) // (32 * args.dcp))
    config = EngineConfig(
        MODEL,
        parallel,
        CacheConfig(32, num_blocks, True),
        SchedulerConfig(args.seqs, 8192, args.context + args.steps + 2),
        RuntimeConfig(),
    )
    clock = Clock()
    core = EngineCore(config, Ranks(Rank(config, clock), clock, args.context), EngineObserver(config))
    outputs = OutputProcessor(None)
    params = SamplingParams(max_tokens=args.steps, ignore_eos=True)
    for i in range(args.seqs):
        prompt = [(i * 31 + k * k) % 90_000 for k in range(args.context)]
        sample_ids = outputs.add_request(str(i), None, prompt, params, 0.0)
        core.add_request(CoreRequest(str(i), sample_ids, prompt, params, 0.0))
    (scheduler,) = core.schedulers
    while any(request.is_prefill for request in scheduler.requests.values()):
        outputs.apply(core.step())
    scheduler.schedule = watch(clock, "engine: schedule", scheduler.schedule)
    scheduler.update_from_output = watch(clock, "engine: update", scheduler.update_from_output)
    observer = core.observer
    assert observer is not None
    observer.on_scheduled = watch(clock, "engine: observe", observer.on_scheduled)
    observer.on_done = watch(clock, "engine: observe the end", observer.on_done)
    clock.seconds.clear()
    while core.has_unfinished_requests and len(scheduler.running) == args.seqs:
        with clock.time("engine: all of a step, ranks' parts included"):
            news = core.step()
        body = clock.run("engine: encode the news", msgspec.msgpack.encode, news)
        news = clock.run("server: decode the news", msgspec.msgpack.Decoder(CoreOutputs).decode, body)
        clock.run("server: take them in", outputs.apply, news)
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, default=256, help="sequences that decode")
    parser.add_argument("--pcp", type=int, default=8)
    parser.add_argument("--dcp", type=int, default=1)
    parser.add_argument("--context", type=int, default=2000, help="tokens of every prompt")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(args)
    for part in sorted(measured):
        print(f"{part:48} {median(measured[part]) * 1e3:7.3f} ms {min(measured[part]) * 1e3:7.3f} ms")
    for pick in (median, min):
        print_sums(pick.__name__, {part: pick(measured[part]) for part in measured})


def print_sums(name: str, seconds: dict[str, float]) -> None:
    ranks = sum(s for part, s in seconds.items() if part.startswith("rank"))
    whole = seconds["engine: all of a step, ranks' parts included"]
    planning = sum(seconds[part] for part in ("engine: schedule", "engine: update", "rank: partition"))
    print(
        f"{name}: schedule + update + partition {planning * 1e3:.3f} ms, a rank {ranks * 1e3:.3f} ms, "
        f"the engine {(whole - ranks) * 1e3:.3f} ms"
    )


if __name__ == "__main__":
    main()
