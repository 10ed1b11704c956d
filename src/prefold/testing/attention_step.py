"""One step's attention on a mesh of threads, compared with dense float64 attention over the whole batch.

Each rank has a cache of its own, which holds its part of the requests' contexts and NaN everywhere else,
and buffers full of NaN. After the step every rank must hold its part of the new KV in the right slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from prefold.attention.backend import LatentRows
from prefold.attention.context_parallel import AttentionSetup, ContextParallelAttention
from prefold.attention.context_ways import ContextWays
from prefold.attention.native_backend import attention_backend
from prefold.attention.plan import StepPlan
from prefold.attention.row_format import row_formats
from prefold.config import MLAConfig
from prefold.distributed.group import Group
from prefold.distributed.mesh import Mesh
from prefold.kv_ownership import KVOwnership
from prefold.kv_spec import row_bytes
from prefold.request import SamplingParams
from prefold.step import NewRequestData, SchedulerOutput
from prefold.testing.threads import ThreadGroup, run_mesh_threads
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.kv_cache import allocate_kv_cache
from prefold.worker.pcp_manager import PCPManager
from prefold.worker.request_states import RequestStates
from prefold.workspace import NAN_BYTE, Workspace

NUM_LAYERS, HEADS_PER_RANK, HIDDEN, SCALE = 2, 3, 5, 0.4
TOLERANCE = 2e-5


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
    """A chunk of a prompt of which `left` tokens remain after the step."""
    return Req(num_computed, num_scheduled, num_computed + num_scheduled + left)


def decode(num_computed: int, num_scheduled: int = 1) -> Req:
    return Req(num_computed, num_scheduled, num_computed)


def random_batch(rng: np.random.Generator, max_computed: int) -> tuple[list[Req], list[int]]:
    """1 to 7 requests with contexts shorter than `max_computed`, and tokens of theirs to be restored."""
    requests = []
    for _ in range(rng.integers(1, 8)):
        computed, scheduled = int(rng.integers(0, max_computed)), int(rng.integers(1, 50))
        left = int(rng.integers(0, 3))
        requests.append(decode(computed + 1) if rng.random() < 0.4 else prefill(computed, scheduled, left))
    total = sum(r.num_scheduled for r in requests)
    return requests, rng.permutation(total)[: rng.integers(0, total + 1)].tolist()


@dataclass(frozen=True)
class Layout:
    """How the step is computed."""

    pcp: int = 1
    tp: int = 1
    dcp: int = 1
    block_size: int = 4
    interleave: int = 1
    way: str = "auto"
    tile: int = 16
    min_split: int = 0
    cache_dtype: str = "float32"
    shared_from: float = math.inf
    shared_rows: int = 1

    @property
    def mla(self) -> MLAConfig:
        return MLAConfig(None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)

    @property
    def mesh(self) -> Mesh:
        return Mesh(tp=self.tp, pcp=self.pcp, dcp=self.dcp)

    @property
    def ownership(self) -> KVOwnership:
        return KVOwnership(self.block_size, self.dcp, self.interleave)

    @property
    def ways(self) -> ContextWays:
        return ContextWays(
            self.mla,
            HEADS_PER_RANK,
            self.mla.token_dim,
            row_bytes(self.mla, self.tp, self.cache_dtype),
            self.pcp,
            self.dcp,
            tile_tokens=self.tile,
            q_itemsize=4,
            forced=self.way,
            shared_from=self.shared_from,
            shared_rows=self.shared_rows,
        )


class Step:
    """Inputs of a step, equal for all ranks: random queries, KV and hidden rows of every token."""

    def __init__(self, requests: Sequence[Req], layout: Layout, seed: int = 0) -> None:
        self.requests, self.layout = requests, layout
        (self.format,) = row_formats(layout.mla, layout.tp, layout.cache_dtype, Workspace())
        mla = layout.mla
        rng = np.random.default_rng(seed)
        counts = [-(-r.end // layout.ownership.virtual_block_size) for r in requests]
        self.num_blocks = sum(counts) + 3
        blocks = rng.permutation(self.num_blocks).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        num_heads = HEADS_PER_RANK * layout.tp
        self.q = [normal(NUM_LAYERS, r.num_scheduled, num_heads, mla.qk_head_dim) for r in requests]
        self.kv = [normal(NUM_LAYERS, r.end, mla.token_dim) for r in requests]
        self.hidden = normal(sum(r.num_scheduled for r in requests), HIDDEN)
        self.w_uk = normal(num_heads, mla.qk_nope_head_dim, mla.kv_lora_rank) * 0.5
        self.w_uv = normal(num_heads, mla.v_head_dim, mla.kv_lora_rank) * 0.5

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

    def slots(self, i: int, dcp_rank: int) -> list[int]:
        """Where DCP rank `dcp_rank` holds request i's tokens, -1 where it does not, token by token."""
        block, dcp, run = self.layout.block_size, self.layout.dcp, self.layout.interleave
        slots, held = [], [0] * dcp
        for p in range(self.requests[i].end):
            owner = p // run % dcp
            table = self.tables[i][held[owner] // block]
            slots.append(table * block + held[owner] % block if owner == dcp_rank else -1)
            held[owner] += 1
        return slots

    def cache(self, dcp_rank: int, new: bool) -> torch.Tensor:
        """[layers, blocks, block_size, width]: contexts, with `new` also this step's KV, else NaN."""
        formats, block_size = (self.format,), self.layout.block_size
        cache = allocate_kv_cache(
            NUM_LAYERS, self.num_blocks, block_size, formats, torch.device("cpu"), poison=True
        )
        for i, r in enumerate(self.requests):
            num = r.end if new else r.num_computed
            slots = torch.tensor(self.slots(i, dcp_rank)[:num], dtype=torch.int64)
            held = self.stored(self.kv[i][:, :num][:, slots >= 0].flatten(0, 1))
            cache.flatten(1, 2)[:, slots[slots >= 0]] = held.unflatten(0, (NUM_LAYERS, -1))
        return cache

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, dim] as the cache has them, padding poisoned."""
        out = torch.empty(len(rows), self.format.width, dtype=self.format.dtype)
        out.fill_(torch.nan if out.is_floating_point() else NAN_BYTE)
        self.format.encode(rows, out)
        return out

    def expected(self, layer: int) -> torch.Tensor:
        """[T, heads, v] float64, each request on its own; KV as it comes out of the cache."""
        outs, mla = [], self.layout.mla
        for q, kv, r in zip(self.q, self.kv, self.requests):
            latent = self.format.decode(self.stored(kv[layer])).double()
            kv_c, k_pe = latent.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
            k_nope = torch.einsum("sc,hdc->hsd", kv_c, self.w_uk.double())
            k = torch.cat((k_nope, k_pe.expand(len(k_nope), -1, -1)), dim=-1)
            v = torch.einsum("sc,hdc->hsd", kv_c, self.w_uv.double())
            scores = torch.einsum("thd,hsd->hts", q[layer].double(), k) * SCALE
            future = torch.arange(r.end) > torch.arange(r.num_computed, r.end)[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            outs.append(torch.einsum("hts,hsd->thd", weights, v))
        return torch.cat(outs)


@dataclass(frozen=True)
class RankResult:
    """What a rank has computed. `gathers`, of the PCP group: in each layer, then in the exchange."""

    tokens: np.ndarray
    """Global indices of the rank's tokens."""
    heads: slice
    dcp_rank: int
    outs: list[torch.Tensor]
    cache: torch.Tensor
    restored: torch.Tensor | None
    """On PCP place 0."""
    gathers: list[int]
    traces: dict[str, list]
    traffic: dict[str, int]
    """Bytes that the rank handed to its collectives, by their names."""
    places: dict[str, int]
    """The rank's place in each group."""
    plan: StepPlan


