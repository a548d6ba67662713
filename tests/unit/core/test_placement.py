import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.graph import Graph
from partita.core.order import is_acyclic
from partita.core.placement import is_pipeline, placement_plan
from partita.core.plan import Plan
from partita.core.problem import Problem, Schedule
from partita.errors import InvalidInputError
from partita.testing.builders import chain, diamond, flat_cluster, graph_of, random_dag

NAMES = ("d0", "d1", "d2")


def forward_edges(graph: Graph) -> list[tuple[int, int]]:
    pairs = zip(graph.edge_source.tolist(), graph.edges.reader.tolist(), strict=True)
    return [(a, b) for a, b in pairs if a >= 0 and graph.is_forward[a] and graph.is_forward[b]]


def random_order(graph: Graph, rng: random.Random) -> np.ndarray:
    """Return one of the topological orders of a graph."""
    before = dict.fromkeys(range(len(graph)), 0)
    after: dict[int, list[int]] = {op: [] for op in range(len(graph))}
    for a, b in forward_edges(graph):
        before[b] += 1
        after[a].append(b)
    ready, found = [op for op, count in before.items() if count == 0], []
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        found.append(op)
        for reader in after[op]:
            before[reader] -= 1
            if before[reader] == 0:
                ready.append(reader)
    return np.array(found)


def check_stages(graph: Graph, plan: Plan, device_of: np.ndarray, order: np.ndarray) -> None:
    """Check all that a placement promises."""
    assert plan.device_of.tolist() == device_of.tolist()
    plan.check_fits(Problem(graph=graph, cluster=flat_cluster(len(plan.devices))))
    position = {int(op): place for place, op in enumerate(order)}
    members: dict[int, list[int]] = {}
    for op in order.tolist():
        if graph.is_forward[op]:
            members.setdefault(int(plan.stage_of[op]), []).append(op)
    edges = forward_edges(graph)
    source, reader = np.array(edges, dtype=np.int32).reshape(-1, 2).T
    stages = plan.stage_of[source], plan.stage_of[reader]
    assert bool((stages[0] <= stages[1]).all())
    cut = stages[0] != stages[1]
    assert is_acyclic(len(plan.stages), stages[0][cut], stages[1][cut])
    firsts = [position[ops[0]] for _, ops in sorted(members.items())]
    assert firsts == sorted(firsts)
    for a, b in edges:
        if device_of[a] != device_of[b]:
            assert members[int(plan.stage_of[b])][0] == b
            assert members[int(plan.stage_of[a])][-1] == a
    for ops in members.values():
        for op in ops[1:]:
            remote = [a for a, b in edges if b == op and device_of[a] != device_of[op]]
            assert not remote


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(2, 14), st.integers(1, 3), st.integers(0, 2**20), st.booleans())
def test_any_placement_becomes_stages_that_are_never_cyclic(size, count, seed, shuffled):
    rng = random.Random(seed)
    graph = random_dag(size, rng)
    device_of = np.array([rng.randrange(count) for _ in range(size)])
    order = random_order(graph, rng) if shuffled else graph.topological_order
    plan = placement_plan(graph, NAMES[:count], device_of, order=order if shuffled else None)
    check_stages(graph, plan, device_of, order)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(2, 12), st.integers(0, 2**20))
def test_placements_of_graphs_with_backward_ops_keep_the_device_of_each_op(size, seed):
    rng = random.Random(seed)
    graph = random_dag(size, rng)
    phase = [int(rng.random() < 0.4) for _ in range(size)]
    colocation = [rng.randrange(-1, 3) for _ in range(size)]
    ops = dataclasses.replace(graph.ops, phase=phase, colocation=colocation)
    graph = dataclasses.replace(graph, ops=ops)
    device_of = np.array([rng.randrange(3) for _ in range(size)])
    plan = placement_plan(graph, NAMES, device_of)
    check_stages(graph, plan, device_of, graph.topological_order)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.integers(2, 12), st.integers(0, 2**20))
