"""Piper's planner against brute force over all plans, its limits, its refusals."""

import math
import random
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.cluster import Cluster, Level
from partita.core.graph import Graph, VariantTable
from partita.core.problem import Metric, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Proof
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.effort import SearchTrace
from partita.planners.piper import kernels
from partita.planners.piper.choices import Allowed, choices_of
from partita.planners.piper.planner import plan_piper
from partita.planners.piper.pools import assign_devices, pools, search_in
from partita.planners.piper.space import THOROUGH, Room, space_of
from partita.testing.builders import (
    Figures,
    chain,
    diamond,
    flat_cluster,
    random_dag,
)
from partita.testing.piper_bound import piper_bound


@dataclass(frozen=True)
class Made:
    """How to make a problem with variants."""

    graph: Graph
    devices: int = 3
    microbatches: int = 4
    memory_bytes: float = 60.0
    degrees: tuple[int, ...] = (1, 2)
    seed: int = 0
    equal_sides: bool = True


def variants(graph: Graph, degrees: tuple[int, ...], seed: int, *, equal_sides: bool = True):
    """Return two variants of every op and degree; with equal sides they exchange the same."""
    rng = random.Random(seed)
    keys = [(op, tp, flag) for op in range(len(graph)) for tp in degrees for flag in (False, True)]
    ins, outs = np.diff(graph.in_edges[0]), np.diff(graph.out_edges[0])
    base = {op: rng.uniform(1, 8) for op in range(len(graph))}
    sides: dict[tuple[int, int, bool], tuple[float, list[float], list[float]]] = {}
    for op, tp, flag in keys:
        same = (op, tp, False)
        sides[op, tp, flag] = (
            sides[same]
            if flag and equal_sides
            else (
                rng.uniform(0, 9) / tp,
                [rng.uniform(0, 3) for _ in range(ins[op])],
                [rng.uniform(0, 3) for _ in range(outs[op])],
            )
        )
    return VariantTable(
        op=[key[0] for key in keys],
        tp=[key[1] for key in keys],
        recompute=[key[2] for key in keys],
        forward_s=[base[op] / tp * (1.3 if flag else 1.0) for op, tp, flag in keys],
        backward_s=[base[op] / tp * rng.uniform(1.5, 2.0) for op, tp, _ in keys],
        parameter_bytes=[sides[key][0] for key in keys],
        saved_bytes=[rng.uniform(0, 2) if key[2] else rng.uniform(3, 9) for key in keys],
        fixed_memory_bytes=[rng.uniform(2, 9) for _ in keys],
        sync_in_ptr=np.cumsum([0, *(len(sides[key][1]) for key in keys)]),
        sync_in_bytes=[value for key in keys for value in sides[key][1]],
        sync_out_ptr=np.cumsum([0, *(len(sides[key][2]) for key in keys)]),
        sync_out_bytes=[value for key in keys for value in sides[key][2]],
    )


def make(made: Made) -> Problem:
    table = variants(made.graph, made.degrees, made.seed, equal_sides=made.equal_sides)
    return Problem(
        graph=replace(made.graph, variants=table),
        cluster=flat_cluster(
            made.devices, memory_bytes=made.memory_bytes, bandwidth_bytes_per_s=20.0
        ),
        objective=Objective(metric=Metric.PIPER, microbatches=made.microbatches),
    )


def ordered_splits(graph: Graph):
    """Return every numbering of stages along the data, as a stage for each op."""
    size = len(graph)
    for stage_of in product(range(size), repeat=size):
        used = set(stage_of)
        if used != set(range(len(used))):
            continue
        source, reader = graph.edge_source.tolist(), graph.edges.reader.tolist()
        if all(s < 0 or stage_of[s] <= stage_of[r] for s, r in zip(source, reader, strict=True)):
            yield stage_of


