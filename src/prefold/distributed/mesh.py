"""Rank arithmetic: which rank sits where on the mesh DP x PP x PCP x TP, and who shares a group.

Nothing here talks to anybody and nothing imports torch: scheduler, executor, worker and planner get
the same answers from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

AXES = ("dp", "pp", "pcp", "tp")
"""Mesh axes from slowest to fastest."""


class Coords(NamedTuple):
    """Where a rank sits: its index along each axis."""

    dp: int
    pp: int
    pcp: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the axes. `rank = ((dp * PP + pp) * PCP + pcp) * TP + tp`, so tp is the fastest.

    Neighbouring ranks share a TP group, because TP talks most.

    >>> mesh = Mesh(tp=2, pcp=3)
    >>> mesh.world_size
    6
    >>> mesh.groups("tp")
    [[0, 1], [2, 3], [4, 5]]
    >>> mesh.groups("pcp")
    [[0, 2, 4], [1, 3, 5]]
    >>> mesh.coords(5)
    Coords(dp=0, pp=0, pcp=2, tp=1)
    >>> mesh.rank(pcp=2, tp=1)
    5
    """

    tp: int = 1
    pcp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.axis_size(axis) < 1:
                raise ValueError(f"{axis}={self.axis_size(axis)}: the size of an axis is at least 1")

    def axis_size(self, axis: str) -> int:
        """Ranks along `axis` ("world": all ranks)."""
        if axis == "world":
            return self.world_size
        if axis not in AXES:
            raise ValueError(f"{axis!r} is no axis of the mesh; axes are {AXES} and 'world'")
        return getattr(self, axis)

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.pcp * self.tp

    def rank(self, *, pcp: int = 0, tp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """The rank at these coordinates; ValueError if one is outside its axis."""
        coords = Coords(dp, pp, pcp, tp)
        rank = 0
        for axis, index in zip(AXES, coords, strict=True):
            if not 0 <= index < self.axis_size(axis):
                raise ValueError(f"{axis} index {index} is outside [0, {self.axis_size(axis)})")
            rank = rank * self.axis_size(axis) + index
        return rank

    def coords(self, rank: int) -> Coords:
        """The coordinates of `rank`; ValueError if it is outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size})")
        indices = []
        for axis in reversed(AXES):
            rank, index = divmod(rank, self.axis_size(axis))
            indices.append(index)
        return Coords(*reversed(indices))

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ranks that differ along `axis` only ("world": one group of all ranks).

        Disjoint, and together the whole world; ranks ascend within a group, so a rank's place in
        its group is its index along `axis`. Groups are ordered by their first rank.
        """
        world = range(self.world_size)
        if axis == "world":
            return [list(world)]
        size = self.axis_size(axis)
        stride = 1
        for faster in AXES[AXES.index(axis) + 1 :]:
            stride *= self.axis_size(faster)
        firsts = [rank for rank in world if (rank // stride) % size == 0]
        return [[first + i * stride for i in range(size)] for first in firsts]

    def group_of(self, axis: str, rank: int) -> list[int]:
        """The group along `axis` that `rank` belongs to."""
        return next(group for group in self.groups(axis) if rank in group)
