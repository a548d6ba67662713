"""Which GPUs and CPUs: numbers for the counts that a policy grants.

The policy decides how many on which server. Here a job keeps its numbers, and others get free
ones, so that a job that stays is not disturbed. A part of a CPU takes a number that others share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
        memory_bytes: Memory.
    """

    server: int
    gpus: int
    cpus: float
    memory_bytes: float


def pieces_of(places: Sequence[Place], names: Sequence[str]) -> tuple[Piece, ...]:
    """Return what a job holds as a policy sees it; servers that are gone are left out."""
    return tuple(
        Piece(
            server=names.index(place.server),
            gpus=len(place.gpus),
            cpus=place.cpus,
            memory_bytes=place.memory_bytes,
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
                    memory_bytes=piece.memory_bytes,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a job is to hold.

    Attributes:
        places: Where.
        gain: How much faster it would be than with what it holds now, as a factor.
    """

    places: tuple[Place, ...]
    gain: float = 1.0


WORTH_RESTART = 1.25
"""Gain above which a job is restarted for it where CPUs of a running job cannot be changed."""


def keep_sizes(
    shares: Mapping[int, Share], held: Mapping[int, Sequence[Place]], servers: Servers
) -> dict[int, tuple[Place, ...]]:
    """Return the places of all jobs where CPUs and memory of a running job cannot be changed.

    Who stays on its GPUs keeps what it holds, unless it would gain much by a restart. Where what
    is left of a server is too little for those who come, those who hold more than they are to hold
    give it back (by a restart), who holds most too much first; ties by number.

    Args:
        shares: What each job is to hold.
        held: What jobs hold now.
        servers: The servers.
    """
    stays = {
        job: tuple(held[job])
        for job, share in shares.items()
        if job in held and _same(share.places, held[job]) and share.gain < WORTH_RESTART
    }
    for row, name in enumerate(servers.names):
        for capacity, amount in (
            (float(servers.cpus[row]), _cpus_on),
            (float(servers.memory_bytes[row]), _memory_on),
        ):
            total = sum(amount(stays.get(job, share.places), name) for job, share in shares.items())
            surplus = {
                job: amount(places, name) - amount(shares[job].places, name)
                for job, places in stays.items()
            }
            for job in sorted(stays, key=lambda job: (-surplus[job], job)):
                if total <= capacity * (1 + _CLOSE) or surplus[job] <= capacity * _CLOSE:
                    break
                total -= surplus[job]
                del stays[job]
    return {job: stays.get(job, share.places) for job, share in shares.items()}


def _same(places: Sequence[Place], held: Sequence[Place]) -> bool:
    return sorted((p.server, len(p.gpus)) for p in places) == sorted(
        (p.server, len(p.gpus)) for p in held
    )


def _cpus_on(places: Sequence[Place], server: str) -> float:
    return sum(place.cpus for place in places if place.server == server)


def _memory_on(places: Sequence[Place], server: str) -> float:
    return sum(place.memory_bytes for place in places if place.server == server)


def whole_cpus(
    places: Mapping[int, Sequence[Place]], servers: Servers
) -> dict[int, tuple[Place, ...]]:
    """Return places of whole CPUs: rounded down, what is left to the largest parts; at least one.

    Ties by number of the job.
    """
    counts: dict[tuple[int, str], float] = {}
    for row, name in enumerate(servers.names):
        wanted = {job: _cpus_on(held, name) for job, held in places.items()}
        wanted = {job: cpus for job, cpus in wanted.items() if cpus > 0}
        whole = {job: max(1, math.floor(cpus + _CLOSE)) for job, cpus in wanted.items()}
        left = int(servers.cpus[row]) - sum(whole.values())
        for job in sorted(wanted, key=lambda job: (whole[job] - wanted[job], job)):
            if left > 0 and wanted[job] > whole[job] + _CLOSE:
                whole[job] += 1
                left -= 1
        counts.update({(job, name): float(cpus) for job, cpus in whole.items()})
    return {
        job: tuple(replace(place, cpus=counts[job, place.server]) for place in held)
        for job, held in places.items()
    }
