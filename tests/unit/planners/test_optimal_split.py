"""Optimal splits, against all splits of small graphs scored by an independent formula."""

import itertools
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.core.cluster import Cluster, Device, Level
from partita.core.graph import DeviceKind, Phase
from partita.core.problem import Metric, Mode, Objective, Problem
from partita.core.rules import Rule
from partita.core.solution import Proof
from partita.cost.judge import measure
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.effort import Effort, SearchTrace
from partita.planners.lattice.quotient import quotient, unordered_quotient
from partita.planners.optimal_split import plan_optimal_split
from partita.planners.split import contiguous, max_load, refine
from partita.planners.split.max_load import liquid_bound
from partita.planners.split.model import split_model, without_idle_nodes
from partita.testing.builders import Figures, chain, diamond, flat_cluster, random_dag
from partita.testing.planner_suite import all_placements

FEW = settings(max_examples=25)


def mixed_cluster(accelerators, cpus, memory=1e18, speeds=(), rate=30.0):
    speeds = list(speeds) or [1.0] * accelerators
    devices = [
        Device(name=f"acc{i}", memory_bytes=memory, speed=speeds[i]) for i in range(accelerators)
    ]
    devices += [
        Device(name=f"cpu{i}", kind=DeviceKind.CPU, speed=0.3, memory_bytes=1.0)
        for i in range(cpus)
    ]
    level = Level(
        name="bus",
        group_of=np.zeros(len(devices), np.int32),
        bandwidth_bytes_per_s=np.array([rate]),
    )
    return Cluster(devices=tuple(devices), levels=(level,))


def random_problem(seed, *, metric=Metric.MAX_LOAD, mode=None, most=6, idle=0.3):
    """Return a small problem with idle ops, classes, shared parameters and several devices."""
    rng = random.Random(seed)
    size = rng.randint(4, most)
    graph = random_dag(size, rng, tied=rng.randint(0, 1))
    seconds = [0.0 if rng.random() < idle else rng.randint(1, 6) for _ in range(size)]
    bare = rng.random() < 0.5
    costs = replace(
        graph.costs[0],
        forward_s=seconds,
        backward_s=[0.0 if bare else 2 * value for value in seconds],
        backward_input_s=[np.nan] * size,
    )
    colors = [rng.choice([-1, -1, -1, 0, 1]) for _ in range(size)]
    ops = replace(graph.ops, colocation=colors)
    graph = replace(graph, ops=ops, costs=(costs,))
    memory = rng.choice([1e18, 1e18, 0.7 * total_bytes(graph), 0.5 * total_bytes(graph)])
    speeds = rng.choice([(1, 1), (1, 2), (1, 1, 1)])
    cluster = mixed_cluster(len(speeds), rng.randint(0, 1), memory, speeds)
    mode = mode or rng.choice(list(Mode))
    objective = Objective(metric=metric, mode=mode, optimizer_bytes_per_element=0.0)
    return Problem(graph=graph, cluster=cluster, objective=objective)


def total_bytes(graph):
    return float(graph.ops.saved_bytes.sum() + 2 * graph.parameters.bytes.sum())


def load_of(problem, device_of):
    """Return the largest load of an assignment, by the published formula; None if it breaks one."""
    graph, devices = problem.graph, problem.cluster.devices
    training = problem.objective.mode is Mode.TRAINING
    color_at = {}
    for op, color in enumerate(graph.ops.colocation.tolist()):
        if color >= 0 and color_at.setdefault(color, device_of[op]) != device_of[op]:
            return None
    back = graph.backward_s if training else 0 * graph.backward_s
    rate = float(problem.cluster.levels[0].bandwidth_bytes_per_s[0])
    load = [0.0] * len(devices)
    for op, device in enumerate(device_of):
        load[device] += float(graph.forward_s[op] + back[op]) / devices[device].speed
    made = dict.fromkeys(range(len(graph)), 0.0)
    for size, producer in zip(graph.tensors.bytes, graph.tensors.producer, strict=True):
        if producer >= 0:
            made[int(producer)] += float(size) / rate
    times = 2 if back.any() else 1
    for op in range(len(graph)):
        readers = {
            device_of[reader]
            for source, reader in zip(graph.edge_source, graph.edges.reader, strict=True)
            if source == op
        }
        for device in readers - {device_of[op]} and readers | {device_of[op]}:
            if devices[device].kind is not DeviceKind.CPU:
                load[device] += made[op] * (times if graph.is_forward[op] else 1)
    return max(load) if fits(problem, device_of, training) else None