def brute_force(problem: Problem, *, data=True, tensor=True, again=True) -> float:
    """Return the least time of all plans, by the formula alone; inf = none fits."""
    graph, table = problem.graph, problem.graph.variants
    row_of = table.row_of
    batch = problem.objective.microbatches
    limit = problem.cluster.devices[0].memory_bytes
    rate = float(problem.cluster.levels[0].bandwidth_bytes_per_s[0])
    devices = len(problem.cluster)
    degrees = [d for d in range(1, devices + 1) if batch % d == 0 and (data or d == 1)]
    splits = sorted({int(tp) for tp in table.tp} if tensor else {1})
    flags = (False, True) if again else (False,)
    best = math.inf
    for stage_of in ordered_splits(graph):
        count = max(stage_of) + 1
        members = [[op for op in range(len(graph)) if stage_of[op] == s] for s in range(count)]
        for shape in product(product(degrees, splits), repeat=count):
            if sum(d * t for d, t in shape) > devices or sum(d for d, _ in shape) > batch:
                continue
            after = [sum(d for d, _ in shape[s:]) for s in range(count)]
            worst = 0.0
            for s, (d, t) in enumerate(shape):
                flight = math.ceil(after[s] / d)
                least = math.inf
                for chosen in product(flags, repeat=len(members[s])):
                    keys = [(op, t, flag) for op, flag in zip(members[s], chosen, strict=True)]
                    if any(key not in row_of for key in keys):
                        continue
                    rows = [row_of[key] for key in keys]
                    need = sum(
                        table.saved_bytes[r] * flight + table.fixed_memory_bytes[r] for r in rows
                    )
                    if need <= limit:
                        least = min(least, stage_time(problem, stage_of, s, rows, (d, batch, rate)))
                worst = max(worst, least)
            best = min(best, worst)
    return best


def stage_time(problem: Problem, stage_of, stage, rows, figures) -> float:
    graph, table = problem.graph, problem.graph.variants
    d, batch, rate = figures
    moved = 0.0
    for r in rows:
        op = int(table.op[r])
        ptr, edges = graph.in_edges
        for k, edge in enumerate(edges[ptr[op] : ptr[op + 1]].tolist()):
            source = int(graph.edge_source[edge])
            if source >= 0 and stage_of[source] != stage:
                size = graph.tensors.bytes[graph.edges.tensor[edge]]
                moved += 2 * (size + table.sync_in_bytes[table.sync_in_ptr[r] + k]) / d
        ptr, edges = graph.out_edges
        for k, edge in enumerate(edges[ptr[op] : ptr[op + 1]].tolist()):
            if stage_of[int(graph.edges.reader[edge])] != stage:
                size = graph.tensors.bytes[graph.edges.tensor[edge]]
                moved += 2 * (size + table.sync_out_bytes[table.sync_out_ptr[r] + k]) / d
    moved += sum(4 * (d - 1) * table.parameter_bytes[r] / d / batch for r in rows)
    return moved / rate + sum(table.forward_s[r] + table.backward_s[r] for r in rows) / d


GRAPHS = {
    "chain": chain(4, Figures(tensor_bytes=5.0)),
    "diamond": diamond(2, Figures(tensor_bytes=7.0)),
    "random": random_dag(4, random.Random(3)),
}


@given(
    name=st.sampled_from(sorted(GRAPHS)),
    seed=st.integers(0, 10**6),
    devices=st.integers(1, 4),
    microbatches=st.sampled_from([1, 2, 4, 6]),
    memory_bytes=st.sampled_from([15.0, 22.0, 30.0, 45.0, 1e4]),
)
def test_the_plan_is_the_best_of_all(name, seed, devices, microbatches, memory_bytes):
    problem = make(
        Made(
            graph=GRAPHS[name],
            seed=seed,
            devices=devices,
            microbatches=microbatches,
            memory_bytes=memory_bytes,
        )
    )
    best = brute_force(problem)
    if best == math.inf:
        with pytest.raises(InfeasibleError):
            plan_piper(problem)
        assert piper_bound(problem) == (math.inf, "no plan fits")
        return
    solution = plan_piper(problem)
    assert solution.value == pytest.approx(best, rel=1e-8)
    assert solution.proof is Proof.OPTIMAL
    assert solution.lower_bound == pytest.approx(best, rel=1e-8)
    bound, _ = piper_bound(problem)
    assert bound <= best * (1 + 1e-12)
    assert bound == pytest.approx(best, rel=1e-8)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), memory_bytes=st.sampled_from([22.0, 40.0]))
