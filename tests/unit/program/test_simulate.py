"""The simulator: closed forms, links, disturbances, and a plain second simulator."""

import dataclasses
import heapq
import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from partita import kernels
from partita.core.placement import placement_plan
from partita.core.plan import Shard
from partita.core.problem import Problem, Schedule
from partita.core.program import FIRST_COLLECTIVE, LAST_COMPUTE, Kind
from partita.cost.durations import instruction_seconds
from partita.cost.predict import Disturbance, simulate, steady_period_s
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.program.matching import match
from partita.program.simulate import play
from partita.testing.builders import (
    Figures,
    chain,
    flat_cluster,
    graph_of,
    host_cluster,
    lists_of,
    paired_cluster,
    pipeline,
    random_dag,
    random_pipeline,
    relisted,
)


def equal_stages(num_stages, devices, microbatches, schedule, **figures):
    """Return a problem and plan of equal stages, dealt to the devices in turn."""
    graph = chain(num_stages, Figures(**{"forward_s": 1.0, "backward_s": 2.0, **figures}))
    cluster = flat_cluster(devices)
    groups = [stage % devices for stage in range(num_stages)]
    plan = pipeline(graph, cluster, groups, schedule=schedule, microbatches=microbatches)
    return Problem(graph=graph, cluster=cluster), plan


def rows_of(program, kind, **fields):
    mask = program.kind == kind
    for name, value in fields.items():
        mask &= getattr(program, name) == value
    return np.flatnonzero(mask)


# Closed forms.


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (1, 5), (4, 1), (4, 3), (4, 8), (7, 9)]
)
def test_flushing_pipelines_take_m_plus_s_minus_1_turns(schedule, stages, microbatches):
    problem, plan = equal_stages(stages, stages, microbatches, schedule)
    assert simulate(problem, plan).makespan_s == (microbatches + stages - 1) * 3.0


@pytest.mark.parametrize(("devices", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16)])
def test_interleaving_divides_the_bubble(devices, chunks, microbatches):
    # f and b of a device are those of all its stages together.
    each = {"forward_s": 1.0 / chunks, "backward_s": 2.0 / chunks}
    stages = devices * chunks
    problem, plan = equal_stages(stages, devices, microbatches, Schedule.INTERLEAVED, **each)
    expected = microbatches * 3.0 + (devices - 1) * 3.0 / chunks
    assert simulate(problem, plan).makespan_s == pytest.approx(expected, rel=1e-12)


def test_interleaving_that_does_not_divide_runs_in_another_order():
    problem, plan = equal_stages(8, 4, 6, Schedule.INTERLEAVED, forward_s=0.5, backward_s=1.0)
    makespan = simulate(problem, plan).makespan_s
    assert 6 * 3.0 + 3 * 1.5 <= makespan < 6 * 3.0 + 3 * 3.0
    assert makespan == simulate(problem, replace(plan, schedule=Schedule.ONE_F_ONE_B)).makespan_s


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (3, 5), (4, 4), (4, 8)])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)])
def test_nobody_waits_for_weights_where_backward_is_split(
    stages, microbatches, forward, inputs, weights
):
    figures = {
        "forward_s": forward,
        "backward_s": inputs + weights,
        "backward_input_s": inputs,
    }
    problem, plan = equal_stages(stages, stages, microbatches, Schedule.SPLIT, **figures)
    whole = microbatches * (forward + inputs + weights)
    expected = whole + (stages - 1) * (forward + inputs)
    assert simulate(problem, plan).makespan_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (3, 5), (4, 4), (4, 8)])
@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5)])
def test_zero_bubble_leaves_f_plus_b_minus_w(stages, microbatches, forward, inputs, weights):
    problem, plan = equal_stages(
        stages,
        stages,
        microbatches,
        Schedule.ZERO_BUBBLE,
        forward_s=forward,
        backward_s=inputs + weights,
        backward_input_s=inputs,
    )
    whole = microbatches * (forward + inputs + weights)
    expected = whole + (stages - 1) * (forward + inputs - weights)
    assert simulate(problem, plan).makespan_s == pytest.approx(expected, rel=1e-12)