def fits(problem, device_of, training):
    table, graph = problem.graph.parameters, problem.graph
    for number, device in enumerate(problem.cluster.devices):
        if device.kind is DeviceKind.CPU:
            continue
        ops = [op for op, place in enumerate(device_of) if place == number]
        uses = zip(table.use_op.tolist(), table.use_parameter.tolist(), strict=True)
        held = {parameter for op, parameter in uses if op in ops}
        need = sum(float(graph.ops.saved_bytes[op]) for op in ops)
        need += sum(
            float(table.bytes[p]) * (2 if training and table.trainable[p] else 1) for p in held
        )
        if need > device.memory_bytes:
            return False
    return True


def is_chain(graph, device_of):
    """Return whether no forward data flows in a circle between devices."""
    follows = {
        (device_of[source], device_of[reader])
        for source, reader in zip(graph.edge_source, graph.edges.reader, strict=True)
        if source >= 0 and graph.is_forward[source] and graph.is_forward[reader]
    }
    left = set(device_of)
    while left:
        free = [d for d in left if not any(b == d and a in left and a != d for a, b in follows)]
        if not free:
            return False
        left -= set(free)
    return True


def optima(problem):
    """Return the least load of chains, and of all splits; infinite where nothing fits."""
    best = {True: np.inf, False: np.inf}
    for device_of in product(range(len(problem.cluster)), repeat=len(problem.graph)):
        load = load_of(problem, device_of)
        if load is not None:
            best[False] = min(best[False], load)
            if load < best[True] and is_chain(problem.graph, device_of):
                best[True] = load
    return best[True], best[False]


def solved(problem, **options):
    try:
        return plan_optimal_split(problem, **options)
    except InfeasibleError:
        return None


def value_of(problem, **options):
    solution = solved(problem, **options)
    return np.inf if solution is None else solution.value


