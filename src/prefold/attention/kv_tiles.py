"""Keys that travel to the queries: the way `kv` (attention.context_ways) for a sharded cache.

The shards of the context are gathered over the DCP group, tile by tile, and each rank attends its own
queries to all of a tile. While it does, the next tile travels. A tile may hold keys of several requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from prefold.attention.backend import AttentionBackend
from prefold.attention.walk import CacheReader, Walk
from prefold.distributed.group import Gather, Group
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class KVPiece:
    """One request's share of a tile.

    Attributes:
        work: the request among this rank's prefills, None if the rank has no queries of it.
        block_ids: of the request.
        first_row: where the piece starts in what every rank sends.
        first_token: first token that ranks send, as each of them numbers those that it holds.
        counts: tokens that each rank of the group holds of the piece.
    """

    work: int | None
    block_ids: torch.Tensor
    first_row: int
    first_token: int
    counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class KVTile:
    """Keys that are gathered at once. `num_rows`: what every rank sends, the same on all of them."""

    num_rows: int
    pieces: tuple[KVPiece, ...]


class KVTiles:
    """A layer's tiles, from the first gather to the last key.

    All ranks of the group take part, also with requests of which they have no queries or no keys.
    """

    def __init__(
        self,
        tiles: Sequence[KVTile],
        group: Group,
        reader: CacheReader,
        backend: AttentionBackend,
        workspace: Workspace,
    ) -> None:
        self._tiles = tiles
        self._group = group
        self._reader = reader
        self._backend = backend
        self._workspace = workspace

    def run(self, walks: Sequence[Walk]) -> None:
        """Attend all walks to their contexts."""
        for piece, stored in self.pieces():
            if piece.work is not None:
                walk = walks[piece.work]
                k, v = walk.keys_values(self._reader.format.decode(stored))
                self._backend.attend_(walk.state, slice(0, walk.num_queries), k, v, causal=False)

    def pieces(self) -> Iterator[tuple[KVPiece, torch.Tensor]]:
        """Each piece and its stored rows, rank after rank, [sum of counts, width]; valid until the next."""
        gathers = (self._send(tile) for tile in self._tiles)  # each starts when it is asked for
        coming = next(gathers, None)
        for tile in self._tiles:
            assert coming is not None
            stored = self._receive(tile, coming)
            coming = next(gathers, None)
            end = 0
            for piece in tile.pieces:
                start, end = end, end + sum(piece.counts)
                yield piece, stored[start:end]

    def _send(self, tile: KVTile) -> Gather:
        sent = self._buffer("kv_tiles.sent", tile.num_rows)
        for piece in tile.pieces:
            count = piece.counts[self._group.rank]
            if count > 0:
                own = self._reader.stored(piece.block_ids, piece.first_token, piece.first_token + count)
                sent[piece.first_row : piece.first_row + count].copy_(own)
        return self._group.start_all_gather(sent)

    def _receive(self, tile: KVTile, gather: Gather) -> torch.Tensor:
        """The tile's stored rows, pieces one after the other, without what pads them."""
        total = sum(sum(piece.counts) for piece in tile.pieces)
        stored = self._buffer("kv_tiles.received", total)
        parts = gather.wait()
        end = 0
        for piece in tile.pieces:
            for part, count in zip(parts, piece.counts, strict=True):
                start, end = end, end + count
                stored[start:end].copy_(part[piece.first_row : piece.first_row + count])
        gather.release()
        return stored

    def _buffer(self, name: str, num_rows: int) -> torch.Tensor:
        row_format = self._reader.format
        return self._workspace.get(name, (num_rows, row_format.width), row_format.dtype)
