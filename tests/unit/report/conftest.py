"""Builders of small timelines, written down or simulated."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from partita.core.cluster import Cluster, Device, LinkMatrix
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, ParameterTable, TensorTable
from partita.core.plan import Plan, Stage
from partita.core.problem import Problem, Schedule
from partita.core.program import Kind
from partita.core.timeline import Timeline
from partita.cost.predict import simulate

Row = tuple[int, Kind, int, int, int, float, float]


@pytest.fixture
def make() -> Callable[..., Timeline]:
    """Return a maker of timelines from (device, kind, stage, microbatch, peer, start, end) rows."""

    def build(
        rows: Sequence[Row],
        devices: Sequence[str] = ("host0/gpu0", "host1/gpu0"),
        **columns: object,
    ) -> Timeline:
        table = [*zip(*rows, strict=True)] or [[]] * 7
        device, kind, stage, microbatch, peer, start, end = (np.array(part) for part in table)
        return Timeline(
            devices=tuple(devices),
            device=device,
            instruction=np.arange(len(rows)),
            kind=kind,
            stage=stage,
            microbatch=microbatch,
            peer=peer,
            start_s=start,
            end_s=end,
            bytes=columns.pop("bytes", 0),
            **columns,
        )

    return build


@pytest.fixture
def exchange(make) -> Timeline:
    """Return two devices that send an activation there and its gradient back."""
    return make(
        [
            (0, Kind.FORWARD, 0, 0, -1, 0.0, 1.0),
            (0, Kind.SEND, 0, 0, 1, 1.0, 1.5),
            (0, Kind.RECV, 0, 0, 1, 1.0, 4.0),
            (0, Kind.BACKWARD, 0, 0, -1, 4.0, 6.0),
            (0, Kind.UPDATE, 0, -1, -1, 6.0, 6.5),
            (1, Kind.RECV, 1, 0, 0, 0.0, 1.5),
            (1, Kind.FORWARD, 1, 0, -1, 1.5, 2.5),
            (1, Kind.BACKWARD, 1, 0, -1, 2.5, 3.5),
            (1, Kind.SEND, 1, 0, 0, 3.5, 4.0),
        ]
    )


@pytest.fixture
def problem_of() -> Callable[..., tuple[Problem, Plan]]:
    """Return a maker of a chain of equal stages on devices that take turns."""

    def build(
        schedule: Schedule = Schedule.ONE_F_ONE_B,
        *,
        stages: int = 4,
        devices: int = 4,
        microbatches: int = 8,
        transfer_s: float = 0.0,
        memory_bytes: float = float("inf"),
    ) -> tuple[Problem, Plan]:
        ops = np.arange(stages)
        graph = Graph(
            ops=OpTable(names=tuple(f"op{i}" for i in ops), saved_bytes=1e9),
            costs=(OpCosts(forward_s=np.ones(stages), backward_s=2.0, backward_input_s=1.0),),
            tensors=TensorTable(
                names=tuple(f"t{i}" for i in ops), producer=ops, transfer_s=transfer_s
            ),
            edges=EdgeTable(tensor=ops[:-1], reader=ops[1:]),
            parameters=ParameterTable(
                names=tuple(f"w{i}" for i in ops), bytes=1e6, use_op=ops, use_parameter=ops
            ),
            loss=stages - 1,
            outputs=(stages - 1,),
        )
        names = [f"host{i // 2}/gpu{i % 2}" for i in range(devices)]
        cluster = Cluster(
            devices=[Device(name=name, memory_bytes=memory_bytes) for name in names],
            matrix=LinkMatrix(bandwidth_bytes_per_s=np.full(devices**2, 1e9)),
        )
        plan = Plan(
            fingerprint=graph.fingerprint,
            devices=cluster.device_names,
            stage_of=ops,
            stages=tuple(Stage(devices=((i % devices,),)) for i in range(stages)),
            schedule=schedule,
            microbatch_sizes=np.ones(microbatches, np.int32),
        )
        return Problem(graph=graph, cluster=cluster), plan

    return build


@pytest.fixture
def pipeline(problem_of) -> Callable[..., Timeline]:
    """Return a maker of simulated pipelines."""
    return lambda *args, **options: simulate(*problem_of(*args, **options))
