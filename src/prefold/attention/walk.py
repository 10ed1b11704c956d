"""The walk of a request's queries over its keys, tile by tile.

A request's local tokens are one or two runs of ascending positions (DualChunkSwap). For keys that
lie outside the rank's own runs, the queries that see them are a suffix of the local queries, and
they see all of them; only a rank's own tokens meet on the causal diagonal. So the walk needs just
two shapes: rectangles and squares. Both runs share one walk: a tile is read and up-projected once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prefold.attention.backend import AttentionBackend
from prefold.workspace import Workspace


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one request on this rank: positions [start, end) at local tokens
    [offset, offset + end - start)."""

    start: int
    end: int
    offset: int


@dataclass(frozen=True, eq=False)
class RequestWork:
    """One request's share of this rank's step.

    Attributes:
        runs: one or two, ascending, consecutive in the local batch.
        num_computed: tokens in the cache before the step.
        block_ids: [num_blocks] int64, blocks of the request's tokens up to the step's last.
    """

    runs: tuple[Run, ...]
    num_computed: int
    block_ids: torch.Tensor

    @property
    def offset(self) -> int:
        return self.runs[0].offset

    @property
    def num_queries(self) -> int:
        return sum(run.end - run.start for run in self.runs)

    @property
    def tokens(self) -> slice:
        """Of the local batch."""
        return slice(self.offset, self.offset + self.num_queries)

    @property
    def num_keys(self) -> int:
        return self.runs[-1].end


@dataclass(frozen=True)
class Segment:
    """Keys at positions [start, end) that the queries from `first_query` on attend to.

    `local_offset` is the local token of the first key if the keys are this rank's own new tokens,
    None if they are read from the cache. `causal`: query first_query + i has position start + i.
    """

    start: int
    end: int
    first_query: int
    local_offset: int | None = None
    causal: bool = False


def segments_before_gather(work: RequestWork) -> list[Segment]:
    """What a rank can attend to without the others: the cached context and its own new tokens.

    >>> work = RequestWork((Run(4, 6, 0), Run(10, 12, 2)), num_computed=4, block_ids=torch.arange(3))
    >>> [(s.start, s.end, s.first_query, s.causal) for s in segments_before_gather(work)]
    [(0, 4, 0, False), (4, 6, 0, True), (10, 12, 2, True)]
    >>> [(s.start, s.end, s.first_query, s.causal) for s in segments_after_gather(work)]
    [(6, 10, 2, False)]
    """
    segments = []
    if work.num_computed > 0:
        segments.append(Segment(0, work.num_computed, 0))
    segments += [Segment(r.start, r.end, r.offset - work.offset, r.offset, causal=True) for r in work.runs]
    return segments


def segments_after_gather(work: RequestWork) -> list[Segment]:
    """The other ranks' new tokens that lie before this rank's, from the cache."""
    segments = []
    position = work.num_computed
    for run in work.runs:
        if position < run.start:
            segments.append(Segment(position, run.start, run.offset - work.offset))
        position = run.end
    return segments


@dataclass(frozen=True)
class Walk:
    """A request's queries of one layer on their way over the keys.

    Attributes:
        state: the backend's running softmax of the queries.
        keys_values: turns latents [n, token_dim] into the keys and values that they attend to.
    """

    work: RequestWork
    state: Any
    keys_values: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Walker:
    """Runs walks over one layer's latents.

    Args:
        cache: [num_blocks, block_size, token_dim].
        new_kv: [num_tokens, token_dim], this rank's new tokens.
        tile_tokens: keys that are read and projected at a time.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        workspace: Workspace,
        cache: torch.Tensor,
        new_kv: torch.Tensor,
        tile_tokens: int,
    ) -> None:
        self._backend = backend
        self._workspace = workspace
        self._cache = cache
        self._new_kv = new_kv
        self._tile_tokens = tile_tokens

    def run(self, walk: Walk, segments: Sequence[Segment]) -> None:
        """Merge the attention over `segments` into the walk's state."""
        for segment in segments:
            for start in range(segment.start, segment.end, self._tile_tokens):
                self._attend_tile(walk, segment, start, min(start + self._tile_tokens, segment.end))

    def _attend_tile(self, walk: Walk, segment: Segment, start: int, end: int) -> None:
        if segment.local_offset is None:
            latent = self._read_cache(walk.work.block_ids, start, end)
        else:
            first_row = segment.local_offset + start - segment.start
            latent = self._new_kv[first_row : first_row + end - start]
        k, v = walk.keys_values(latent)
        first = segment.first_query
        if segment.causal:
            first += start - segment.start
            diagonal = slice(first, first + end - start)
            self._backend.attend_(walk.state, diagonal, k, v, causal=True)
            first = diagonal.stop
        self._backend.attend_(walk.state, slice(first, walk.work.num_queries), k, v, causal=False)

    def _read_cache(self, block_ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Latents of positions [start, end): [end - start, token_dim] in the cache's dtype."""
        block_size, token_dim = self._cache.shape[1:]
        first_block, last_block = start // block_size, (end - 1) // block_size + 1
        tile = self._workspace.get(
            "attention.tile", (last_block - first_block, block_size, token_dim), self._cache.dtype
        )
        torch.index_select(self._cache, 0, block_ids[first_block:last_block], out=tile)
        skipped = start - first_block * block_size
        return tile.view(-1, token_dim)[skipped : skipped + end - start]
