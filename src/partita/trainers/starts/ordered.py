"""A plan whose devices stand host by host, as launchers number ranks."""

import dataclasses

from partita.core.plan import Plan
from partita.trainers.target import Node, PlanToWrite


def by_host(plan: PlanToWrite) -> PlanToWrite:
    """Return the same plan with its devices host by host, each host where it is first used."""
    order = [name for group in _names(plan) for name in group]
    index = {name: number for number, name in enumerate(order)}
    old = plan.plan
    stages = tuple(
        dataclasses.replace(
            stage,
            devices=tuple(
                tuple(index[old.devices[device]] for device in group) for group in stage.devices
            ),
        )
        for stage in old.stages
    )
    new: Plan = dataclasses.replace(old, devices=tuple(order), stages=stages)
    solution = dataclasses.replace(plan.solution, plan=new, alternatives=())
    return dataclasses.replace(plan, solution=solution)


def _names(plan: PlanToWrite) -> list[list[str]]:
    cluster = plan.problem.cluster
    used = {device for stage in plan.plan.stages for group in stage.devices for device in group}
    held: dict[int, list[str]] = {}
    for number, name in enumerate(plan.plan.devices):
        if number in used:
            held.setdefault(cluster.devices[cluster.index_of[name]].host, []).append(name)
    return list(held.values())


def equal_runs(nodes: tuple[Node, ...]) -> list[list[Node]]:
    """Return nodes in runs of the same shape, in the order of the plan."""
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and runs[-1][0].shape == node.shape:
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs
