"""Configurations of PipeDream's runtime: which modules are in which stage, which ranks run it.

Each holds ``module_to_stage_map`` (the stage of each module that the package lists, the last one
the criterion), ``stage_to_rank_map`` (string keys) and ``stage_to_depth_map``, the minibatches that
a stage takes in before its first backward: ceil(ranks after the stage / its own ranks).
"""

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from partita.core.plan import Plan
from partita.errors import InvalidInputError

_PAIR = re.compile(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*", re.ASCII)


def read_num_ranks(text: str, num_stages: int) -> list[int]:
    """Return the ranks of each stage that ``0:3,1:1`` gives.

    Raises:
        InvalidInputError: It is not understood, or does not give each stage once.

    >>> read_num_ranks("0:3,1:1", 2)
    [3, 1]
    """
    found: dict[int, int] = {}
    for part in text.split(","):
        match = _PAIR.fullmatch(part)
        if match is None or int(match[2]) < 1 or int(match[1]) in found:
            raise InvalidInputError(
                f"stage to num ranks {text!r} is not understood at {part!r}; write 0:3,1:1, "
                "each stage once with 1 rank or more"
            )
        found[int(match[1])] = int(match[2])
    if sorted(found) != list(range(num_stages)):
        raise InvalidInputError(
            f"stage to num ranks {text!r} names stages {sorted(found)}; the plan has stages 0 to "
            f"{num_stages - 1}"
        )
    return [found[stage] for stage in range(num_stages)]


def num_ranks_of(plan: Plan) -> list[int]:
    """Return the replicas of each stage of a plan.

    Raises:
        InvalidInputError: PipeDream's runtime cannot run it: a device holds several stages, or a
            stage is divided among devices.
    """
    used: dict[int, int] = {}
    for number, stage in enumerate(plan.stages):
        if stage.tp > 1:
            raise InvalidInputError(
                f"stage {number} is divided among {stage.tp} devices; PipeDream's runtime has "
                "replicas alone"
            )
        for (device,) in stage.devices:
            if device in used:
                raise InvalidInputError(
                    f"device {plan.devices[device]!r} holds stages {used[device]} and {number}; "
                    "PipeDream's runtime has one stage for each rank"
                )
            used[device] = number
    return [stage.num_replicas for stage in plan.stages]


def runtime_configurations(num_ranks: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return the configurations for data, model and hybrid parallelism, by name of their file.

    Args:
        num_ranks: Ranks of each stage, first stage first.
    """
    count, total = len(num_ranks), sum(num_ranks)
    modules = [*range(count), count - 1]
    ends = list(accumulate(num_ranks))
    ranks = [list(range(end - own, end)) for own, end in zip(num_ranks, ends, strict=True)]
    return {
        "dp_conf.json": _configuration([0] * (count + 1), [list(range(total))]),
        "mp_conf.json": _configuration(modules, [[stage] for stage in range(count)]),
        "hybrid_conf.json": _configuration(modules, ranks),
    }


def _configuration(modules: list[int], ranks: list[list[int]]) -> dict[str, Any]:
    sizes = list(map(len, ranks))
    after = [sum(sizes[stage + 1 :]) for stage in range(len(sizes))]
    return {
        "module_to_stage_map": modules,
        "stage_to_rank_map": {str(stage): list(own) for stage, own in enumerate(ranks)},
        "stage_to_depth_map": {
            str(stage): -(-left // own)
            for stage, (left, own) in enumerate(zip(after, sizes, strict=True))
        },
    }