def test_early_recomputation_hides_in_the_bubble():
    problem, plan = equal_stages(4, 4, 8, Schedule.ONE_F_ONE_B)
    plan = replace(plan, recompute=np.ones(4, dtype=bool))
    plain = simulate(problem, plan).makespan_s
    assert plain == (8 + 4 - 1) * 4.0
    early = simulate(problem, replace(plan, schedule=Schedule.EARLY_RECOMPUTE)).makespan_s
    assert plain - 3 * 1.0 <= early < plain


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_stashing_flows_on_without_a_bubble(stages):
    problem, plan = equal_stages(stages, stages, 6, Schedule.PIPEDREAM)
    timeline = simulate(problem, plan, period=True)
    assert timeline.makespan_s == (6 + stages - 1) * 3.0
    assert timeline.period_s == pytest.approx(6 * 3.0, rel=1e-12)


def test_the_period_of_a_flushing_pipeline_lies_between_work_and_makespan():
    figures = Figures(forward_s=(1.0, 2.0, 1.0), backward_s=(1.0, 3.0, 2.0))
    graph, cluster = chain(3, figures), flat_cluster(3)
    plan = pipeline(graph, cluster, [0, 1, 2], microbatches=4)
    problem = Problem(graph=graph, cluster=cluster)
    timeline = simulate(problem, plan, period=True)
    assert timeline.busy_s.max() <= timeline.period_s <= timeline.makespan_s
    assert np.isnan(simulate(problem, plan).period_s)
    assert steady_period_s(problem, plan) == timeline.period_s


def test_inference_takes_m_plus_s_minus_1_forwards():
    problem, plan = random_pipeline(random.Random(0), schedule=Schedule.INFERENCE)
    graph, cluster = chain(4), flat_cluster(4)
    plan = pipeline(graph, cluster, [0, 1, 2, 3], schedule=Schedule.INFERENCE, microbatches=5)
    problem = Problem(graph=graph, cluster=cluster, objective=problem.objective)
    assert simulate(problem, plan).makespan_s == 8.0


# Links.


def exchange(cluster, edges, sizes, places, **figures):
    """Return problem, plan, program and timeline of one forward and backward of placed ops."""
    count = len(places)
    figures = {"forward_s": 1.0, "backward_s": 1.0, "tensor_bytes": sizes, **figures}
    graph = graph_of(count, edges, Figures(**figures))
    plan = placement_plan(graph, cluster.device_names, np.array(places))
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    return program, simulate(problem, plan, program=program)


def spans(program, timeline, kind, **fields):
    rows = rows_of(program, kind, **fields)
    return list(zip(timeline.start_s[rows].tolist(), timeline.end_s[rows].tolist(), strict=True))


def test_a_link_carries_one_transfer_at_a_time_in_each_direction():
    # op0 makes two tensors of 4 bytes for d1; the first reader runs while the second travels.
    cluster = paired_cluster(2, bandwidth_bytes_per_s=1.0)
    edges = [(0, 1, 0), (0, 2, 1), (1, 2)]
    program, timeline = exchange(cluster, edges, 4.0, [0, 1, 1])
    assert spans(program, timeline, Kind.SEND, gradient=False) == [(1, 5), (5, 9)]
    assert spans(program, timeline, Kind.FORWARD) == [(0, 1), (5, 6), (9, 10)]
    # Backward: op2 is done at 11, op1 at 12, and both gradients go back one after the other.
    assert spans(program, timeline, Kind.SEND, gradient=True) == [(11, 15), (15, 19)]
    assert timeline.makespan_s == 20


def test_both_directions_of_a_link_work_at_once():
    # d0 and d1 send to each other from the start.
    edges = [(0, 2), (1, 3), (0, 3), (1, 2)]
    for cluster in (
        paired_cluster(2, bandwidth_bytes_per_s=1.0),
        flat_cluster(2, bandwidth_bytes_per_s=1.0),
    ):
        program, timeline = exchange(cluster, edges, 4.0, [0, 1, 0, 1])
        assert spans(program, timeline, Kind.SEND, gradient=False) == [(1, 5), (1, 5)]