def test_each_kind_of_parallelism_can_be_left_out(seed, memory_bytes):
    problem = make(Made(graph=GRAPHS["chain"], seed=seed, memory_bytes=memory_bytes))
    for key, option in (
        ("data", "data_parallel"),
        ("tensor", "tensor_parallel"),
        ("again", "recompute"),
    ):
        best = brute_force(problem, **{key: False})
        if best == math.inf:
            with pytest.raises(InfeasibleError):
                plan_piper(problem, **{option: False})
        else:
            solution = plan_piper(problem, **{option: False})
            assert solution.value == pytest.approx(best, rel=1e-8)
            assert solution.proof is Proof.FEASIBLE
            assert solution.options[option] is False


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_choices_that_exchange_unlike_amounts_leave_a_bound_that_holds(seed):
    problem = make(Made(graph=GRAPHS["diamond"], seed=seed, memory_bytes=35.0, equal_sides=False))
    best = brute_force(problem)
    bound, _ = piper_bound(problem)
    if best == math.inf:
        with pytest.raises(InfeasibleError):
            plan_piper(problem)
        return
    solution = plan_piper(problem)
    assert solution.proof is Proof.FEASIBLE
    assert bound <= best * (1 + 1e-12)
    assert best <= solution.value * (1 + 1e-12)


@given(
    items=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=9),
    need=st.integers(1, 40),
    most=st.integers(0, 40),
)
def test_items_that_cover_a_need_are_the_cheapest(items, need, most):
    items = sorted(items, key=lambda item: (item[1] / item[0], item))
    gain, cost = np.array(items, dtype=np.float64).T
    costs = [
        sum(c for c, taken in zip(cost.tolist(), chosen, strict=True) if taken)
        for chosen in product((0, 1), repeat=len(items))
        if sum(g for g, taken in zip(gain.tolist(), chosen, strict=True) if taken) >= need
    ]
    taken, best = np.zeros((2, len(items)), np.int8)
    low, high, _ = kernels.cover(gain, cost, float(need), float(most), 10_000, taken, best)
    if not costs:
        assert low == high == math.inf
        return
    assert float(gain[best != 0].sum()) >= need
    assert float(cost[best != 0].sum()) == high
    assert low <= min(costs)
    if min(costs) <= most:
        assert high == min(costs)
        assert low == pytest.approx(high, abs=1e-9)
    else:
        assert low > most or low == pytest.approx(high, abs=1e-9)
    low, high, branches = kernels.cover(gain, cost, float(need), float(most), 0, taken, best)
    assert branches == 0
    assert low <= min(costs) <= high


def test_compiled_and_interpreted_loops_find_the_same(monkeypatch):
    problem = make(Made(graph=random_dag(7, random.Random(5)), devices=5, memory_bytes=40.0))
    plain = plan_piper(problem)
    monkeypatch.setattr("partita.planners.piper.space.INTERPRETED", 0)
    assert plan_piper(problem) == plain


