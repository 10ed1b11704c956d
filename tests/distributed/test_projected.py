"""Keys and values that PCP ranks project for each other: results, what travels, and who repeats nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefold import SamplingParams
from prefold.attention.mla import UpProjectedForm
from prefold.attention.walk import Segment
from prefold.testing.attention_step import (
    HEADS_PER_RANK,
    NUM_LAYERS,
    Layout,
    check_step,
    decode,
    prefill,
    random_batch,
)
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.thread_executor import ThreadLLM
from prefold.testing.threads import ThreadGroup
from prefold.traffic import projected_bytes

BATCHES = [
    [prefill(0, 61)],
    [prefill(7, 90, left=3), prefill(0, 33), decode(20)],
    [prefill(30, 29), decode(5), prefill(0, 3), prefill(2, 94)],
]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("way", ["auto", "local", "sliced"])
@pytest.mark.parametrize("pcp", [2, 3])
def test_shared_projections_compute_the_same(pcp: int, way: str, batch: list) -> None:
    for shared_rows in (1, 5, 1000):
        results = check_step(batch, Layout(pcp=pcp, way=way, shared_from=0, shared_rows=shared_rows))
        tiles = [result.plan.projected for result in results]
        assert tiles[0], "nothing was shared"
        rows = [[tile.num_rows for tile in of_rank] for of_rank in tiles]
        assert all(of_rank == rows[0] for of_rank in rows), "sizes are equal on all ranks"
        projected = sum(tokens.stop - tokens.start for of_rank in tiles for t in of_rank for tokens in t.own)
        assert projected <= sum(request.num_scheduled for request in batch), "each token once at most"


@pytest.mark.parametrize("layout", ["PCP2 DCP2", "TP2 PCP2 DCP4", "FP8"])
def test_shared_projections_beside_other_splits(layout: str) -> None:
    layouts = {
        "PCP2 DCP2": Layout(pcp=2, dcp=2, shared_from=0, shared_rows=6),
        "TP2 PCP2 DCP4": Layout(pcp=2, tp=2, dcp=4, shared_from=0, shared_rows=6),
        "FP8": Layout(pcp=2, cache_dtype="fp8_e4m3", shared_from=0, shared_rows=6),
    }
    for seed in range(4):
        batch, wanted = random_batch(np.random.default_rng(seed), max_computed=60)
        check_step(batch, layouts[layout], wanted, seed)


@pytest.mark.parametrize("length", range(16, 29))
def test_every_residue_in_tiles(length: int) -> None:
    check_step([prefill(length % 5, length)], Layout(pcp=2, shared_from=0, shared_rows=3))


def test_no_rank_projects_what_another_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where it is done: rows that all ranks project in a layer."""
    rows: list[int] = []
    project = UpProjectedForm.project

    def counting(self, latents, out):
        rows.append(len(latents))
        project(self, latents, out)

    monkeypatch.setattr(UpProjectedForm, "project", counting)
    check_step([prefill(0, 60)], Layout(pcp=3, shared_from=0, shared_rows=8))
    assert sum(rows) == 2 * 60, "two layers"
    rows.clear()
    check_step([prefill(0, 60)], Layout(pcp=3))
    assert sum(rows) > 2 * 120


def test_pieces_of_a_tile_cover_all_keys_of_a_request() -> None:
    results = check_step([prefill(9, 50)], Layout(pcp=2, shared_from=0, shared_rows=4))
    for result in results:
        seen: list[Segment] = sorted(
            (piece.segment for tile in result.plan.projected for of_rank in tile.pieces for piece in of_rank),
            key=lambda segment: segment.start,
        )
        last = result.plan.works[0].runs[-1].end
        keys = [key for segment in seen for key in range(segment.start, segment.end)]
        assert keys == list(range(9, last)), "up to the rank's last query, each once"


def test_bytes_are_those_of_the_formula() -> None:
    layout = Layout(pcp=2, shared_from=0, shared_rows=7)
    shared, apart = check_step([prefill(3, 61)], layout), check_step([prefill(3, 61)], Layout(pcp=2))
    for with_sharing, without in zip(shared, apart):
        num_rows = sum(tile.num_rows for tile in with_sharing.plan.projected)
        assert num_rows >= 31
        more = with_sharing.traffic["pcp.all_gather"] - without.traffic["pcp.all_gather"]
        assert more == NUM_LAYERS * projected_bytes(num_rows, HEADS_PER_RANK, layout.mla, itemsize=4)


def test_auto_follows_the_transport_that_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where shared memory was asked for and there is none."""
    wide: dict[str, Any] = {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "v_head_dim": 32}
    make_checkpoint("DeepseekV3ForCausalLM", tmp_path, num_hidden_layers=1, **wide)
    options = {"prefill_context_parallel_size": 2, "max_model_len": 400, "num_blocks": 20}

    def num_gathers(choice: str) -> list[int]:
        llm = ThreadLLM(str(tmp_path), share_projections=choice, **options)
        with llm:
            prompt = {"prompt_token_ids": list(range(5, 305))}
            llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
            llm.executor.synchronize()
            return [groups["pcp"].traffic["pcp.all_gather"][0] for groups in llm.executor.groups]

    never, always = num_gathers("off"), num_gathers("on")
    assert min(always) > max(never)
    assert num_gathers("auto") == always
    monkeypatch.setattr(ThreadGroup, "shares_memory", False)
    assert num_gathers("auto") == never
    assert num_gathers("on") == always
