"""How an emulated run is made from a plan: scale, bytes, prediction, the clock of a device."""

from dataclasses import replace

import numpy as np
import pytest

from partita.core.cluster import Cluster
from partita.core.graph import KIND_BIT, DeviceKind
from partita.core.problem import Problem
from partita.core.program import Kind
from partita.cost.predict import simulate
from partita.errors import InvalidInputError
from partita.program.lower import lower
from partita.runtime.clocks import ClockReading
from partita.runtime.device_parts import DeviceStatistics, StepRecord
from partita.runtime.emulation import device as emulation_device
from partita.runtime.emulation.device import Pacer
from partita.runtime.emulation.rehearsal import (
    Emulation,
    emulated_workload,
    predicted,
    put_emulated_together,
    relinked,
    suitable_scale,
)
from partita.runtime.rank import RankReport
from partita.testing.builders import (
    Figures,
    chain,
    flat_cluster,
    host_cluster,
    paired_cluster,
    pipeline,
)

FIGURES = Figures(forward_s=0.001, backward_s=0.002, tensor_bytes=1000, parameter_bytes=4000)


def two_stages(figures: Figures = FIGURES, cluster: Cluster | None = None, **options: object):
    graph = chain(2, figures)
    cluster = cluster or flat_cluster(2, bandwidth_bytes_per_s=1e6, latency_s=1e-4)
    problem = Problem(graph=graph, cluster=cluster)
    return problem, pipeline(graph, cluster, [0, 1], microbatches=4, **options)


def test_the_shortest_instruction_is_made_to_last_ten_milliseconds() -> None:
    workload = emulated_workload(*two_stages())
    assert workload.emulation.scale == pytest.approx(10.0)
    passes = workload.seconds[workload.task.program.kind == Kind.FORWARD]
    assert passes == pytest.approx(np.full(8, 0.01))


def test_a_given_scale_is_used_as_it_is() -> None:
    workload = emulated_workload(*two_stages(), Emulation(scale=0.5))
    passes = workload.seconds[workload.task.program.kind == Kind.BACKWARD]
    assert passes == pytest.approx(np.full(8, 0.001))


def test_long_instructions_are_not_made_shorter() -> None:
    workload = emulated_workload(*two_stages(Figures(forward_s=1.0, backward_s=2.0)))
    assert workload.emulation.scale == 1.0


def test_instructions_that_hardly_count_do_not_set_the_scale() -> None:
    problem, plan = two_stages(Figures(forward_s=[1e-9, 0.005], backward_s=0.02))
    program = lower(problem, plan)
    seconds = emulated_workload(problem, plan, Emulation(scale=1.0)).seconds
    assert suitable_scale(program, seconds) == pytest.approx(2.0)


def test_a_plan_without_compute_has_scale_one() -> None:
    problem, plan = two_stages(Figures(forward_s=0.0, backward_s=0.0))
    assert emulated_workload(problem, plan).emulation.scale == 1.0


def test_a_joint_instruction_lasts_as_long_as_its_slowest_member() -> None:
    cluster = flat_cluster(2, speeds=[1.0, 0.5])
    graph = chain(1, FIGURES)
    plan = pipeline(graph, cluster, [[(0, 1)]], microbatches=2)
    problem = Problem(graph=graph, cluster=cluster)
    workload = emulated_workload(problem, plan, Emulation(scale=1.0))
    forward = workload.seconds[workload.task.program.kind == Kind.FORWARD]
    assert len(forward) == 4
    assert forward == pytest.approx(np.full(4, 0.001))


def test_giant_messages_are_cut_and_it_is_said() -> None:
    workload = emulated_workload(*two_stages(), Emulation(cap_bytes=300))
    sends = workload.task.program.kind == Kind.SEND
    assert set(workload.bytes[sends].tolist()) == {300}
    assert workload.shape_of(int(workload.task.program.tensor[sends][0]), 0)[0] == (300,)
    assert "8 of 8 messages and collectives carry 300 bytes instead of up to 1000" in (
        "\n".join(workload.remarks)
    )


def test_small_messages_are_whole_and_the_scale_is_said() -> None:
    workload = emulated_workload(*two_stages())
    assert workload.remarks == ("emulated: compute is slept through, 10 times as long",)


def test_messages_timed_by_a_file_are_said() -> None:
    problem, plan = two_stages()
    tensors = problem.graph.tensors
    timed = replace(tensors, transfer_s=np.full(len(tensors), 0.5))
    problem = replace(problem, graph=replace(problem.graph, tensors=timed))
    plan = replace(plan, fingerprint=problem.graph.fingerprint)
    workload = emulated_workload(problem, plan)
    assert "8 messages have seconds in the graph's file" in workload.remarks[-1]
    transfer_s = predicted(workload).end_s - predicted(workload).start_s
    sends = workload.task.program.kind == Kind.SEND
    assert transfer_s[sends] == pytest.approx(np.full(8, 1e-4 + 1e-3))


def test_the_prediction_of_an_unscaled_run_is_that_of_the_plan() -> None:
    problem, plan = two_stages()
    workload = emulated_workload(problem, plan, Emulation(scale=1.0))
    assert predicted(workload).makespan_s == simulate(problem, plan).makespan_s