def test_more_ideals_than_fit_leave_a_window_without_a_proof(monkeypatch):
    problem = make(Made(graph=random_dag(9, random.Random(8)), devices=4, memory_bytes=80.0))
    whole = plan_piper(problem)
    tiny = Room(ideals=6, cells=1000, window=12, nodes=6)
    for user in ("planners.piper.planner", "testing.piper_bound"):
        monkeypatch.setattr(f"partita.{user}.THOROUGH", tiny)
    found = plan_piper(problem)
    assert found.proof is Proof.FEASIBLE
    assert not found.stats["all_ideals"]
    assert found.value >= whole.value * (1 - 1e-12)
    choices = choices_of(problem, Allowed())
    space = space_of(problem.graph, choices, math.inf, Room(6, 1000, 12, 6))
    assert not space.whole
    assert space.lattice.member.shape[1] <= 6
    few_cells = space_of(problem.graph, choices, math.inf, THOROUGH._replace(cells=4))
    assert not few_cells.whole
    bound, term = piper_bound(problem)
    assert 0 < bound <= whole.value
    assert term in ("work over devices", "an op that is not split further")


def test_ops_by_the_thousand_choose_recomputation_together(monkeypatch):
    problem = make(Made(graph=chain(6, Figures(tensor_bytes=3.0)), memory_bytes=45.0))
    one_by_one = plan_piper(problem)
    monkeypatch.setattr("partita.planners.piper.space.MAX_ITEMS", 2)
    assert plan_piper(problem).value == pytest.approx(one_by_one.value)


def test_an_op_too_large_for_a_device_is_named_with_its_need():
    problem = make(Made(graph=chain(3), memory_bytes=4.0, degrees=(1,)))
    with pytest.raises(InfeasibleError, match=r"'op\d' needs.*'d0'"):
        plan_piper(problem)


@pytest.mark.parametrize(
    ("memory_bytes", "why"),
    [
        (16.0, r"more than all 2 devices \('d0' to 'd1'\)"),
        (18.0, r"2 devices keeps 'd0' within 18.* B, with 35.*; use more memory"),
    ],
)
def test_a_split_that_no_device_holds_names_device_and_limit(memory_bytes, why):
    problem = make(Made(graph=chain(6), devices=2, memory_bytes=memory_bytes, degrees=(1,)))
    with pytest.raises(InfeasibleError, match=why):
        plan_piper(problem)


def test_an_op_without_a_variant_of_the_kinds_allowed_is_named():
    graph = chain(2)
    table = VariantTable(op=[0, 1], tp=[1, 2], forward_s=[1.0, 1.0])
    problem = Problem(
        graph=replace(graph, variants=table),
        cluster=flat_cluster(3),
        objective=Objective(metric=Metric.PIPER, microbatches=2),
    )
    assert [stage.tp for stage in plan_piper(problem).plan.stages] == [1, 2]
    with pytest.raises(InfeasibleError, match="'op1' has no variant"):
        plan_piper(problem, tensor_parallel=False)
    one = replace(problem, cluster=flat_cluster(1))
    assert piper_bound(one) == (math.inf, "no plan fits")


def test_ops_that_share_a_device_need_a_degree_in_common():
    graph = chain(3)
    graph = replace(graph, ops=replace(graph.ops, colocation=[-1, 0, 0]))
    table = VariantTable(op=[0, 1, 2], tp=[1, 1, 2], forward_s=[1.0, 1.0, 1.0])
    problem = Problem(
        graph=replace(graph, variants=table),
        cluster=flat_cluster(4),
        objective=Objective(metric=Metric.PIPER, microbatches=2),
    )
    with pytest.raises(InfeasibleError, match=r"'op1'.*tensor-parallel"):
        plan_piper(problem)
    assert piper_bound(problem) == (math.inf, "no plan fits")


