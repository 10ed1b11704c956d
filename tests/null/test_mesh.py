import doctest
import itertools

import pytest

from prefold.config import ParallelConfig
from prefold.distributed import mesh as mesh_module
from prefold.distributed.mesh import AXES, CARVED, Coords, Mesh, divides_plane


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
        # DCP within the PCP x TP plane, pcp fastest.
        (Mesh(tp=2, pcp=2), "dcp", [[0], [2], [1], [3]]),
        (Mesh(tp=2, pcp=2, dcp=2), "dcp", [[0, 2], [1, 3]]),
        (Mesh(tp=2, pcp=2, dcp=2), "dcp_pcp", [[0, 2], [1, 3]]),
        (Mesh(tp=2, pcp=2, dcp=2), "dcp_tp", [[0], [2], [1], [3]]),
        (Mesh(tp=2, pcp=2, dcp=4), "dcp", [[0, 2, 1, 3]]),
        (Mesh(tp=2, pcp=2, dcp=4), "dcp_pcp", [[0, 2], [1, 3]]),
        (Mesh(tp=2, pcp=2, dcp=4), "dcp_tp", [[0, 1], [2, 3]]),
        (Mesh(tp=2, dcp=2), "dcp", [[0, 1]]),
        (Mesh(pcp=4, dcp=2), "dcp", [[0, 1], [2, 3]]),
        (Mesh(tp=4, pcp=2, dcp=4), "dcp", [[0, 4, 1, 5], [2, 6, 3, 7]]),
        (Mesh(tp=2, pcp=4, dcp=2), "dcp", [[0, 2], [4, 6], [1, 3], [5, 7]]),
        (Mesh(tp=2, pcp=2, pp=2, dcp=2), "dcp", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (Mesh(tp=2, dp=2, dcp=2), "dcp", [[0, 1], [2, 3]]),
        # EP over DP x PCP x TP of a stage.
        (Mesh(tp=2, pcp=2), "ep", [[0], [1], [2], [3]]),
        (Mesh(tp=2, pcp=2, ep=True), "ep", [[0, 1, 2, 3]]),
        (Mesh(pcp=2, pp=2, ep=True), "ep", [[0, 1], [2, 3]]),
        (Mesh(tp=2, dp=2, ep=True), "ep", [[0, 1, 2, 3]]),
        (Mesh(tp=2, pp=2, dp=2, ep=True), "ep", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_groups_by_hand(mesh, axis, groups):
    assert mesh.groups(axis) == groups


def all_meshes(max_world_size, carved=False):
    """Every mesh up to that size; with `carved`, with every DCP size, EP off and on."""
    sizes = range(1, max_world_size + 1)
    for dp, pp, pcp, tp in itertools.product(sizes, repeat=4):
        if dp * pp * pcp * tp > max_world_size:
            continue
        for dcp in range(1, pcp * tp + 1) if carved else [1]:
            for ep in (False, True) if carved else [False]:
                if divides_plane(dcp, pcp, tp):
                    yield Mesh(dp=dp, pp=pp, pcp=pcp, tp=tp, dcp=dcp, ep=ep)


def test_groups_are_disjoint_and_cover_the_world():
    for mesh in all_meshes(16):
        for axis in (*AXES, "world"):
            groups = mesh.groups(axis)
            assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
            assert {len(group) for group in groups} == {mesh.axis_size(axis)}
            assert groups == sorted(sorted(group) for group in groups)


def test_carved_groups_are_disjoint_and_cover_the_world():
    for mesh in all_meshes(16, carved=True):
        sizes = {
            "dcp": mesh.dcp,
            "dcp_pcp": min(mesh.dcp, mesh.pcp),
            "dcp_tp": max(1, mesh.dcp // mesh.pcp),
            "ep": mesh.dp * mesh.pcp * mesh.tp if mesh.ep else 1,
        }
        assert set(sizes) == set(CARVED)
        for name, size in sizes.items():
            groups = mesh.groups(name)
            assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
            assert {len(group) for group in groups} == {size}


def test_a_dcp_group_is_the_product_of_its_two_parts():
    for mesh in all_meshes(16, carved=True):
        if mesh.ep:
            continue
        for group in mesh.groups("dcp"):
            coords = [mesh.coords(rank) for rank in group]
            assert len({(c.dp, c.pp) for c in coords}) == 1
            # Order: pcp fastest. Its rows are the dcp_pcp groups, its columns the dcp_tp groups.
            assert group == sorted(group, key=lambda rank: (mesh.coords(rank).tp, mesh.coords(rank).pcp))
            rows = [mesh.group_of("dcp_pcp", rank) for rank in mesh.group_of("dcp_tp", group[0])]
            columns = [mesh.group_of("dcp_tp", rank) for rank in mesh.group_of("dcp_pcp", group[0])]
            assert list(itertools.chain(*rows)) == group
            assert [list(column) for column in zip(*rows)] == columns
            for row in rows:
                assert len({mesh.coords(rank).tp for rank in row}) == 1
            for column in columns:
                assert len({mesh.coords(rank).pcp for rank in column}) == 1


def test_experts_are_spread_over_everything_but_the_stages():
    for mesh in all_meshes(16, carved=True):
        for group in mesh.groups("ep") if mesh.ep else []:
            (stage,) = {mesh.coords(rank).pp for rank in group}
            assert group == [rank for rank in range(mesh.world_size) if mesh.coords(rank).pp == stage]


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


def test_a_mesh_of_a_configuration():
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        prefill_context_parallel_size=3,
        decode_context_parallel_size=6,
        pipeline_parallel_size=4,
        data_parallel_size=5,
        enable_expert_parallel=True,
    )
    mesh = Mesh.of(parallel)
    assert mesh == Mesh(tp=2, pcp=3, pp=4, dp=5, dcp=6, ep=True)
    assert mesh.world_size == parallel.world_size == 120
    # A replica's ranks are consecutive.
    for replica in range(mesh.dp):
        ranks = range(replica * parallel.replica_size, (replica + 1) * parallel.replica_size)
        assert {mesh.coords(rank).dp for rank in ranks} == {replica}


def test_dcp_sizes_that_cannot_be_carved():
    assert [d for d in range(20) if divides_plane(d, pcp=4, tp=4)] == [1, 2, 4, 8, 16]
    assert [d for d in range(20) if divides_plane(d, pcp=3, tp=4)] == [1, 3, 6, 12]
    assert [d for d in range(20) if divides_plane(d, pcp=2, tp=6)] == [1, 2, 4, 6, 12]
    with pytest.raises(ValueError, match="dcp=3 is neither a divisor of pcp=4 nor 4 times a divisor of tp=2"):
        Mesh(tp=2, pcp=4, dcp=3)


def test_what_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="pcp=0"):
        Mesh(pcp=0)
    with pytest.raises(ValueError, match="'xp' is no axis"):
        Mesh().groups("xp")
    with pytest.raises(ValueError, match=r"rank 4 is outside \[0, 4\)"):
        Mesh(tp=2, pcp=2).coords(4)
    with pytest.raises(ValueError, match=r"tp index 2 is outside \[0, 2\)"):
        Mesh(tp=2, pcp=2).rank(pcp=0, tp=2)
