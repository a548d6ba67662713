"""Equal numbers of layers on every stage.

Merak's and DeepSpeed's ``uniform``: stages of ceil(layers / stages) layers, in order; fewer stages
where the layers run out. A boundary that would split ops which must stay together moves to the next
one that does not. Costs are not looked at.
"""

import numpy as np

from partita.core.graph import Graph
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.planners.pipeline import (
    cut_layers,
    layer_of_ops,
    legal_boundaries,
    main_devices,
    pipeline_plan,
    solution_of,
)


def plan_uniform(
    problem: Problem,
    *,
    stages: int = 0,
    replicas: int = 1,
    chunks: int = 1,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> Solution:
    """Cut the layers into equal stages on consecutive devices.

    Args:
        problem: The problem.
        stages: Number of stages; 0 = as many as the devices and the layers allow.
        replicas: Replicas of every stage.
        chunks: Stages that each device takes in turn, for ``interleaved-1f1b``; the layers are cut
            into ``stages * chunks``.
        tp: Devices that divide the tensors of a replica.
        sequence_parallel: Whether they divide tensors between products along the sequence, too.

    Raises:
        InfeasibleError: A device has too little memory.
        InvalidInputError: There are not that many devices.
    """
    devices = main_devices(problem)
    if tp < 1 or tp > len(devices):
        raise InvalidInputError(f"tp is {tp}; expected 1 to {len(devices)}")
    if replicas < 1 or replicas * tp > len(devices):
        raise InvalidInputError(f"replicas is {replicas}; expected 1 to {len(devices) // tp}")
    each = replicas * tp
    most = len(devices) // each
    if stages < 0:
        raise InvalidInputError(f"stages is {stages}; expected 0 or more")
    if stages > most:
        raise InvalidInputError(
            f"{stages} stages of {replicas} replicas need {stages * each} devices; "
            f"there are {len(devices)}"
        )
    if chunks < 1:
        raise InvalidInputError(f"chunks is {chunks}; expected 1 or more")
    ring = stages or most
    boundaries = uniform_boundaries(problem.graph, ring * chunks)
    stage_of = cut_layers(problem.graph, boundaries)
    places = [stage % ring for stage in range(len(boundaries) - 1)]
    groups = [devices[place * each : (place + 1) * each] for place in places]
    plan = pipeline_plan(problem, stage_of, groups, tp=tp, sequence_parallel=sequence_parallel)
    options = {"stages": stages, "replicas": replicas, "chunks": chunks}
    if tp > 1:
        options |= {"tp": tp}
    if sequence_parallel:
        options |= {"sequence_parallel": True}
    return solution_of(problem, plan, "uniform", options)


def uniform_boundaries(graph: Graph, stages: int) -> list[int]:
    """Return the boundaries over layers of equal stages; fewer where the layers run out."""
    _, count = layer_of_ops(graph)
    each = -(-count // min(stages, count))
    steps = np.minimum(np.arange(0, count + each, each), count)
    return legal_boundaries(graph, steps.tolist())
