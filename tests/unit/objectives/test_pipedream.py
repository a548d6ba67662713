"""PipeDream's time as released, computed by hand."""

import pytest

from partita.core.cluster import Cluster, Device, Level
from partita.core.problem import Metric, Mode, Objective, Problem
from partita.errors import InvalidInputError
from partita.objectives.pipedream import pipedream_time, why_not_pipedream


@pytest.fixture
def chain(make_graph):
    """Forward and backward seconds 2, 4, 6; outputs 5, 20, 7 bytes; weights 8, 16, 0 bytes."""
    return make_graph(
        [1, 2, 3], [(0, 1), (1, 2)], backward=[1, 2, 3], sizes=[5, 20, 7], parameters=[8, 16]
    )


@pytest.fixture
def flat_case(chain, flat, pipeline):
    def make(bandwidth):
        cluster = flat(4, bandwidth)
        groups = [["d0"], ["d1", "d2"], ["d3"]]
        return Problem(graph=chain, cluster=cluster), pipeline(chain, cluster, [0, 1, 2], groups)

    return make


def test_flat_time_is_the_largest_of_stages_and_transfers(flat_case):
    # B = 5: stage 1 takes (4 + 4*1*16/(5*2))/2 = 5.2 and stage 2 takes 6; into stage 1 go
    # 2*5/(5*2) = 1, out of it 2*20/(5*2) = 4, and into stage 2 go 2*20/5 = 8.
    value = pipedream_time(*flat_case(5.0))
    assert value.value == pytest.approx(8.0)
    assert value.bottleneck == "transfer into stage 2"
    assert value.metric is Metric.PIPEDREAM
    assert value.unit == "s"
    assert value.feasible


def test_compression_divides_transfers_and_none_drops_them(flat_case):
    assert pipedream_time(*flat_case(5.0), compression=2.0).value == pytest.approx(6.0)
    assert pipedream_time(*flat_case(5.0), compression=2.0).bottleneck == "stage 2"
    assert pipedream_time(*flat_case(0.1), compression=None).value == pytest.approx(162.0)
    # B = 0.1: stage 1 (4 + 64/0.2)/2 = 162 with factor 4, (4 + 32/0.2)/2 = 82 with factor 2.
    half = pipedream_time(*flat_case(0.1), compression=None, allreduce_factor=2.0)
    assert half.value == pytest.approx(82.0)


def test_the_first_stage_does_not_pay_for_its_output(make_graph, flat, pipeline):
    graph = make_graph([1, 1], [(0, 1)], sizes=[30, 0])
    cluster = flat(4, 1.0)
    plan = pipeline(graph, cluster, [0, 1], [["d0"], ["d1", "d2", "d3"]])
    # 2*30/(1*3) into stage 1; the one device of stage 0 would need 60.
    assert pipedream_time(Problem(graph=graph, cluster=cluster), plan).value == pytest.approx(20.0)


def test_true_cut_bytes_leave_out_what_nobody_needs(make_graph, flat, pipeline):
    edges = [(0, 1), (0, 2), (1, 3), (2, 3)]
    graph = make_graph([1] * 4, edges, sizes=[100, 10, 1, 1000])
    cluster = flat(2, 1.0)
    case = (
        Problem(graph=graph, cluster=cluster),
        pipeline(graph, cluster, [0, 0, 0, 1], [["d0"], ["d1"]]),
    )
    assert pipedream_time(*case).value == pytest.approx(222.0)
    assert pipedream_time(*case, true_cut_bytes=True).value == pytest.approx(22.0)


def test_two_levels_tie_inner_pipelines_to_their_servers(make_graph, two_level, pipeline):
    # Seconds 6, 4, 12; outputs 10, 10, 0; weights 8, 4, 2. Two outer stages: {0, 1} on hosts 0
    # and 1 as [2, 1] devices in each, {2} on host 2 with its 3 devices. B1 = 4, B2 = 1, n1 = 3.
    graph = make_graph([6, 4, 12], [(0, 1), (1, 2)], sizes=[10, 10, 0], parameters=[8, 4, 2])
    cluster = two_level(3, 3, 4.0, 1.0)
    groups = [["h0d0", "h1d0", "h0d1", "h1d1"], ["h0d2", "h1d2"], ["h2d0", "h2d1", "h2d2"]]
    plan = pipeline(graph, cluster, [0, 1, 2], groups)
    value = pipedream_time(Problem(graph=graph, cluster=cluster), plan)
    # Outer stage 0 inside a server: (6 + 4*1*8/(4*2))/2 = 5; 4; into stage 1 2*10/(4*1) = 5, and
    # the same out of it: 5. Over 2 servers: (5 + 4*1*12/(1*2)/3)/2 = 6.5.
    # Outer stage 1: (12 + 4*2*2/(4*3))/3 = 4.444; into it 2*10/(1*1) = 20.
    assert value.value == pytest.approx(20.0)
    without = pipedream_time(Problem(graph=graph, cluster=cluster), plan, compression=None)
    assert without.value == pytest.approx(6.5)
    assert without.bottleneck == "stage 0 on 2 servers"
    assert value.details["replicas"] == (2, 1, 3)
    assert value.details["servers"] == (2, 2, 1)


