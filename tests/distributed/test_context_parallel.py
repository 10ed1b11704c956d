"""A step on P ranks (as threads) against dense float64 attention over the whole batch.

Each rank has a cache of its own, which holds the requests' contexts and NaN everywhere else, and
buffers full of NaN. After the step every rank must hold the same new KV in the right slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import prefold.attention.context_parallel as context_parallel
from prefold.attention.context_parallel import ContextParallelAttention
from prefold.attention.torch_backend import TorchBackend
from prefold.config import MLAConfig
from prefold.request import SamplingParams
from prefold.step import NewRequestData, SchedulerOutput
from prefold.testing.threads import ThreadGroup, run_threads
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.pcp_manager import PCPManager
from prefold.worker.request_states import RequestStates
from prefold.workspace import Workspace

torch.set_num_threads(1)

MLA = MLAConfig(None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
NUM_LAYERS, NUM_HEADS, HIDDEN, SCALE = 2, 3, 5, 0.4


@dataclass(frozen=True)
class Req:
    """`num_scheduled` tokens after `num_computed`; its prompt has `num_prefill` tokens."""

    num_computed: int
    num_scheduled: int
    num_prefill: int

    @property
    def end(self) -> int:
        return self.num_computed + self.num_scheduled


def prefill(num_computed: int, num_scheduled: int, left: int = 0) -> Req:
    return Req(num_computed, num_scheduled, num_computed + num_scheduled + left)


def decode(num_computed: int) -> Req:
    return Req(num_computed, 1, num_computed)


class Step:
    """Inputs of a step, equal for all ranks: random queries, KV and hidden rows of every token."""

    def __init__(self, requests: Sequence[Req], block_size: int, seed: int = 0) -> None:
        self.requests, self.block_size = requests, block_size
        rng = np.random.default_rng(seed)
        counts = [-(-r.end // block_size) for r in requests]
        self.num_blocks = sum(counts) + 3
        blocks = rng.permutation(self.num_blocks).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.q = [normal(NUM_LAYERS, r.num_scheduled, NUM_HEADS, MLA.qk_head_dim) for r in requests]
        self.kv = [normal(NUM_LAYERS, r.end, MLA.token_dim) for r in requests]
        self.hidden = normal(sum(r.num_scheduled for r in requests), HIDDEN)
        self.w_uk = normal(NUM_HEADS, MLA.qk_nope_head_dim, MLA.kv_lora_rank) * 0.5
        self.w_uv = normal(NUM_HEADS, MLA.v_head_dim, MLA.kv_lora_rank) * 0.5

    def scheduler_output(self) -> SchedulerOutput:
        new = [
            NewRequestData(
                request_id=str(i),
                token_ids=[(17 * i + p) % 100 for p in range(max(r.end, r.num_prefill))],
                num_prompt_tokens=r.num_prefill,
                num_prefill_tokens=r.num_prefill,
                num_computed_tokens=r.num_computed,
                block_ids=self.tables[i],
                sampling_params=SamplingParams(),
                seed=0,
            )
            for i, r in enumerate(self.requests)
        ]
        return SchedulerOutput(0, new, [], {str(i): r.num_scheduled for i, r in enumerate(self.requests)}, [])

    def slots(self, i: int) -> torch.Tensor:
        """Cache slots of request i's tokens, position by position."""
        size = self.block_size
        table = self.tables[i]
        return torch.tensor([table[p // size] * size + p % size for p in range(self.requests[i].end)])

    def cache(self, dtype: torch.dtype, new: bool) -> torch.Tensor:
        """[layers, blocks, block_size, token_dim]: contexts, with `new` also this step's KV, else NaN."""
        cache = torch.full((NUM_LAYERS, self.num_blocks, self.block_size, MLA.token_dim), torch.nan).to(dtype)
        for i, r in enumerate(self.requests):
            num = r.end if new else r.num_computed
            cache.flatten(1, 2)[:, self.slots(i)[:num]] = self.kv[i][:, :num].to(dtype)
        return cache

    def expected(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """[T, heads * v] float64, each request on its own; KV rounded to the cache's dtype."""
        outs = []
        for q, kv, r in zip(self.q, self.kv, self.requests):
            latent = kv[layer].to(dtype).double()
            kv_c, k_pe = latent.split([MLA.kv_lora_rank, MLA.qk_rope_head_dim], dim=-1)
            k_nope = torch.einsum("sc,hdc->hsd", kv_c, self.w_uk.double())
            k = torch.cat((k_nope, k_pe.expand(NUM_HEADS, -1, -1)), dim=-1)
            v = torch.einsum("sc,hdc->hsd", kv_c, self.w_uv.double())
            scores = torch.einsum("thd,hsd->hts", q[layer].double(), k) * SCALE
            future = torch.arange(r.end) > torch.arange(r.num_computed, r.end)[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hts,hsd->thd", weights, v).flatten(1))
        return torch.cat(outs)


@dataclass(frozen=True)
class RankResult:
    tokens: np.ndarray
    """Global indices of the rank's tokens."""
    outs: list[torch.Tensor]
    cache: torch.Tensor
    restored: torch.Tensor
    gathers: list[int]
    """Collectives in each layer, then in the exchange."""


def run_rank(
    group: ThreadGroup,
    step: Step,
    wanted: np.ndarray,
    tile: int,
    min_split: int,
    dtype: torch.dtype,
) -> RankResult:
    torch.set_num_threads(1)
    workspace = Workspace(poison=True)
    cache = step.cache(dtype, new=False)
    states = RequestStates(len(step.requests) + 2, 2000, step.block_size)
    output = step.scheduler_output()
    states.apply(output)
    manager = PCPManager(group, min_split, cache, workspace)
    backend = TorchBackend(workspace, torch.device("cpu"))
    attention = ContextParallelAttention(MLA, SCALE, cache, group, backend, workspace, tile, torch.float32)
    batch = GlobalBatch.build(states, output, step.block_size)
    parts = manager.partition(batch)
    local = manager.input_batch(batch, parts, states)
    attention.begin_step(local.plan)
    # Where the rank's tokens are in the global batch, by what the local batch says of them.
    ids = local.input_ids.tolist()
    where = {(int(t), int(p)): i for i, (t, p) in enumerate(zip(batch.token_ids, batch.positions))}
    assert len(where) == len(batch.token_ids), "token ids and positions name the tokens of these tests"
    tokens = np.array([where[key] for key in zip(ids, local.positions.tolist())], dtype=np.int64)

    outs, gathers = [], []
    for layer in range(NUM_LAYERS):
        q = torch.cat([q[layer] for q in step.q])[tokens]
        kv = torch.cat([kv[layer, r.num_computed :] for kv, r in zip(step.kv, step.requests)])[tokens]
        before = group.num_gathers
        outs.append(attention.attend(layer, q, kv, step.w_uk, step.w_uv).clone())
        gathers.append(group.num_gathers - before)
    before = group.num_gathers
    restored = manager.exchange(batch, parts, local.plan, step.hidden[tokens], wanted).clone()
    gathers.append(group.num_gathers - before)
    return RankResult(tokens, outs, cache, restored, gathers)


def check(
    step: Step,
    size: int,
    tile: int = 16,
    min_split: int = 0,
    dtype: torch.dtype = torch.float32,
    wanted: Sequence[int] | None = None,
) -> list[RankResult]:
    """Run `step` on `size` ranks and compare everything."""
    total = len(step.hidden)
    ends = np.cumsum([r.num_scheduled for r in step.requests]) - 1
    chosen = np.array(ends if wanted is None else wanted, dtype=np.int64)
    results = run_threads(size, lambda group: run_rank(group, step, chosen, tile, min_split, dtype))
    computed = np.concatenate([result.tokens for result in results])
    assert sorted(computed.tolist()) == list(range(total)), "each token is computed by one rank"
    expected_cache = step.cache(dtype, new=True)
    for layer in range(NUM_LAYERS):
        expected = step.expected(layer, dtype)
        for result in results:
            assert result.outs[layer].shape == (len(result.tokens), NUM_HEADS * MLA.v_head_dim)
            assert torch.allclose(result.outs[layer].double(), expected[result.tokens], atol=2e-5, rtol=0)
    for result in results:
        same = (result.cache == expected_cache) | (result.cache.isnan() & expected_cache.isnan())
        assert same.all()
        assert torch.equal(result.restored, step.hidden[chosen])
    return results


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
        monkeypatch.setattr(context_parallel, "prefer_absorbed", forced[request.param])
    return request.param


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BATCHES)
def test_a_step_on_ranks_equals_dense_attention(name: str, size: int):
    check(Step(BATCHES[name], block_size=4), size)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("tile", [1, 3, 32, 1000])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_tiles_and_blocks_of_any_size(tile: int, block_size: int):
    check(Step(BATCHES["mixed"], block_size), 3, tile=tile)


@pytest.mark.parametrize("size", [2, 3])
def test_every_length(size: int):
    """Each residue of the length modulo the chunks and blocks, fresh and after a context."""
    for length in range(1, 8 * size + 4):
        check(Step([prefill(length % 7, length)], block_size=2, seed=length), size, tile=5)


@pytest.mark.parametrize("seed", range(25))
def test_random_batches(seed: int):
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(rng.integers(1, 8)):
        computed, scheduled = int(rng.integers(0, 60)), int(rng.integers(1, 50))
        left = int(rng.integers(0, 3))
        requests.append(decode(computed + 1) if rng.random() < 0.4 else prefill(computed, scheduled, left))
    total = sum(r.num_scheduled for r in requests)
    wanted = rng.permutation(total)[: rng.integers(0, total + 1)]
    check(
        Step(requests, block_size=int(rng.integers(1, 9)), seed=seed),
        size=int(rng.integers(1, 7)),
        tile=int(rng.integers(1, 40)),
        min_split=int(rng.choice([0, 16, 32])),
        wanted=wanted.tolist(),
    )


def test_ranks_without_tokens_join_in():
    for requests in ([prefill(0, 1)], [decode(9)], [prefill(0, 3), decode(2)]):
        results = check(Step(requests, block_size=4), 8)
        assert sum(len(result.tokens) == 0 for result in results) >= 4
        assert len({tuple(result.gathers) for result in results}) == 1


def test_a_cache_in_bfloat16():
    """Queries and sums stay float32; keys and values are what the cache holds, on every rank."""
    for size in (1, 3):
        check(Step(BATCHES["mixed"], block_size=4), size, dtype=torch.bfloat16)


def test_collectives_of_a_step():
    """One per layer where prompts are computed; one for decode KV and sampled rows together."""

    def gathers(requests: list[Req], wanted: list[int]) -> list[int]:
        results = check(Step(requests, block_size=4), 2, wanted=wanted)
        assert results[0].gathers == results[1].gathers
        return results[0].gathers

    assert gathers([prefill(0, 40, left=3)], []) == [1, 1, 0], "a non-final chunk moves no hidden state"
    assert gathers([prefill(0, 40)], [39]) == [1, 1, 1]
    assert gathers([decode(5), decode(9)], [0, 1]) == [0, 0, 1]
    assert gathers([decode(5), prefill(0, 40, left=3)], [0]) == [1, 1, 1]


def test_the_dense_oracle_notices(monkeypatch: pytest.MonkeyPatch):
    """These tests can fail: without its last segment a rank misses the others' tokens."""
    monkeypatch.setattr(context_parallel, "segments_after_gather", lambda work: [])
    with pytest.raises(AssertionError):
        check(Step(BATCHES["one prompt"], block_size=4), 2)
    check(Step(BATCHES["one prompt"], block_size=4), 1)
