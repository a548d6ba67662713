"""Who holds which parameters: compared with the plan before the first step."""

import json
from collections.abc import Iterable, Mapping

from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.errors import InvalidInputError
from partita.program.layout import owners
from partita.ranks.failures import PeerError, first_line
from partita.ranks.member import Member
from partita.runtime.process_transport import used_devices
from partita.runtime.task import Task


def expected_holders(task: Task) -> dict[str, list[int]]:
    """Return the ranks that should hold each parameter and buffer: those of its stages."""
    rank_of = {device: rank for rank, device in enumerate(used_devices(task.program))}
    names, found = task.graph.parameters.names, dict[str, set[int]]()
    for row, stage in zip(
        *(column.tolist() for column in owners(task.graph, task.plan)), strict=True
    ):
        devices = (device for group in task.plan.stages[stage].devices for device in group)
        found.setdefault(names[row], set()).update(rank_of[device] for device in devices)
    return {name: sorted(ranks) for name, ranks in found.items()}


def held_names(graph: Graph, plan: Plan, device: int) -> set[str]:
    """Return the parameters and buffers that a device holds by a plan."""
    pairs = zip(*(column.tolist() for column in owners(graph, plan)), strict=True)
    stages = [any(device in group for group in stage.devices) for stage in plan.stages]
    return {graph.parameters.names[row] for row, stage in pairs if stages[stage]}


def check_holders(held: Mapping[int, Iterable[str]], expected: Mapping[str, list[int]]) -> None:
    """Check that every parameter is held by exactly the ranks that should.

    Args:
        held: The names that each rank holds.
        expected: The ranks of each name.

    Raises:
        InvalidInputError: One is missing, or held elsewhere; names it and the ranks.
    """
    found: dict[str, list[int]] = {name: [] for name in expected}
    for rank, names in sorted(held.items()):
        for name in names:
            found.setdefault(name, []).append(rank)
    for name, ranks in found.items():
        wanted = expected.get(name, [])
        if ranks != wanted:
            raise InvalidInputError(
                f"parameter {name!r} is held by ranks {ranks}; by the plan it belongs to {wanted}"
            )


def agree_on_holders(task: Task, member: Member, held: Iterable[str], job: str) -> None:
    """Tell the others what this rank holds, and check what all of them hold.

    Raises:
        InvalidInputError: A parameter is missing, or held elsewhere.
        PeerError: A rank did not say in time.
    """
    world = len(used_devices(task.program))
    try:
        member.store.set(f"{job}/holds/{member.rank}", json.dumps(sorted(held)))
        claims = {
            rank: json.loads(member.store.get(f"{job}/holds/{rank}")) for rank in range(world)
        }
    except RuntimeError as exc:
        raise PeerError(
            f"rank {member.rank}: not all ranks said what they hold within {member.limit_s:g} s: "
            f"{first_line(exc)}"
        ) from exc
    check_holders(claims, expected_holders(task))
