"""Who is to blame: ranks that are silent, gone or failed, as the engine sees them over sockets."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from prefold.control import (
    ERROR,
    OUTPUT,
    PING,
    PONG,
    RANK_ENDED,
    STEP,
    Channel,
    Pong,
    RankEnded,
    WorkerFailure,
    encode,
)
from prefold.engine.launch import LocalRanks
from prefold.engine.ranks import Rank, RankFailure, Ranks

LIMIT_S = 0.8


class FakeRank:
    """Answers pings from a thread of its own, as a worker does, unless it is stopped."""

    def __init__(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(theirs)
        self.rank = Rank(number, Channel(ours), pid=1000 + number)
        self.stopped = threading.Event()
        self.closed = threading.Event()
        self.cpu_share = 0.5
        self.busy = True
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def _answer(self) -> None:
        while not self.closed.is_set():
            select.select([self.channel], [], [], 0.02)
            if not self.stopped.is_set():
                for kind, _ in self.channel.receive():
                    if kind == PING:
                        cpu_s = self.cpu_share * time.monotonic()
                        self.channel.send(PONG, encode(Pong(7, self.busy, cpu_s)))

    def fail(self, message: str, **about: bool) -> None:
        self.channel.send(ERROR, encode(WorkerFailure(message, "trace", **about)))

    def leave(self) -> None:
        self.closed.set()
        self.thread.join()
        self.channel.close()


@pytest.fixture
def fakes() -> Iterator[list[FakeRank]]:
    fakes = [FakeRank(number) for number in range(3)]
    yield fakes
    for fake in fakes:
        fake.leave()
        fake.rank.channel.close()


@pytest.fixture
def ranks(fakes: list[FakeRank]) -> Ranks:
    return Ranks([fake.rank for fake in fakes], {}, LocalRanks(1), LIMIT_S)


def listen(ranks: Ranks, seconds: float, step: int | None = 12) -> None:
    """As the engine does while it waits for an output."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ranks.poll(deadline - time.monotonic(), step)


def test_ranks_may_compute_for_long(ranks: Ranks):
    """They answer, so nothing is wrong, however long no output comes."""
    listen(ranks, 3 * LIMIT_S)
    assert ranks.ranks[1].step == 7


@pytest.mark.parametrize("victim", [0, 2])
def test_a_silent_rank_is_named(ranks: Ranks, fakes: list[FakeRank], victim: int):
    listen(ranks, 0.3)
    fakes[victim].stopped.set()
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        listen(ranks, 10 * LIMIT_S)
    assert LIMIT_S * 0.7 < time.monotonic() - start < LIMIT_S + 2.5
    message = str(caught.value)
    assert f"rank {victim} (process {1000 + victim}) has not answered for" in message
    assert "in step 12" in message
    assert message.count("rank") == 1


def test_several_silent_ranks_are_all_named(ranks: Ranks, fakes: list[FakeRank]):
    fakes[1].stopped.set()
    fakes[2].stopped.set()
    with pytest.raises(RankFailure, match=r"rank 1 \(process 1001\), rank 2 \(process 1002\) have not"):
        listen(ranks, 10 * LIMIT_S, step=None)


def test_a_rank_that_answers_but_does_nothing_is_stuck(ranks: Ranks, fakes: list[FakeRank]):
    """In the middle of a step. An idle rank uses no processor time either, and rightly so."""
    fakes[0].busy = False
    fakes[0].cpu_share = fakes[1].cpu_share = 0.0
    with pytest.raises(RankFailure, match=r"^rank 1 \(process 1001\) is stuck in step 7: .* for \d s$"):
        listen(ranks, 10 * LIMIT_S)


def test_a_busy_engine_accuses_nobody(ranks: Ranks):
    """It judges by what has come only after reading it."""
    listen(ranks, 0.1)
    for _ in range(2):
        time.sleep(1.5 * LIMIT_S)
        ranks.poll(0.0, 12)
        ranks.poll(0.05, 12)


def test_after_a_suspension_ranks_may_answer_first(ranks: Ranks, fakes: list[FakeRank]):
    """Ctrl-Z stops engine and ranks alike: the time in between is nobody's silence."""
    listen(ranks, 0.1)
    for fake in fakes:
        fake.stopped.set()
    time.sleep(2 * LIMIT_S)
    ranks.poll(0.0, 12)
    for fake in fakes:
        fake.stopped.clear()
    listen(ranks, 1.5 * LIMIT_S)


def test_a_rank_that_does_not_read_does_not_block_the_engine(ranks: Ranks, fakes: list[FakeRank]):
    fakes[1].stopped.set()
    start = time.monotonic()
    for rank in range(3):
        ranks.send(rank, STEP, bytes(20 << 20))
    assert time.monotonic() - start < LIMIT_S
    with pytest.raises(RankFailure, match=r"rank 1 .*has not answered"):
        listen(ranks, 10 * LIMIT_S)