def test_a_device_has_one_port_but_a_matrix_a_link_for_each_pair():
    edges = [(0, 1), (0, 2)]
    program, timeline = exchange(flat_cluster(3, bandwidth_bytes_per_s=1.0), edges, 4.0, [0, 1, 2])
    assert spans(program, timeline, Kind.SEND, gradient=False) == [(1, 5), (5, 9)]
    program, timeline = exchange(
        paired_cluster(3, bandwidth_bytes_per_s=1.0), edges, 4.0, [0, 1, 2]
    )
    assert spans(program, timeline, Kind.SEND, gradient=False) == [(1, 5), (1, 5)]


def test_ports_in_serve_by_time_of_issue():
    # d1 issues at 1 and d0 at 2; both send to d2, which takes them one after the other.
    figures = {"forward_s": (2.0, 1.0, 1.0)}
    cluster = flat_cluster(3, bandwidth_bytes_per_s=1.0)
    program, timeline = exchange(cluster, [(0, 2), (1, 2)], 4.0, [0, 1, 2], **figures)
    assert spans(program, timeline, Kind.SEND, gradient=False, device=0) == [(5, 9)]
    assert spans(program, timeline, Kind.SEND, gradient=False, device=1) == [(1, 5)]


def test_transfers_overlap_compute_and_pay_latency():
    cluster = flat_cluster(2, bandwidth_bytes_per_s=2.0, latency_s=0.5)
    graph = chain(2, Figures(forward_s=1.0, backward_s=1.0, tensor_bytes=2.0))
    plan = pipeline(graph, cluster, [0, 1], schedule=Schedule.GPIPE, microbatches=3)
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    timeline = simulate(problem, plan, program=program)
    assert spans(program, timeline, Kind.FORWARD, stage=0) == [(0, 1), (1, 2), (2, 3)]
    ways = spans(program, timeline, Kind.SEND, gradient=False)
    assert ways == [(1, 2.5), (2.5, 4), (4, 5.5)]
    assert spans(program, timeline, Kind.FORWARD, stage=1) == [(2.5, 3.5), (4, 5), (5.5, 6.5)]
    # A receive is posted after the compute before it, and ends when the tensor is there.
    assert spans(program, timeline, Kind.RECV, stage=1) == [(0, 2.5), (3.5, 4), (5, 5.5)]


def test_loading_occupies_the_device():
    graph = chain(2, Figures(forward_s=1.0, backward_s=1.0, load_s=0.25))
    cluster = flat_cluster(2)
    plan = pipeline(graph, cluster, [0, 1], schedule=Schedule.GPIPE, microbatches=[1, 2])
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    timeline = simulate(problem, plan, program=program)
    assert spans(program, timeline, Kind.LOAD) == [(0, 0.25), (1.25, 1.75)]
    assert spans(program, timeline, Kind.FORWARD, stage=0) == [(0.25, 1.25), (1.75, 3.75)]


def reduced(cluster, groups, **options):
    graph = chain(1, Figures(forward_s=1.0, backward_s=1.0, parameter_bytes=40.0))
    plan = pipeline(graph, cluster, groups, microbatches=len(groups[0]), **options)
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    return program, simulate(problem, plan, program=program)


def test_an_all_reduce_is_a_ring_over_one_host():
    program, timeline = reduced(flat_cluster(4, bandwidth_bytes_per_s=10.0), [(0, 1, 2, 3)])
    # Twice 3/4 of 40 bytes at 10 bytes/s.
    assert spans(program, timeline, Kind.ALL_REDUCE) == [(2, 8)] * 4
    assert timeline.makespan_s == 8


def test_an_all_reduce_over_two_hosts_is_hierarchical():
    cluster = host_cluster(2, 2, inside_bytes_per_s=100.0, between_bytes_per_s=10.0)
    program, timeline = reduced(cluster, [(0, 1, 2, 3)])
    # Inside a host twice 1/2 of 40 bytes at 100, between hosts twice 1/2 at 10; a flat ring would
    # take twice 3/4 of 40 bytes at 10.
    assert spans(program, timeline, Kind.ALL_REDUCE)[0] == (2, pytest.approx(2 + 0.4 + 4.0))
    slow = host_cluster(2, 2, inside_bytes_per_s=10.0, between_bytes_per_s=10.0)
    program, timeline = reduced(slow, [(0, 1, 2, 3)])
    assert spans(program, timeline, Kind.ALL_REDUCE)[0] == (2, pytest.approx(2 + 6.0))


