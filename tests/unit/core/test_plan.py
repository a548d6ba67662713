import dataclasses
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.plan import Plan, Shard, Stage, equal_microbatches, pipeline_stages
from partita.core.problem import Problem, Schedule
from partita.errors import InvalidInputError
from partita.testing.builders import chain, flat_cluster, graph_of, pipeline


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        make()
    return str(caught.value)


def stage(*devices: int, shares: tuple[int, ...] = ()) -> Stage:
    return Stage(devices=tuple((device,) for device in devices), shares=shares)


def plan(**changes: object) -> Plan:
    """Return four ops in two stages, the second with two replicas, some of it changed."""
    parts: dict[str, object] = {
        "fingerprint": chain(4).fingerprint,
        "devices": ("d0", "d1", "d2"),
        "stage_of": [0, 0, 1, 1],
        "stages": (stage(0), stage(1, 2)),
        "microbatch_sizes": [1, 1, 1, 1],
    }
    return Plan(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": ()}, "a stage needs at least one device"),
        ({"devices": ((),)}, "a stage needs at least one device"),
        (
            {"devices": ((0, 1), (2,))},
            "the replicas of a stage have [2, 1] devices; replicas times the tensor-parallel "
            "degree must match the devices",
        ),
        ({"devices": ((0,), (0,))}, "a stage uses devices [0, 0]; each may stand once, from 0 on"),
        ({"devices": ((-1,),)}, "a stage uses devices [-1]; each may stand once, from 0 on"),
        (
            {"devices": ((0,), (1,)), "shares": (1,)},
            "shares [1] do not fit 2 replicas; expected a whole number of 1 or more for each",
        ),
        (
            {"devices": ((0,), (1,)), "shares": (1, 0)},
            "shares [1, 0] do not fit 2 replicas; expected a whole number of 1 or more for each",
        ),
        (
            {"devices": ((0,), (1,)), "shares": (1_000_000, 1)},
            "a round of 1000001 microbatches is too long",
        ),
        (
            {"devices": ((0,), (1,)), "shares": (2, 1), "shard": Shard.PARAMETERS},
            "sharded parameters need equal shares, got [2, 1]",
        ),
        (
            {"devices": ((0,), (1,)), "shares": (2, 1), "shard": Shard.GRADIENTS},
            "sharded gradients need equal shares, got [2, 1]",
        ),
        (
            {"devices": ((0.5,),)},
            "a stage has devices ((0.5,),) and shares (); expected whole numbers, the devices by "
            "replica",
        ),
        ({"devices": (0, 1)}, "a stage has devices (0, 1) and shares (); expected whole numbers"),
    ],
)
def test_stages_that_cannot_be_are_refused(changes, words):
    assert refusal(lambda: Stage(**changes)).startswith(words)


def test_a_stage_is_frozen_hashable_and_counts_its_parts():
    made = Stage(devices=[[0, 1], [2, 3]], shares=[np.int64(3), 1])
    assert (made.num_replicas, made.tp, made.round) == (2, 2, 4)
    assert made.devices == ((0, 1), (2, 3))
    assert {made: 1}[Stage(devices=((0, 1), (2, 3)), shares=(3, 1))] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.shares = (1, 1)
    assert Stage(devices=((0,), (1,))).shares == (1, 1)
    assert Stage(devices=((0,), (1,)), shares=(2, 1), shard=Shard.OPTIMIZER).round == 3


@pytest.mark.parametrize(
    ("shares", "route"),
    [
        ((5, 3), (0, 1, 0, 0, 1, 0, 1, 0)),
        ((1,), (0,)),
        ((1, 1, 1), (0, 1, 2)),
        ((2, 2), (0, 1, 0, 1)),
        ((3, 1), (0, 0, 1, 0)),
        ((1, 2), (1, 0, 1)),
    ],
)
def test_microbatches_are_dealt_evenly(shares, route):
    assert stage(*range(len(shares)), shares=shares).route == route


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6).map(tuple))
def test_a_route_gives_every_replica_its_share_spread_over_the_round(shares):
    route = stage(*range(len(shares)), shares=shares).route
    total = sum(shares)
    assert Counter(route) == dict(enumerate(shares))
    taken = [0] * len(shares)
    for position, replica in enumerate(route):
        taken[replica] += 1
        for other, share in enumerate(shares):
            even = Fraction(share * (position + 1), total)
            assert abs(taken[other] - even) < len(shares)
    keys = []
    turn = [0] * len(shares)
    for replica in route:
        keys.append((Fraction(2 * turn[replica] + 1, 2 * shares[replica]), replica))
        turn[replica] += 1
    assert keys == sorted(keys)


