"""A worker that dies or does not start: the call raises and names it, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from prefold import LLM, SamplingParams
from prefold.engine.executor import EngineDeadError, MultiProcessExecutor
from prefold.testing.checkpoints import make_checkpoint

OPTIONS = {
    "threads_per_rank": 1,
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 16,
    "num_blocks": 1000,
    "block_size": 8,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("v3")))


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def workers(llm: LLM) -> list[int]:
    executor = llm.engine._executor
    assert isinstance(executor, MultiProcessExecutor)
    return executor.pids


def assert_nothing_left(pids: list[int], folder: str, memory_before: set[str]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not Path(folder).exists()
    assert not shared_memory() - memory_before


def kill_when(llm: LLM, victim: int, tokens: int, number: int = signal.SIGKILL) -> list[str]:
    """Run a long request and kill a worker once `tokens` tokens are computed; the errors seen."""
    killed = threading.Event()

    def progress(metrics: object, finished: int, total: int) -> None:
        if llm.engine.metrics.rank_tokens and sum(llm.engine.metrics.rank_tokens) >= tokens:
            if not killed.is_set():
                os.kill(victim, number)
            killed.set()

    with pytest.raises(EngineDeadError) as caught:
        llm.generate([[i % 200 for i in range(700)]] * 2, GREEDY, progress=progress)
    assert killed.is_set()
    return [str(caught.value)]


@pytest.mark.parametrize(("victim", "tokens"), [(1, 100), (0, 100), (1, 800)])
def test_a_killed_worker_ends_the_call(checkpoint: str, victim: int, tokens: int) -> None:
    """In mid-prefill (100 of 700 tokens; the second prompt hits the first one) and in decode."""
    before = shared_memory()
    llm = LLM(checkpoint, prefill_context_parallel_size=2, **OPTIONS)
    pids, folder = workers(llm), llm.engine._executor._folder  # type: ignore[attr-defined]
    started = time.monotonic()
    (message,) = kill_when(llm, pids[victim], tokens)
    assert f"rank {victim}" in message
    assert str(pids[victim]) in message
    assert "SIGKILL" in message
    assert_nothing_left(pids, folder, before)
    with pytest.raises(EngineDeadError, match=f"rank {victim}"):
        llm.generate([[1, 2, 3]], GREEDY)
    assert time.monotonic() - started < 60


def test_a_worker_killed_while_idle_is_noticed_by_the_next_call(checkpoint: str) -> None:
    before = shared_memory()
    llm = LLM(checkpoint, prefill_context_parallel_size=2, **OPTIONS)
    pids, folder = workers(llm), llm.engine._executor._folder  # type: ignore[attr-defined]
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 .*SIGKILL"):
        llm.generate([[1, 2, 3]], GREEDY)
    assert_nothing_left(pids, folder, before)


def test_a_stopped_worker_times_out(checkpoint: str) -> None:
    """SIGSTOP: alive but silent. The others' collective names it within the time-out."""
    before = shared_memory()
    llm = LLM(checkpoint, prefill_context_parallel_size=2, collective_timeout_s=3, **OPTIONS)
    pids, folder = workers(llm), llm.engine._executor._folder  # type: ignore[attr-defined]
    (message,) = kill_when(llm, pids[1], 100, signal.SIGSTOP)
    assert "all_gather" in message
    assert "'pcp'" in message
    assert "missing ranks: 1" in message
    assert_nothing_left(pids, folder, before)


ORPHANING_ENGINE = """
import sys
from prefold import LLM, SamplingParams
llm = LLM(sys.argv[1], prefill_context_parallel_size=2, threads_per_rank=1, skip_tokenizer_init=True,
          max_num_batched_tokens=16, num_blocks=1000, block_size=8)
executor = llm.engine._executor
print(executor._folder, *executor.pids, flush=True)
while len(sys.argv) > 2:
    llm.generate([[i % 200 for i in range(700)]], SamplingParams(temperature=0.0, max_tokens=50))
sys.stdin.read()
"""


@pytest.mark.parametrize("busy", [False, True])
def test_workers_of_a_killed_engine_leave_and_clear_up(checkpoint: str, busy: bool) -> None:
    """Idle ranks see the socket close; a rank in a collective sees that its parent has changed."""
    before = shared_memory()
    command = [sys.executable, "-c", ORPHANING_ENGINE, checkpoint, *(["busy"] if busy else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        folder, *numbers = engine.stdout.readline().split()
        pids = [int(number) for number in numbers]
        assert len(pids) == 2
        time.sleep(1.0 if busy else 0.0)
        engine.kill()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (Path(folder).exists() or any(map(is_running, pids))):
        time.sleep(0.1)
    assert not list(filter(is_running, pids))
    assert not Path(folder).exists()
    assert not shared_memory() - before


def is_running(pid: int) -> bool:
    """An orphan that has ended may stay in the table until its new parent looks."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_shutdown_leaves_nothing(checkpoint: str) -> None:
    before = shared_memory()
    with LLM(checkpoint, tensor_parallel_size=2, **OPTIONS) as llm:
        pids, folder = workers(llm), llm.engine._executor._folder  # type: ignore[attr-defined]
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=2))
    assert_nothing_left(pids, folder, before)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate([[1, 2, 3]], GREEDY)
    llm.shutdown()


def test_a_bad_checkpoint_is_reported_as_such_by_workers(checkpoint: str, tmp_path: Path) -> None:
    """A wrong tensor shape shows on the ranks: the user sees a ValueError, not a dead engine."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    file = next(f for f in sorted(folder.glob("*.safetensors")) if "model.norm.weight" in load_file(f))
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    before = shared_memory()
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        LLM(str(folder), prefill_context_parallel_size=2, **OPTIONS)
    assert not shared_memory() - before


def test_more_ranks_than_cores_is_a_warning(
    checkpoint: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import prefold.engine.args as args

    monkeypatch.setattr(args, "available_cores", lambda: 1)
    args.EngineArgs(checkpoint, prefill_context_parallel_size=2).resolve()
    assert "2 ranks x 1 threads on 1 cores" in caplog.text