def test_a_later_outer_stage_pays_the_all_reduce_in_full(make_graph, two_level, pipeline):
    graph = make_graph([1, 1], [(0, 1)], parameters=[0, 12])
    cluster = two_level(3, 1, 1.0, 1.0)
    plan = pipeline(graph, cluster, [0, 1], [["h0d0"], ["h1d0", "h2d0"]])
    # One second and the all-reduce of (2 - 1)/2 of 12 bytes, four times: 1 + 24, over 2 servers.
    assert pipedream_time(Problem(graph=graph, cluster=cluster), plan).value == pytest.approx(12.5)


def test_released_memory_rule_never_binds_the_last_stage(chain, flat, pipeline):
    cluster = flat(3, 5.0, memory_bytes=20.0)
    plan = pipeline(chain, cluster, [0, 1, 2], [["d0"], ["d1"], ["d2"]])
    # ceil(2/1)*(5+8) = 26 and ceil(1/1)*(20+16) = 36, both above 20; stage 2 needs 0 * 7.
    errors = pipedream_time(Problem(graph=chain, cluster=cluster), plan).errors
    assert errors == ("stage 1 needs 36 bytes, limit 20", "stage 0 needs 26 bytes, limit 20")


def test_a_stage_of_unequal_devices_takes_the_slowest(make_graph, pipeline):
    cluster = Cluster(
        devices=(Device(name="fast", speed=2.0), Device(name="slow", speed=0.5)),
        levels=(Level(name="host", group_of=[0, 0], bandwidth_bytes_per_s=1.0),),
    )
    graph = make_graph([3.0], [])
    plan = pipeline(graph, cluster, [0], [["fast", "slow"]])
    assert pipedream_time(Problem(graph=graph, cluster=cluster), plan).value == pytest.approx(3.0)


def test_it_does_not_apply_to_what_pipedream_cannot_say(
    chain, make_graph, flat, matrix, two_level, pipeline
):
    cluster = flat(4, 1.0)
    problem = Problem(graph=chain, cluster=cluster)
    twice = pipeline(chain, cluster, [0, 1, 2], [["d0"], ["d1"], ["d0"]])
    assert "runs stages 0 and 2" in why_not_pipedream(problem, twice)
    with pytest.raises(InvalidInputError, match=r"'pipedream'.*'d0'"):
        pipedream_time(problem, twice)
    tensor = pipeline(chain, cluster, [0, 0, 0], [["d0", "d1"]], tp=[2])
    assert "tensor-parallel" in why_not_pipedream(problem, tensor)
    uneven = pipeline(chain, cluster, [0, 0, 0], [["d0", "d1"]], shares=[[2, 1]])
    assert "unequal shares" in why_not_pipedream(problem, uneven)
    good = pipeline(chain, cluster, [0, 0, 0], [["d0"]])
    inference = Problem(graph=chain, cluster=cluster, objective=Objective(mode=Mode.INFERENCE))
    assert "inference" in why_not_pipedream(inference, good)
    links = matrix([[0, 1], [1, 0]])
    alone = pipeline(chain, links, [0, 0, 0], [["d0"]])
    assert "matrix" in why_not_pipedream(Problem(graph=chain, cluster=links), alone)
    explicit = make_graph([1, 1], [(0, 1)], phase=[0, 1])
    plan = pipeline(explicit, cluster, [0, 0], [["d0"]])
    assert "explicit backward" in why_not_pipedream(Problem(graph=explicit, cluster=cluster), plan)
    with pytest.raises(InvalidInputError, match="compression is 0"):
        pipedream_time(problem, good, compression=0.0)
    hosts = two_level(2, 2, 1.0, 1.0)
    ragged = pipeline(chain, hosts, [0, 0, 0], [["h0d0", "h0d1", "h1d0"]])
    on_hosts = Problem(graph=chain, cluster=hosts)
    assert "unequal numbers of replicas" in why_not_pipedream(on_hosts, ragged)
    shared = pipeline(chain, hosts, [0, 1, 1], [["h0d0"], ["h0d1", "h1d0"]])
    assert "shares a server" in why_not_pipedream(on_hosts, shared)
