"""Plans of Piper, as JSON: ``{"stages": [...]}`` in the order of the pipeline.

A stage has ``nodes``, ``dataParallelDegree`` (replicas), ``tensorParallelDegree`` and, for each
node, the option that it runs (``TMPCids``). Devices are not named: the stages take those of the
problem in their order.
"""

from collections.abc import Mapping

import numpy as np

from partita.core.columns import frozen_array
from partita.core.plan import Plan, Stage, equal_microbatches
from partita.core.problem import Problem, Schedule
from partita.errors import FormatError, InvalidInputError
from partita.formats.dnn_partitioning import op_ids
from partita.formats.json_fields import (
    MAX_ID,
    Fields,
    as_integer,
    format_errors,
    read_object,
    refuse,
    write_rows,
)
from partita.formats.piper import OPTION_OF_RECOMPUTE, RECOMPUTE_OF_OPTION


@format_errors()
def read_piper_plan(text: str, problem: Problem) -> Plan:
    """Return the plan of a list of stages, for the microbatches of the problem (else the fewest).

    Raises:
        FormatError: A node is not there, stands twice or is missing, an option is not one of the
            node's, or there are too few devices or a degree that does not divide the microbatches.
    """
    rows = read_object(text).rows("stages")
    row_of = {name: row for row, name in enumerate(op_ids(problem.graph))}
    stage_of = [-1] * len(problem.graph)
    recompute = [False] * len(problem.graph)
    stages: list[Stage] = []
    used = 0
    for number, row in enumerate(rows):
        replicas = row.integer("dataParallelDegree", low=1)
        tp = row.integer("tensorParallelDegree", low=1)
        if used + replicas * tp > len(problem.cluster):
            raise FormatError(
                f"{row.place} needs devices {used} to {used + replicas * tp - 1}; "
                f"the problem has {len(problem.cluster)}"
            )
        stages.append(_stage(used, replicas, tp))
        used += replicas * tp
        for op, flag in _ops(row, row_of, problem, tp).items():
            if stage_of[op] >= 0:
                refuse(row.at("nodes"), problem.graph.ops.names[op], "each node once")
            stage_of[op], recompute[op] = number, flag
    missing = [name for name, stage in zip(row_of, stage_of, strict=True) if stage < 0]
    if missing:
        raise FormatError(f"{len(missing)} nodes are in no stage, such as {missing[0]}")
    microbatches = problem.objective.microbatches or int(np.lcm.reduce([s.round for s in stages]))
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names[:used],
        stage_of=frozen_array(stage_of, np.int32),
        stages=tuple(stages),
        schedule=Schedule.ONE_F_ONE_B,
        microbatch_sizes=equal_microbatches(microbatches, problem.microbatch_size),
        recompute=frozen_array(recompute, np.bool_),
    )
    plan.check_fits(problem)
    return plan


def _stage(first: int, replicas: int, tp: int) -> Stage:
    groups = [
        range(first + replica * tp, first + (replica + 1) * tp) for replica in range(replicas)
    ]
    return Stage(devices=tuple(tuple(group) for group in groups))


def _ops(row: Fields, row_of: Mapping[str, int], problem: Problem, tp: int) -> dict[int, bool]:
    """Return the ops of a stage and whether each recomputes."""
    options = row.object("TMPCids") if "TMPCids" in row.values else Fields({}, row.at("TMPCids"))
    variants = problem.graph.variants
    found: dict[int, bool] = {}
    for item in row.items("nodes"):
        name = str(as_integer(item, row.at("nodes"), low=-MAX_ID))
        if name not in row_of or row_of[name] in found:
            refuse(row.at("nodes"), item, "the id of a node, each once")
        option = options.text_or(name, OPTION_OF_RECOMPUTE[False])
        if option not in RECOMPUTE_OF_OPTION:
            refuse(options.at(name), option, " or ".join(map(repr, RECOMPUTE_OF_OPTION)))
        recompute = RECOMPUTE_OF_OPTION[option]
        if len(variants) and (row_of[name], tp, recompute) not in variants.row_of:
            raise FormatError(
                f"{row.place}: node {name} has no option {option!r} for tensor-parallel degree {tp}"
            )
        found[row_of[name]] = recompute
    return found


def write_piper_plan(problem: Problem, plan: Plan) -> str:
    """Return a plan as a list of stages.

    Raises:
        InvalidInputError: The plan does not fit the problem, gives replicas uneven shares, or runs
            two stages on one device.
    """
    plan.check_fits(problem)
    flat = [device for stage in plan.stages for group in stage.devices for device in group]
    if len(set(flat)) < len(flat):
        raise InvalidInputError("a Piper plan has one stage for each device; here one has several")
    if any(len(set(stage.shares)) > 1 for stage in plan.stages):
        raise InvalidInputError("a Piper plan shares microbatches evenly; here shares differ")
    ids = op_ids(problem.graph)
    ops: list[list[int]] = [[] for _ in plan.stages]
    for op, stage in enumerate(plan.stage_of.tolist()):
        ops[stage].append(op)
    return write_rows(
        {
            "stages": [
                {
                    "nodes": [int(ids[op]) for op in members],
                    "dataParallelDegree": stage.num_replicas,
                    "tensorParallelDegree": stage.tp,
                    "TMPCids": {
                        ids[op]: OPTION_OF_RECOMPUTE[bool(plan.recompute[op])] for op in members
                    },
                }
                for stage, members in zip(plan.stages, ops, strict=True)
            ]
        }
    )
