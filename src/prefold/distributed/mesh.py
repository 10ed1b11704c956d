"""Rank arithmetic: which rank sits where on the mesh DP x PP x PCP x TP, and who shares a group.

Nothing here talks to anybody and nothing imports torch: scheduler, executor, worker and planner get
the same answers from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from prefold.config import ParallelConfig

AXES = ("dp", "pp", "pcp", "tp")
"""Mesh axes from slowest to fastest."""

CARVED = ("dcp", "dcp_pcp", "dcp_tp", "ep")
"""Groups that add no ranks: see `Mesh.groups`."""


def divides_plane(dcp: int, pcp: int, tp: int) -> bool:
    """Whether D ranks can be carved from the PCP x TP plane: D divides P, or is P times a divisor of TP.

    >>> [d for d in range(1, 9) if divides_plane(d, pcp=2, tp=4)]
    [1, 2, 4, 8]
    """
    if dcp < 1:
        return False
    return pcp % dcp == 0 if dcp <= pcp else dcp % pcp == 0 and tp % (dcp // pcp) == 0


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
    dcp: int = 1
    ep: bool = False

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.axis_size(axis) < 1:
                raise ValueError(f"{axis}={self.axis_size(axis)}: the size of an axis is at least 1")
        if not divides_plane(self.dcp, self.pcp, self.tp):
            raise ValueError(
                f"dcp={self.dcp} is neither a divisor of pcp={self.pcp} nor {self.pcp} times "
                f"a divisor of tp={self.tp}"
            )

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Mesh:
        """The mesh that a configuration describes."""
        return cls(
            tp=parallel.tensor_parallel_size,
            pcp=parallel.prefill_context_parallel_size,
            pp=parallel.pipeline_parallel_size,
            dp=parallel.data_parallel_size,
            dcp=parallel.decode_context_parallel_size,
            ep=parallel.enable_expert_parallel,
        )

    def axis_size(self, axis: str) -> int:
        """Ranks along `axis` ("world": all ranks)."""
        if axis == "world":
            return self.world_size
        if axis not in AXES:
            raise ValueError(f"{axis!r} is no axis of the mesh; there are {AXES}, {CARVED} and 'world'")
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

        Carved from the mesh, adding no ranks (groups in the order of the plane):

        - "dcp": ranks that share the KV cache of a sequence. The PCP x TP plane of a stage, pcp fastest,
          cut into runs of D; the order in a group is that order, and a rank's place is its DCP rank.
        - "dcp_pcp", "dcp_tp": the ranks of a DCP group that differ in pcp only (they have the same heads)
          and in tp only (they have the same tokens). A DCP group is their product.
        - "ep": ranks among which the experts of a stage are spread, DP x PCP x TP, ascending; each rank
          by itself without expert parallelism.

        >>> Mesh(tp=2, pcp=2, dcp=2).groups("dcp"), Mesh(tp=2, pcp=2, dcp=4).groups("dcp")
        ([[0, 2], [1, 3]], [[0, 2, 1, 3]])
        >>> Mesh(tp=2, pcp=2, dcp=4).groups("dcp_pcp"), Mesh(tp=2, pcp=2, dcp=4).groups("dcp_tp")
        ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
        """
        if axis in CARVED:
            return self._carved_groups(axis)
        world = range(self.world_size)
        if axis == "world":
            return [list(world)]
        size = self.axis_size(axis)
        stride = 1
        for faster in AXES[AXES.index(axis) + 1 :]:
            stride *= self.axis_size(faster)
        firsts = [rank for rank in world if (rank // stride) % size == 0]
        return [[first + i * stride for i in range(size)] for first in firsts]

    def _carved_groups(self, name: str) -> list[list[int]]:
        """Groups that are no axis of the mesh; see `groups`."""
        planes = range(0, self.world_size, self.pcp * self.tp)
        if name == "ep":
            if not self.ep:
                return [[rank] for rank in range(self.world_size)]
            stages = [self.coords(rank).pp for rank in range(self.world_size)]
            return [[r for r, at in enumerate(stages) if at == stage] for stage in range(self.pp)]
        pcp_part = min(self.dcp, self.pcp)
        groups = []
        for plane in planes:
            order = [plane + pcp * self.tp + tp for tp in range(self.tp) for pcp in range(self.pcp)]
            for start in range(0, len(order), self.dcp):
                group = order[start : start + self.dcp]
                if name == "dcp":
                    groups.append(group)
                elif name == "dcp_pcp":
                    groups += [group[i : i + pcp_part] for i in range(0, self.dcp, pcp_part)]
                else:
                    groups += [group[i::pcp_part] for i in range(pcp_part)]
        return groups

    def group_of(self, axis: str, rank: int) -> list[int]:
        """The group along `axis` that `rank` belongs to."""
        return next(group for group in self.groups(axis) if rank in group)