def test_only_compute_is_scaled_in_the_prediction() -> None:
    problem, plan = two_stages()
    timeline = predicted(emulated_workload(problem, plan, Emulation(scale=3.0)))
    plain = simulate(problem, plan)
    for scaled, kind in ((3.0, Kind.FORWARD), (3.0, Kind.BACKWARD), (1.0, Kind.SEND)):
        rows = plain.kind == kind
        there = (timeline.end_s - timeline.start_s)[rows]
        assert there == pytest.approx(scaled * (plain.end_s - plain.start_s)[rows])


def test_the_prediction_knows_of_blocking_transfers() -> None:
    problem, plan = two_stages()
    workload = emulated_workload(problem, plan, Emulation(scale=1.0, blocking=True))
    overlapped = emulated_workload(problem, plan, Emulation(scale=1.0))
    assert predicted(workload).makespan_s > predicted(overlapped).makespan_s


@pytest.mark.parametrize(
    "links",
    [
        host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e6),
        paired_cluster(3, bandwidth_bytes_per_s=1e9),
    ],
    ids=["levels", "matrix"],
)
def test_the_prediction_takes_the_links_of_the_machines_that_emulate(links: Cluster) -> None:
    workload = emulated_workload(*two_stages(), Emulation(scale=1.0))
    timeline = predicted(workload, links)
    sends = timeline.kind == Kind.SEND
    assert (timeline.end_s - timeline.start_s)[sends] == pytest.approx(np.full(8, 1e-6))


def test_ranks_are_placed_by_their_number() -> None:
    problem, plan = two_stages()
    links = host_cluster(2, 1, inside_bytes_per_s=1e9, between_bytes_per_s=1e6)
    joined = relinked(problem.cluster, lower(problem, plan), links)
    assert joined.device_names == plan.devices
    assert [device.host for device in joined.devices] == [0, 1]


def test_collectives_are_those_of_the_machines_that_emulate() -> None:
    gpus = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e6)
    cpus = replace(gpus, devices=tuple(replace(d, kind=DeviceKind.CPU) for d in gpus.devices))
    graph = chain(1, replace(FIGURES, parameter_bytes=1e6))
    only_gpus = np.full(1, KIND_BIT[DeviceKind.GPU])
    graph = replace(graph, ops=replace(graph.ops, device_kinds=only_gpus))
    plan = pipeline(graph, gpus, [range(4)], microbatches=4)
    workload = emulated_workload(Problem(graph=graph, cluster=gpus), plan, Emulation(scale=1.0))
    reduces = workload.task.program.kind == Kind.ALL_REDUCE
    for links, seconds in ((None, 1.001), (cpus, 1.5)):
        timeline = predicted(workload, links)
        assert (timeline.end_s - timeline.start_s)[reduces] == pytest.approx(np.full(4, seconds))


def test_too_few_machines_are_refused() -> None:
    problem, plan = two_stages()
    with pytest.raises(InvalidInputError, match=r"1 devices.*2 ranks;.*2"):
        relinked(problem.cluster, lower(problem, plan), flat_cluster(1))


@pytest.mark.parametrize(
    "values", [{"scale": -1.0}, {"scale": float("nan")}, {"cap_bytes": 0}, {"steps": 0}]
)
def test_impossible_emulations_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(values))} of an emulation is"):
        Emulation(**values)


class LateClock:
    """A clock whose sleeps all take too long."""

    def __init__(self, late_ns: int) -> None:
        self.now_ns, self.late_ns = 0, late_ns

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9) + self.late_ns


def test_steps_are_timed_by_rank_0s_clock() -> None:
    workload = emulated_workload(*two_stages(), Emulation(scale=1.0))
    sizes = np.diff(workload.task.program.ptr)
    ahead = 10**12
    reports = [
        RankReport(
            device=device,
            records=[
                StepRecord(
                    begin_ns=np.full(sizes[device], begin), end_ns=np.full(sizes[device], end)
                )
            ],
            state={},
            statistics=DeviceStatistics(),
            step_ns=[(begin, end)],
            clock=(ClockReading(begin - 10, begin - 1_000_000_000 * device - 1, 5),)
            if device
            else (),
        )
        for device, begin, end in ((0, 1, 2_000_000_001), (1, ahead, ahead + 3_000_000_000))
    ]
    run = put_emulated_together(workload, reports)
    assert run.step_s == (4.0,)
    assert run.timelines[0].end_s.max() == 4.0


def test_late_sleeps_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LateClock(late_ns=100_000)
    monkeypatch.setattr(emulation_device, "time", clock)
    pacer = Pacer()
    for _ in range(50):
        pacer.compute(0.01)
    assert clock.now_ns == 50 * 10_000_000 + 100_000


def test_a_device_that_had_to_wait_begins_when_it_could(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LateClock(late_ns=0)
    monkeypatch.setattr(emulation_device, "time", clock)
    pacer = Pacer()
    pacer.compute(0.01)
    clock.now_ns += 5_000_000
    pacer.wait_until_now()
    pacer.compute(0.01)
    assert clock.now_ns == 25_000_000