def run_rank(groups: dict[str, ThreadGroup], step: Step, wanted: np.ndarray) -> RankResult:
    """The step on one rank."""
    layout, pcp = step.layout, groups["pcp"]
    as_groups = cast(dict[str, Group], groups)
    for group in groups.values():
        group.trace = []
    workspace = Workspace(poison=True)
    ownership, dcp_rank = layout.ownership, groups["dcp"].rank
    cache = step.cache(dcp_rank, new=False)
    states = RequestStates(len(step.requests) + 2, 2000, ownership.virtual_block_size)
    output = step.scheduler_output()
    states.apply(output)
    manager = PCPManager(as_groups, ownership, layout.ways, layout.min_split, cache, workspace)
    backend = attention_backend(workspace, torch.device("cpu"), torch.float32)
    setup = AttentionSetup(
        attention=layout.mla,
        num_heads=HEADS_PER_RANK,
        scale=SCALE,
        kv_cache=cache,
        formats=row_formats(layout.mla, layout.tp, layout.cache_dtype, workspace),
        groups=as_groups,
        ownership=ownership,
        backend=backend,
        workspace=workspace,
        tile_tokens=layout.tile,
        compute_dtype=torch.float32,
    )
    attention = ContextParallelAttention(setup)
    batch = GlobalBatch.build(states, output, ownership, dcp_rank)
    parts = manager.partition(batch)
    local = manager.input_batch(batch, parts, states)
    attention.begin_step(local.plan)
    # Where the rank's tokens are in the global batch, by what the local batch says of them.
    ids = local.input_ids.tolist()
    where = {(int(t), int(p)): i for i, (t, p) in enumerate(zip(batch.token_ids, batch.positions))}
    assert len(where) == len(batch.token_ids), "token ids and positions name the tokens of these tests"
    tokens = np.array([where[key] for key in zip(ids, local.positions.tolist())], dtype=np.int64)

    heads = slice(groups["tp"].rank * HEADS_PER_RANK, (groups["tp"].rank + 1) * HEADS_PER_RANK)
    outs, gathers = [], []
    for layer in range(NUM_LAYERS):
        q = torch.cat([q[layer] for q in step.q])[tokens][:, heads].contiguous()
        kv = torch.cat([kv[layer, r.num_computed :] for kv, r in zip(step.kv, step.requests)])[tokens]
        before = pcp.num_gathers
        outs.append(
            attention.attend(layer, q, kv, LatentRows(layout.mla, step.w_uk[heads], step.w_uv[heads])).clone()
        )
        gathers.append(pcp.num_gathers - before)
    before = pcp.num_gathers
    restored = manager.exchange(local, step.hidden[tokens], wanted).clone()
    gathers.append(pcp.num_gathers - before)
    return RankResult(
        tokens=tokens,
        heads=heads,
        dcp_rank=dcp_rank,
        outs=outs,
        cache=cache,
        restored=restored if pcp.rank == 0 else None,
        gathers=gathers,
        traces={name: group.trace or [] for name, group in groups.items()},
        traffic={key: sent for group in groups.values() for key, (_, sent) in group.traffic.items()},
        places={name: group.rank for name, group in groups.items()},
        plan=local.plan,
    )


