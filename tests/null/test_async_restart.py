"""When AsyncLLM starts a new engine process, and when it gives up. The processes here are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from prefold.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig
from prefold.control import encode
from prefold.engine import async_engine
from prefold.engine.async_engine import AsyncLLM, EngineDeadError, EngineRestartingError, EngineStatus
from prefold.engine.core_client import CoreFailed
from prefold.engine.core_messages import ABORTED, OUTPUTS, CoreFailure, CoreOutputs, CoreReady, SampleOutput
from prefold.request import SamplingParams

CONFIG = EngineConfig(
    None, ParallelConfig(), CacheConfig(4, 64, True), SchedulerConfig(8, 64, 200), RuntimeConfig()
)


class FakeClient:
    """An engine process that is ready at once, or fails to start where `starts` says so."""

    def __init__(self, made: list[FakeClient], starts: Callable[[int], bool], *args: object) -> None:
        _, self.on_message, self.on_lost = args
        self.sent: list[tuple[bytes, bytes]] = []
        self.alive = starts(len(made))
        self.ended = False
        self.ready = asyncio.get_running_loop().create_future()
        if self.alive:
            self.ready.set_result(CoreReady([]))
        else:
            self.ready.set_exception(CoreFailed(CoreFailure(f"start {len(made)} failed")))
        made.append(self)

    def send(self, kind: bytes, body: bytes = b"") -> None:
        assert self.alive
        self.sent.append((kind, body))

    async def end(self) -> None:
        self.alive, self.ended = False, True

    def fail(self, message: str) -> None:
        self.alive = False
        self.on_lost(CoreFailure(message))

    def answer(self, sample_id: str, tokens: list[int], reason: str | None = None) -> None:
        sample = SampleOutput(sample_id, tokens, finish_reason=reason)
        self.on_message(OUTPUTS, encode(CoreOutputs(0.0, [sample])))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(async_engine, "check_request", lambda *args: 5)


async def make(
    monkeypatch: pytest.MonkeyPatch, starts: Callable[[int], bool] = lambda number: True, restart: bool = True
) -> tuple[AsyncLLM, list[FakeClient]]:
    made: list[FakeClient] = []
    monkeypatch.setattr(async_engine, "CoreClient", lambda *args: FakeClient(made, starts, *args))
    engine = AsyncLLM(CONFIG, None, restart_workers=restart)
    await engine._launch()
    return engine, made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_three_failures_are_for_good(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        engine, made = await make(monkeypatch)
        for number in range(3):
            reader = engine.generate("a", [1], SamplingParams())
            task = asyncio.create_task(anext(reader))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            made[number].fail(f"failure {number}")
            with pytest.raises(EngineDeadError, match=f"failure {number}"):
                await task
            if number < 2:
                with pytest.raises(EngineRestartingError, match=f"being restarted: failure {number}"):
                    await anext(engine.generate("b", [1], SamplingParams()))
                await until(lambda: engine.status is EngineStatus.READY)
                assert made[number].ended
        reason = await asyncio.wait_for(engine.wait_dead(), 5)
        assert reason == engine.failure == "failure 2 (3 failures within 60 s)"
        assert engine.status is EngineStatus.DEAD
        assert len(made) == 3
        await engine.shutdown()
        assert engine.status is EngineStatus.DEAD

    asyncio.run(main())


def test_starts_that_fail_count(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        engine, made = await make(monkeypatch, starts=lambda number: number == 0)
        made[0].fail("the first")
        assert await asyncio.wait_for(engine.wait_dead(), 5) == "start 2 failed (3 failures within 60 s)"

    asyncio.run(main())


@pytest.mark.parametrize(("reason", "goes_on"), [("length", True), ("stop", True), ("error", False)])
def test_a_completed_request_makes_up_for_failures(
    monkeypatch: pytest.MonkeyPatch, reason: str, goes_on: bool
):
    async def main() -> None:
        engine, made = await make(monkeypatch)
        for number in range(4):
            reader = engine.generate("a", [1], SamplingParams())
            task = asyncio.create_task(anext(reader))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            made[-1].answer("a", [7], reason)
            assert (await task).finished
            made[-1].fail(f"failure {number}")
            await until(lambda: engine.status is not EngineStatus.RESTARTING)
            if not goes_on and number == 2:
                assert engine.status is EngineStatus.DEAD
                return
            assert engine.status is EngineStatus.READY
        await engine.shutdown()

    asyncio.run(main())


def test_shutdown_ends_a_restart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_engine, "BACK_OFF_S", 60.0)

    async def main() -> None:
        engine, made = await make(monkeypatch)
        made[0].fail("failure")
        await asyncio.sleep(0)
        await asyncio.wait_for(engine.shutdown(), 5)
        assert (engine.status, len(made)) == (EngineStatus.STOPPED, 1)
        made[0].on_lost(CoreFailure("late"))
        assert engine.status is EngineStatus.STOPPED

    asyncio.run(main())


def test_late_outputs_of_an_aborted_request_are_not_those_of_its_successor(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        engine, made = await make(monkeypatch, restart=False)
        (client,) = made
        first = engine.generate("a", [1], SamplingParams())
        task = asyncio.create_task(anext(first))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        client.answer("a", [7])
        await task
        await first.aclose()  # type: ignore[attr-defined]
        second = asyncio.create_task(anext(engine.generate("a", [1], SamplingParams())))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        client.answer("a", [8])
        client.answer("a", [9], "length")
        await asyncio.sleep(0)
        assert not second.done()
        client.on_message(ABORTED, encode(["a"]))
        client.answer("a", [10])
        assert (await second).outputs[0].token_ids == [10]
        await engine.shutdown()

    asyncio.run(main())