def test_stages_are_not_cut_more_than_the_exchanges_ask(size, seed):
    rng = random.Random(seed)
    graph = random_dag(size, rng)
    device_of = np.array([rng.randrange(2) for _ in range(size)])
    plan = placement_plan(graph, NAMES[:2], device_of)
    edges = forward_edges(graph)
    for device in range(2):
        own = [op for op in graph.topological_order.tolist() if device_of[op] == device]
        for before, op in itertools.pairwise(own):
            opens = any(b == op and device_of[a] != device for a, b in edges)
            closes = any(a == before and device_of[b] != device for a, b in edges)
            assert (plan.stage_of[before] != plan.stage_of[op]) == (opens or closes)


def test_a_chain_there_and_back_has_three_stages():
    plan = placement_plan(chain(6), NAMES, np.array([0, 0, 1, 1, 0, 0]))
    assert plan.stage_of.tolist() == [0, 0, 1, 1, 2, 2]
    assert [stage.devices for stage in plan.stages] == [((0,),), ((1,),), ((0,),)]
    assert plan.schedule is Schedule.GPIPE
    assert plan.microbatch_sizes.tolist() == [1]
    assert plan.stages[0] is plan.stages[2]


def test_the_order_of_the_caller_decides():
    graph = diamond(2)
    device_of = np.array([0, 0, 1, 0])
    early = placement_plan(graph, NAMES, device_of, order=[0, 1, 2, 3])
    late = placement_plan(graph, NAMES, device_of, order=[0, 2, 1, 3])
    assert early.stage_of.tolist() == [0, 1, 2, 3]
    assert late.stage_of.tolist() == [0, 2, 1, 3]


def test_schedule_and_microbatches_are_passed_on():
    plan = placement_plan(
        chain(2),
        NAMES,
        [0, 1],
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=np.array([2, 1]),
    )
    assert plan.schedule is Schedule.ONE_F_ONE_B
    assert plan.microbatch_sizes.tolist() == [2, 1]


def test_a_backward_op_joins_a_forward_op_of_its_class_else_its_device():
    graph = graph_of(5, [(0, 1), (1, 2), (2, 3), (3, 4)])
    ops = dataclasses.replace(graph.ops, phase=[0, 0, 0, 1, 1], colocation=[-1, 7, -1, 7, -1])
    graph = dataclasses.replace(graph, ops=ops)
    plan = placement_plan(graph, NAMES, np.array([0, 1, 0, 1, 0]))
    assert plan.stage_of.tolist() == [0, 1, 2, 1, 0]
    alone = placement_plan(graph, NAMES, np.array([0, 0, 0, 1, 2]))
    assert alone.stage_of.tolist() == [0, 0, 0, 1, 2]
    assert alone.device_of.tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_of": [0, 1]}, "2 placements for 3 ops"),
        ({"device_of": [0, 1, 3]}, "a placement names a device beyond the 3 there are"),
        ({"device_of": [0, -1, 0]}, "a placement names a device beyond the 3 there are"),
        ({"order": [0, 1]}, "an order of 2 ops does not hold each of 3 once"),
        ({"order": [0, 1, 1]}, "an order of 3 ops does not hold each of 3 once"),
        ({"order": [0, 1, 7]}, "an order of 3 ops does not hold each of 3 once"),
        ({"order": [0, 2, 1]}, "the order runs 'op2' before 'op1', which it reads"),
    ],
)
def test_placements_that_cannot_be_are_refused(arguments, words):
    with pytest.raises(InvalidInputError) as caught:
        placement_plan(chain(3), NAMES, **({"device_of": [0, 0, 0]} | arguments))
    assert str(caught.value) == words


def test_parts_are_a_pipeline_where_none_is_left_and_entered_again():
    graph = diamond(2)
    assert is_pipeline(graph, np.array([0, 0, 1, 1]))
    assert is_pipeline(graph, np.array([1, 1, 0, 0]))
    assert not is_pipeline(graph, np.array([0, 1, 0, 0]))
    assert is_pipeline(graph, np.array([0, 0, 0, 0]))


def test_a_placement_of_100000_ops_is_quick_and_flat():
    size = 100_000
    graph = chain(size)
    plan = placement_plan(graph, NAMES, np.arange(size) % 3)
    assert len(plan.stages) == size
    assert len({id(stage) for stage in plan.stages}) == 3
