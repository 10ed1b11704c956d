"""Who counts as waiting, before and after the engine has said so."""

import random

from prefold.engine.output_processor import OutputProcessor
from prefold.engine.streams import Phase, Stream, Streams
from prefold.request import SamplingParams


def add(streams: Streams, name: str, n: int = 1) -> Stream:
    processor = OutputProcessor(None)
    first, *_ = processor.add_request(name, None, [1], SamplingParams(n=n))
    stream = Stream(name, processor.requests[first], n)
    streams.add(stream)
    return stream


def test_a_burst_takes_the_free_seats_first():
    streams = Streams(3)
    for i, waiting in enumerate([0, 0, 0, 1, 2]):
        assert streams.num_waiting_with_one_more == waiting
        add(streams, str(i))


def test_what_runs_takes_a_seat_per_sample():
    streams = Streams(4)
    add(streams, "a", n=3)
    streams.mark_running("a")
    assert streams.num_waiting_with_one_more == 0
    b = add(streams, "b")
    assert streams.num_waiting_with_one_more == 1
    assert streams.remove(b)
    assert not streams.remove(b)
    assert streams.num_waiting_with_one_more == 0


def test_nobody_overtakes_one_that_waits():
    """It waits for memory though there are seats: so do all that come later."""
    streams = Streams(100)
    add(streams, "long")
    streams.mark_waiting("long")
    assert streams.num_waiting_with_one_more == 2
    add(streams, "b")
    assert streams.num_waiting_with_one_more == 3
    streams.mark_running("long")
    assert streams.num_waiting_with_one_more == 0


def test_counts_agree_whatever_happens():
    rng = random.Random(0)
    for _ in range(200):
        streams, seats = Streams(5), 5
        alive: dict[str, Stream] = {}
        for i in range(40):
            what = rng.randrange(4)
            name = rng.choice([*alive, "unknown"])
            if what == 0:
                alive[str(i)] = add(streams, str(i), n=rng.randrange(1, 4))
            elif what == 1:
                streams.mark_waiting(name)
            elif what == 2:
                streams.mark_running(name)
            elif name in alive:
                assert streams.remove(alive.pop(name))
            phases = [stream.phase for stream in alive.values()]
            waiting = phases.count(Phase.WAITING)
            taken = sum(s.num_samples for s in alive.values() if s.phase is Phase.RUNNING)
            free = 0 if waiting else max(0, seats - taken)
            expected = waiting + max(0, phases.count(Phase.SENT) + 1 - free)
            assert streams.num_waiting_with_one_more == expected
            assert len(streams) == len(alive)
