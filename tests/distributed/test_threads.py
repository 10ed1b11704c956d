"""Ranks as threads: the ops mean what Group's mean, and breaking a rule shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prefold import SamplingParams
from prefold.distributed.errors import CollectiveError, CollectiveTimeout
from prefold.distributed.mesh import AXES, CARVED, Mesh
from prefold.engine.executor import EngineDeadError
from prefold.testing.thread_executor import ThreadLLM
from prefold.testing.threads import RankEnded, ThreadGroup, run_mesh_threads, run_threads, single_rank

MESHES = [
    Mesh(),
    Mesh(tp=3),
    Mesh(tp=2, pcp=2, dcp=4),
    Mesh(tp=2, pcp=2, dcp=2, pp=2, dp=2, ep=True),
]


@pytest.mark.parametrize("name", [*AXES, *CARVED])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_results_come_in_the_order_of_the_groups_ranks(mesh: Mesh, name: str) -> None:
    def rank_main(rank: int, groups: dict[str, ThreadGroup]) -> None:
        group = groups[name]
        ranks = mesh.group_of(name, rank)
        assert (group.ranks, group.rank) == (ranks, ranks.index(rank))
        assert group.all_reduce(torch.tensor([float(rank), 1.0])).tolist() == [sum(ranks), len(ranks)]
        assert group.all_gather(torch.tensor([rank])).tolist() == [[r] for r in ranks]
        part = group.reduce_scatter(torch.arange(2.0 * len(ranks)).view(-1, 2) + rank)
        expected = [2 * group.rank * len(ranks) + sum(ranks) + i * len(ranks) for i in range(2)]
        assert part.tolist() == expected
        assert group.broadcast(torch.tensor([rank]), len(ranks) - 1).tolist() == [ranks[-1]]
        group.barrier()
        gathers = [group.start_all_gather(torch.tensor([rank, i])) for i in range(2)]
        for i, gather in enumerate(gathers):
            assert [part.tolist() for part in gather.wait()] == [[r, i] for r in ranks]
            gather.release()

    run_mesh_threads(mesh, rank_main)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_to_all_moves_rows_to_their_places(size: int) -> None:
    def rank_main(group: ThreadGroup) -> None:
        counts = [(group.rank + place) % 3 for place in range(size)]
        rows = [[group.rank, place] for place in range(size) for _ in range(counts[place])]
        received = [(source + group.rank) % 3 for source in range(size)]
        for receive_counts in (None, received):
            x = torch.tensor(rows, dtype=torch.uint8).view(-1, 2)
            exchange = group.start_all_to_all(x, counts, 20, receive_counts)
            parts = [part.tolist() for part in exchange.wait()]
            exchange.release()
            assert parts == [[[source, group.rank]] * received[source] for source in range(size)]
        own = counts[group.rank]
        sent = (sum(counts) - own) * 2 * 2
        assert group.traffic.get("tp.all_to_all", [2, 0]) == [2, sent]

    run_threads(size, rank_main)


def test_messages_arrive_in_order_and_two_may_be_unread() -> None:
    def rank_main(rank: int, groups: dict[str, ThreadGroup]) -> list[float]:
        group = groups["pp"]
        group.send(torch.empty(0, 4), (group.rank + 1) % 2)  # nothing is sent
        if group.rank == 0:
            for i in range(5):
                group.send(torch.tensor([float(i)]), 1)
            return []
        return [group.recv(torch.empty(1), 0).item() for _ in range(5)]

    assert run_mesh_threads(Mesh(pp=2), rank_main) == [[], [0.0, 1.0, 2.0, 3.0, 4.0]]

    def unread(rank: int, groups: dict[str, ThreadGroup], count: int) -> None:
        if rank == 0:
            for _ in range(count):
                groups["pp"].send(torch.ones(1), 1)
        groups["pp"].barrier()

    run_mesh_threads(Mesh(pp=2), lambda *rank: unread(*rank, count=2))
    with pytest.raises(CollectiveTimeout):
        run_mesh_threads(Mesh(pp=2), lambda *rank: unread(*rank, count=3), timeout_s=0.2)


@pytest.mark.parametrize("size", [1, 3])
def test_calls_without_elements_do_nothing(size: int) -> None:
    def rank_main(group: ThreadGroup) -> dict:
        empty = torch.empty(size, 0)
        group.all_reduce(empty)
        group.all_gather(empty)
        group.reduce_scatter(empty)
        group.broadcast(empty, 0)
        for exchange in (group.start_all_gather(empty), group.start_all_to_all(empty[:0], [0] * size, 0)):
            assert all(part.numel() == 0 for part in exchange.wait())
            exchange.release()
        return group.traffic

    assert run_threads(size, rank_main) == [{}] * size


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.all_reduce(torch.ones(2 + (g.rank == 1))), ["all_reduce of [2]", "all_reduce of [3]"]),
        (lambda g: g.barrier() if g.rank else g.all_gather(torch.ones(2)), ["barrier", "all_gather of [2]"]),
        (lambda g: g.broadcast(torch.ones(2), g.rank), ["from place 0", "from place 1"]),
        (
            lambda g: g.all_gather(torch.ones(1, dtype=torch.float32 if g.rank else torch.float64)),
            ["torch.float32", "torch.float64"],
        ),
        (lambda g: g.start_all_to_all(torch.ones(0, 2), [0, 0], 4 + g.rank).wait(), ["[4, 2]", "[5, 2]"]),
    ],
)
def test_ranks_that_disagree_are_both_named(call: Callable[[ThreadGroup], object], words: list[str]) -> None:
    with pytest.raises(CollectiveError) as error:
        run_threads(2, call)
    for word in ["call 1 of group 'tp' [0, 1]", "rank 0", "rank 1", *words]:
        assert word in str(error.value)


def test_one_error_ends_all_and_is_the_one_raised() -> None:
    def rank_main(rank: int, groups: dict[str, ThreadGroup]) -> None:
        if rank == 3:
            raise ZeroDivisionError("on purpose")
        groups["tp"].barrier()

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        run_mesh_threads(Mesh(tp=4), rank_main)


def test_a_rank_that_returns_is_not_waited_for() -> None:
    with pytest.raises(RankEnded, match=r"barrier \(call 1 of group 'tp'\) waits for rank 0"):
        run_threads(2, lambda group: group.barrier() if group.rank else None)


def test_ranks_that_wait_for_each_other_time_out() -> None:
    def rank_main(rank: int, groups: dict[str, ThreadGroup]) -> None:
        first, second = ("tp", "pcp") if rank in (0, 3) else ("pcp", "tp")
        groups[first].barrier()
        groups[second].barrier()

    with pytest.raises(CollectiveTimeout, match="missing ranks: "):
        run_mesh_threads(Mesh(tp=2, pcp=2), rank_main, timeout_s=0.2)


def use(break_rule: Callable[[torch.Tensor, ThreadGroup], object]) -> None:
    run_threads(2, lambda group: break_rule(torch.ones(3, 2), group))


def test_broken_rules_of_exchanges_show() -> None:
    def change(x: torch.Tensor, group: ThreadGroup) -> None:
        gather = group.start_all_gather(x)
        x.add_(1)
        gather.wait()

    def write(x: torch.Tensor, group: ThreadGroup) -> None:
        gather = group.start_all_gather(x)
        gather.wait()[0].add_(1)
        gather.release()

    def three(x: torch.Tensor, group: ThreadGroup) -> None:
        for _ in range(3):
            group.start_all_gather(x)

    def crowd(x: torch.Tensor, group: ThreadGroup) -> None:
        group.start_all_to_all(x, [2, 1], 2)

    def miscount(x: torch.Tensor, group: ThreadGroup) -> None:
        group.start_all_to_all(x, [2, 1], 3, [1, 2]).wait()

    rules = [
        (change, "changed"),
        (write, "written"),
        (three, "in flight"),
        (crowd, "2"),
        (miscount, "receive_counts"),
    ]
    for break_rule, words in rules:
        with pytest.raises(AssertionError, match=words):
            use(break_rule)


def test_what_is_read_after_release_is_poison() -> None:
    def rank_main(group: ThreadGroup) -> None:
        for x, poison in ((torch.ones(2), torch.tensor(torch.nan)), (torch.tensor([1]), torch.tensor(77))):
            gather = group.start_all_gather(x)
            parts = gather.wait()
            gather.release()
            assert all(torch.equal(p, poison.expand_as(p)) or p.isnan().all() for p in parts)
            assert x[0] == 1

    run_threads(2, rank_main)
    gather = single_rank().start_all_gather(x := torch.ones(2))
    gather.wait()
    gather.release()
    assert x.tolist() == [1, 1], "a group of one hands out x itself"


def test_an_error_on_a_rank_ends_the_engine(checkpoint_of: Callable[[int], Path]) -> None:
    llm = ThreadLLM(str(checkpoint_of(2)), prefill_context_parallel_size=2, num_blocks=100, max_model_len=99)
    runner = llm.executor.runners[1]
    assert runner is not None

    def fail(*args: object) -> None:
        raise RuntimeError("rank 1 had enough")

    runner.execute = fail  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="rank 1 failed: RuntimeError: rank 1 had enough"):
        llm.generate([[1, 2, 3] * 20], SamplingParams(max_tokens=2))
    with pytest.raises(EngineDeadError):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
