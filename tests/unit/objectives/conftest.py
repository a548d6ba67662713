"""Builders of small graphs, clusters and plans."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from partita.core.cluster import Cluster, Device, Host, Level, LinkMatrix
from partita.core.graph import (
    DeviceKind,
    EdgeTable,
    Graph,
    Labels,
    OpCosts,
    OpTable,
    ParameterTable,
    TensorTable,
    VariantTable,
)
from partita.core.plan import Plan, Stage


def _graph(
    forward: Sequence[float],
    edges: Sequence[tuple[int, int]],
    *,
    backward: Sequence[float] | float = 0.0,
    sizes: Sequence[float] | float = 0.0,
    transfer: Sequence[float] | float = float("nan"),
    parameters: Sequence[float] = (),
    costs: Sequence[OpCosts] = (),
    types: Sequence[str] = (),
    variants: VariantTable | None = None,
    **columns: object,
) -> Graph:
    """Return a graph whose op i makes tensor i; edges are pairs of ops."""
    count = len(forward)
    names = sorted(set(types))
    return Graph(
        ops=OpTable(
            names=tuple(f"op{i}" for i in range(count)),
            types=Labels(
                names=tuple(names), of=np.array([names.index(t) for t in types], np.int32)
            ),
            **columns,
        ),
        costs=tuple(costs) or (OpCosts(forward_s=np.array(forward, float), backward_s=backward),),
        tensors=TensorTable(
            names=tuple(f"t{i}" for i in range(count)),
            producer=np.arange(count),
            bytes=sizes,
            transfer_s=transfer,
        ),
        edges=EdgeTable(
            tensor=np.array([u for u, _ in edges], np.int32),
            reader=np.array([v for _, v in edges], np.int32),
        ),
        parameters=ParameterTable(
            names=tuple(f"w{i}" for i in range(len(parameters))),
            bytes=np.array(parameters, float),
            use_op=np.arange(len(parameters)),
            use_parameter=np.arange(len(parameters)),
        ),
        variants=variants or VariantTable(),
    )


def _flat(count: int, bandwidth: float = float("inf"), **columns: object) -> Cluster:
    """Return devices ``d0``.. of one host."""
    return Cluster(
        devices=tuple(Device(name=f"d{i}", **columns) for i in range(count)),
        levels=(
            Level(name="host", group_of=np.zeros(count, int), bandwidth_bytes_per_s=bandwidth),
        ),
    )


def _two_level(hosts: int, each: int, inside: float, between: float) -> Cluster:
    """Return devices ``h<host>d<i>``."""
    count = hosts * each
    return Cluster(
        hosts=tuple(Host(name=f"h{h}") for h in range(hosts)),
        devices=tuple(Device(name=f"h{h}d{i}", host=h) for h in range(hosts) for i in range(each)),
        levels=(
            Level(
                name="host",
                group_of=np.repeat(np.arange(hosts), each),
                bandwidth_bytes_per_s=inside,
            ),
            Level(name="rack", group_of=np.zeros(count, int), bandwidth_bytes_per_s=between),
        ),
    )


def _mixed(accelerators: int, cpus: int, **columns: object) -> Cluster:
    """Return accelerators ``acc0``.. and CPUs ``cpu0``.. of those types."""
    devices = [
        *(Device(name=f"acc{i}", type="accelerator", **columns) for i in range(accelerators)),
        *(Device(name=f"cpu{i}", type="cpu", kind=DeviceKind.CPU) for i in range(cpus)),
    ]
    count = len(devices)
    level = Level(name="host", group_of=np.zeros(count, int), bandwidth_bytes_per_s=np.inf)
    return Cluster(devices=tuple(devices), levels=(level,))


def _matrix(rows: Sequence[Sequence[float]]) -> Cluster:
    """Return devices whose links cost only latency."""
    size = len(rows)
    return Cluster(
        devices=tuple(Device(name=f"d{i}") for i in range(size)),
        matrix=LinkMatrix(
            bandwidth_bytes_per_s=np.full(size * size, np.inf), latency_s=np.array(rows)
        ),
    )


def _pipeline(
    graph: Graph,
    cluster: Cluster,
    stage_of: Sequence[int],
    groups: Sequence[Sequence[str]],
    *,
    shares: Sequence[Sequence[int]] = (),
    tp: Sequence[int] = (),
    microbatches: int = 120,
    recompute: Sequence[bool] | bool = False,
) -> Plan:
    """Return a plan with the named devices of each stage, ``tp`` in a row to a replica."""
    index_of = cluster.index_of
    stages = []
    for number, group in enumerate(groups):
        degree = tp[number] if tp else 1
        devices = [index_of[name] for name in group]
        replicas = tuple(tuple(devices[i : i + degree]) for i in range(0, len(devices), degree))
        stages.append(Stage(devices=replicas, shares=tuple(shares[number]) if shares else ()))
    return Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        stage_of=np.array(stage_of, np.int32),
        stages=tuple(stages),
        microbatch_sizes=np.ones(microbatches, np.int32),
        recompute=recompute if isinstance(recompute, bool) else np.array(recompute),
    )


@pytest.fixture
def make_graph() -> Callable[..., Graph]:
    return _graph


@pytest.fixture
def flat() -> Callable[..., Cluster]:
    return _flat


@pytest.fixture
def two_level() -> Callable[..., Cluster]:
    return _two_level


@pytest.fixture
def mixed() -> Callable[..., Cluster]:
    return _mixed


@pytest.fixture
def matrix() -> Callable[..., Cluster]:
    return _matrix


@pytest.fixture
def pipeline() -> Callable[..., Plan]:
    return _pipeline
