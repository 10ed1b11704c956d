"""A worker that dies or does not start: the call raises and names it, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from prefold import LLM, SamplingParams
from prefold.engine.executor import EngineDeadError, MultiProcessExecutor
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.live_server import wait_for

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
    executor = llm.engine.core.executor
    assert isinstance(executor, MultiProcessExecutor)
    return executor.pids


def assert_nothing_left(pids: list[int], folder: str, memory_before: set[str]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert not Path(folder).exists()
    # Whatever else runs on this machine may have files there for a moment.
    wait_for(lambda: not shared_memory() - memory_before)


PHASES = {"prefill": 100, "decode": 800}
"""Tokens computed when it happens: of two prompts of 700 tokens, the second of which hits the first."""
TIMEOUT_S = 3.0
MARGIN_S = 8.0
"""What noticing and clearing up may take beyond the time-out on a busy machine."""
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
PROMPTS = [[i % 200 for i in range(700)]] * 2


def signal_when(llm: LLM, victim: int, tokens: int, number: int) -> tuple[str, float]:
    """Run a long request and signal a worker once `tokens` tokens are computed; the error and the time
    from then to it."""
    sent: list[float] = []

    def progress(metrics: object, finished: int, total: int) -> None:
        if sum(llm.engine.metrics.rank_tokens) >= tokens and not sent:
            sent.append(time.monotonic())
            os.kill(victim, number)

    with pytest.raises(EngineDeadError) as caught:
        llm.generate(PROMPTS, LONG, progress=progress)
    assert sent
    return str(caught.value), time.monotonic() - sent[0]


def expected_message(rank: int, pid: int, number: int) -> str:
    how = "was killed by SIGKILL" if number == signal.SIGKILL else r"has not answered for \d+ s in step \d+"
    return rf"rank {rank} \(process {pid}\) {how}"


LAYOUTS = {
    "pcp": {"prefill_context_parallel_size": 2},
    "pp": {"pipeline_parallel_size": 2},
    "dp": {"data_parallel_size": 2},
}


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
AT_WORK = [("pcp", phase, victim, number) for phase in PHASES for victim in (0, 1) for number in (KILL, STOP)]


@pytest.mark.parametrize(
    ("layout", "phase", "victim", "number"),
    [*AT_WORK, ("pp", "prefill", 0, STOP), ("pp", "decode", 1, KILL)],
)
def test_a_worker_that_is_killed_or_stopped_at_work(
    checkpoint: str, layout: str, phase: str, victim: int, number: int
) -> None:
    """The call raises and names it, within the time-out, and nothing is left behind."""
    before = shared_memory()
    llm = LLM(checkpoint, collective_timeout_s=TIMEOUT_S, **LAYOUTS[layout], **OPTIONS)
    pids, folder = workers(llm), llm.engine.core.executor._folder  # type: ignore[attr-defined]
    message, seconds = signal_when(llm, pids[victim], PHASES[phase], number)
    assert re.search(expected_message(victim, pids[victim], number), message), message
    assert seconds < MARGIN_S + (TIMEOUT_S if number == signal.SIGSTOP else 0)
    assert_nothing_left(pids, folder, before)
    with pytest.raises(EngineDeadError, match=f"rank {victim}"):
        llm.generate([[1, 2, 3]], GREEDY)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize(("layout", "victim"), [("pcp", 0), ("pcp", 1), ("dp", 1)])
def test_a_worker_that_is_killed_or_stopped_while_idle(
    checkpoint: str, layout: str, victim: int, number: int
) -> None:
    """The next call raises: at once if the worker is dead, and after the time-out if it is stopped.

    A new engine in the same process works, and gives the tokens that the old one gave.
    """
    before = shared_memory()
    options = {**LAYOUTS[layout], **OPTIONS}
    few = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm = LLM(checkpoint, collective_timeout_s=TIMEOUT_S, **options)
    tokens = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, few)]
    pids, folder = workers(llm), llm.engine.core.executor._folder  # type: ignore[attr-defined]
    llm.engine.core.executor.check_health()
    os.kill(pids[victim], number)
    message = expected_message(victim, pids[victim], number)
    started = time.monotonic()
    if number == signal.SIGKILL:
        time.sleep(0.1)
        with pytest.raises(EngineDeadError, match=message):
            llm.engine.core.executor.check_health()
    with pytest.raises(EngineDeadError, match=message):
        llm.generate(PROMPTS, LONG)
    assert time.monotonic() - started < MARGIN_S + (TIMEOUT_S if number == signal.SIGSTOP else 0)
    assert_nothing_left(pids, folder, before)
    if number == signal.SIGSTOP:
        return
    with LLM(checkpoint, **options) as again:
        assert [output.outputs[0].token_ids for output in again.generate(PROMPTS, few)] == tokens


def test_the_message_of_a_stopped_worker_names_what_waited_for_it(checkpoint: str) -> None:
    llm = LLM(checkpoint, prefill_context_parallel_size=2, collective_timeout_s=TIMEOUT_S, **OPTIONS)
    message, _ = signal_when(llm, workers(llm)[1], PHASES["prefill"], signal.SIGSTOP)
    assert re.search(
        r"rank 0 failed: CollectiveTimeout: .*all_gather \(call \d+ of group 'pcp'\)", message
    ), message
    assert "missing ranks: 1" in message


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_the_command_ends_when_a_worker_is_killed_or_stopped(
    checkpoint: str, tmp_path: Path, number: int
) -> None:
    """Exit code 1, a message that names the worker, and no process left."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(PROMPTS[0]))
    command = [sys.executable, "-m", "prefold", "generate", checkpoint, "--prompt-token-ids", str(ids)]
    command += ["-pcp", "2", "--threads-per-rank", "1", "--max-tokens", "3000", "--ignore-eos", "--stream"]
    command += ["--max-model-len", "3800", "--collective-timeout-s", str(TIMEOUT_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it generates
        children = psutil.Process(process.pid).children(recursive=True)
        pids = [child.pid for child in children]
        (victim,) = (child.pid for child in children if child.name() == "prefold-rank-1")
        os.kill(victim, number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    how = "was killed by SIGKILL" if number == signal.SIGKILL else "has not answered"
    assert re.search(rf"error: the engine is dead: rank 1 \(process {victim}\) {how}", errors.decode())
    assert not list(filter(is_running, pids))


ORPHANING_ENGINE = """
import sys
from prefold import LLM, SamplingParams
llm = LLM(sys.argv[1], prefill_context_parallel_size=2, threads_per_rank=1, skip_tokenizer_init=True,
          max_num_batched_tokens=16, num_blocks=1000, block_size=8)
executor = llm.engine.core.executor
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
        pids, folder = workers(llm), llm.engine.core.executor._folder  # type: ignore[attr-defined]
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


def test_a_killed_fork_server_takes_its_ranks_with_it(checkpoint: str) -> None:
    llm = LLM(checkpoint, prefill_context_parallel_size=2, **OPTIONS)
    pids = workers(llm)
    parents = {psutil.Process(pid).ppid() for pid in pids}
    assert len(parents) == 1
    os.kill(parents.pop(), signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        llm.generate(PROMPTS, LONG)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_have_cores_and_threads_of_their_own(checkpoint: str) -> None:
    """Forked ranks are bound to their cores and start their threads then; the fork server has one thread."""
    cores = os.sched_getaffinity(0)
    num_threads = {}
    for threads in (1, 2):
        options = OPTIONS | {"threads_per_rank": threads, "max_num_batched_tokens": 512}
        with LLM(checkpoint, prefill_context_parallel_size=2, **options) as llm:
            llm.generate([list(range(200)) * 3], SamplingParams(temperature=0.0, max_tokens=2))
            ranks = [psutil.Process(pid) for pid in workers(llm)]
            assert psutil.Process(ranks[0].ppid()).num_threads() == 1
            bound = [os.sched_getaffinity(rank.pid) for rank in ranks]
            if 2 * threads <= len(cores):
                assert [len(own) for own in bound] == [threads, threads]
                assert not bound[0] & bound[1]
            num_threads[threads] = [rank.num_threads() for rank in ranks]
    assert min(num_threads[2]) > max(num_threads[1])
