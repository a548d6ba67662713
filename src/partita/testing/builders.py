"""Small graphs, clusters and plans for tests, built in a line each; no torch.

Ops are ``op0, op1, ...``; op i makes tensor ``t<i>`` and uses parameter ``w<i>``. Ops without a
predecessor read the model's input ``x``; the last op makes the loss and reads ``labels`` where
there are any. Devices are ``d0, d1, ...``.

>>> graph = chain(4, Figures(forward_s=1.0, backward_s=2.0))
>>> plan = pipeline(graph, flat_cluster(3), [0, (1, 2)], microbatches=8)
>>> len(plan.stages), plan.stages[1].num_replicas
(2, 2)
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from partita.core.cluster import Cluster, Device, Host, Level, LinkMatrix
from partita.core.columns import frozen_array
from partita.core.energy import EnergyProfile, Frontier
from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, ParameterTable, TensorTable
from partita.core.plan import Plan, Shard, Stage
from partita.core.problem import Mode, Objective, Problem, Schedule
from partita.core.program import Kind, Program

_ROW = ("kind", "stage", "microbatch", "tensor", "gradient", "peer", "group", "bucket", "bytes")
Values: TypeAlias = float | Sequence[float]
Edge: TypeAlias = tuple[int, int] | tuple[int, int, int]
Group: TypeAlias = int | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Costs and sizes: one number for all ops, or one for each.

    Attributes:
        forward_s: Forward seconds.
        backward_s: Backward seconds.
        backward_input_s: The part of backward for the inputs; NaN = not known.
        saved_bytes: Kept from forward to backward.
        tensor_bytes: Size of what the op makes.
        parameter_bytes: Size of the op's parameter.
        input_bytes: Size of the model's input.
        load_s: Seconds to load the model's input.
        batch_size: Samples that all this stands for.
    """

    forward_s: Values = 1.0
    backward_s: Values = 2.0
    backward_input_s: Values = float("nan")
    saved_bytes: Values = 0.0
    tensor_bytes: Values = 0.0
    parameter_bytes: Values = 0.0
    input_bytes: float = 0.0
    load_s: float = 0.0
    batch_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What makes a graph more than ops and edges.

    Attributes:
        tied: Sets of ops that share one more parameter, ``tied0, tied1, ...``.
        frozen: Ops whose own parameter is not trained.
        detached: Ops whose tensors carry no gradient.
        bare: Ops without a parameter of their own.
        labels: Whether the last op reads ``labels``.
    """

    tied: Sequence[Sequence[int]] = ()
    frozen: Sequence[int] = ()
    detached: Sequence[int] = ()
    bare: Sequence[int] = ()
    labels: bool = False


DEFAULT_FIGURES = Figures()
DEFAULT_TRAITS = Traits()


def graph_of(
    num_ops: int,
    edges: Sequence[Edge],
    figures: Figures = DEFAULT_FIGURES,
    traits: Traits = DEFAULT_TRAITS,
) -> Graph:
    """Return a graph with the given edges.

    Args:
        num_ops: Number of ops.
        edges: ``(producer, reader)``, or ``(producer, reader, output)`` to read another than the
            first tensor of the producer.
        figures: Costs and sizes.
        traits: Tied and frozen parameters, tensors without gradient, labels.
    """
    made = sorted({(edge[0], edge[2] if len(edge) > 2 else 0) for edge in edges})
    made = sorted({*made, *((op, 0) for op in range(num_ops))}, key=lambda pair: pair[::-1])
    inputs = 2 if traits.labels else 1
    tensor_of = {pair: inputs + row for row, pair in enumerate(made)}
    fed = {edge[1] for edge in edges}
    reads = [(0, op) for op in range(num_ops) if op not in fed]
    reads += [(1, num_ops - 1)] if traits.labels else []
    reads += [(tensor_of[edge[0], edge[2] if len(edge) > 2 else 0], edge[1]) for edge in edges]
    sizes = _spread(figures.tensor_bytes, num_ops)
    producers = [op for op, _ in made]
    return Graph(
        name="built",
        ops=OpTable(
            names=tuple(f"op{op}" for op in range(num_ops)),
            saved_bytes=_spread(figures.saved_bytes, num_ops),
        ),
        costs=(
            OpCosts(
                forward_s=_spread(figures.forward_s, num_ops),
                backward_s=_spread(figures.backward_s, num_ops),
                backward_input_s=_spread(figures.backward_input_s, num_ops),
            ),
        ),
        tensors=TensorTable(
            names=(
                *("x", "labels")[:inputs],
                *(f"t{op}" if output == 0 else f"t{op}.{output}" for op, output in made),
            ),
            producer=np.array([*[-1] * inputs, *producers]),
            bytes=np.array([*[figures.input_bytes] * inputs, *(sizes[op] for op in producers)]),
            differentiable=np.array(
                [*[False] * inputs, *(op not in set(traits.detached) for op in producers)]
            ),
            load_s=np.array([*[figures.load_s] * inputs, *[0.0] * len(made)]),
        ),
        edges=EdgeTable(
            tensor=np.array([tensor for tensor, _ in reads]),
            reader=np.array([reader for _, reader in reads]),
        ),
        parameters=_parameters(num_ops, figures, traits),
        outputs=np.array([tensor_of[num_ops - 1, 0]]),
        loss=tensor_of[num_ops - 1, 0],
        batch_size=figures.batch_size,
    )


def _spread(values: Values, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(np.broadcast_to(np.asarray(values, dtype=np.float64), (count,)))


def _parameters(num_ops: int, figures: Figures, traits: Traits) -> ParameterTable:
    own = [op for op in range(num_ops) if op not in set(traits.bare)]
    sizes = _spread(figures.parameter_bytes, num_ops)
    uses = [(op, row) for row, op in enumerate(own)]
    uses += [(op, len(own) + row) for row, ops in enumerate(traits.tied) for op in ops]
    return ParameterTable(
        names=(*(f"w{op}" for op in own), *(f"tied{row}" for row in range(len(traits.tied)))),
        bytes=np.array([*(sizes[op] for op in own), *(sizes[ops[0]] for ops in traits.tied)]),
        trainable=np.array(
            [*(op not in set(traits.frozen) for op in own), *[True] * len(traits.tied)], dtype=bool
        ),
        use_op=np.array([op for op, _ in uses], dtype=np.int32),
        use_parameter=np.array([row for _, row in uses], dtype=np.int32),
    )


def chain(
    num_ops: int,
    figures: Figures = DEFAULT_FIGURES,
    traits: Traits = DEFAULT_TRAITS,
    *,
    skips: Sequence[tuple[int, int]] = (),
) -> Graph:
    """Return ops in a row; ``skips`` adds edges over several of them."""
    steps = [(op, op + 1) for op in range(num_ops - 1)]
    return graph_of(num_ops, [*steps, *skips], figures, traits)


def diamond(
    width: int, figures: Figures = DEFAULT_FIGURES, traits: Traits = DEFAULT_TRAITS
) -> Graph:
    """Return one op that feeds ``width`` ops, which all feed a last one."""
    edges = [(0, op) for op in range(1, width + 1)]
    edges += [(op, width + 1) for op in range(1, width + 1)]
    return graph_of(width + 2, edges, figures, traits)


def random_dag(
    num_ops: int,
    rng: random.Random,
    *,
    window: int = 6,
    tied: int = 1,
    figures: Figures | None = None,
) -> Graph:
    """Return a random graph whose ops read from one to three of the ``window`` ops before them.

    Some ops have two outputs, some tensors carry no gradient, some ops have no parameter.

    Args:
        num_ops: Number of ops, 2 or more.
        rng: Source of chance; one seed, one graph.
        window: How far back an op reads.
        tied: How many parameters are shared by two ops.
        figures: Costs and sizes; ``None`` = random ones, all unequal.
    """
    edges: list[Edge] = []
    for op in range(1, num_ops):
        near = range(max(0, op - window), op)
        sources = rng.sample(near, min(len(near), rng.randint(1, 3)))
        edges += [(source, op, int(rng.random() < 0.2)) for source in sources]
    traits = Traits(
        tied=[sorted(rng.sample(range(num_ops), 2)) for _ in range(tied)],
        frozen=[op for op in range(num_ops) if rng.random() < 0.1],
        detached=[op for op in range(num_ops - 1) if rng.random() < 0.1],
        bare=[op for op in range(num_ops) if rng.random() < 0.2],
        labels=True,
    )
    return graph_of(num_ops, edges, figures or random_figures(num_ops, rng), traits)


def random_figures(num_ops: int, rng: random.Random) -> Figures:
    """Return unequal costs and sizes, so that no two events fall together by chance."""

    def draw(low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) for _ in range(num_ops)]

    backward = draw(0.5, 3.0)
    return Figures(
        forward_s=draw(0.2, 2.0),
        backward_s=backward,
        backward_input_s=[value * rng.uniform(0.2, 0.8) for value in backward],
        saved_bytes=draw(1, 100),
        tensor_bytes=draw(1, 50),
        parameter_bytes=draw(1, 100),
        load_s=rng.uniform(0.01, 0.1),
    )


def flat_cluster(
    num_devices: int,
    *,
    bandwidth_bytes_per_s: float = float("inf"),
    latency_s: float = 0.0,
    memory_bytes: float = float("inf"),
    speeds: Sequence[float] = (),
) -> Cluster:
    """Return devices of one host; each has one port out and one port in."""
    level = Level(
        name="host",
        group_of=np.zeros(num_devices, dtype=np.int32),
        bandwidth_bytes_per_s=np.array([bandwidth_bytes_per_s]),
        latency_s=np.array([latency_s]),
    )
    return Cluster(devices=_devices(num_devices, memory_bytes, speeds), levels=(level,))


def paired_cluster(
    num_devices: int,
    *,
    bandwidth_bytes_per_s: float = float("inf"),
    latency_s: float = 0.0,
    memory_bytes: float = float("inf"),
) -> Cluster:
    """Return devices with a link of its own for every ordered pair."""
    matrix = LinkMatrix(
        bandwidth_bytes_per_s=np.full(num_devices**2, bandwidth_bytes_per_s),
        latency_s=np.full(num_devices**2, latency_s),
    )
    return Cluster(devices=_devices(num_devices, memory_bytes, ()), matrix=matrix)


def host_cluster(
    num_hosts: int,
    devices_per_host: int,
    *,
    inside_bytes_per_s: float,
    between_bytes_per_s: float,
) -> Cluster:
    """Return hosts with several devices: ports of devices inside, one port a host between."""
    count = num_hosts * devices_per_host
    host_of = np.repeat(np.arange(num_hosts, dtype=np.int32), devices_per_host)
    return Cluster(
        hosts=tuple(Host(name=f"h{host}") for host in range(num_hosts)),
        devices=tuple(Device(name=f"d{d}", host=int(host_of[d])) for d in range(count)),
        levels=(
            Level(
                name="host",
                group_of=host_of,
                bandwidth_bytes_per_s=np.full(num_hosts, inside_bytes_per_s),
            ),
            Level(
                name="network",
                group_of=np.zeros(count, dtype=np.int32),
                bandwidth_bytes_per_s=np.array([between_bytes_per_s]),
            ),
        ),
    )


def _devices(count: int, memory_bytes: float, speeds: Sequence[float]) -> tuple[Device, ...]:
    rates = list(speeds) or [1.0] * count
    return tuple(
        Device(name=f"d{d}", memory_bytes=memory_bytes, speed=rates[d]) for d in range(count)
    )


def pipeline(
    graph: Graph,
    cluster: Cluster,
    groups: Sequence[Group],
    *,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    microbatches: int | Sequence[int] = 1,
    shard: Shard = Shard.NONE,
    shares: Mapping[int, Sequence[int]] | None = None,
) -> Plan:
    """Return a plan with one stage for each group, the ops dealt out evenly in their order.

    Args:
        graph: A graph whose ops are numbered along the data.
        cluster: The cluster; the plan names all of its devices.
        groups: The devices of each stage: one, a list of replicas, or a list of replicas that are
            lists of tensor-parallel ranks.
        schedule: The schedule.
        microbatches: Their number, each of the graph's batch size, or their sizes.
        shard: What replicas divide, in every stage that has several.
        shares: Shares of the replicas by stage; others take one microbatch in turn.
    """
    given = shares or {}
    stages = []
    for number, group in enumerate(groups):
        replicas: Sequence[int | Sequence[int]] = [group] if isinstance(group, int) else group
        devices = tuple((r,) if isinstance(r, int) else tuple(r) for r in replicas)
        stages.append(
            Stage(
                devices=devices,
                shares=tuple(given.get(number, ())),
                shard=shard if len(devices) > 1 else Shard.NONE,
            )
        )
    sizes = [graph.batch_size] * microbatches if isinstance(microbatches, int) else microbatches
    return Plan(
        fingerprint=graph.fingerprint,
        devices=cluster.device_names,
        stage_of=frozen_array(np.arange(len(graph)) * len(stages) // len(graph), np.int32),
        stages=tuple(stages),
        schedule=schedule,
        microbatch_sizes=np.array(sizes),
    )


def random_pipeline(
    rng: random.Random,
    *,
    schedule: Schedule,
    shard: Shard = Shard.NONE,
    make_cluster: Callable[[int], Cluster] = flat_cluster,
) -> tuple[Problem, Plan]:
    """Return a random graph cut into one to five stages, with replicas and tensor parallelism.

    Stages may share devices and have uneven shares; microbatches differ in size; some ops
    recompute. Parameters are tied where the schedule and the degrees allow it.

    Args:
        rng: Source of chance; one seed, one plan.
        schedule: The schedule.
        shard: What replicas divide; ignored by inference and weight stashing, which divide nothing.
        make_cluster: Makes a cluster of a number of devices.
    """
    flushes = schedule.row.flushes and not schedule.row.infers
    shard = shard if flushes else Shard.NONE
    num_ops = rng.randint(4, 14)
    groups, shares = _random_groups(rng, rng.randint(1, min(5, num_ops)))
    if shard in (Shard.GRADIENTS, Shard.PARAMETERS):
        shares = {}
    rounds = [sum(shares.get(s, [1] * len(group))) for s, group in enumerate(groups)]
    microbatches = math.lcm(*rounds)
    microbatches *= rng.randint(1, max(1, 8 // microbatches))
    alike = len({len(group[0]) for group in groups}) == 1
    graph = random_dag(num_ops, rng, tied=rng.randint(0, 2) if alike and flushes else 0)
    cluster = make_cluster(1 + max(max(ranks) for group in groups for ranks in group))
    plan = pipeline(
        graph,
        cluster,
        groups,
        schedule=schedule,
        microbatches=[rng.randint(1, 3) for _ in range(microbatches)],
        shard=shard,
        shares=shares,
    )
    recompute = np.array([rng.random() < 0.3 for _ in range(num_ops)])
    infers = schedule.row.infers
    objective = Objective(mode=Mode.INFERENCE if infers else Mode.TRAINING)
    graph, stages = _random_degrees(rng, graph, plan.stages)
    problem = Problem(graph=graph, cluster=cluster, objective=objective)
    return problem, replace(plan, recompute=recompute, stages=stages)


def _random_degrees(
    rng: random.Random, graph: Graph, stages: tuple[Stage, ...]
) -> tuple[Graph, tuple[Stage, ...]]:
    """Return stages that also divide sequences, experts and state in groups, and some experts.

    All stages have one context-parallel degree or none, so that tied parameters stay divided alike.
    """
    context = all(stage.ranks % 2 == 0 for stage in stages) and rng.random() < 0.4
    table = graph.parameters
    uses = np.bincount(table.use_parameter, minlength=len(table))
    drawn = np.array([rng.random() < 0.4 for _ in range(len(table))], dtype=bool)
    expert = drawn & (uses == 1)
    made: dict[Stage, Stage] = {}
    for stage in stages:
        if stage in made:
            continue
        cp = 2 if context else 1
        copies = len(stage) // (stage.ranks // cp)
        group = rng.choice([size for size in range(1, copies + 1) if copies % size == 0])
        made[stage] = replace(
            stage,
            cp=cp,
            sequence_parallel=stage.ranks > cp and rng.random() < 0.5,
            ep=rng.choice([size for size in range(1, len(stage) + 1) if len(stage) % size == 0]),
            shard_group=0 if stage.shard is Shard.NONE or rng.random() < 0.5 else group,
            offload_optimizer=rng.choice([0.0, 0.0, 0.5]),
        )
    parameters = replace(table, expert=expert)
    return replace(graph, parameters=parameters), tuple(made[stage] for stage in stages)


def _random_groups(
    rng: random.Random, num_stages: int
) -> tuple[list[list[tuple[int, ...]]], dict[int, list[int]]]:
    """Return the devices of each stage, and the shares of some."""
    groups: list[list[tuple[int, ...]]] = []
    shares: dict[int, list[int]] = {}
    degree = rng.choice([1, 1, 2, 0])
    used = 0
    for stage in range(num_stages):
        if groups and rng.random() < 0.3:
            groups.append(rng.choice(groups))
        else:
            tp, replicas = degree or rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 3])
            first = range(used, used + replicas * tp, tp)
            groups.append([tuple(range(begin, begin + tp)) for begin in first])
            used += replicas * tp
        if len(groups[-1]) > 1 and rng.random() < 0.3:
            shares[stage] = [rng.randint(1, 3) for _ in groups[-1]]
    return groups, shares


def relisted(program: Program, lists: Sequence[Sequence[int]]) -> Program:
    """Return a Program whose devices issue the given rows of another one, in the order given.

    Rows may be left out, stand twice, or move to another device: this is how tests make Programs
    that are wrong.
    """
    rows = np.array([row for part in lists for row in part], dtype=np.int64)
    ptr = np.cumsum([0, *(len(part) for part in lists)])
    columns = {name: getattr(program, name)[rows] for name in (*_ROW, "version")}
    return replace(program, ptr=frozen_array(ptr, np.int64), **columns)


def lists_of(program: Program) -> list[list[int]]:
    """Return the rows of each device, for ``relisted``."""
    return [list(range(begin, end)) for begin, end in pairwise(program.ptr.tolist())]


def small_energy_profile() -> EnergyProfile:
    """Return a profile of one stage with two clocks."""
    return EnergyProfile(
        stage=np.array([0, 0, 0, 0]),
        kind=np.array([Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD]),
        clock_mhz=np.array([1400.0, 700.0, 1400.0, 700.0]),
        seconds=np.array([1.0, 1.8, 2.0, 3.6]),
        joules=np.array([300.0, 270.0, 600.0, 540.0]),
        blocking_w={"": 80.0},
    )


def small_frontier() -> Frontier:
    """Return a frontier of two points for two instructions."""
    return Frontier(
        devices=("gpu0",),
        num_instructions=2,
        time_s=np.array([3.0, 5.4]),
        energy_j=np.array([900.0, 810.0]),
        bound_j=np.array([890.0, 805.0]),
        clock_mhz=np.array([1400.0, 1400.0, 700.0, 700.0]),
        all_max_s=3.0,
        all_max_j=900.0,
        fastest_s=3.0,
        best_s=5.4,
    )
