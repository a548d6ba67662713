"""DynamicMLTrainer's sharding cost.

With W_g the weight (seconds of the reference costs) of the ops on device g and M the matrix of
latencies,

    cost = Σ_g (W_g - mean W)²  +  Σ over edges u -> v between devices of M[g(u)][g(v)]

The first sum is not divided by the number of devices. A device without an op makes it infinite.
"""

import math

import numpy as np

from partita.core.columns import sum_by
from partita.core.plan import Plan
from partita.core.problem import Metric, Mode, Problem
from partita.cost.durations import cluster_devices
from partita.objectives.placed import placement_errors
from partita.objectives.value import Value, check_applies


def why_not_sharding(problem: Problem, plan: Plan) -> str | None:
    """Return why the sharding cost does not apply, or ``None``."""
    if problem.cluster.matrix is None and problem.objective.metric is not Metric.SHARDING_COST:
        return "the cluster has levels; it compares placements on a matrix of links"
    return plan.why_not_placed()


def sharding_cost(problem: Problem, plan: Plan) -> Value:
    """Return the spread of the devices' weights plus the cost of the edges between them.

    Raises:
        InvalidInputError: The objective does not apply.
    """
    check_applies(Metric.SHARDING_COST, why_not_sharding(problem, plan))
    graph, cluster = problem.graph, problem.cluster
    training = problem.objective.mode is Mode.TRAINING
    seconds = graph.forward_s + graph.backward_s if training else graph.forward_s
    device_of = cluster_devices(problem, plan.devices)[plan.device_of]
    weight = sum_by(device_of, seconds, len(cluster))
    variance = float(((weight - weight.mean()) ** 2).sum())
    inner = np.flatnonzero(graph.edge_source >= 0)
    source, reader = device_of[graph.edge_source[inner]], device_of[graph.edges.reader[inner]]
    cut = source != reader
    latency = cluster.links(source[cut], reader[cut]).latency_s
    crossing = float(latency.sum())
    empty = np.flatnonzero(np.bincount(device_of, minlength=len(cluster)) == 0)
    errors = placement_errors(problem, plan)
    errors += [f"device {cluster.device_names[device]!r} holds no op" for device in empty.tolist()]
    worst = int(np.argmax(np.abs(weight - weight.mean())))
    return Value(
        metric=Metric.SHARDING_COST,
        value=math.inf if len(empty) else variance + crossing,
        unit="cost",
        bottleneck=f"weight of {cluster.device_names[worst]}"
        if variance > crossing
        else "edges between devices",
        details={"variance": variance, "cross_edge": crossing, "cut_edges": int(cut.sum())},
        errors=tuple(errors),
    )