def test_outputs_come_in_order_before_a_failure_does(ranks: Ranks, fakes: list[FakeRank]):
    for body in (b"a", b"b"):
        fakes[2].channel.send(OUTPUT, body)
    while len(ranks.outputs) < 2:
        ranks.poll(0.1, 12)
    assert list(ranks.outputs) == [(2, b"a"), (2, b"b")]
    fakes[0].leave()
    with pytest.raises(RankFailure, match=r"rank 0 .*closed its connection"):
        listen(ranks, 1)


def ask(ranks: Ranks, limit_s: float) -> tuple[list[str], float]:
    """Who gives no sign of life, and how long it takes until that is known."""
    answers: list[list[str]] = []
    start = time.monotonic()
    ranks.ask(limit_s, answers.append)
    while not answers:
        ranks.poll(1.0, 12)
    return answers[0], time.monotonic() - start


def test_who_lives(ranks: Ranks, fakes: list[FakeRank]):
    """An answer is quick if all do; a ping that was sent before the question does not count."""
    ranks.limit_s = 60.0
    silent, seconds = ask(ranks, 30.0)
    assert (silent, seconds < 2) == ([], True)
    assert ask(ranks, 30.0)[0] == []
    fakes[1].stopped.set()
    for _ in range(2):  # the second time its ping is an old one
        silent, seconds = ask(ranks, 0.4)
        assert silent == ["rank 1 (process 1001)"]
        assert 0.4 <= seconds < 3
    threading.Timer(0.2, fakes[1].stopped.clear).start()
    silent, seconds = ask(ranks, 30.0)
    assert (silent, seconds < 5) == ([], True)


TIMED_OUT = "all_gather (call 7 of group 'pcp') did not complete; missing ranks: 2"


def test_the_cause_of_a_failed_collective_is_a_dead_rank(ranks: Ranks, fakes: list[FakeRank]):
    fakes[0].fail("connection reset by peer", collective=True)
    fakes[1].fail("connection reset by peer", collective=True)
    threading.Timer(0.3, fakes[2].leave).start()
    with pytest.raises(RankFailure, match=r"rank 2 .*closed its connection") as caught:
        listen(ranks, 5)
    assert "rank 0" not in str(caught.value)


def test_the_cause_of_a_failed_collective_is_a_stopped_rank(ranks: Ranks, fakes: list[FakeRank]):
    listen(ranks, 0.1)
    fakes[2].stopped.set()
    for fake in fakes[:2]:
        fake.fail(TIMED_OUT, collective=True)
    with pytest.raises(RankFailure) as caught:
        listen(ranks, 5)
    first, _, second = str(caught.value).partition("; rank 0 failed: ")
    assert first.startswith("rank 2 (process 1002) has not answered for")
    assert second == TIMED_OUT


def test_a_failed_collective_of_answering_ranks_is_reported_as_it_is(ranks: Ranks, fakes: list[FakeRank]):
    fakes[1].fail(TIMED_OUT, collective=True)
    with pytest.raises(RankFailure) as caught:
        listen(ranks, 5)
    assert str(caught.value) == f"rank 1 failed: {TIMED_OUT}"
    assert caught.value.trace == "trace"


def test_the_cause_of_a_failed_collective_is_another_ranks_error(ranks: Ranks, fakes: list[FakeRank]):
    fakes[0].fail(TIMED_OUT, collective=True)
    threading.Timer(0.3, lambda: fakes[2].fail("MemoryError: no memory")).start()
    with pytest.raises(RankFailure, match=r"^rank 2 failed: MemoryError: no memory$"):
        listen(ranks, 5)


def test_a_users_error_comes_first(ranks: Ranks, fakes: list[FakeRank]):
    fakes[0].fail("lost", collective=True)
    fakes[2].fail("the checkpoint has no norm", user_error=True)
    with pytest.raises(RankFailure, match=r"^the checkpoint has no norm$") as caught:
        listen(ranks, 5)
    assert caught.value.user_error


@pytest.mark.parametrize("reported", [True, False])
def test_ranks_of_another_node(fakes: list[FakeRank], reported: bool):
    """Its command says what became of a rank; if the command itself is gone, that is the news."""
    ours, theirs = socket.socketpair()
    node = Channel(theirs)
    fakes[2].rank.node, fakes[2].rank.place = 1, "node 1"
    ranks = Ranks([fake.rank for fake in fakes], {1: Channel(ours)}, LocalRanks(1), LIMIT_S)
    if reported:
        fakes[2].leave()
        threading.Timer(0.3, lambda: node.send(RANK_ENDED, encode(RankEnded(2, -9)))).start()
    else:
        node.close()
    expected = r"^rank 2 \(process 1002, node 1\) was killed by SIGKILL$" if reported else "^node 1 is gone"
    with pytest.raises(RankFailure, match=expected):
        listen(ranks, 10)
    node.close()
    ours.close()