class TestMaxLoad:
    @FEW
    @given(st.integers(0, 10_000))
    def test_contiguous_splits_are_the_best_of_all_chains(self, seed):
        problem = random_problem(seed)
        chains, everything = optima(problem)
        assert value_of(problem) == pytest.approx(chains, rel=1e-9)
        loose = value_of(problem, contiguous=False, iterations=2_000)
        assert everything * (1 - 1e-9) <= loose <= chains * (1 + 1e-9)

    @FEW
    @given(st.integers(0, 10_000))
    def test_annealing_finds_the_best_of_a_few_ops(self, seed):
        problem = random_problem(seed, most=5)
        everything = optima(problem)[1]
        assert value_of(problem, contiguous=False) == pytest.approx(everything, rel=1e-9)

    @pytest.mark.parametrize("seed", range(12))
    def test_explicit_backward_ops_ride_with_their_class(self, seed):
        rng = random.Random(seed)
        size = 3
        graph = chain(2 * size, Figures(tensor_bytes=[float(rng.randint(1, 90)) for _ in range(6)]))
        costs = replace(graph.costs[0], forward_s=[rng.randint(0, 5) for _ in range(6)])
        ops = replace(
            graph.ops,
            phase=[Phase.FORWARD] * size + [Phase.BACKWARD] * size,
            colocation=[0, 1, 2, 2, 1, 0],
        )
        problem = Problem(
            graph=replace(graph, ops=ops, costs=(costs,)),
            cluster=mixed_cluster(2, 1),
            objective=Objective(metric=Metric.MAX_LOAD),
        )
        assert value_of(problem) == pytest.approx(optima(problem)[0], rel=1e-9)

    def test_the_value_is_that_of_the_published_formula(self):
        problem = random_problem(4)
        solution = plan_optimal_split(problem)
        index = problem.cluster.index_of
        device_of = [index[solution.plan.devices[d]] for d in solution.plan.device_of]
        assert solution.value == pytest.approx(load_of(problem, device_of), rel=1e-12)

    @pytest.mark.parametrize("seed", range(8))
    def test_compiled_and_interpreted_searches_agree(self, monkeypatch, seed):
        problem = random_problem(seed)
        plain = solved(problem, contiguous=False, iterations=400)
        monkeypatch.setattr(max_load, "INTERPRETED_IDEALS", 0)
        monkeypatch.setattr(refine, "INTERPRETED_WORK", 0)
        again = solved(problem, contiguous=False, iterations=400)
        assert (plain is None) == (again is None)
        assert plain is None or plain.plan == again.plan

    @pytest.mark.parametrize("seed", range(10))
    def test_above_the_limits_splits_are_valid_and_no_better(self, monkeypatch, seed):
        problem = random_problem(seed)
        exact = value_of(problem)
        assert value_of(problem, ideals=0, iterations=200) >= exact * (1 - 1e-9)
        monkeypatch.setattr(max_load, "MAX_CELLS", 0)
        ordered = solved(problem)
        assert ordered is None or ordered.value >= exact * (1 - 1e-9)
        assert ordered is None or not ordered.stats["best_contiguous"]

    def test_a_search_that_gives_up_goes_on_near_the_best_order(self, monkeypatch):
        problem = Problem(
            graph=diamond(6), cluster=flat_cluster(3), objective=Objective(metric=Metric.MAX_LOAD)
        )
        exact = plan_optimal_split(problem)
        monkeypatch.setattr(max_load, "MAX_PAIRS", 10)
        monkeypatch.setattr(contiguous, "FIRST_IDEALS", 5)
        less = plan_optimal_split(problem, iterations=50)
        assert exact.stats["best_contiguous"]
        assert not less.stats["best_contiguous"]
        assert less.value >= exact.value

    def test_annealing_keeps_a_contiguous_split_contiguous(self):
        problem = replace(random_problem(7, idle=0.0), objective=Objective(metric=Metric.MAX_LOAD))
        model = split_model(problem, quotient(problem.graph))
        start = contiguous.contiguous_split(model, 1000, Effort()).chain
        flow = refine.ordered_flow(model)
        first = contiguous.assignment_of(model, start)
        found = refine.anneal(model, flow, first, Effort(seed=1, iterations=500))
        again = contiguous.chain_of(model, found.device_of, found.value)
        stage = np.zeros(model.q.num_nodes, int)
        for number, (nodes, _) in enumerate(again.pieces):
            stage[nodes] = number
        source, target = model.q.edges
        assert (stage[source] <= stage[target]).all()

    @FEW
    @given(st.integers(0, 10_000))
    def test_no_split_is_below_the_liquid_bound(self, seed):
        problem = random_problem(seed)
        model = split_model(problem, unordered_quotient(problem.graph))
        assert liquid_bound(model) <= optima(problem)[1] * (1 + 1e-9)

    def test_idle_nodes_are_merged(self):
        graph = chain(4, Figures(forward_s=[1.0, 0.0, 0.0, 1.0], tensor_bytes=[9.0, 5.0, 2.0, 2.0]))
        problem = Problem(graph=graph, cluster=flat_cluster(2, bandwidth_bytes_per_s=1.0))
        model = split_model(problem, quotient(problem.graph), mode=Mode.INFERENCE)
        joined = without_idle_nodes(
            model, lambda q: split_model(problem, q, mode=Mode.INFERENCE), any_size=True
        )
        assert joined.q.node_of.tolist() == [0, 0, 0, 1]

    def test_a_value_that_meets_the_bound_is_proven(self):
        figures = Figures(forward_s=1.0, backward_s=0.0, tensor_bytes=0.0)
        problem = Problem(
            graph=chain(4, figures),
            cluster=flat_cluster(2),
            objective=Objective(metric=Metric.MAX_LOAD),
        )
        solution = plan_optimal_split(problem)
        assert (solution.value, solution.proof) == (2.0, Proof.OPTIMAL)


