"""A step on P ranks that all hold the whole cache, against dense attention (testing.attention_step)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from prefold.attention import plan, travel
from prefold.kernels import library
from prefold.testing.attention_step import Layout, Req, check_step, decode, prefill, random_batch
from prefold.worker import step_plan

torch.set_num_threads(1)

SIZES = [1, 2, 3, 4, 8]

BATCHES: dict[str, list[Req]] = {
    "one prompt": [prefill(0, 70)],
    "a later chunk": [prefill(37, 33, left=5)],
    "one token": [prefill(0, 1)],
    "the last token of a prompt": [prefill(40, 1)],
    "shorter than 2P": [prefill(0, 5), prefill(9, 3)],
    "decode only": [decode(1), decode(30), decode(64), decode(7), decode(16)],
    "one decode": [decode(50)],
    "mixed": [decode(21), prefill(0, 40), prefill(13, 9), decode(3), prefill(0, 1), prefill(64, 17, left=9)],
    "many lengths": [prefill(i % 5 * 4, n) for i, n in enumerate([1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33])],
    "uneven": [prefill(0, 64), prefill(0, 10), prefill(0, 64)],
    "one token each": [prefill(3 * i, 1) for i in range(16)],
}


@pytest.fixture(params=["by cost", "absorbed", "up-projected"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    forced: dict[str, Callable[..., bool]] = {
        "absorbed": lambda *_: True,
        "up-projected": lambda *_: False,
    }
    if request.param in forced:
        monkeypatch.setattr(step_plan, "prefer_absorbed", forced[request.param])
        monkeypatch.setattr(travel, "prefer_absorbed", forced[request.param])
    return request.param


WAYS = ["local", "sliced"]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_on_ranks_equals_dense_attention(name: str, size: int, way: str):
    check_step(BATCHES[name], Layout(size, way=way))


@pytest.mark.parametrize("most", [0, 9, 20])
@pytest.mark.parametrize("form", ["absorbed"], indirect=True)
def test_absorbed_queries_that_buffers_have_no_room_for(most: int, form: str, monkeypatch):
    """The first ones stay absorbed, the rest is up-projected, decode tokens are absorbed in any case."""
    monkeypatch.setattr(plan, "ABSORBED_TOKENS", most)
    for name in ("mixed", "many lengths", "decode only"):
        check_step(BATCHES[name], Layout(2, way="local"))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["the last token of a prompt", "decode only", "mixed"])
def test_few_queries_without_native_kernels(name: str, size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "is_available", lambda: False)
    check_step(BATCHES[name], Layout(size, way="local"))


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("size", [1, 2])
def test_few_queries_at_stored_rows(size: int, cache_dtype: str):
    """In one call with those of other requests, neighbours in the batch or not."""
    chunks = [prefill(40, 1), prefill(0, 40), prefill(33, 8), prefill(31, 9), prefill(1, 3)]
    for requests in (chunks, [*chunks, decode(30), decode(64, 3)], [decode(1), decode(50)]):
        check_step(requests, Layout(size, cache_dtype=cache_dtype))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tile", [1, 3, 32, 1000])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_tiles_and_blocks_of_any_size(tile: int, block_size: int, way: str):
    check_step(BATCHES["mixed"], Layout(3, block_size=block_size, tile=tile, way=way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_every_length(size: int, way: str):
    """Each residue of the length modulo the chunks and blocks, fresh and after a context."""
    layout = Layout(size, block_size=2, tile=5, way=way)
    for length in range(1, 8 * size + 4):
        check_step([prefill(length % 7, length)], layout, seed=length)


@pytest.mark.parametrize("seed", range(25))
def test_random_batches(seed: int):
    rng = np.random.default_rng(seed)
    requests, wanted = random_batch(rng, max_computed=60)
    layout = Layout(
        pcp=int(rng.integers(1, 7)),
        block_size=int(rng.integers(1, 9)),
        tile=int(rng.integers(1, 40)),
        min_split=int(rng.choice([0, 16, 32])),
        way=str(rng.choice(WAYS)),
    )
    check_step(requests, layout, wanted=wanted, seed=seed)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_tokens_join_in(way: str):
    for requests in ([prefill(0, 1)], [decode(9)], [prefill(9, 1)], [prefill(0, 3), decode(2)]):
        results = check_step(requests, Layout(8, way=way))
        assert sum(len(result.tokens) == 0 for result in results) >= 4
        assert len({tuple(result.gathers) for result in results}) == 1


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_of_few_bits(way: str, cache_dtype: str):
    """Queries and sums stay float32; keys and values are what the cache holds, on every rank."""
    for size in (1, 3):
        check_step(BATCHES["mixed"], Layout(size, way=way, cache_dtype=cache_dtype))


@pytest.mark.parametrize("way", WAYS)
def test_decode_rows_of_several_tokens(way: str):
    """Each token sees what is before it, and itself."""
    check_step([decode(9, 4), decode(30, 2), prefill(0, 9), decode(1, 3)], Layout(2, way=way))


@pytest.mark.parametrize("piece", [1, 7, 16])
def test_queries_travel_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch):
    """However few fit into the buffers, and with requests that end and start within a piece."""
    monkeypatch.setattr(step_plan, "TRAVEL_TOKENS", piece)
    for name in ("mixed", "many lengths", "decode only"):
        check_step(BATCHES[name], Layout(2, way="sliced"))


def test_collectives_of_a_step():
    """One per layer where prompts are computed; one for decode KV and sampled rows together."""

    def gathers(requests: list[Req], wanted: list[int], way: str = "auto") -> list[int]:
        results = check_step(requests, Layout(2, way=way), wanted=wanted)
        assert results[0].gathers == results[1].gathers
        return results[0].gathers

    assert gathers([prefill(0, 40, left=3)], []) == [1, 1, 0], "a non-final chunk moves no hidden state"
    assert gathers([prefill(0, 40)], [39]) == [1, 1, 0], "the last token is on place 0"
    assert gathers([prefill(0, 40)], [20, 39]) == [1, 1, 1]
    assert gathers([decode(5), decode(9)], [0, 1]) == [0, 0, 1]
    assert gathers([decode(5), prefill(0, 40, left=3)], [0]) == [1, 1, 1]
    assert gathers([prefill(0, 40)], [39], way="sliced") == [1, 1, 0], "no context, nobody travels"
    assert gathers([prefill(3, 40), prefill(5, 9)], [39], way="sliced") == [2, 2, 0], "queries, all at once"


def test_the_dense_oracle_notices(monkeypatch: pytest.MonkeyPatch):
    """These tests can fail: without its last segment a rank misses the others' tokens."""
    monkeypatch.setattr(step_plan, "others_segments", lambda *_: ())
    with pytest.raises(AssertionError):
        check_step(BATCHES["one prompt"], Layout(2))
    check_step(BATCHES["one prompt"], Layout(1))
