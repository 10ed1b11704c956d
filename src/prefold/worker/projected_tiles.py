"""Which new tokens' keys and values a rank projects for all, tile by tile (attention.projected)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from prefold.attention.plan import RequestWork
from prefold.attention.projected import ProjectedPiece, ProjectedTile
from prefold.attention.walk import Segment
from prefold.distributed.pcp_layout import Partition


def projected_tiles(
    parts: Partition,
    rank: int,
    is_projected: np.ndarray,
    work_of: Mapping[int, int],
    works: Sequence[RequestWork],
    most_rows: int,
) -> tuple[ProjectedTile, ...]:
    """The tiles of a step, on one PCP rank: number and sizes are equal on all ranks.

    Args:
        is_projected: [R] requests whose keys and values are shared.
        work_of: request -> place in `works`, of those with tokens on this rank.
        most_rows: that a rank projects at a time (and up to one more per run).
    """
    chosen = is_projected[parts.row_request]
    if not chosen.any():
        return ()
    offsets = np.zeros(len(chosen), np.int64)
    own = parts.rows_of(rank)
    offsets[own] = np.cumsum(parts.row_num_tokens[own]) - parts.row_num_tokens[own]
    sums = np.bincount(parts.row_rank[chosen], parts.row_num_tokens[chosen], parts.size)
    num_tiles = -(-int(sums.max()) // most_rows)
    columns = (parts.row_request, parts.row_start, parts.row_end, offsets)
    rows = [
        list(zip(*(column[chosen & (parts.row_rank == source)].tolist() for column in columns)))
        for source in range(parts.size)
    ]

    def part(start: int, end: int, tile: int) -> tuple[int, int]:
        return tuple(start + (end - start) * i // num_tiles for i in (tile, tile + 1))  # type: ignore[return-value]

    def pieces(tile: int, source: int) -> Iterator[ProjectedPiece]:
        end_row = 0
        for request, first, last, _ in rows[source]:
            start, end = part(first, last, tile)
            row, end_row = end_row, end_row + end - start
            if request in work_of and start < end:
                segment = _segment(works[work_of[request]], start, end, causal=source == rank)
                if segment is not None:
                    yield ProjectedPiece(work_of[request], segment, row)

    tiles = []
    for tile in range(num_tiles):
        bounds = [[part(first, last, tile) for _, first, last, _ in of_rank] for of_rank in rows]
        tiles.append(
            ProjectedTile(
                num_rows=max(sum(end - start for start, end in of_rank) for of_rank in bounds),
                own=tuple(
                    slice(offset + start - first, offset + end - first)
                    for (start, end), (_, first, _, offset) in zip(bounds[rank], rows[rank])
                ),
                pieces=tuple(tuple(pieces(tile, source)) for source in range(parts.size)),
            )
        )
    return tuple(tiles)


def _segment(work: RequestWork, start: int, end: int, causal: bool) -> Segment | None:
    """Keys [start, end) for the queries of `work` that see them: all after them, and, if `causal`, theirs."""
    before = sum(max(0, min(run.end, start) - run.start) for run in work.runs)
    num_queries = work.tokens.stop - work.tokens.start
    return Segment(start, end, before, causal) if before < num_queries else None