class TestLatency:
    @FEW
    @given(st.integers(0, 10_000))
    def test_no_plan_beats_all_placements_and_one_device_is_no_better(self, seed):
        problem = random_problem(
            seed, metric=Metric.SINGLE_SAMPLE_LATENCY, mode=Mode.INFERENCE, most=5
        )
        solution = solved(problem, iterations=200)
        if solution is None:
            return
        values = [measure(problem, plan) for plan in all_placements(problem, solution.plan)]
        feasible = [value.value for value in values if not value.errors]
        assert min(feasible) * (1 - 1e-9) <= solution.value
        alone = [value.value for value in (values[0], values[-1]) if not value.errors]
        assert solution.value <= min(alone, default=np.inf) * (1 + 1e-9)

    @pytest.mark.parametrize("seed", range(6))
    def test_compiled_and_interpreted_searches_agree(self, monkeypatch, seed):
        problem = random_problem(seed, metric=Metric.SINGLE_SAMPLE_LATENCY, mode=Mode.INFERENCE)
        plain = solved(problem, iterations=60)
        monkeypatch.setattr("partita.planners.split.latency.INTERPRETED_IDEALS", 0)
        monkeypatch.setattr(refine, "INTERPRETED_WORK", 0)
        again = solved(problem, iterations=60)
        assert (plain is None) == (again is None)
        assert plain is None or plain.plan == again.plan

    def test_branches_run_at_the_same_time(self):
        figures = Figures(forward_s=[0.0, 8.0, 8.0, 0.0], backward_s=0.0, tensor_bytes=3.0)
        problem = Problem(
            graph=diamond(2, figures),
            cluster=mixed_cluster(2, 1),
            objective=Objective(metric=Metric.SINGLE_SAMPLE_LATENCY, mode=Mode.INFERENCE),
        )
        assert plan_optimal_split(problem).value < 9.0

    def test_large_graphs_are_coarsened_first(self, monkeypatch):
        monkeypatch.setattr("partita.planners.split.latency.MAX_NODES", 4)
        for memory in (1e18, 120.0):
            figures = Figures(saved_bytes=60.0, parameter_bytes=0.0)
            problem = Problem(
                graph=chain(9, figures),
                cluster=flat_cluster(5, memory_bytes=memory),
                objective=Objective(metric=Metric.SINGLE_SAMPLE_LATENCY, mode=Mode.INFERENCE),
            )
            assert plan_optimal_split(problem, iterations=50).value > 0

    def test_states_that_are_too_many_leave_devices_out(self, monkeypatch):
        problem = random_problem(3, metric=Metric.SINGLE_SAMPLE_LATENCY, mode=Mode.INFERENCE)
        monkeypatch.setattr(max_load, "MAX_CELLS", 20)
        assert solved(problem, iterations=50) is None or solved(problem, iterations=50).value > 0


class TestOptions:
    def problem(self):
        return Problem(
            graph=diamond(4),
            cluster=flat_cluster(3, bandwidth_bytes_per_s=10.0),
            objective=Objective(metric=Metric.MAX_LOAD),
        )

    @pytest.mark.parametrize(
        "options",
        [
            {"ideals": -1},
            {"iterations": -1},
            {"time_limit": -1.0},
            {"time_limit": float("nan")},
            {"iterations": 1, "time_limit": 1.0},
        ],
    )
    def test_limits_that_make_no_sense_are_refused(self, options):
        with pytest.raises(InvalidInputError):
            plan_optimal_split(self.problem(), **options)

    def test_equal_seeds_give_equal_plans(self):
        calls = [
            plan_optimal_split(self.problem(), contiguous=False, iterations=500, seed=s)
            for s in (3, 3)
        ]
        assert calls[0] == calls[1]

    def test_a_time_limit_ends_the_search(self):
        solution = plan_optimal_split(self.problem(), contiguous=False, time_limit=0.01)
        assert solution.options["time_limit"] == 0.01

    def test_better_values_are_traced(self):
        trace = SearchTrace()
        solution = plan_optimal_split(self.problem(), contiguous=False, iterations=500, trace=trace)
        values = [value for _, value in trace.points]
        assert values == sorted(values, reverse=True)
        assert values[-1] == pytest.approx(solution.value)
        assert "trace" not in solution.options

    def test_pins_and_bans_hold(self):
        rules = (Rule(ops="op1", devices="d2"), Rule(ops="op2", devices="d0", forbids=True))
        problem = replace(self.problem(), rules=rules)
        for loose in (True, False):
            plan = plan_optimal_split(problem, contiguous=not loose, iterations=200).plan
            names = [plan.devices[device] for device in plan.device_of]
            assert names[1] == "d2"
            assert names[2] != "d0"


