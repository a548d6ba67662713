"""Twenty mixed problems with tight memory: graphs, clusters of three device types and three links.

All figures follow from the seed. A graph is a row of blocks (with skips, with branches, or with a
few heavy ends), whose matrices carry nearly all weights and time. The memory of the devices is
scaled so that weights, gradients, optimizer state and the activations of one pass take a given
share of all memory together: most splits do not fit, and those that do recompute or shard.
"""

import random

import numpy as np

from partita.core.cluster import Cluster, Device, Host, Level
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, ParameterTable, TensorTable
from partita.core.problem import Objective, Problem

NUM_PROBLEMS = 20
TYPES = (("large", 1.0, 40.0, 1.5e12), ("middle", 0.5, 24.0, 0.9e12), ("small", 0.28, 16.0, 0.4e12))
"""Name, speed of matrices, share of memory and bytes per second of memory."""


def problems() -> list[tuple[str, Problem]]:
    """Return the problems, by name."""
    return [(f"tight{seed:02d}", tight_problem(seed)) for seed in range(NUM_PROBLEMS)]


def tight_problem(seed: int) -> Problem:
    """Return the problem of a seed."""
    rng = random.Random(1000 + seed)
    ops = round(30 * (1000 / 30) ** (seed / (NUM_PROBLEMS - 1)))
    graph = _graph(rng, ops, ("skips", "branches", "ends")[seed % 3])
    cluster = _cluster(rng, graph, rng.choice((6, 8, 12, 16, 20, 24)), rng.uniform(0.3, 0.5))
    given = {} if seed % 2 else {"microbatches": rng.choice((32, 48, 64))}
    return Problem(graph=graph, cluster=cluster, objective=Objective(**given))


def _graph(rng: random.Random, ops: int, family: str) -> Graph:
    """Return a graph of about as many ops; every third one or so is a matrix."""
    width = rng.choice((1024, 2048, 4096))
    tokens, batch = rng.choice((512, 1024, 2048)), 4
    edges = [(op - 1, op) for op in range(1, ops)]
    if family == "skips":
        edges += [(op, op + 6) for op in range(0, ops - 6, 6)]
    elif family == "branches":
        # Two arms over four ops: the chain edge between them goes.
        arms = list(range(1, ops - 6, 7))
        gone = {(op + 1, op + 2) for op in arms}
        edges = [edge for edge in edges if edge not in gone]
        edges += [pair for op in arms for pair in ((op - 1, op + 2), (op + 1, op + 4))]
    matrix = np.array([rng.random() < 0.4 for _ in range(ops)])
    matrix[[0, -1]] = True
    scale = np.array([rng.uniform(0.5, 2.0) for _ in range(ops)])
    if family == "ends":
        scale[[0, -1]] *= 8
    parameters = np.where(matrix, 4.0 * width * width * scale, 0.0)
    out = (
        np.array([rng.choice((0.5, 1, 1, 1, 2)) for _ in range(ops)]) * 4.0 * width * tokens * batch
    )
    saved = out * np.array([rng.choice((0, 1, 1, 2)) for _ in range(ops)])
    flops = 2 * (parameters / 4) * tokens * batch
    costs = []
    for name, speed, _, memory in TYPES:
        # Matrices by the type's arithmetic, all else by its memory; a few per cent by chance.
        chance = np.array([rng.uniform(0.9, 1.1) for _ in range(ops)])
        forward = (flops / (12e12 * speed) + 3 * out / memory + 5e-6) * chance
        costs.append(OpCosts(device_type=name, forward_s=forward, backward_s=2 * forward))
    kept = np.flatnonzero(matrix)
    return Graph(
        name=f"{family}-{ops}",
        ops=OpTable(names=tuple(f"op{op}" for op in range(ops)), saved_bytes=saved, flops=flops),
        costs=tuple(costs),
        tensors=TensorTable(
            names=("x", *(f"t{op}" for op in range(ops))),
            producer=np.array([-1, *range(ops)]),
            bytes=np.array([4.0 * tokens * batch, *out]),
        ),
        edges=EdgeTable(
            tensor=np.array([0, *(source + 1 for source, _ in edges)]),
            reader=np.array([0, *(reader for _, reader in edges)]),
        ),
        parameters=ParameterTable(
            names=tuple(f"w{op}" for op in kept.tolist()),
            bytes=parameters[kept],
            use_op=kept,
            use_parameter=np.arange(len(kept)),
        ),
        batch_size=batch,
    )


def _cluster(rng: random.Random, graph: Graph, size: int, filled: float) -> Cluster:
    """Return hosts of two to four devices of one type, in racks of two hosts."""
    types: list[int] = []
    hosts: list[int] = []
    while len(types) < size:
        host = hosts[-1] + 1 if hosts else 0
        count = min(rng.choice((2, 4)), size - len(types))
        # The first three hosts have the three types: every cluster mixes them.
        kind = host if host < 3 else rng.randrange(3)
        types += [kind] * count
        hosts += [host] * count
    state = 4 * float(graph.parameters.bytes.sum())
    need = (state + float(graph.ops.saved_bytes.sum())) / filled
    # The largest op alone must leave the large devices some room.
    alone = 4 * graph.parameter_bytes + graph.ops.saved_bytes
    unit = max(need / sum(TYPES[kind][2] for kind in types), 1.5 * alone.max() / TYPES[0][2])
    devices = tuple(
        Device(
            name=f"{TYPES[kind][0]}{number}",
            host=host,
            type=TYPES[kind][0],
            memory_bytes=TYPES[kind][2] * unit,
            memory_bytes_per_s=TYPES[kind][3],
        )
        for number, (kind, host) in enumerate(zip(types, hosts, strict=True))
    )
    rack = [host // 2 for host in hosts]
    return Cluster(
        hosts=tuple(Host(name=f"host{host}") for host in range(hosts[-1] + 1)),
        devices=devices,
        levels=(
            Level(
                name="host",
                group_of=np.array(hosts),
                bandwidth_bytes_per_s=rng.choice((25e9, 50e9)),
                latency_s=1e-5,
                port_per_device=True,
            ),
            Level(name="rack", group_of=np.array(rack), bandwidth_bytes_per_s=10e9, latency_s=2e-5),
            Level(
                name="site",
                group_of=np.zeros(size, dtype=int),
                bandwidth_bytes_per_s=rng.choice((3e9, 6e9)),
                latency_s=5e-5,
            ),
        ),
    )