def check_step(
    requests: Sequence[Req], layout: Layout, wanted: Sequence[int] | None = None, seed: int = 0
) -> list[RankResult]:
    """Run a step on all ranks of `layout` and compare everything. AssertionError if anything differs.

    Args:
        wanted: tokens whose hidden rows are restored; by default the last of each request.
    """
    step = Step(requests, layout, seed)
    ends = np.cumsum([r.num_scheduled for r in requests]) - 1
    chosen = np.array(ends if wanted is None else wanted, dtype=np.int64)
    mesh = layout.mesh
    results = run_mesh_threads(mesh, lambda rank, groups: run_rank(groups, step, chosen))
    _check_who_computes(step, results)
    for layer in range(NUM_LAYERS):
        expected = step.expected(layer)
        for result in results:
            rows = expected[result.tokens][:, result.heads].flatten(1)
            assert result.outs[layer].shape == rows.shape
            assert torch.allclose(result.outs[layer].double(), rows, atol=TOLERANCE, rtol=0)
    caches = [step.cache(dcp_rank, new=True) for dcp_rank in range(layout.dcp)]
    for result in results:
        expected_cache = caches[result.dcp_rank]
        same = (result.cache == expected_cache) | (result.cache.isnan() & expected_cache.isnan())
        assert same.all()
        assert result.restored is None or torch.equal(result.restored, step.hidden[chosen])
    for name in results[0].traces:
        for ranks in mesh.groups(name):
            assert all(results[rank].traces[name] == results[ranks[0]].traces[name] for rank in ranks), name
    return results


def _check_who_computes(step: Step, results: Sequence[RankResult]) -> None:
    """Every token by one PCP rank, or, a decode token of a sharded cache, by all ranks of one unit."""
    layout = step.layout
    unit = min(layout.dcp, layout.pcp)
    is_prefill = np.repeat(
        [r.num_computed < r.num_prefill for r in step.requests], [r.num_scheduled for r in step.requests]
    )
    for tp in range(layout.tp):
        ranks = [result for i, result in enumerate(results) if i % layout.tp == tp]
        by_token: list[list[int]] = [[] for _ in is_prefill]
        for pcp, result in enumerate(ranks):
            for token in result.tokens:
                by_token[token].append(pcp)
        for token, pcps in enumerate(by_token):
            size = 1 if is_prefill[token] else unit
            assert pcps == list(range(pcps[0], pcps[0] + size)), (token, pcps)
            assert pcps[0] % size == 0
