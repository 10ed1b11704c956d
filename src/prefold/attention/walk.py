"""The walk of queries over keys, tile by tile.

A request's local tokens are one or two runs of ascending positions (DualChunkSwap). Keys outside the
rank's own runs are seen by a suffix of the local queries, and by all of that suffix; only a rank's own
tokens meet on the causal diagonal. So a walk needs just two shapes, rectangles and squares, whatever
the keys are: new tokens of this rank, new tokens of others, or any part of the cached context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from prefold.attention.backend import AttentionBackend
from prefold.attention.row_format import RowFormat
from prefold.workspace import Workspace

Latents = Callable[[int, int], torch.Tensor]
"""Where keys come from: decoded rows of keys [start, end) of a request, [end - start, dim]."""


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one request on this rank: positions [start, end) at local tokens
    [offset, offset + end - start)."""

    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class Segment:
    """Keys [start, end) that the queries from `first_query` on attend to.

    `causal`: query first_query + i is the token of key start + i, and later keys are in its future.
    """

    start: int
    end: int
    first_query: int
    causal: bool = False


def own_segments(runs: Sequence[Run]) -> tuple[Segment, ...]:
    """The rank's own new tokens, by position: one segment per run.

    >>> runs = (Run(4, 6, 0), Run(10, 12, 2))
    >>> [(s.start, s.end, s.first_query, s.causal) for s in own_segments(runs)]
    [(4, 6, 0, True), (10, 12, 2, True)]
    >>> [(s.start, s.end, s.first_query, s.causal) for s in others_segments(runs, num_computed=4)]
    [(6, 10, 2, False)]
    """
    first = runs[0].offset
    return tuple(Segment(run.start, run.end, run.offset - first, causal=True) for run in runs)


def others_segments(runs: Sequence[Run], num_computed: int) -> tuple[Segment, ...]:
    """The other ranks' new tokens that lie before this rank's, by position."""
    segments = []
    position = num_computed
    for run in runs:
        if position < run.start:
            segments.append(Segment(position, run.start, run.offset - runs[0].offset))
        position = run.end
    return tuple(segments)


def prefix_segments(lengths: Sequence[int]) -> tuple[Segment, ...]:
    """Query i attends to the first `lengths[i]` keys; lengths never fall from query to query.

    Three tokens of a request whose keys are spread over ranks, of which this one holds 4, 5 and 5:

    >>> [(s.start, s.end, s.first_query) for s in prefix_segments([4, 5, 5])]
    [(0, 4, 0), (4, 5, 1)]
    """
    edges = pairwise((0, *lengths))
    return tuple(Segment(start, end, query) for query, (start, end) in enumerate(edges) if start < end)


def rows_of(stored: torch.Tensor, first: int, row_format: RowFormat) -> Latents:
    """Keys that lie in the stored rows of a tensor: key i is row i - first."""
    return lambda start, end: row_format.decode(stored[start - first : end - first])


class CacheReader:
    """Reads one part of a layer's rows out of a rank's paged cache.

    Args:
        cache: [num_blocks, block_size, width of the format], of its dtype; may be a part of longer rows.
    """

    def __init__(self, cache: torch.Tensor, row_format: RowFormat, workspace: Workspace) -> None:
        assert (cache.shape[2], cache.dtype) == (row_format.width, row_format.dtype)
        self._cache = cache
        self.format = row_format
        self._workspace = workspace

    def request(self, block_ids: torch.Tensor) -> Latents:
        """The tokens that this rank holds of a request, numbered as they lie in its blocks.

        Args:
            block_ids: [>= number of blocks] int64.

        What is read is valid until the next read, of whatever request.
        """
        return lambda start, end: self.format.decode(self.stored(block_ids, start, end))

    def stored(self, block_ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """As `request` reads them, but not decoded: [end - start, width]."""
        block_size, width = self._cache.shape[1:]
        first, last = start // block_size, (end - 1) // block_size + 1
        shape = (last - first, block_size, width)
        tile = self._workspace.get("attention.tile", shape, self._cache.dtype)
        torch.index_select(self._cache, 0, block_ids[first:last], out=tile)
        skipped = start - first * block_size
        return tile.view(-1, width)[skipped : skipped + end - start]


@dataclass(frozen=True, eq=False)
class Window:
    """How far the queries of a walk see: query i sees keys (positions[i] - size, positions[i]].

    For keys that are numbered by position.

    >>> window = Window(np.array([4, 5, 9]), size=3)
    >>> window.first_key(query=0), window.first_key(query=2)
    (2, 7)
    >>> window.end_of_queries(last_key=3)
    2
    >>> window.unseen(slice(0, 2), 1, 4)
    tensor([1, 2])
    """

    positions: np.ndarray
    size: int

    def first_key(self, query: int) -> int:
        """The first key that `query`, and with it any later one, sees."""
        return max(0, int(self.positions[query]) - self.size + 1)

    def end_of_queries(self, last_key: int) -> int:
        """Queries from here on do not see `last_key`, nor any before it."""
        return int(np.searchsorted(self.positions, last_key + self.size))

    def unseen(self, queries: slice, start: int, end: int) -> torch.Tensor | None:
        """For each of `queries` how many keys of [start, end), the first ones, it does not see.

        None if all see all."""
        counts = np.clip(self.positions[queries] - self.size + 1 - start, 0, end - start)
        return torch.from_numpy(counts) if counts.any() else None


@dataclass(frozen=True)
class Walk:
    """A request's queries of one layer on their way over the keys.

    Attributes:
        tokens: of the batch that the queries are part of.
        state: the backend's running softmax of the queries.
        keys_values: turns decoded rows [n, dim] into the keys and values that they attend to.
    """

    tokens: slice
    state: Any
    keys_values: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    @property
    def num_queries(self) -> int:
        return self.tokens.stop - self.tokens.start


class Walker:
    """Runs walks.

    Args:
        tile_tokens: keys that are read and projected at a time.
    """

    def __init__(self, backend: AttentionBackend, tile_tokens: int) -> None:
        self._backend = backend
        self._tile_tokens = tile_tokens

    def run(
        self, walk: Walk, segments: Sequence[Segment], latents: Latents, window: Window | None = None
    ) -> None:
        """Merge the attention over `segments` into the walk's state."""
        for segment in segments:
            first = (
                segment.start if window is None else max(segment.start, window.first_key(segment.first_query))
            )
            for start in range(first, segment.end, self._tile_tokens):
                end = min(start + self._tile_tokens, segment.end)
                self._attend_tile(walk, segment, start, end, latents(start, end), window)

    def _attend_tile(
        self, walk: Walk, segment: Segment, start: int, end: int, latents: torch.Tensor, window: Window | None
    ) -> None:
        k, v = walk.keys_values(latents)
        first, stop = segment.first_query, walk.num_queries
        if segment.causal:
            first += start - segment.start
            diagonal = slice(first, first + end - start)
            self._attend(walk, diagonal, start, k, v, True, window)
            first = diagonal.stop
        if window is not None:
            stop = max(first, window.end_of_queries(end - 1))
        self._attend(walk, slice(first, stop), start, k, v, False, window)

    def _attend(
        self,
        walk: Walk,
        queries: slice,
        start: int,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        window: Window | None,
    ) -> None:
        unseen = None if window is None else window.unseen(queries, start, start + k.shape[1])
        self._backend.attend_(walk.state, queries, k, v, causal, unseen)