def test_scaled_shares_repeat_the_route_of_equal_ones():
    assert stage(0, 1, 2, shares=(4, 4, 4)).route == (0, 1, 2) * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": ()}, "a plan needs at least one stage and one microbatch"),
        ({"microbatch_sizes": []}, "a plan needs at least one stage and one microbatch"),
        ({"stage_of": [0, 0, 0, 2]}, "stage of an op of row 3 is 2; expected 0 to 1"),
        ({"stage_of": [0, 0, 0, -1]}, "stage of an op of row 3 is -1; expected 0 to 1"),
        ({"stage_of": [1, 1, 1, 1]}, "stage 0 holds no op; leave it out"),
        ({"stage_of": []}, "stage 0 holds no op; leave it out"),
        ({"devices": ("d0", "d0", "d1")}, "devices of the plan: 'd0' stands twice"),
        ({"devices": ("d0", "d1")}, "stage 1 uses device 2; the plan names 2"),
        ({"microbatch_sizes": [1, 0]}, "microbatch size of row 1 is 0; expected 1 or more"),
        (
            {"microbatch_sizes": [1, 1, 1]},
            "stage 1 deals rounds of 2 microbatches (shares [1, 1]), which do not divide 3; use a "
            "multiple of 2 microbatches, or other shares",
        ),
        (
            {"stages": (stage(0), stage(1, 2, shares=(5, 3)))},
            "stage 1 deals rounds of 8 microbatches (shares [5, 3]), which do not divide 4",
        ),
        (
            {"stages": (Stage(devices=((0, 1),)), Stage(devices=((1, 2),)))},
            "device 'd1' is in two tensor-parallel groups; groups that share a device must be the",
        ),
        (
            {"stages": (Stage(devices=((0, 1),)), Stage(devices=((1, 0),)))},
            "device 'd1' is in two tensor-parallel groups",
        ),
        ({"recompute": [True]}, "recompute has 1 values for 4 rows"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, words):
    assert refusal(lambda: plan(**changes)).startswith(words)


def test_a_plan_is_frozen_and_its_columns_are_read_only():
    made = plan(stages=[stage(0), stage(1, 2)], recompute=True)
    assert isinstance(made.stages, tuple)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.schedule = Schedule.GPIPE
    for values in (made.stage_of, made.microbatch_sizes, made.recompute, made.device_of):
        assert not values.flags.writeable
    assert made.recompute.tolist() == [True] * 4


def test_a_plan_knows_its_figures():
    made = plan(microbatch_sizes=[3, 3, 3, 1], schedule=Schedule.PIPEDREAM)
    assert (len(made), made.num_microbatches, made.samples) == (2, 4, 10)
    assert made.stashes_weights
    assert not plan().stashes_weights
    assert made.device_of.tolist() == [0, 0, 1, 1]
    assert made.stage_index == {stage(0): 0, stage(1, 2): 1}
    assert plan() == plan() != made


def test_a_device_may_own_many_stages():
    made = plan(stages=(stage(0), stage(1), stage(0)), stage_of=[0, 1, 1, 2])
    assert made.device_of.tolist() == [0, 1, 1, 0]
    assert made.stage_index == {stage(0): 0, stage(1): 1}


@pytest.mark.parametrize(
    ("wide", "words"),
    [
        (stage(1, 2), "2 replicas of 1 devices"),
        (Stage(devices=((1, 2),)), "1 replicas of 2 devices"),
        (Stage(devices=((1, 2),), cp=2), "1 replicas of 2 devices"),
    ],
    ids=["replicas", "tensor parallel", "context parallel"],
)
def test_a_stage_on_several_devices_is_no_placement(wide, words):
    assert plan(stages=(stage(0), stage(1))).why_not_placed() is None
    assert words in plan(stages=(stage(0), wide)).why_not_placed()


def problem() -> Problem:
    return Problem(graph=chain(4), cluster=flat_cluster(3))


def test_a_plan_for_the_problem_fits():
    plan().check_fits(problem())


def test_a_plan_that_misses_an_op_does_not_fit():
    short = plan(stage_of=[0, 0, 1])
    assert refusal(lambda: short.check_fits(problem())) == (
        "the plan places 3 ops, graph 'built' has 4; every op must be placed once"
    )


def test_a_plan_for_another_graph_does_not_fit():
    assert refusal(lambda: plan(fingerprint="abc").check_fits(problem())) == (
        "the plan is for a graph with fingerprint abc, 'built' has "
        f"{chain(4).fingerprint}; plan this graph again"
    )


def test_a_plan_that_names_a_device_not_there_does_not_fit():
    other = plan(devices=("d0", "d1", "gpu7"))
    assert refusal(lambda: other.check_fits(problem())) == (
        "device 'gpu7' of the plan is not in cluster 'cluster' (d0, d1, d2)"
    )
    many = Problem(graph=chain(4), cluster=flat_cluster(9))
    assert refusal(lambda: other.check_fits(many)).endswith("d6, d7, ...)")


def test_stages_numbered_against_the_data_do_not_fit():
    back = plan(stage_of=[0, 1, 0, 1])
    assert refusal(lambda: back.check_fits(problem())) == (
        "op 'op2' in stage 0 reads from 'op1' in the later stage 1; data must flow to stages with "
        "higher numbers"
    )


def test_edges_from_explicit_backward_ops_may_lead_back():
    graph = graph_of(4, [(0, 1), (1, 2), (2, 3), (0, 3)])
    graph = dataclasses.replace(graph, ops=dataclasses.replace(graph.ops, phase=[0, 0, 1, 1]))
    made = plan(fingerprint=graph.fingerprint, stage_of=[0, 1, 1, 0])
    made.check_fits(Problem(graph=graph, cluster=flat_cluster(3)))


def test_short_ways_to_write_stages_and_microbatches():
    assert equal_microbatches(3, 8).tolist() == [8, 8, 8]
    assert pipeline_stages([[0], [1, 2]]) == (stage(0), stage(1, 2))
    assert len(pipeline(chain(4), flat_cluster(4), [0, [[1, 2]]])) == 2
