"""A step on ranks that share a KV cache (D > 1), against dense attention (testing.attention_step)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from prefold.attention import merge, travel
from prefold.attention.context_ways import ContextWays
from prefold.kernels import library
from prefold.testing.attention_step import (
    HEADS_PER_RANK,
    NUM_LAYERS,
    Layout,
    Req,
    check_step,
    decode,
    prefill,
    random_batch,
)
from prefold.traffic import exchange_bytes, shared_decode_bytes, travel_bytes
from prefold.worker import step_plan

torch.set_num_threads(1)

# (P, TP, D): D divides P, D = P * k, and D with the heads alone (P = 1).
LAYOUTS = [(2, 1, 2), (4, 1, 2), (4, 1, 4), (1, 2, 2), (2, 2, 2), (2, 2, 4), (1, 4, 2)]
WAYS = ["kv", "query"]
BLOCK, TILE = 4, 32


def layout_of(sizes: tuple[int, int, int], interleave: int = 1, **options) -> Layout:
    pcp, tp, dcp = sizes
    return Layout(pcp, tp, dcp, BLOCK, interleave, tile=TILE, **options)


@pytest.fixture(params=LAYOUTS, ids=lambda sizes: "pcp{}_tp{}_dcp{}".format(*sizes))
def sizes(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    return request.param


BATCHES: dict[str, list[Req]] = {
    "one prompt": [prefill(0, 70)],
    "tails": [prefill(40, 1), prefill(33, 2), prefill(31, 7), prefill(1, 1)],
    "decode": [decode(1), decode(30), decode(64), decode(7), decode(16)],
    "one decode": [decode(50)],
    "rows of several tokens": [decode(9, 3), decode(30, 2), decode(1, 4)],
    "mixed": [decode(21), prefill(0, 40), prefill(13, 9), decode(3), prefill(0, 1), prefill(64, 17, left=9)],
    "one token each": [prefill(3 * i, 1) for i in range(9)],
}


@pytest.mark.parametrize("interleave", [1, BLOCK])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_on_ranks_equals_dense_attention(
    sizes: tuple[int, int, int], name: str, way: str, interleave: int
):
    check_step(BATCHES[name], layout_of(sizes, interleave, way=way))


@pytest.mark.parametrize("form", ["absorbed", "up-projected"])
@pytest.mark.parametrize("way", WAYS)
def test_both_forms(sizes: tuple[int, int, int], way: str, form: str, monkeypatch: pytest.MonkeyPatch):
    for module in (step_plan, travel):
        monkeypatch.setattr(module, "prefer_absorbed", lambda *_: form == "absorbed")
    check_step(BATCHES["mixed"], layout_of(sizes, way=way))


@pytest.mark.parametrize("name", ["decode", "rows of several tokens"])
def test_decode_without_native_kernels(
    sizes: tuple[int, int, int], name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(library, "is_available", lambda: False)
    check_step(BATCHES[name], layout_of(sizes))


@pytest.mark.parametrize("way", WAYS)
def test_contexts_around_tiles_and_virtual_blocks(sizes: tuple[int, int, int], way: str):
    """A context that ends below, at and above a tile, a tile of every rank, and a virtual block; with
    tails of one token, of a few, and of one more than that."""
    layout = layout_of(sizes, interleave=2, way=way)
    virtual = layout.ownership.virtual_block_size
    edges = {TILE, TILE * layout.dcp, virtual, 3 * virtual}
    contexts = sorted({edge + i for edge in edges for i in (-1, 0, 1)})
    requests = [prefill(context, 1 + i % 3 * 5) for i, context in enumerate(contexts)]
    check_step(requests, layout)


def test_every_length(sizes: tuple[int, int, int]):
    """Each residue of context and length modulo chunks and blocks; decode at every length."""
    turns = 2 * sizes[0] * BLOCK * sizes[2]
    for i, start in enumerate(range(0, turns + 3, 12)):
        lengths = range(start + 1, start + 13)
        layout = layout_of(sizes, interleave=(1, 2, BLOCK)[i % 3], way=WAYS[i % 2])
        check_step([prefill(n % 9, n) for n in lengths] + [decode(n) for n in lengths], layout, seed=start)


@pytest.mark.parametrize("seed", range(24))
def test_random_batches(seed: int):
    rng = np.random.default_rng(seed)
    requests, wanted = random_batch(rng, max_computed=90)
    pcp, tp, dcp = LAYOUTS[seed % len(LAYOUTS)]
    block = int(rng.choice([1, 2, 6, 8]))
    layout = Layout(
        pcp,
        tp,
        dcp,
        block_size=block,
        interleave=int(rng.choice([i for i in range(1, block + 1) if block % i == 0])),
        tile=int(rng.integers(1, 40)),
        min_split=int(rng.choice([0, 16, 32])),
        way=str(rng.choice([*WAYS, "auto"])),
    )
    check_step(requests, layout, wanted=wanted, seed=seed)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_without_tokens_or_keys_join_in(sizes: tuple[int, int, int], way: str):
    """A context of one token, of which all ranks but one hold nothing; a token that one rank computes."""
    for requests in ([prefill(1, 1)], [decode(1)], [prefill(0, 1)], [prefill(2, 3), decode(2)]):
        check_step(requests, layout_of(sizes, way=way))


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_of_few_bits(sizes: tuple[int, int, int], way: str, cache_dtype: str):
    check_step(BATCHES["mixed"], layout_of(sizes, way=way, cache_dtype=cache_dtype))


@pytest.mark.parametrize("piece", [1, 7, 16])
def test_queries_travel_in_pieces(sizes: tuple[int, int, int], piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_plan, "TRAVEL_TOKENS", piece)
    check_step(BATCHES["mixed"], layout_of(sizes, way="query"))


@pytest.mark.parametrize("name", ["decode", "rows of several tokens", "mixed"])
def test_large_results_are_summed(sizes: tuple[int, int, int], name: str, monkeypatch: pytest.MonkeyPatch):
    """And small ones too, if told so; with shards that hold nothing of a request."""
    monkeypatch.setattr(merge, "SUM_FROM_BYTES", -(1 << 40))
    results = check_step([*BATCHES[name], decode(1)], layout_of(sizes))
    assert ("dcp_pcp.all_reduce" in results[0].traffic) == (min(sizes[0], sizes[2]) > 1)


# ---------------------------------------------------------------- what is moved


def trace(
    sizes: tuple[int, int, int], requests: list[Req], way: str = "auto", wanted: list[int] | None = None
) -> list[tuple[str, str]]:
    """(group, op) of what rank 0 calls in two layers and the exchange, without what is the identity."""
    result = check_step(requests, layout_of(sizes, way=way), wanted)[0]
    return sorted((name, call[1]) for name, calls in result.traces.items() for call in calls)


def test_collectives_of_a_prefill():
    """Without context: one gather per layer, sharded or not, and sampled rows that are not on place 0."""
    for sizes in ((2, 1, 2), (4, 1, 2), (2, 2, 4)):
        assert trace(sizes, [prefill(0, 40)]) == [("pcp", "all_gather")] * 2
        assert trace(sizes, [prefill(0, 40)], wanted=[20, 39]) == [("pcp", "all_gather")] * 3
    assert trace((1, 2, 2), [prefill(0, 40)]) == []


def test_collectives_of_a_decode_step():
    """Ranks with the same heads have the queries already; one unit has nothing to tell another."""
    rows = [decode(9), decode(30)]
    joined = ("dcp_pcp", "all_gather")
    assert trace((2, 1, 2), rows) == [joined] * 2
    heads = [("dcp_tp", "all_gather")] * 2 + [("dcp_tp", "all_to_all")] * 2
    assert trace((1, 2, 2), rows) == heads
    assert trace((2, 2, 4), rows) == [joined] * 2 + heads
    exchange = ("pcp", "all_gather")
    assert trace((4, 1, 2), rows) == [joined] * 2 + [exchange], "two units: each tells the other"


def test_collectives_of_a_context():
    """Keys: a gather per tile. Queries: there and back, whatever the number of requests."""
    rows = [prefill(70, 8), prefill(40, 9)]  # 55 tokens on a rank, in tiles of 16
    new = [("pcp", "all_gather")] * 2
    assert trace((2, 1, 2), rows, "kv") == [("dcp", "all_gather")] * 8 + new
    there_and_back = [("dcp", "all_gather")] * 2 + [("dcp", "all_to_all")] * 2
    assert trace((2, 1, 2), rows, "query") == there_and_back + new


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["tails", "mixed", "decode"])
def test_bytes_equal_the_formulas(sizes: tuple[int, int, int], name: str, way: str):
    """On every rank, all layers and the exchange."""
    layout = layout_of(sizes, way=way)
    results = check_step(BATCHES[name], layout, wanted=[])
    mla, num_parts = layout.mla, layout.dcp // min(layout.dcp, layout.pcp)
    for result in results:
        plan, token_bytes = result.plan, mla.token_dim * 4
        num_decode = plan.num_tokens - plan.num_prefill_tokens
        expected = Counter(shared_decode_bytes(num_decode, HEADS_PER_RANK, num_parts, mla))
        expected["pcp.all_gather"] += plan.gather_tokens * token_bytes
        expected["dcp.all_gather"] += sum(tile.num_rows for tile in plan.kv_tiles) * token_bytes
        q_dim, out_dim = (mla.qk_head_dim, mla.v_head_dim)
        if num_parts > 1:
            q_dim, out_dim = mla.token_dim, mla.kv_lora_rank
        for piece in plan.travel:
            sent = travel_bytes(piece.counts, result.places["dcp"], HEADS_PER_RANK, q_dim * 4, out_dim)
            expected.update(dict(zip(("dcp.all_gather", "dcp.all_to_all"), sent)))
        expected = Counter({key: NUM_LAYERS * num_bytes for key, num_bytes in expected.items()})
        expected["pcp.all_gather"] += exchange_bytes(
            int(plan.sent_decode.max()) * NUM_LAYERS * token_bytes, 0
        )[1]
        alone = {"pcp": layout.pcp, "dcp_tp": num_parts, "dcp_pcp": layout.dcp // num_parts}
        happened = {key: n for key, n in expected.items() if alone.get(key.split(".")[0], layout.dcp) > 1}
        assert {key: n for key, n in result.traffic.items() if n} == {k: n for k, n in happened.items() if n}


def test_keys_and_queries_travel_in_one_step(monkeypatch: pytest.MonkeyPatch):
    """Both over the same group, some requests this way and some that."""

    def choose(self: ContextWays, num_queries: np.ndarray, num_computed: np.ndarray) -> np.ndarray:
        return np.where(np.arange(len(num_computed)) % 2, *WAYS)

    monkeypatch.setattr(ContextWays, "choose", choose)
    for sizes in LAYOUTS:
        check_step([prefill(30 + 9 * i, 3 * i + 1) for i in range(6)] + [decode(20)], layout_of(sizes))


def test_other_units_get_the_decode_kv():
    """P / D units decode different requests; afterwards every replica of a shard is the same."""
    results = check_step([decode(i + 5) for i in range(6)], layout_of((4, 1, 2)))
    assert [len(result.tokens) for result in results] == [3] * 4
    assert [result.plan.sent_decode.sum() for result in results] == [6] * 4, "each token by its owner"
    assert [result.tokens.tolist() for result in results[::2]] != [results[0].tokens.tolist()] * 2


def test_the_dense_oracle_notices(monkeypatch: pytest.MonkeyPatch):
    """These tests can fail: with one key less on a shard, and with a length that counts all ranks' keys."""
    monkeypatch.setattr(
        step_plan.RankPlace, "part_of_context", lambda self, n: (0, max(0, n // self.ownership.dcp_size - 1))
    )
    with pytest.raises(AssertionError):
        check_step([prefill(40, 9)], layout_of((2, 1, 2), way="query"))
