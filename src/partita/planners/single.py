"""Everything on one device: what every other plan is compared with."""

import numpy as np

from partita.core.graph import KIND_BIT
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.cost.durations import op_seconds
from partita.cost.tables import device_classes
from partita.errors import InfeasibleError, InvalidInputError
from partita.planners.pipeline import pipeline_plan, solution_of


def plan_single(problem: Problem, *, device: str = "") -> Solution:
    """Run the whole graph on one device.

    Args:
        problem: The problem.
        device: Name of the device; empty = the fastest on which everything may run, ties by index.

    Raises:
        InfeasibleError: No device can hold it.
    """
    cluster, graph = problem.cluster, problem.graph
    if device and device not in cluster.index_of:
        known = ", ".join(cluster.device_names[:8])
        raise InvalidInputError(f"device {device!r} is not in the cluster; there are {known}")
    # Devices of one class give one value, so that the first of each stands for all.
    wanted = [cluster.index_of[device]] if device else device_classes(problem).first
    refused = {
        index: (graph.ops.device_kinds & KIND_BIT[cluster.devices[index].kind]) == 0
        for index in wanted
    }
    able = [index for index in wanted if not bool(refused[index].any())]
    if not able:
        first = wanted[0]
        op = graph.ops.names[int(refused[first].argmax())]
        raise InfeasibleError(
            f"no single device may run all ops of the graph: {cluster.device_names[first]!r} "
            f"does not run op {op!r}"
        )
    stage_of = np.zeros(len(graph), dtype=np.int32)
    seconds = {}
    for index in able:
        times = op_seconds(graph, cluster.devices[index])
        seconds[index] = float(times.forward_s.sum() + times.backward_s.sum())
    refusal = None
    for index in sorted(able, key=lambda i: (seconds[i], i)):
        try:
            plan = pipeline_plan(problem, stage_of, [[index]])
            return solution_of(problem, plan, "single", {"device": device})
        except InfeasibleError as exc:
            refusal = refusal or exc
    assert refusal is not None
    raise refusal