def test_devices_of_unequal_memory_are_used_as_far_as_they_do():
    problem = make(Made(graph=chain(4), devices=4, memory_bytes=1e4))
    devices = tuple(
        replace(device, memory_bytes=memory)
        for device, memory in zip(problem.cluster.devices, (5.0, 1e4, 5.0, 1e4), strict=True)
    )
    mixed = replace(problem, cluster=replace(problem.cluster, devices=devices))
    found = plan_piper(mixed)
    assert set(found.plan.devices) <= {"d1", "d3"}
    assert found.proof is Proof.FEASIBLE
    two = replace(problem, cluster=flat_cluster(2, memory_bytes=1e4, bandwidth_bytes_per_s=20.0))
    assert found.value == pytest.approx(plan_piper(two).value)
    bound, _ = piper_bound(mixed)
    assert bound <= found.value


def test_rules_are_kept_or_refused():
    problem = make(Made(graph=chain(4), devices=4, memory_bytes=1e4))
    pinned = replace(
        problem,
        rules=(Rule(ops="op0", devices="d3"), Rule(ops="op3", devices="d3", forbids=True)),
    )
    found = plan_piper(pinned)
    first, last = (found.plan.stages[int(found.plan.stage_of[op])] for op in (0, 3))
    assert [found.plan.devices[d] for group in first.devices for d in group] == ["d3"]
    assert all(found.plan.devices[d] != "d3" for group in last.devices for d in group)
    assert found.proof is Proof.FEASIBLE
    apart = replace(
        problem,
        rules=tuple(Rule(ops=f"op{i}", devices=f"d{i % 2}") for i in range(4)),
    )
    with pytest.raises(InfeasibleError, match="op 'op"):
        plan_piper(apart)


def test_devices_move_along_a_chain_so_that_all_stages_get_theirs():
    rules = (
        Rule(ops="op0", devices="d[01]"),
        Rule(ops="op1", devices="d[02]"),
        Rule(ops="op2", devices="d[02]"),
    )
    problem = Problem(graph=chain(3), cluster=flat_cluster(4), rules=rules)
    stage_of = np.array([0, 1, 2])
    assert assign_devices(problem, stage_of, [1, 1, 1], np.arange(4)) == [[1], [2], [0]]
    with pytest.raises(InfeasibleError, match="op 'op2' needs 2 devices"):
        assign_devices(problem, stage_of, [1, 1, 2], np.arange(4))


def test_without_a_number_of_microbatches_nothing_is_proven():
    problem = make(Made(graph=chain(3), memory_bytes=1e4))
    problem = replace(problem, objective=Objective(metric=Metric.PIPER))
    assert plan_piper(problem).proof is Proof.FEASIBLE
    assert piper_bound(problem) == (0.0, "none")


def test_the_bound_names_its_term():
    one = make(Made(graph=chain(1), devices=2, microbatches=1, degrees=(1,), memory_bytes=1e4))
    assert piper_bound(one)[1] == "an op that is not split further"
    even = make(Made(graph=chain(1), devices=1, degrees=(1,), memory_bytes=1e4))
    assert piper_bound(even)[1] == "work over devices"
    cut = make(Made(graph=chain(4, Figures(tensor_bytes=50.0)), memory_bytes=40.0))
    assert piper_bound(cut)[1] == "search"


def test_ops_without_time_are_planned_by_their_transfers():
    graph = chain(4, Figures(forward_s=0.0, backward_s=0.0, tensor_bytes=5.0))
    keys = [(op, flag) for op in range(4) for flag in (False, True)]
    table = VariantTable(
        op=[op for op, _ in keys],
        recompute=[flag for _, flag in keys],
        saved_bytes=[1.0 if flag else 4.0 for _, flag in keys],
        fixed_memory_bytes=[2.0] * len(keys),
    )
    problem = Problem(
        graph=replace(graph, variants=table),
        cluster=flat_cluster(2, memory_bytes=9.0, bandwidth_bytes_per_s=10.0),
        objective=Objective(metric=Metric.PIPER, microbatches=2),
    )
    assert plan_piper(problem).value == pytest.approx(1.0)
    wide = flat_cluster(2, memory_bytes=100.0, bandwidth_bytes_per_s=10.0)
    assert plan_piper(replace(problem, cluster=wide)).value == 0.0


