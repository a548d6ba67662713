"""Problems that come with the package, so that an installation has something to plan.

``EXAMPLES`` is the table. The published toys hold what their own files say, in the encoding of the
readers in ``formats``; the two models are generated, with estimated costs (``generated_models``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.generated_models import gpt_small, labels, resnet50
from partita.catalogue.shorthand import read_shorthand
from partita.core.cluster import Cluster, Device, Host, Level, LinkMatrix
from partita.core.columns import frozen_array
from partita.core.graph import (
    EdgeTable,
    Graph,
    OpCosts,
    OpTable,
    ParameterTable,
    SampleUnit,
    TensorTable,
)
from partita.core.problem import Metric, Objective, Problem
from partita.errors import InvalidInputError

Edge = tuple[int, int, float]


def chain201() -> Problem:
    """Return DynamicMLTrainer's toy: two chains that join at op 100, on three equal GPUs.

    201 ops of weight 2; every edge between two GPUs costs 1. The best sharding cost is 2.
    """
    edges = [(op, op + 1) for op in range(100)]
    edges += [(op, op + 1) for op in range(101, 200)] + [(200, 100)]
    names = tuple(str(op) for op in range(201))
    feeds = list(dict.fromkeys(before for before, _ in edges))
    producer = [*feeds, *(op for op in range(201) if op not in set(feeds))]
    tensor_of = {op: tensor for tensor, op in enumerate(producer)}
    graph = Graph(
        name="chain201",
        ops=OpTable(names=names),
        costs=(OpCosts(forward_s=frozen_array(np.full(201, 2.0), np.float64)),),
        tensors=TensorTable(
            names=tuple(names[op] for op in producer), producer=frozen_array(producer, np.int32)
        ),
        edges=EdgeTable(
            tensor=frozen_array([tensor_of[before] for before, _ in edges], np.int32),
            reader=frozen_array([after for _, after in edges], np.int32),
        ),
        outputs=frozen_array([tensor_of[100]], np.int32),
        sample_unit=SampleUnit.MINIBATCH,
    )
    cluster = Cluster(
        name="chain201",
        devices=tuple(Device(name=f"host0/gpu{index}") for index in range(3)),
        matrix=LinkMatrix(
            bandwidth_bytes_per_s=frozen_array(np.full(9, np.inf), np.float64),
            latency_s=frozen_array((1.0 - np.eye(3)).ravel(), np.float64),
        ),
    )
    return Problem(graph=graph, cluster=cluster, objective=Objective(metric=Metric.SHARDING_COST))


def six_node_chain() -> Problem:
    """Return SparsePipedream's toy: an input and five ops, on a TitanV and three TitanXP.

    Parameters are inflated (165 MB against 5 ms of compute), so that data parallelism is slow.
    """
    types = ("Conv2d", "BatchNorm2d", "ReLU", "Conv2d", "BatchNorm2d")
    names = tuple(f"node{number}" for number in range(2, 7))
    times_ms = {
        "TitanV": ((0.302, 0.319, 0.158, 0.640, 0.303), (0.679, 0.265, 0.192, 2.240, 0.273)),
        "TitanXP": ((0.388, 0.322, 0.185, 0.805, 0.313), (0.856, 0.385, 0.251, 2.798, 0.366)),
    }
    activation = 33554432.0
    graph = Graph(
        name="six-node-chain",
        ops=OpTable(
            names=names,
            saved_bytes=frozen_array(
                [0.0 if kind == "ReLU" else activation for kind in types], np.float64
            ),
            types=labels(types),
        ),
        costs=tuple(
            OpCosts(
                device_type=kind,
                forward_s=frozen_array([ms / 1000 for ms in forward], np.float64),
                backward_s=frozen_array([ms / 1000 for ms in backward], np.float64),
            )
            for kind, (forward, backward) in times_ms.items()
        ),
        tensors=TensorTable(
            names=("node1", *names),
            producer=frozen_array([-1, 0, 1, 2, 3, 4], np.int32),
            bytes=frozen_array([0.0] + [activation] * 5, np.float64),
            differentiable=frozen_array([False] + [True] * 5, np.bool_),
        ),
        edges=EdgeTable(
            tensor=frozen_array(range(5), np.int32), reader=frozen_array(range(5), np.int32)
        ),
        parameters=_weights(names, (7168000.0, 512.0, 10000000.0, 147712000.0, 512000.0)),
        outputs=frozen_array([5], np.int32),
        sample_unit=SampleUnit.MINIBATCH,
    )
    cluster = Cluster(
        name="six-node-chain",
        hosts=(Host(name="Server0"),),
        devices=tuple(
            Device(name=f"Server0/gpu{index}", type="TitanXP" if index else "TitanV")
            for index in range(4)
        ),
        levels=(_level(4, 1e8),),
    )
    return Problem(graph=graph, cluster=cluster, objective=Objective(metric=Metric.PIPEDREAM))


def _placement_toy(
    name: str,
    num_devices: int,
    times_ms: Sequence[float],
    memory: Sequence[float],
    edges: Sequence[Edge],
) -> Problem:
    """Return one of Baechi's dummy graphs, with devices of 4 units of memory.

    Half of the memory of an op is parameters with their gradients. An edge is ``(source, target,
    milliseconds)``; transfers overlap with everything.
    """
    names = tuple(str(op) for op in range(len(times_ms)))
    tensors: dict[tuple[int, float], int] = {}
    for before, _, ms in edges:
        tensors.setdefault((before, ms), len(tensors))
    makers = [op for op, _ in tensors]
    titles = [
        names[op] if op not in makers[:row] else f"{names[op]}#{makers[:row].count(op)}"
        for row, op in enumerate(makers)
    ]
    sinks = [op for op in range(len(names)) if op not in makers]
    graph = Graph(
        name=name,
        ops=OpTable(
            names=names,
            saved_bytes=frozen_array([size - size / 2 for size in memory], np.float64),
        ),
        costs=(OpCosts(forward_s=frozen_array([ms / 1000 for ms in times_ms], np.float64)),),
        tensors=TensorTable(
            names=tuple(titles + [names[op] for op in sinks]),
            producer=frozen_array(makers + sinks, np.int32),
            transfer_s=frozen_array(
                [ms / 1000 for _, ms in tensors] + [np.nan] * len(sinks), np.float64
            ),
        ),
        edges=EdgeTable(
            tensor=frozen_array([tensors[before, ms] for before, _, ms in edges], np.int32),
            reader=frozen_array([after for _, after, _ in edges], np.int32),
        ),
        parameters=_weights(names, [size / 4 for size in memory]),
        outputs=frozen_array(range(len(makers), len(makers) + len(sinks)), np.int32),
        sample_unit=SampleUnit.MINIBATCH,
        annotations={
            "baechi": {
                "permanent_mem": memory,
                "temporary_mem": [0.0] * len(names),
                "parameter_mem": [size / 2 for size in memory],
                "output_mem": [0.0] * len(names),
                "names": [f"op{name}" for name in names],
            }
        },
    )
    devices = [Device(name=f"host0/gpu{index}", memory_bytes=4.0) for index in range(num_devices)]
    level = _level(num_devices, float("inf"))
    return Problem(
        graph=graph,
        cluster=Cluster(name=name, devices=tuple(devices), levels=(level,)),
        objective=Objective(metric=Metric.MAKESPAN_PARALLEL, optimizer_bytes_per_element=0.0),
    )


def _level(num_devices: int, bandwidth_bytes_per_s: float) -> Level:
    return Level(
        name="host",
        group_of=frozen_array(np.zeros(num_devices), np.int32),
        bandwidth_bytes_per_s=frozen_array([bandwidth_bytes_per_s], np.float64),
    )


def _weights(names: Sequence[str], num_bytes: Sequence[float]) -> ParameterTable:
    rows = range(len(names))
    return ParameterTable(
        names=tuple(f"{name}.weight" for name in names),
        bytes=frozen_array(num_bytes, np.float64),
        use_op=frozen_array(rows, np.int32),
        use_parameter=frozen_array(rows, np.int32),
    )


def _model(make: Callable[[], Graph], cluster: str, microbatches: int) -> Problem:
    return Problem(
        graph=make(),
        cluster=read_shorthand(cluster, load_catalogue()),
        objective=Objective(microbatches=microbatches),
    )


EXAMPLES: Mapping[str, Callable[[], Problem]] = {
    "chain201": chain201,
    "six-node-chain": six_node_chain,
    "baechi-fig1": partial(
        _placement_toy,
        "baechi-fig1",
        2,
        (1.0, 3.0, 3.0, 1.0, 3.0, 1.0),
        (1.0, 2.0, 2.0, 1.0, 1.0, 1.0),
        ((0, 1, 1.0), (0, 4, 1.0), (1, 2, 1.0), (2, 3, 1.0), (4, 5, 1.0), (5, 3, 1.0)),
    ),
    "baechi-fig2": partial(
        _placement_toy,
        "baechi-fig2",
        2,
        (5.0, 4.0, 7.0, 4.0),
        (0.1,) * 4,
        ((0, 2, 1.0), (1, 2, 3.0), (1, 3, 1.0)),
    ),
    "baechi-fig21": partial(
        _placement_toy,
        "baechi-fig21",
        2,
        (9.0, 9.0, 8.0, 5.0, 6.0, 4.0),
        (0.1,) * 6,
        ((0, 2, 2.0), (1, 2, 3.0), (1, 3, 1.0), (4, 5, 3.0)),
    ),
    "baechi-fig3": partial(
        _placement_toy,
        "baechi-fig3",
        3,
        (6.0, 7.0, 9.0, 8.0, 10.0, 6.0, 6.0, 10.0, 6.0),
        (0.01,) * 9,
        (
            *((0, 2, 1.0), (0, 3, 5.0), (0, 4, 2.0), (1, 2, 1.0), (1, 3, 1.0), (1, 4, 1.0)),
            *((2, 5, 5.0), (2, 6, 3.0), (3, 5, 4.0), (3, 6, 1.0), (3, 7, 5.0), (4, 8, 1.0)),
        ),
    ),
    "gpt-small": partial(_model, gpt_small, "4xa100", 8),
    "resnet50": partial(_model, resnet50, "2xa100+2xv100", 4),
}
"""The built-in problems by name; each call makes its problem anew."""


def example(name: str) -> Problem:
    """Return a built-in problem: a graph, a default cluster for it, and an objective.

    Raises:
        InvalidInputError: There is none of that name; says which there are.
    """
    if name not in EXAMPLES:
        raise InvalidInputError(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}")
    return EXAMPLES[name]()
