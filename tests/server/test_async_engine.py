"""AsyncLLM over a real engine process: what comes out, what is freed, and what happens when things die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from itertools import pairwise
from typing import Any, TypeVar

import psutil
import pytest
from safetensors.torch import load_file, save_file

from prefold import LLM, SamplingParams
from prefold.engine.args import EngineArgs
from prefold.engine.async_engine import (
    AsyncLLM,
    EngineDeadError,
    EngineRestartingError,
    EngineStatus,
    QueueFullError,
)
from prefold.request import RequestOutput
from prefold.testing.checkpoints import make_checkpoint

T = TypeVar("T")
Run = Callable[[Coroutine[Any, Any, T]], T]

NUM_LONG = 200
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=NUM_LONG, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "threads_per_rank": 1,
    "block_size": 4,
    "num_blocks": 2000,
    "max_model_len": 700,
    "max_num_batched_tokens": 32,
}
PCP2 = {"prefill_context_parallel_size": 2}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(2, 300) for i in range(length)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3"), num_hidden_layers=2))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a coroutine on the one event loop of this file."""
    with asyncio.Runner() as runner:
        yield runner.run


def start(run: Run, checkpoint: str, **options: Any) -> AsyncLLM:
    own = {name: options.pop(name) for name in ("max_waiting", "restart_workers") if name in options}
    return run(AsyncLLM.start(EngineArgs(checkpoint, **(OPTIONS | options)), **own))


def end(run: Run, engine: AsyncLLM) -> None:
    """Shut down; nothing may be left."""
    assert engine._client is not None
    left = tree(engine._client.pid)
    run(asyncio.wait_for(engine.shutdown(), 30))
    assert engine.status in (EngineStatus.STOPPED, EngineStatus.DEAD)
    assert not list(filter(is_alive, left))


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def llm(checkpoint: str) -> LLM:
    return LLM(checkpoint, **OPTIONS)


@pytest.fixture(scope="module")
def engine(run: Run, checkpoint: str) -> Iterator[AsyncLLM]:
    """One rank, which is the engine process."""
    engine = start(run, checkpoint, max_num_seqs=4)
    yield engine
    end(run, engine)


@pytest.fixture(scope="module")
def engine2(run: Run, checkpoint: str) -> Iterator[AsyncLLM]:
    """Two ranks, and restarts."""
    engine = start(run, checkpoint, restart_workers=True, **PCP2)
    yield engine
    end(run, engine)


async def last(
    engine: AsyncLLM, request_id: str, prompt: list[int], params: SamplingParams = GREEDY
) -> RequestOutput:
    outputs = [output async for output in engine.generate(request_id, prompt, params)]
    assert outputs[-1].finished
    return outputs[-1]


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


async def idle(engine: AsyncLLM) -> None:
    """Wait until the engine has dropped what was aborted; all blocks must be free then."""
    deadline = time.monotonic() + 10
    while (used := await engine.check_integrity()) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert used == 0
    assert engine.num_unfinished == 0


# ---------------------------------------------------------------- outputs


def test_tokens_are_those_of_llm(run: Run, engine: AsyncLLM, engine2: AsyncLLM, llm: LLM):
    prompts = [prompt_of(length, length) for length in (1, 2, 31, 32, 33, 100, 131)]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    expected = llm.generate(prompts, params)

    async def all_of(engine: AsyncLLM) -> list[RequestOutput]:
        return await asyncio.gather(*(last(engine, f"r{i}", p, params) for i, p in enumerate(prompts)))

    for some in (engine, engine2):
        outputs = run(all_of(some))
        assert list(map(tokens_of, outputs)) == list(map(tokens_of, expected))
        for ours, theirs in zip(outputs, expected):
            assert ours.outputs[0].text == theirs.outputs[0].text
            assert list(map(list, ours.outputs[0].logprobs)) == list(map(list, theirs.outputs[0].logprobs))
            assert len(ours.prompt_logprobs) == len(ours.prompt_token_ids)
            metrics = ours.metrics
            assert 0 < metrics.first_scheduled_s < metrics.ttft_s < metrics.latency_s < 30
        run(idle(some))