def test_a_collective_starts_with_its_last_member_and_holds_its_ports():
    # d0 and d1 reduce while d0's gradient for d2 waits for the port, or the other way round.
    graph = chain(2, Figures(forward_s=1.0, backward_s=1.0, tensor_bytes=10, parameter_bytes=20))
    cluster = flat_cluster(3, bandwidth_bytes_per_s=10.0, speeds=(1.0, 0.5, 1.0))
    plan = pipeline(graph, cluster, [2, (0, 1)], microbatches=2)
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    timeline = simulate(problem, plan, program=program)
    backward = spans(program, timeline, Kind.BACKWARD, stage=1)
    # d1, at half the speed, ends last, sends its gradient for a second and only then reduces.
    start = backward[1][1] + 1.0
    assert spans(program, timeline, Kind.ALL_REDUCE) == [(start, start + 2.0)] * 2


def test_the_order_of_a_plans_devices_does_not_matter():
    """Rings go by the cluster's order, so that a renamed plan takes the same time."""
    graph = chain(4, Figures(tensor_bytes=30.0, parameter_bytes=40.0, forward_s=1, backward_s=2))
    cluster = host_cluster(2, 3, inside_bytes_per_s=30.0, between_bytes_per_s=20.0)
    plan = pipeline(
        graph, cluster, [(0, 2, 3, 5), (1, 4)], schedule=Schedule.PIPEDREAM, microbatches=8
    )
    problem = Problem(graph=graph, cluster=cluster)
    unequal = Disturbance(slow={f"d{device}": 1 + 0.137 * device for device in range(6)})
    for order in ([0, 3, 2, 5, 1, 4], [5, 4, 3, 2, 1, 0]):
        place = np.argsort(order)
        stages = tuple(
            replace(stage, devices=tuple((int(place[d]),) for (d,) in stage.devices))
            for stage in plan.stages
        )
        names = tuple(cluster.device_names[d] for d in order)
        other = replace(plan, devices=names, stages=stages)
        here, there = (simulate(problem, p, disturbance=unequal) for p in (plan, other))
        rows = [(here.device == d) & (here.kind != Kind.RECV) for d in order]
        assert there.end_s[there.kind != Kind.RECV].tolist() == pytest.approx(
            np.concatenate([here.end_s[mask] for mask in rows]).tolist(), rel=1e-12
        )


# Disturbances.


def test_a_straggler_slows_the_step():
    problem, plan = equal_stages(4, 4, 8, Schedule.GPIPE)
    slow = simulate(problem, plan, disturbance=Disturbance(slow={"d2": 2.0}))
    assert slow.makespan_s == 8 * 6.0 + 3 * 3.0
    assert slow.busy_s.tolist() == [24, 24, 48, 24]