def test_a_search_says_whether_anything_fits():
    problem = make(Made(graph=chain(3), memory_bytes=1e4))
    choices, (pool, *_) = choices_of(problem, Allowed()), pools(problem)
    for size, fits in ((1e4, True), (3.0, False)):
        small = replace(pool, size=size)
        space = space_of(problem.graph, choices, size, THOROUGH)
        assert search_in(problem, Allowed(), choices, space, small).fits() is fits


def test_a_trace_records_what_was_found():
    trace = SearchTrace()
    solution = plan_piper(make(Made(graph=chain(3), memory_bytes=1e4)), trace=trace)
    assert [value for _, value in trace.points] == [solution.value]


def test_a_graph_without_variants_has_no_piper_value():
    problem = Problem(
        graph=chain(3), cluster=flat_cluster(2), objective=Objective(metric=Metric.PIPER)
    )
    with pytest.raises(InvalidInputError, match="has 0 variants"):
        plan_piper(problem)
    assert piper_bound(problem) == (0.0, "none")


def test_other_metrics_are_refused():
    with pytest.raises(InvalidInputError, match="is throughput"):
        plan_piper(Problem(graph=chain(3), cluster=flat_cluster(2)))


def test_sums_of_bytes_that_round_across_a_limit_are_tried_with_less(monkeypatch):
    problem = make(Made(graph=chain(4), memory_bytes=30.0))
    plain = plan_piper(problem)
    exact = measure(problem, plain.plan).details["memory_bytes"]
    tight = replace(
        problem, cluster=flat_cluster(3, memory_bytes=max(exact), bandwidth_bytes_per_s=20.0)
    )
    assert plan_piper(tight).value == pytest.approx(plain.value)
    monkeypatch.setattr("partita.planners.piper.planner.ROUNDED", (3.0, 1.0))
    assert plan_piper(problem).value == pytest.approx(plain.value)
    monkeypatch.setattr("partita.planners.piper.planner.ROUNDED", (3.0,))
    with pytest.raises(InfeasibleError, match="device 'd"):
        plan_piper(problem)


def test_no_order_of_stages_keeps_rules_that_cross():
    rules = (
        Rule(ops="op0", devices="d0"),
        Rule(ops="op1", devices="d1"),
        Rule(ops="op1", devices="d0", forbids=True),
        Rule(ops="op2", devices="d0"),
    )
    problem = replace(make(Made(graph=chain(3), devices=2, memory_bytes=1e4)), rules=rules)
    with pytest.raises(InfeasibleError, match="op 'op"):
        plan_piper(problem)
    joined = replace(problem.graph, ops=replace(problem.graph.ops, colocation=[0, 0, -1]))
    with pytest.raises(InfeasibleError, match=r"may.*'op0'.*1"):
        plan_piper(replace(problem, graph=joined))


def test_ops_that_only_a_cpu_runs_bring_it_into_play():
    problem = make(Made(graph=chain(3), devices=3, memory_bytes=1e4))
    kinds = [2, 1, 1]
    devices = list(problem.cluster.devices)
    devices[2] = replace(devices[2], kind="cpu")
    level = Level(name="host", group_of=np.zeros(3, np.int32), bandwidth_bytes_per_s=[20.0])
    cluster = Cluster(devices=tuple(devices), levels=(level,))
    graph = replace(problem.graph, ops=replace(problem.graph.ops, device_kinds=kinds))
    found = plan_piper(replace(problem, graph=graph, cluster=cluster))
    first = found.plan.stages[int(found.plan.stage_of[0])]
    assert [found.plan.devices[d] for group in first.devices for d in group] == ["d2"]
    only_first = replace(graph, ops=replace(graph.ops, device_kinds=[2, 1, 2]))
    with pytest.raises(InfeasibleError, match="op 'op"):
        plan_piper(replace(problem, graph=only_first, cluster=cluster))