class TestObstacles:
    def problem(self, graph, cluster, **objective):
        objective = {"metric": Metric.MAX_LOAD, **objective}
        return Problem(graph=graph, cluster=cluster, objective=Objective(**objective))

    def test_an_op_that_is_too_large_is_named(self):
        graph = chain(3, Figures(saved_bytes=[1.0, 900.0, 1.0], parameter_bytes=0.0))
        with pytest.raises(InfeasibleError, match=r"'op1'.*900 B, 800 B.*100 B.*'d0'"):
            plan_optimal_split(self.problem(graph, flat_cluster(2, memory_bytes=100.0)))

    def test_too_many_bytes_for_all_devices_are_said(self):
        graph = chain(4, Figures(saved_bytes=90.0, parameter_bytes=0.0))
        problem = self.problem(graph, flat_cluster(2, memory_bytes=100.0))
        with pytest.raises(InfeasibleError, match=r"360 B, 160 B.*2 devices"):
            plan_optimal_split(problem)

    def test_a_cut_that_is_not_there_is_said_with_what_would_do(self):
        graph = chain(3, Figures(saved_bytes=[60.0, 40.0, 60.0], parameter_bytes=0.0))
        graph = replace(graph, ops=replace(graph.ops, colocation=[0, -1, 0]))
        problem = self.problem(graph, flat_cluster(2, memory_bytes=125.0))
        with pytest.raises(InfeasibleError, match=r"'op0' with the 2 ops .* contiguous=false"):
            plan_optimal_split(problem)
        assert plan_optimal_split(problem, contiguous=False).value > 0

    def test_ops_that_must_stay_together_and_may_not_are_named(self):
        rules = (Rule(ops="op0", devices="d0"), Rule(ops="op2", devices="d1"))
        graph = chain(3)
        graph = replace(graph, ops=replace(graph.ops, colocation=[0, -1, 0]))
        problem = replace(self.problem(graph, flat_cluster(2)), rules=rules)
        for metric in (Metric.MAX_LOAD, Metric.SINGLE_SAMPLE_LATENCY):
            asked = replace(problem, objective=replace(problem.objective, metric=metric))
            with pytest.raises(InfeasibleError, match=r"'op0'.*'op2'"):
                plan_optimal_split(asked)

    def test_places_that_do_not_follow_one_another_are_said(self):
        rules = (Rule(ops="op0", devices="d0"), Rule(ops="op1", devices="d1"))
        rules += (Rule(ops="op2", devices="d0"),)
        problem = replace(self.problem(chain(3), flat_cluster(2)), rules=rules)
        with pytest.raises(
            InfeasibleError,
            match=r"'op0'.*1.*\d+ devices,.*'d0',.*contiguous=false",
        ):
            plan_optimal_split(problem)
        assert plan_optimal_split(problem, contiguous=False, iterations=100).value > 0

    def test_latency_that_fits_nowhere_names_a_device(self):
        graph = chain(3, Figures(saved_bytes=60.0, parameter_bytes=0.0))
        problem = self.problem(
            graph,
            flat_cluster(2, memory_bytes=100.0),
            metric=Metric.SINGLE_SAMPLE_LATENCY,
            mode=Mode.INFERENCE,
        )
        with pytest.raises(InfeasibleError, match="2 devices keeps 'd0' within 100 B"):
            plan_optimal_split(problem)

    def test_less_memory_is_tried_under_another_rule(self):
        figures = Figures(saved_bytes=20.0, parameter_bytes=[90.0, 1.0, 1.0, 1.0, 1.0, 90.0])
        problem = Problem(graph=chain(6, figures), cluster=flat_cluster(2, memory_bytes=900.0))
        assert solved(problem) is None or solved(problem).value > 0


def test_a_time_limit_also_ends_the_look_at_chains_of_ideals(monkeypatch):
    """Time is up from the first look on: one order is cut, and nothing is claimed to be best."""
    clock_s = itertools.chain([0.0], itertools.repeat(1e12))  # the search begins at 0
    monkeypatch.setattr("time.monotonic", lambda: next(clock_s))
    rng = random.Random(2)
    problem = Problem(
        graph=random_dag(30, rng),
        cluster=flat_cluster(3),
        objective=Objective(metric=Metric.MAX_LOAD),
    )
    solution = plan_optimal_split(problem, time_limit=1.0)
    assert not solution.stats["best_contiguous"]