def test_perturbation_is_seeded_and_bounded():
    problem, plan = equal_stages(4, 4, 8, Schedule.GPIPE)
    runs = [
        simulate(problem, plan, disturbance=Disturbance(perturb=0.2, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0].makespan_s != runs[2].makespan_s
    took = (runs[0].end_s - runs[0].start_s)[runs[0].kind == Kind.FORWARD]
    assert took.min() >= 0.8
    assert took.max() <= 1.2
    assert len(set(took.tolist())) == 32


def test_impossible_disturbances_are_refused():
    problem, plan = equal_stages(2, 2, 1, Schedule.GPIPE)
    with pytest.raises(InvalidInputError, match="perturb is 1"):
        Disturbance(perturb=1.0)
    with pytest.raises(InvalidInputError, match="'d0' is slowed by 0"):
        Disturbance(slow={"d0": 0})
    with pytest.raises(InvalidInputError, match=r"'d9'.*plan;.*d0, d1"):
        simulate(problem, plan, disturbance=Disturbance(slow={"d9": 2.0}))


# Programs that cannot run.


def test_a_program_that_cannot_go_on_names_what_is_stuck():
    problem, plan = equal_stages(2, 2, 2, Schedule.ONE_F_ONE_B)
    program = lower(problem, plan)
    lists = lists_of(program)
    lists[0].sort(key=lambda row: program.microbatch[row] % 3)
    lists[1].sort(
        key=lambda row: (program.kind[row] > Kind.FORWARD and program.kind[row] != Kind.RECV, row)
    )
    with pytest.raises(InvalidInputError, match=r"cannot go on, .*: d0: BACKWARD.*; d1: FORWARD"):
        simulate(problem, plan, program=relisted(program, lists))


@pytest.mark.parametrize("kind", [Kind.SEND, Kind.RECV])
def test_messages_without_partner_are_named(kind):
    problem, plan = equal_stages(3, 3, 2, Schedule.GPIPE)
    program = lower(problem, plan)
    other = {Kind.SEND: "RECV", Kind.RECV: "SEND"}[kind]
    pattern = rf"{other}\(.* has no {kind.name} at the other end|their (tensor|microbatch) differ"
    for row in rows_of(program, kind).tolist():
        lists = lists_of(program)
        lists[int(program.device[row])].remove(row)
        with pytest.raises(InvalidInputError, match=pattern):
            simulate(problem, plan, program=relisted(program, lists))


def test_members_of_a_group_that_disagree_are_named():
    graph, cluster = chain(2, Figures(parameter_bytes=8)), flat_cluster(2)
    plan = pipeline(graph, cluster, [[(0, 1)]], microbatches=2, schedule=Schedule.GPIPE)
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    lists = lists_of(program)
    with pytest.raises(InvalidInputError, match=r"waits.*d1"):
        simulate(problem, plan, program=relisted(program, [lists[0], lists[1][:-1]]))
    first, second = rows_of(program, Kind.FORWARD, device=1).tolist()
    i, j = lists[1].index(first), lists[1].index(second)
    lists[1][i], lists[1][j] = second, first
    with pytest.raises(InvalidInputError, match=r"microbatch differ\)"):
        simulate(problem, plan, program=relisted(program, lists))


def test_collectives_and_compute_of_a_group_count_together():
    """A group has one order: what computes together waits, so that no member may be elsewhere."""
    graph, cluster = chain(2, Figures(parameter_bytes=8)), flat_cluster(2)
    plan = pipeline(graph, cluster, [[(0, 1)]], microbatches=1, schedule=Schedule.GPIPE)
    problem = Problem(graph=graph, cluster=cluster)
    program = lower(problem, plan)
    # Both members gather something between forward and backward ...
    backward = rows_of(program, Kind.BACKWARD)
    lists = lists_of(program)
    forward = rows_of(program, Kind.FORWARD)
    for device in range(2):
        lists[device].insert(lists[device].index(int(backward[device])), int(forward[device]))
    made = relisted(program, lists)
    kind = made.kind.copy()
    second = [rows_of(made, Kind.FORWARD, device=d)[1] for d in range(2)]
    kind[second] = Kind.ALL_GATHER
    made = replace(made, kind=kind)
    joint = match(made).joint
    assert joint[second[0]] == joint[second[1]] >= 0
    # ... and one of them only after backward: the others' backward waits for it, and it for theirs.
    lists = lists_of(made)
    gather = lists[1].pop(lists[1].index(int(second[1])))
    lists[1].append(gather)
    with pytest.raises(InvalidInputError, match=r"\(their kind"):
        match(relisted(made, lists))


# A second simulator, written plainly.


FREE, ARRIVED, MESSAGE, COLLECTIVE = range(4)


class PlainSimulator:
    """Plays a Program event by event with dictionaries, lists and one heap."""

    def __init__(self, program, cluster, seconds):
        self.program, self.cluster, self.seconds = program, cluster, seconds.tolist()
        self.kind = [Kind(int(kind)) for kind in program.kind]
        self.device = program.device.tolist()
        self.lists = lists_of(program)
        self.position = [0] * len(self.lists)
        self.busy = [False] * len(self.lists)
        self.arrival = {}
        self.start, self.end = {}, {}
        self.free = defaultdict(float)
        self.events = []
        self.come = defaultdict(set)
        self.partner = self._partners()
        self.members = self._members()
        self.waits = self._waits()
        self.depth = self._depths()

    def _partners(self):
        channels = defaultdict(lambda: ([], []))
        for row, kind in enumerate(self.kind):
            here, there = self.device[row], int(self.program.peer[row])
            if kind is Kind.SEND:
                channels[here, there][0].append(row)
            elif kind is Kind.RECV:
                channels[there, here][1].append(row)
        pairs = [pair for ends in channels.values() for pair in zip(*ends, strict=True)]
        return dict(pairs) | {recv: send for send, recv in pairs}

    def _members(self):
        turns, joint = defaultdict(int), defaultdict(list)
        for row in range(len(self.kind)):
            group = int(self.program.group[row])
            if group >= 0:
                joint[group, turns[group, self.device[row]]].append(row)
                turns[group, self.device[row]] += 1
        return {row: rows for rows in joint.values() for row in rows}

    def _depths(self):
        """Return how many collectives must come before each one, by its first member."""
        before = defaultdict(set)
        for rows in self.lists:
            together = [self.members[r][0] for r in rows if self.kind[r] >= FIRST_COLLECTIVE]
            for one, next_one in pairwise(together):
                before[next_one].add(one)

        @cache
        def depth(one):
            return 1 + max(map(depth, before[one]), default=0)

        return {rows[0]: depth(rows[0]) for rows in self.members.values()}

    def _waits(self):
        waits = defaultdict(list)
        for rows in self.lists:
            for place, row in enumerate(rows):
                for later in rows[place + 1 :]:
                    if self._awaits(later, row):
                        waits[later].append(row)
                        break
        return waits

    def _awaits(self, later, row):
        program, kind, what = self.program, self.kind[row], self.kind[later]
        if program.stage[later] != program.stage[row]:
            return False
        if kind is Kind.RECV:
            backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            wanted = backward if program.gradient[row] else (Kind.FORWARD,)
            return what in wanted and program.microbatch[later] == program.microbatch[row]
        if kind is Kind.ALL_GATHER:
            return what < Kind.UPDATE
        return kind >= FIRST_COLLECTIVE and what is Kind.UPDATE

    def _ports(self, row):
        index = [self.cluster.index_of[name] for name in self.program.devices]
        here = index[self.device[row]]
        if self.kind[row] is Kind.SEND:
            there = index[int(self.program.peer[row])]
        else:
            ring = sorted(index[d] for d in self.program.group_of(row).tolist())
            there = ring[(ring.index(here) + 1) % len(ring)]
        way = self.cluster.links(np.array([here]), np.array([there]))
        ports = [("out", int(way.out_port[0]))]
        return ports + ([("in", int(way.in_port[0]))] if way.in_port[0] >= 0 else [])

    def run(self):
        for device in range(len(self.lists)):
            self._advance(device, 0.0)
        while self.events:
            now, what, _, row = heapq.heappop(self.events)
            device = self.device[row]
            if what in (MESSAGE, COLLECTIVE):
                self._transfer(self.members.get(row, [row]), now)
                continue
            if what == FREE:
                self.busy[device] = False
            if not self.busy[device]:
                self._advance(device, now)
        rows = range(len(self.kind))
        for row in rows:
            if self.kind[row] is Kind.RECV:
                self.end[row] = max(self.start[row], self.end[self.partner[row]])
        return [self.start[row] for row in rows], [self.end[row] for row in rows]

    def _advance(self, device, now):
        """Issue what stands next on a device that is free, up to the next compute."""
        while self.position[device] < len(self.lists[device]):
            row = self.lists[device][self.position[device]]
            if self.kind[row] <= LAST_COMPUTE:
                if all(self.arrival.get(waited, now + 1) <= now for waited in self.waits[row]):
                    self._compute(row, now)
                return
            self.position[device] += 1
            if self.kind[row] is Kind.SEND:
                heapq.heappush(self.events, (now, MESSAGE, (device,), row))
            elif self.kind[row] is Kind.RECV:
                self.start[row] = now
            else:
                self.come[self.members[row][0]].add(row)
                if len(self.come[self.members[row][0]]) == len(self.members[row]):
                    place = (self.depth[self.members[row][0]], self.device[self.members[row][0]])
                    heapq.heappush(self.events, (now, COLLECTIVE, place, row))

    def _compute(self, row, now):
        together = self.members.get(row, [row])
        self.come[together[0]].add(row)
        if len(self.come[together[0]]) < len(together):
            return
        longest = max(self.seconds[member] for member in together)
        for member in together:
            device = self.device[member]
            self.position[device] += 1
            self.busy[device] = True
            self.start[member], self.end[member] = now, now + longest
            heapq.heappush(self.events, (now + longest, FREE, (device,), member))

    def _transfer(self, rows, now):
        ports = [port for row in rows for port in self._ports(row)]
        begin = max(now, *(self.free[port] for port in ports))
        finish = begin + max(self.seconds[row] for row in rows)
        for port in ports:
            self.free[port] = finish
        for row in rows:
            self.start[row], self.end[row] = begin, finish
            waiter = self.partner.get(row, row)
            self.arrival[waiter] = finish
            heapq.heappush(self.events, (finish, ARRIVED, (self.device[waiter],), waiter))


CLUSTERS = {
    "one host": lambda count: flat_cluster(count, bandwidth_bytes_per_s=37.0, latency_s=0.013),
    "matrix": lambda count: paired_cluster(count, bandwidth_bytes_per_s=37.0, latency_s=0.013),
    "two hosts": lambda count: host_cluster(
        2, (count + 1) // 2, inside_bytes_per_s=61.0, between_bytes_per_s=17.0
    ),
}


@pytest.mark.parametrize("links", CLUSTERS)
@pytest.mark.parametrize("schedule", Schedule)
def test_the_plain_simulator_agrees_on_random_pipelines(schedule, links):
    shards = list(Shard)
    for seed in range(8):
        rng = random.Random(f"{schedule}{links}{seed}")
        problem, plan = random_pipeline(
            rng, schedule=schedule, shard=shards[seed % 4], make_cluster=CLUSTERS[links]
        )
        compare(
            problem,
            lower(problem, plan),
            instruction_seconds(problem, plan, lower(problem, plan)),
            rng,
        )


@pytest.mark.parametrize("links", CLUSTERS)
def test_the_plain_simulator_agrees_on_random_placements(links):
    for seed in range(12):
        rng = random.Random(f"{links}{seed}")
        graph, cluster = random_dag(18, rng), CLUSTERS[links](4)
        places = np.array([rng.randrange(4) for _ in range(18)])
        schedule = rng.choice([Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
        sizes = np.array([1, 2, 3])
        plan = placement_plan(
            graph, cluster.device_names, places, schedule=schedule, microbatch_sizes=sizes
        )
        problem = Problem(graph=graph, cluster=cluster)
        program = lower(problem, plan)
        compare(problem, program, instruction_seconds(problem, plan, program), rng)


def compare(problem, program, seconds, rng):
    """Compare both simulators on times without coincidences."""
    seconds = seconds * np.array([rng.uniform(0.9, 1.1) for _ in range(len(seconds))])
    start, end = PlainSimulator(program, problem.cluster, seconds).run()
    timeline = play(program, problem.cluster, seconds)
    assert np.allclose(timeline.start_s, start, rtol=1e-12, atol=1e-12)
    assert np.allclose(timeline.end_s, end, rtol=1e-12, atol=1e-12)
    check_causes(timeline)


def check_causes(timeline):
    """Check that every row starts when its cause ends, so that the critical path has no gap."""
    for row in np.flatnonzero(timeline.kind != Kind.RECV).tolist():
        cause = int(timeline.cause[row])
        if cause < 0:
            assert timeline.start_s[row] == 0
        else:
            assert timeline.start_s[row] == pytest.approx(timeline.end_s[cause], rel=1e-12)
    path = timeline.critical_path
    took = (timeline.end_s - timeline.start_s)[path].sum()
    assert took == pytest.approx(timeline.makespan_s, rel=1e-9)


# Compiled.


@pytest.mark.parametrize("links", CLUSTERS)
def test_compiled_and_uncompiled_kernels_give_equal_timelines(links, monkeypatch):
    rng = random.Random(5)
    problem, plan = random_pipeline(
        rng, schedule=Schedule.ONE_F_ONE_B, shard=Shard.OPTIMIZER, make_cluster=CLUSTERS[links]
    )
    slow_program, slow = lower(problem, plan), simulate(problem, plan)
    monkeypatch.setattr(kernels, "ROWS", kernels.Threshold(size=0))
    assert lower(problem, plan) == slow_program
    fast = simulate(problem, plan)
    assert dataclasses.replace(fast, period_s=0.0) == dataclasses.replace(slow, period_s=0.0)
