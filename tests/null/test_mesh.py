import doctest
import itertools

import pytest

from prefold.distributed import mesh as mesh_module
from prefold.distributed.mesh import AXES, Coords, Mesh


def test_worked_example():
    result = doctest.testmod(mesh_module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("mesh", "axis", "groups"),
    [
        (Mesh(), "tp", [[0]]),
        (Mesh(), "world", [[0]]),
        (Mesh(tp=4), "tp", [[0, 1, 2, 3]]),
        (Mesh(tp=4), "pcp", [[0], [1], [2], [3]]),
        (Mesh(pcp=4), "pcp", [[0, 1, 2, 3]]),
        (Mesh(tp=2, pcp=2), "tp", [[0, 1], [2, 3]]),
        (Mesh(tp=2, pcp=2), "pcp", [[0, 2], [1, 3]]),
        (Mesh(tp=2, pcp=2), "world", [[0, 1, 2, 3]]),
        (Mesh(tp=2, pcp=3, pp=2), "pcp", [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]),
        (Mesh(tp=2, pcp=3, pp=2), "pp", [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]),
        (Mesh(tp=2, pp=2, dp=2), "dp", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_groups_by_hand(mesh, axis, groups):
    assert mesh.groups(axis) == groups


def all_meshes(max_world_size):
    for dp, pp, pcp, tp in itertools.product(range(1, max_world_size + 1), repeat=4):
        if dp * pp * pcp * tp <= max_world_size:
            yield Mesh(dp=dp, pp=pp, pcp=pcp, tp=tp)


def test_groups_are_disjoint_and_cover_the_world():
    for mesh in all_meshes(16):
        for axis in (*AXES, "world"):
            groups = mesh.groups(axis)
            assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
            assert {len(group) for group in groups} == {mesh.axis_size(axis)}
            assert groups == sorted(sorted(group) for group in groups)


def test_a_group_differs_along_its_axis_only_and_in_order():
    for mesh in all_meshes(16):
        for axis in AXES:
            for group in mesh.groups(axis):
                coords = [mesh.coords(rank)._asdict() for rank in group]
                assert [c.pop(axis) for c in coords] == list(range(mesh.axis_size(axis)))
                assert all(c == coords[0] for c in coords)
                assert all(mesh.group_of(axis, rank) == group for rank in group)


def test_rank_and_coords_are_inverse():
    for mesh in all_meshes(16):
        for rank in range(mesh.world_size):
            coords = mesh.coords(rank)
            assert mesh.rank(**coords._asdict()) == rank
            assert rank == ((coords.dp * mesh.pp + coords.pp) * mesh.pcp + coords.pcp) * mesh.tp + coords.tp
    assert Mesh(tp=2, pcp=2).coords(3) == Coords(dp=0, pp=0, pcp=1, tp=1)


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="pcp=0"):
        Mesh(pcp=0)
    with pytest.raises(ValueError, match="'xp' is no axis"):
        Mesh().groups("xp")
    with pytest.raises(ValueError, match=r"rank 4 is outside \[0, 4\)"):
        Mesh(tp=2, pcp=2).coords(4)
    with pytest.raises(ValueError, match=r"tp index 2 is outside \[0, 2\)"):
        Mesh(tp=2, pcp=2).rank(pcp=0, tp=2)
