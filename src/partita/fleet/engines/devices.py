"""Which GPUs and CPUs: numbers for the counts that a policy grants.

The policy decides how many on which server. Here a job keeps its numbers, and others get free
ones, so that a job that stays is not disturbed. A part of a CPU takes a number that others share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from partita.fleet.engines.protocol import Place
from partita.fleet.policies.resources import Servers

_CLOSE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a policy grants a job on one server.

    Attributes:
        server: Row of the server.
        gpus: Number of GPUs.
        cpus: CPUs.
        memory_gb: Memory.
    """

    server: int
    gpus: int
    cpus: float
    memory_gb: float


def pieces_of(places: Sequence[Place], names: Sequence[str]) -> tuple[Piece, ...]:
    """Return what a job holds as a policy sees it; servers that are gone are left out."""
    return tuple(
        Piece(
            server=names.index(place.server),
            gpus=len(place.gpus),
            cpus=place.cpus,
            memory_gb=place.memory_gb,
        )
        for place in places
        if place.server in names
    )


def same_gpus(pieces: Sequence[Piece], places: Sequence[Place], names: Sequence[str]) -> bool:
    """Return whether a grant is on the GPUs that a job has."""
    wanted = sorted((names[piece.server], piece.gpus) for piece in pieces)
    return wanted == sorted((place.server, len(place.gpus)) for place in places)


def choose_devices(
    grants: Mapping[int, Sequence[Piece]],
    held: Mapping[int, Sequence[Place]],
    servers: Servers,
) -> dict[int, tuple[Place, ...]]:
    """Return the places of all jobs that are granted something.

    Args:
        grants: Pieces by job.
        held: What jobs hold now; those that are granted the same GPUs keep their numbers.
        servers: The servers.
    """
    names = servers.names
    stays = {
        job: held[job]
        for job, pieces in grants.items()
        if job in held and same_gpus(pieces, held[job], names)
    }
    gpus = {name: list(range(int(n))) for name, n in zip(names, servers.gpus, strict=True)}
    loads = {
        name: dict.fromkeys(range(max(1, int(n))), 0.0)
        for name, n in zip(names, servers.cpus, strict=True)
    }
    for places in stays.values():
        for place in places:
            gpus[place.server] = [gpu for gpu in gpus[place.server] if gpu not in place.gpus]
    result: dict[int, tuple[Place, ...]] = {}
    # Who stays chooses first, so that its CPUs are free for it.
    for job in sorted(grants, key=lambda job: (job not in stays, job)):
        kept = {place.server: place for place in stays.get(job, ())}
        places = []
        for piece in grants[job]:
            name = names[piece.server]
            before = kept.get(name)
            chosen = before.gpus if before else tuple(gpus[name][: piece.gpus])
            if before is None:
                gpus[name] = gpus[name][piece.gpus :]
            places.append(
                Place(
                    server=name,
                    gpus=chosen,
                    cpu_ids=_take_cpus(loads[name], piece.cpus, before),
                    cpus=piece.cpus,
                    memory_gb=piece.memory_gb,
                )
            )
        result[job] = tuple(places)
    return result


def _take_cpus(load: dict[int, float], cpus: float, before: Place | None) -> tuple[int, ...]:
    """Return the least loaded CPUs, those held before first among equals; adds their load."""
    count = min(max(1, math.ceil(cpus - _CLOSE)), len(load))
    mine = before.cpu_ids if before else ()
    ranked = sorted(load, key=lambda cpu: (load[cpu] > _CLOSE, cpu not in mine, load[cpu], cpu))
    chosen = tuple(sorted(ranked[:count]))
    for cpu in chosen:
        load[cpu] += cpus / count
    return chosen