def test_seeds_do_not_depend_on_the_layout_nor_on_the_process(
    run: Run, engine: AsyncLLM, engine2: AsyncLLM, llm: LLM
):
    params = SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
    unseeded = SamplingParams(n=2, temperature=1.0, max_tokens=8, ignore_eos=True)
    prompt = prompt_of(41)
    (expected,) = llm.generate(prompt, params)
    assert len(set(map(tuple, tokens_of(expected)))) == 4
    outputs = [run(last(some, "same", prompt, params)) for some in (engine, engine2)]
    assert [tokens_of(output) for output in outputs] == [tokens_of(expected)] * 2
    first, second = (tokens_of(run(last(some, "same", prompt, unseeded))) for some in (engine, engine2))
    assert first == second, "drawn from the engine's seed and the request's id"


def test_outputs_are_cumulative_and_a_slow_reader_skips(run: Run, engine: AsyncLLM):
    async def read(delay: float) -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate(f"delay{delay}", prompt_of(20), LONG):
            outputs.append(output)
            await asyncio.sleep(delay)
        return outputs

    async def both() -> tuple[list[RequestOutput], list[RequestOutput], float]:
        slow = asyncio.create_task(read(0.4))
        fast = await read(0.0)
        ended = time.monotonic()
        return fast, await slow, ended

    fast, slow, _ = run(both())
    assert tokens_of(fast[-1]) == tokens_of(slow[-1])
    assert len(fast[-1].outputs[0].token_ids) == NUM_LONG
    assert len(slow) < 0.5 * len(fast)
    assert slow[-1].metrics.latency_s == pytest.approx(fast[-1].metrics.latency_s, abs=0.3)
    for outputs in (fast, slow):
        texts = [output.outputs[0].text for output in outputs]
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_stop_strings_end_a_sample_and_free_its_blocks(run: Run, engine: AsyncLLM, llm: LLM):
    prompt = prompt_of(30, 5)
    text = llm.generate(prompt, LONG)[0].outputs[0].text
    stop = text[40:43]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_LONG, ignore_eos=True, stop=[stop], n=2)
    output = run(last(engine, "stop", prompt, params))
    for sample in output.outputs:
        assert sample.text == text[: text.index(stop)]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    again = run(last(engine, "stop", prompt_of(9, 1)))  # late tokens of the first are not taken for its own
    assert tokens_of(again) == tokens_of(llm.generate(prompt_of(9, 1), GREEDY)[0])
    run(idle(engine))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "the prompt is empty"),
        ([5, 10**30], GREEDY, "outside the vocabulary"),
        ([5, -1], GREEDY, "token id -1 is outside"),
        ([5] * 693, GREEDY, r"693 prompt tokens \+ max_tokens=8 exceed max_model_len=700"),
        ([5], SamplingParams(logit_bias={10**6: 1.0}), "logit_bias names token 1000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused(run: Run, engine: AsyncLLM, prompt, params, message: str):
    with pytest.raises(ValueError, match=message):
        run(last(engine, "bad", prompt, params))
    assert engine.num_unfinished == 0


def test_an_id_that_is_in_use(run: Run, engine: AsyncLLM):
    async def twice() -> None:
        reader = engine.generate("id", prompt_of(20), LONG)
        await anext(reader)
        with pytest.raises(ValueError, match="'id' is in use"):
            await last(engine, "id", prompt_of(3))
        await reader.aclose()  # type: ignore[attr-defined]
        await last(engine, "id", prompt_of(3))

    run(twice())
    run(idle(engine))


# ---------------------------------------------------------------- aborts


def test_closing_the_iterator_aborts_in_the_middle_of_a_prefill(run: Run, engine2: AsyncLLM, llm: LLM):
    """Also if the id is used again at once, for another prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1)

    async def aborted(delay: float) -> None:
        task = asyncio.create_task(last(engine2, "a", prompt_of(690, 3), params))
        await asyncio.sleep(delay)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        output = await last(engine2, "a", prompt_of(33, 4))
        assert tokens_of(output) == expected
        await idle(engine2)

    expected = tokens_of(llm.generate(prompt_of(33, 4), GREEDY)[0])
    for delay in (0.0, 0.005, 0.02):
        run(aborted(delay))


def test_an_abort_storm(run: Run, engine2: AsyncLLM, llm: LLM):
    rng = random.Random(0)

    async def one(i: int) -> None:
        reader = last(engine2, f"storm{i % 20}-{i}", prompt_of(rng.randrange(300, 600), i), LONG)
        await asyncio.wait([task := asyncio.create_task(reader)], timeout=rng.random() * 2)
        task.cancel()
        await asyncio.wait([task])

    async def storm() -> RequestOutput:
        await asyncio.gather(*(one(i) for i in range(50)))
        await idle(engine2)
        return await last(engine2, "after", prompt_of(100))

    assert tokens_of(run(storm())) == tokens_of(llm.generate(prompt_of(100), GREEDY)[0])


def test_drain(run: Run, checkpoint: str, engine: AsyncLLM):
    """What has time ends by itself, the rest with "abort"; nothing new is taken."""

    async def drain() -> tuple[RequestOutput, RequestOutput]:
        start = time.monotonic()
        await last(engine, "alone", prompt_of(5))
        pace_s = (
            time.monotonic() - start
        )  # the machine may be busy: time for about 40 tokens is given, of 8 and 200
        few = asyncio.create_task(last(engine, "few", prompt_of(5)))
        many = asyncio.create_task(last(engine, "many", prompt_of(5), LONG))
        while engine.num_unfinished < 2:
            await asyncio.sleep(0)
        await engine.drain(5 * pace_s)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await last(engine, "new", prompt_of(5))
        return await few, await many

    few, many = run(drain())
    engine._draining = False
    assert few.outputs[0].finish_reason == "length"
    assert many.outputs[0].finish_reason == "abort"
    assert 0 < len(many.outputs[0].token_ids) < NUM_LONG
    run(idle(engine))


# ---------------------------------------------------------------- the queue


def test_the_queue_is_full(run: Run, engine: AsyncLLM):
    """4 run, 3 may wait, in a burst and later."""

    async def fill() -> None:
        engine._max_waiting = 3
        tasks = [asyncio.create_task(last(engine, f"q{i}", prompt_of(3, i), LONG)) for i in range(7)]
        for _ in range(3):
            await asyncio.sleep(0.1)
            with pytest.raises(QueueFullError, match="3 requests are waiting, and max_waiting is 3"):
                await last(engine, "late", prompt_of(3))
        assert engine.snapshot.num_running == 4
        assert engine.snapshot.num_waiting == 3
        tasks[0].cancel()
        await asyncio.sleep(0.1)
        tasks.append(asyncio.create_task(last(engine, "later", prompt_of(3))))
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [True] + [False] * 7
        assert all(task.result().finished for task in tasks[1:])

    try:
        run(fill())
    finally:
        engine._max_waiting = None
    run(idle(engine))


# ---------------------------------------------------------------- health, failure, restart


def test_health_and_snapshots(run: Run, engine: AsyncLLM, engine2: AsyncLLM):
    async def look() -> None:
        for some in (engine, engine2):
            await some.check_health()
            before = some.snapshot.totals.num_generation_tokens
            reader = asyncio.create_task(last(some, "look", prompt_of(200), LONG))
            await asyncio.sleep(0.3)
            await some.check_health()
            assert some.snapshot.num_running == 1
            assert [r.request_id for r in some.snapshot.requests] == ["look"]
            assert some.snapshot.blocks_used > 0
            await reader
            await asyncio.sleep(0.05)  # one comes when the engine has become idle
            assert some.snapshot.num_running == some.snapshot.blocks_used == 0
            assert some.snapshot.totals.num_generation_tokens - before == NUM_LONG
            assert len(some.recent_steps) > NUM_LONG

    run(look())


def test_a_stopped_process_is_not_healthy(run: Run, engine: AsyncLLM):
    client = engine._client
    assert client is not None
    os.kill(client.pid, signal.SIGSTOP)
    while psutil.Process(client.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    try:
        with pytest.raises(EngineDeadError, match=r"not answered for 0\.2 s"):
            run(engine.check_health(0.2))
    finally:
        os.kill(client.pid, signal.SIGCONT)
    run(engine.check_health())
    assert tokens_of(run(last(engine, "after", prompt_of(5))))


async def failures(engine: AsyncLLM, harm: Callable[[], Awaitable[None] | None]) -> tuple[list, float]:
    """What ten running requests end with, and how long that takes."""
    tasks = [asyncio.create_task(last(engine, str(i), prompt_of(300, i), LONG)) for i in range(10)]
    await asyncio.sleep(0.3)
    began = time.monotonic()
    harm()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    return errors, time.monotonic() - began


def test_a_signal_to_all_processes_of_a_service_ends_no_request(run: Run, engine2: AsyncLLM):
    """As when a service is stopped: the server decides when its engine ends."""

    async def signalled() -> RequestOutput:
        task = asyncio.create_task(last(engine2, "a", prompt_of(100), LONG))
        await asyncio.sleep(0.1)
        assert engine2._client is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            for process in tree(engine2._client.pid):
                process.send_signal(number)
        return await task

    assert len(tokens_of(run(signalled()))[0]) == NUM_LONG
    assert engine2.status is EngineStatus.READY


@pytest.mark.parametrize("victim", ["rank 1", "process"])
def test_a_new_engine_after_a_failure(run: Run, engine2: AsyncLLM, llm: LLM, victim: str):
    client = engine2._client
    assert client is not None
    pids = [client.pid, *engine2.rank_pids]
    pid = engine2.rank_pids[1] if victim == "rank 1" else client.pid

    async def fail_and_recover() -> tuple[list, float, RequestOutput]:
        errors, seconds = await failures(engine2, lambda: os.kill(pid, signal.SIGKILL))
        assert engine2.status is EngineStatus.RESTARTING
        for attempt in (engine2.check_health(), last(engine2, "meanwhile", prompt_of(5))):
            with pytest.raises(EngineRestartingError, match=rf"being restarted: .*{pid}\) was killed"):
                await attempt
        deadline = time.monotonic() + 60
        while engine2.status is not EngineStatus.READY and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return errors, seconds, await last(engine2, "after", prompt_of(50))

    errors, seconds, after = run(fail_and_recover())
    assert seconds < 8
    assert {type(error) for error in errors} == {EngineDeadError}
    who = "rank 1 (process {})" if victim == "rank 1" else "its process ({})"
    assert {str(error) for error in errors} == {
        f"the engine is dead: {who.format(pid)} was killed by SIGKILL"
    }
    assert tokens_of(after) == tokens_of(llm.generate(prompt_of(50), GREEDY)[0])
    assert engine2.failure is None
    assert not [old for old in pids if psutil.pid_exists(old)]
    run(idle(engine2))


def test_dead_for_good(run: Run, checkpoint: str):
    """Without restarts; a silent process counts as dead after the time-out."""
    engine = start(run, checkpoint, collective_timeout_s=1.0)
    client = engine._client
    assert client is not None

    async def stop() -> tuple[list, float, str]:
        errors, seconds = await failures(engine, lambda: os.kill(client.pid, signal.SIGSTOP))
        return errors, seconds, await asyncio.wait_for(engine.wait_dead(), 5)

    errors, seconds, reason = run(stop())
    assert engine.status is EngineStatus.DEAD
    assert "has not answered for" in reason
    assert {(type(error), str(error)) for error in errors} == {(EngineDeadError, reason)}
    assert 1.0 < seconds < 5.0
    for attempt in (engine.check_health(), last(engine, "late", [5])):
        with pytest.raises(EngineDeadError, match="has not answered"):
            run(attempt)
    end(run, engine)


def test_what_cannot_start(run: Run, checkpoint: str, tmp_path):
    broken = make_checkpoint("DeepseekV3ForCausalLM", tmp_path / "broken", num_hidden_layers=2)
    for shard in broken.glob("*.safetensors"):
        tensors = load_file(shard)
        tensors.pop("model.norm.weight", None)
        save_file(tensors, shard)
    before = tree(os.getpid())
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        start(run, str(broken))
    with pytest.raises(ValueError, match="max_num_seqs"):
        start(run, checkpoint, max_num_seqs=0)
    assert not set(tree(os.getpid())) - set(before)


SERVER = """
import asyncio, sys
from prefold import SamplingParams
from prefold.engine.args import EngineArgs
from prefold.engine.async_engine import AsyncLLM

async def main():
    args = EngineArgs(sys.argv[1], prefill_context_parallel_size=2, threads_per_rank=1, num_blocks=50)
    engine = await AsyncLLM.start(args)
    async for output in engine.generate("a", [5] * 20, SamplingParams(max_tokens=400, ignore_eos=True)):
        print(len(output.outputs[0].token_ids), flush=True)

asyncio.run(main())
"""


def test_the_engine_leaves_when_its_server_is_killed(checkpoint: str):
    with subprocess.Popen([sys.executable, "-c", SERVER, checkpoint], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it generates
        everybody = tree(process.pid)
        assert len(everybody) == 5  # the server, its engine, the engine's fork server and two ranks
        process.kill()
    deadline = time.monotonic() + 10
    while any(map(is_alive, everybody)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(filter(is_alive, everybody))
