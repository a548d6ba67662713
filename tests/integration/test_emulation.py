"""Emulated runs over forked ranks: what they do, not how long they take."""

import os
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from partita.core.graph import Graph
from partita.core.placement import placement_plan
from partita.core.plan import Plan, Shard
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import Kind, Program
from partita.core.timeline import TimelineOrigin
from partita.errors import WorkerError
from partita.formats.dnn_partitioning import read_dnn_partitioning
from partita.ranks.member import Member
from partita.ranks.status import Phase, StatusBoard, StatusView
from partita.runtime.emulation.device import EmulatedStore
from partita.runtime.emulation.rehearsal import (
    EmulatedWorkload,
    Emulation,
    emulate_forked,
    emulated_workload,
    put_emulated_together,
    run_emulated_rank,
)
from partita.runtime.executor import Run, reports_of_forked
from partita.runtime.rank import KEPT_STAMPS, RankReport
from partita.testing.builders import (
    Figures,
    Group,
    chain,
    flat_cluster,
    pipeline,
    random_dag,
)

pytestmark = pytest.mark.slow

SHORT = Figures(
    forward_s=1e-4,
    backward_s=2e-4,
    backward_input_s=1e-4,
    tensor_bytes=1001,
    parameter_bytes=403,
    load_s=1e-5,
)
PLAIN = Emulation(scale=1.0, steps=2)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Devices of each stage, and what is special about a plan."""

    groups: tuple[Group, ...]
    schedule: Schedule = Schedule.ONE_F_ONE_B
    shard: Shard = Shard.NONE
    microbatches: int = 4
    recompute: bool = False
    emulation: Emulation = PLAIN


SHAPES = {
    "1f1b": Shape(groups=(0, 1, 2)),
    "gpipe": Shape(groups=(0, 1, 2), schedule=Schedule.GPIPE),
    "interleaved": Shape(groups=(0, 1, 0, 1), schedule=Schedule.INTERLEAVED),
    "zero-bubble": Shape(groups=(0, 1, 2), schedule=Schedule.ZERO_BUBBLE),
    "early recompute": Shape(groups=(0, 1), schedule=Schedule.EARLY_RECOMPUTE, recompute=True),
    "recompute": Shape(groups=(0, 1), recompute=True),
    "weight stashing": Shape(groups=((0, 1), 2), schedule=Schedule.PIPEDREAM),
    "inference": Shape(groups=(0, 1), schedule=Schedule.INFERENCE),
    "replicated 3-1": Shape(groups=((0, 1, 2), 3), microbatches=6),
    "data parallel": Shape(groups=((0, 1, 2),), microbatches=6),
    "tensor parallel": Shape(groups=(((0, 1),), ((2, 3),))),
    "tensor parallel 2 to 1": Shape(groups=(((0, 1),), 2)),
    "sharded optimizer": Shape(groups=((0, 1),), shard=Shard.OPTIMIZER),
    "sharded gradients": Shape(groups=((0, 1),), shard=Shard.GRADIENTS),
    "sharded parameters": Shape(groups=((0, 1, 2), 3), shard=Shard.PARAMETERS, microbatches=6),
    "blocking": Shape(groups=(0, 1, 2), emulation=replace(PLAIN, blocking=True)),
    "capped": Shape(groups=(0, 1, 2), emulation=replace(PLAIN, cap_bytes=10)),
}


def workload_of(shape: Shape) -> EmulatedWorkload:
    graph = chain(6, SHORT)
    devices = {d for group in shape.groups for d in np.ravel(group).tolist()}
    cluster = flat_cluster(len(devices))
    plan = pipeline(
        graph,
        cluster,
        shape.groups,
        schedule=shape.schedule,
        microbatches=shape.microbatches,
        shard=shape.shard,
    )
    plan = replace(plan, recompute=np.full(len(graph), shape.recompute))
    infers = shape.schedule is Schedule.INFERENCE
    objective = Objective(mode=Mode.INFERENCE if infers else Mode.TRAINING)
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    return emulated_workload(problem, plan, shape.emulation)


def check_carried_out(run: Run, workload: EmulatedWorkload) -> None:
    """Check that all devices did all that their lists say, and sent as many bytes."""
    program: Program = workload.task.program
    steps = workload.emulation.steps
    assert len(run.timelines) == len(run.step_s) == steps
    for device, name in enumerate(program.devices):
        rows = slice(int(program.ptr[device]), int(program.ptr[device + 1]))
        done = run.result.statistics[name]
        kinds = Counter(Kind(kind) for kind in program.kind[rows].tolist())
        assert done.instructions == {kind: steps * count for kind, count in kinds.items()}
        sends = program.kind[rows] == Kind.SEND
        assert done.sent_bytes == steps * workload.bytes[rows][sends].sum()
    for timeline in run.timelines:
        assert timeline.origin is TimelineOrigin.EMULATED
        assert len(timeline) == len(program)
        took = (timeline.end_s - timeline.start_s)[program.is_compute]
        assert (took >= 0).all()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_shape_of_plan_is_carried_out(shape: Shape) -> None:
    workload = workload_of(shape)
    check_carried_out(emulate_forked(workload, limit_s=60.0), workload)


def test_stamps_of_the_last_steps_are_kept() -> None:
    emulation = replace(PLAIN, steps=KEPT_STAMPS + 3)
    workload = workload_of(Shape(groups=(0, 1), microbatches=1, emulation=emulation))
    run = emulate_forked(workload)
    assert len(run.timelines) == KEPT_STAMPS
    assert len(run.step_s) == len(run.result.steps) == KEPT_STAMPS + 3


def test_ranks_without_a_common_clock_compare_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partita.runtime.process_transport.clock_identity", lambda: "")
    workload = workload_of(Shape(groups=(0, 1)))
    board = StatusBoard(2)

    def main(member: Member, _: object) -> RankReport:
        return run_emulated_rank(workload, member, board=board)

    view = StatusView(board, workload.task.program, range(2))
    reports = reports_of_forked(main, view, stall_limit_s=60.0)
    for report in reports:
        before, after = report.clock
        assert board.read(report.device).phase is Phase.ENDED
        assert before.at_ns <= report.step_ns[0][0] < report.step_ns[-1][1] <= after.at_ns
    check_carried_out(put_emulated_together(workload, reports), workload)


def test_a_rank_that_dies_is_named_with_its_instruction() -> None:
    def die(*_: object) -> None:
        os._exit(3)

    def move(member: Member) -> Member:
        if member.rank == 1:
            EmulatedStore.update = die  # type: ignore[method-assign]  # in this rank alone
        return member

    workload = workload_of(Shape(groups=(0, 1)))
    with pytest.raises(WorkerError, match=r"rank 1.*exit code 3.*d1: UPDATE"):
        emulate_forked(workload, move=move)


def test_whole_bytes_are_sent_unless_they_are_capped() -> None:
    whole, capped = workload_of(SHAPES["1f1b"]), workload_of(SHAPES["capped"])
    program = whole.task.program
    assert np.array_equal(whole.bytes, program.bytes)
    assert set(capped.bytes[program.kind == Kind.SEND].tolist()) == {10}


def test_sixteen_devices_are_emulated_on_any_machine() -> None:
    graph, cluster = chain(16, SHORT), flat_cluster(16)
    plan = pipeline(graph, cluster, range(16), microbatches=8)
    problem = Problem(graph=graph, cluster=cluster)
    workload = emulated_workload(problem, plan, Emulation(scale=1.0))
    check_carried_out(emulate_forked(workload, limit_s=60.0), workload)


def test_a_placement_of_a_random_graph_is_emulated() -> None:
    rng = random.Random(4)
    graph, cluster = random_dag(12, rng, figures=SHORT), flat_cluster(3)
    device_of = np.array([rng.randrange(3) for _ in range(12)])
    plan = placement_plan(
        graph, cluster.device_names, device_of, microbatch_sizes=np.array([1, 2, 1])
    )
    workload = emulated_workload(Problem(graph=graph, cluster=cluster), plan, PLAIN)
    check_carried_out(emulate_forked(workload, limit_s=60.0), workload)


def emulate_over_three(graph: Graph) -> None:
    cluster = flat_cluster(3)
    order = graph.topological_order
    device_of = np.empty(len(graph), dtype=np.int64)
    device_of[order] = np.arange(len(graph)) * 3 // len(graph)
    plan: Plan = placement_plan(graph, cluster.device_names, device_of)
    problem = Problem(graph=graph, cluster=cluster)
    scale = 0.05 / float(np.nansum(graph.costs[0].forward_s + graph.costs[0].backward_s))
    workload = emulated_workload(problem, plan, Emulation(scale=scale))
    check_carried_out(emulate_forked(workload, limit_s=60.0), workload)


def test_a_graph_without_a_loss_is_emulated() -> None:
    graph = chain(6, SHORT)
    emulate_over_three(replace(graph, loss=-1))


def test_an_imported_graph_with_explicit_backward_ops_is_emulated(shared_data: Path) -> None:
    path = shared_data / "dnn-partitioning" / "throughput" / "LayerGraphs" / "bert24_training.json"
    graph = read_dnn_partitioning(path.read_text(encoding="utf-8")).graph
    assert not graph.is_forward.all()
    emulate_over_three(graph)
