"""Up-projected keys and values that ranks share, for prompts that are split over them.

In up-projected form each rank would make keys and values of all new tokens, of the other ranks' as well as
of its own. Where ranks read each other's memory, each projects its own and attends to what the others have
projected. That is many times the bytes of latents, so it goes in tiles: of each run of each rank's tokens a
part at a time, so that the ranks have equal work between two tiles. A tile is projected and sent before the
one before it is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from prefold.attention.mla import UpProjectedForm
from prefold.attention.walk import Latents, Segment, Walk, Walker, Window
from prefold.distributed.group import Gather, Group


@dataclass(frozen=True)
class ProjectedPiece:
    """Neighbouring keys of one request in a rank's part of a tile.

    Attributes:
        work: the request among this rank's works.
        segment: the keys, and which of its queries here attend to them.
        row: of the first key in what the rank sends.
    """

    work: int
    segment: Segment
    row: int


@dataclass(frozen=True)
class ProjectedTile:
    """Keys that are sent at once.

    Attributes:
        num_rows: what every rank sends, the same on all of them.
        own: this rank's tokens, in the order of their rows: slices of the local batch.
        pieces: per rank, those of its keys that this rank's queries see.
    """

    num_rows: int
    own: tuple[slice, ...]
    pieces: tuple[tuple[ProjectedPiece, ...], ...]


class ProjectedTiles:
    """A layer's tiles: `begin` while at most one other gather is in flight, `finish` while none is.

    Args:
        latents: decoded rows of local tokens.
        walks, windows: by work.
    """

    def __init__(
        self,
        tiles: Sequence[ProjectedTile],
        group: Group,
        form: UpProjectedForm,
        latents: Latents,
        walker: Walker,
        walks: Mapping[int, Walk],
        windows: Mapping[int, Window | None],
    ) -> None:
        self._tiles = tiles
        self._group = group
        self._form = form
        self._latents = latents
        self._walker = walker
        self._walks = {work: replace(walk, keys_values=form.heads_of) for work, walk in walks.items()}
        self._windows = windows
        self._sent: list[Gather] = []

    def begin(self) -> None:
        """Send the first tile, and attend to this rank's part of it."""
        for tile in self._tiles[:1]:
            self._send(tile)

    def finish(self) -> None:
        """All the rest, or all if nothing was begun."""
        if not self._sent:
            self.begin()
        for i, tile in enumerate(self._tiles):
            for following in self._tiles[i + 1 : i + 2]:
                self._send(following)
            gather = self._sent.pop(0)
            for rank, rows in enumerate(gather.wait()):
                if rank != self._group.rank:
                    self._attend(tile.pieces[rank], rows)
            gather.release()

    def _send(self, tile: ProjectedTile) -> None:
        shape = (tile.num_rows, self._form.projected_width)
        rows = self._group.gather_buffer(shape, self._form.dtype)
        end = 0
        for tokens in tile.own:
            start, end = end, end + tokens.stop - tokens.start
            self._form.project(self._latents(tokens.start, tokens.stop), rows[start:end])
        self._sent.append(self._group.start_all_gather(rows))
        self._attend(tile.pieces[self._group.rank], rows)

    def _attend(self, pieces: Sequence[ProjectedPiece], rows: torch.Tensor) -> None:
        for piece in pieces:
            first = piece.segment.start - piece.row

            def source(start: int, end: int, first: int = first) -> torch.Tensor:
                return rows[start - first : end - first]

            self._walker.run(self._walks[piece.work], [piece.segment], source, self._windows[piece.work])
