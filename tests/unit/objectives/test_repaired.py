"""PipeDream's repaired objective, computed by hand."""

import pytest

from partita.core.cluster import Cluster, Device, Level
from partita.core.problem import Objective, Problem
from partita.objectives.repaired import pipedream_repaired_time, why_not_repaired


def test_flat_time_charges_both_sides_of_a_cut(make_graph, flat, pipeline):
    graph = make_graph([1, 1], [(0, 1)], sizes=[30, 0])
    cluster = flat(4, 1.0)
    plan = pipeline(graph, cluster, [0, 1], [["d0"], ["d1", "d2", "d3"]])
    value = pipedream_repaired_time(Problem(graph=graph, cluster=cluster), plan)
    # 2*30/(1*min(1, 3)): what PipeDream calls 20.
    assert value.value == pytest.approx(60.0)
    assert value.bottleneck == "link of d0, cut after stage 0"
    assert value.details["cut_bytes"] == (30.0,)


def test_flat_stage_is_compute_and_all_reduce_over_replicas(make_graph, flat, pipeline):
    graph = make_graph([3, 1], [(0, 1)], backward=[5, 0], parameters=[6, 0])
    cluster = flat(4, 2.0)
    plan = pipeline(graph, cluster, [0, 1], [["d0", "d1", "d2"], ["d3"]])
    problem = Problem(graph=graph, cluster=cluster)
    # 8 seconds and g times 2/3 of 6 bytes at 2 bytes/s, over 3 replicas.
    assert pipedream_repaired_time(problem, plan).value == pytest.approx((8 + 8) / 3)
    fast = pipedream_repaired_time(problem, plan, allreduce_factor=2.0)
    assert fast.value == pytest.approx((8 + 4) / 3)


def test_shares_weigh_the_devices(make_graph, pipeline):
    cluster = Cluster(
        devices=(Device(name="fast", speed=3.0), Device(name="slow")),
        levels=(Level(name="host", group_of=[0, 0], bandwidth_bytes_per_s=1.0),),
    )
    graph = make_graph([12.0], [])
    problem = Problem(graph=graph, cluster=cluster)
    equal = pipeline(graph, cluster, [0], [["fast", "slow"]])
    assert pipedream_repaired_time(problem, equal).value == pytest.approx(6.0)
    weighted = pipeline(graph, cluster, [0], [["fast", "slow"]], shares=[[3, 1]])
    # 3/4 of 12/3 and 1/4 of 12.
    assert pipedream_repaired_time(problem, weighted).value == pytest.approx(3.0)


def test_all_reduce_passes_both_levels(make_graph, two_level, pipeline):
    graph = make_graph([4.0], [], parameters=[6])
    cluster = two_level(3, 2, 8.0, 1.0)
    names = ["h0d0", "h0d1", "h1d0", "h1d1", "h2d0", "h2d1"]
    plan = pipeline(graph, cluster, [0], [names])
    value = pipedream_repaired_time(Problem(graph=graph, cluster=cluster), plan)
    # Four times 1/2 of 6 bytes at 8 bytes/s, and four times 2/3 of 6 bytes at 1 byte/s.
    assert value.value == pytest.approx(4 / 6 + (1.5 + 16) / 6)


def test_tied_stages_stay_inside_their_servers(make_graph, two_level, pipeline):
    graph = make_graph([1, 1], [(0, 1)], sizes=[30, 0])
    cluster = two_level(2, 3, 10.0, 1.0)
    plan = pipeline(graph, cluster, [0, 1], [["h0d0", "h1d0"], ["h0d1", "h1d1", "h0d2", "h1d2"]])
    value = pipedream_repaired_time(Problem(graph=graph, cluster=cluster), plan)
    # 2*30*(1/2)/10 on the links of stage 0, nothing on the ports.
    assert value.value == pytest.approx(3.0)


def test_a_cut_between_servers_loads_their_ports(make_graph, two_level, pipeline):
    graph = make_graph([1, 1], [(0, 1)], sizes=[30, 0])
    cluster = two_level(2, 2, 10.0, 1.0)
    apart = pipeline(graph, cluster, [0, 1], [["h0d0", "h0d1"], ["h1d0"]])
    value = pipedream_repaired_time(Problem(graph=graph, cluster=cluster), apart)
    assert value.value == pytest.approx(60.0)
    assert value.bottleneck == "port of server 0, cut after stage 0"
    mixed = pipeline(graph, cluster, [0, 1], [["h0d0"], ["h0d1", "h1d0"]])
    value = pipedream_repaired_time(Problem(graph=graph, cluster=cluster), mixed)
    # Server 0 has all of stage 0 and half of stage 1: 2*30*(1*(1/2) + (1/2)*0)/1 leaves it.
    assert value.value == pytest.approx(30.0)


def test_memory_counts_versions_gradients_optimizer_and_inputs(make_graph, flat, pipeline):
    graph = make_graph(
        [1, 1, 1], [(0, 1), (1, 2)], sizes=[10, 20, 0], parameters=[4, 8], saved_bytes=[3, 5, 7]
    )
    plan_of = [["d0"], ["d1"], ["d2"]]
    # Adam keeps 8 bytes for each of 1 and 2 elements. Versions 3, 2, 1. The first device needs
    # 3*4 + 4 + 8 + 3*3 = 33, the second 2*8 + 8 + 16 + 2*(5 + 10) = 70, the last 1*(7 + 20) = 27.
    for limit, errors in (
        (70.0, []),
        (69.0, ["device 'd1' needs 70 bytes, limit 69"]),
        (32.0, ["device 'd0' needs 33 bytes, limit 32", "device 'd1' needs 70 bytes, limit 32"]),
    ):
        cluster = flat(3, 1.0, memory_bytes=limit)
        problem = Problem(graph=graph, cluster=cluster)
        plan = pipeline(graph, cluster, [0, 1, 2], plan_of)
        assert list(pipedream_repaired_time(problem, plan).errors) == errors
    half = Problem(
        graph=graph, cluster=flat(3, 1.0, memory_bytes=70.0), objective=Objective(memory_factor=0.5)
    )
    assert len(pipedream_repaired_time(half, plan).errors) == 1


def test_three_levels_are_refused(make_graph, pipeline):
    cluster = Cluster(
        devices=(Device(name="d0"),),
        levels=tuple(
            Level(name=name, group_of=[0], bandwidth_bytes_per_s=1.0) for name in ("a", "b", "c")
        ),
    )
    graph = make_graph([1.0], [])
    plan = pipeline(graph, cluster, [0], [["d0"]])
    assert "3 levels" in why_not_repaired(Problem(graph=graph, cluster=cluster), plan)


def test_a_lone_device_needs_no_links(make_graph, pipeline):
    graph = make_graph([2.0], [], backward=[1.0], parameters=[5])
    cluster = Cluster(devices=(Device(name="d0"),))
    plan = pipeline(graph, cluster, [0], [["d0"]])
    assert pipedream_repaired_time(Problem(graph=graph, cluster=cluster), plan).value == 3.0
