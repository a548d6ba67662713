"""A trace played by the rules of Synergy's released code; `synergy_rounds.py` lists them."""

import math
from dataclasses import replace

import numpy as np

from partita.core.columns import Floats, Longs
from partita.core.fleet import FleetHistory, Trace, Usage
from partita.errors import InfeasibleError, InvalidInputError
from partita.fleet.policies.kernels import JOB_ROUNDS
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import Policy
from partita.fleet.simulate.options import Rules
from partita.fleet.simulate.recorder import known_before
from partita.fleet.simulate.rounds import Progress
from partita.fleet.simulate.table import Simulator
from partita.kernels import as_lists, compiled, pays
from partita.released import synergy_packing as packing
from partita.released import synergy_rounds as kernel

ORDERINGS = {
    "fifo": packing.FIFO,
    "srtf": packing.SRTF,
    "las": packing.LAS,
    "ftf": packing.FTF,
    "drf": packing.DRF,
    "tetris": packing.TETRIS,
}
ALLOCATORS = {"fair": packing.FAIR, "greedy": packing.GREEDY, "tune": packing.TUNE}
_GB, _MB = 1e9, 1e6
"""Units of the released code, which compares sums without a tolerance: their rounding counts."""
STORAGE_BYTES_PER_S = 62.5e6
"""What the released code asks of storage for each GPU, whatever the profile says."""
ROUND_S = 300.0
DIFFERENCES = (
    "FTF serves the largest ratio of shared to lone time first; the released code the smallest",
    "DRF fills progressively by tenant and Tetris counts alignment; released, both are sort keys",
    "tune demotes along the matrix as far as needed; released, from the ideal to the fair share",
    "jobs stay on their GPUs and whole jobs go to one server; released, all is packed anew",
    "a resumption or move costs a restart; released, nothing",
    "a job ends with its last iteration and keeps parts of iterations; released, with the round",
    "an idle gap is waited through; released, the run ends there and later jobs are lost",
)
"""Where our rules depart from the released code's, for those who compare the two."""
_ROWS = 4096


def simulate_released(
    trace: Trace, servers: Servers, *, ordering: str, allocator: str
) -> FleetHistory:
    """Return what the released simulator makes of a trace.

    Args:
        trace: The jobs.
        servers: The servers, all alike.
        ordering: One of ``ORDERINGS``.
        allocator: One of ``ALLOCATORS``.

    Raises:
        InvalidInputError: The released code does not know such a policy, cluster or job.
        InfeasibleError: It stops with jobs that it cannot place.
    """
    _check(trace, servers, ordering, allocator)
    by_arrival = np.argsort(trace.arrival_s, kind="stable")
    demands, demand_of = _demands(trace, servers, fair=allocator == "fair")
    jobs = _jobs(trace, by_arrival, demand_of, demands.speed[demand_of])
    room = _room(servers)
    count = np.zeros(packing.COUNTS, dtype=np.int64)
    events = _events(trace, by_arrival, jobs, servers.num_gpus, count)
    work = float((trace.fair_s / ROUND_S).sum())
    run = kernel.released_rounds
    fast = pays(run, work, JOB_ROUNDS)
    if not fast:
        jobs, demands, room = as_lists(jobs), as_lists(demands), as_lists(room)
        events = as_lists(events)
    else:
        run = compiled(run)
    policy = (ORDERINGS[ordering], ALLOCATORS[allocator])
    chunks: list[packing.Rows] = []
    while count[packing.STATUS] in (packing.RUNNING, packing.FULL):
        rows = _rows()
        count[packing.ROWS] = 0
        run(policy, jobs, demands, room, events, count, rows)
        chunks.append(packing.Rows(*(part[: count[packing.ROWS]] for part in rows)))
    if count[packing.STATUS] == packing.STUCK:
        raise InfeasibleError(
            f"{ordering}:{allocator} by the released rules cannot place a job at "
            f"{events.clock[packing.NOW]:g} s; the released code ends there too"
        )
    return _history(trace, servers, f"{ordering}:{allocator}", by_arrival, jobs, count, chunks)


def _check(trace: Trace, servers: Servers, ordering: str, allocator: str) -> None:
    for name, known in ((ordering, ORDERINGS), (allocator, ALLOCATORS)):
        if name not in known:
            raise InvalidInputError(
                f"{name!r} is not in the released code; it has {', '.join(known)}"
            )
    if not servers.alike:
        raise InvalidInputError("the released code knows servers that are all alike only")
    if trace.gpus.max() > servers.num_gpus:
        row = int(np.argmax(trace.gpus))
        raise InfeasibleError(
            f"job {trace.job_id[row]} asks for {trace.gpus[row]} GPUs; there are {servers.num_gpus}"
        )
    slow = max(trace.sensitivities, key=lambda part: part.iteration_s)
    if slow.iteration_s > ROUND_S:
        raise InvalidInputError(
            f"an iteration of {slow.name!r} takes {slow.iteration_s:g} s; by the released rules a "
            f"job makes no progress unless one fits a round of {ROUND_S:g} s"
        )


def _start(trace: Trace) -> float:
    """Return the time of the first round; that of the released code follows the first row."""
    if not math.isnan(trace.start_s):
        return trace.start_s
    return math.ceil(float(trace.arrival_s[0]) / ROUND_S) * ROUND_S


def _capacity(servers: Servers) -> Floats:
    """Return CPUs, GB of memory and MB/s of storage of a server."""
    return np.array(
        [servers.cpus[0], servers.memory_bytes[0] / _GB, servers.storage_bytes_per_s[0] / _MB]
    )


def _demands(trace: Trace, servers: Servers, *, fair: bool) -> tuple[packing.Demands, Longs]:
    """Return the distinct demands, capped at a server, and that of each job."""
    keys = np.stack([trace.sensitivity, trace.gpus], axis=1)
    distinct, of = np.unique(keys, axis=0, return_inverse=True)
    gpus = float(servers.gpus[0])
    capacity = _capacity(servers)
    total = np.array([gpus, capacity[0], capacity[1]]) * len(servers)
    vectors, speeds, shares = [], [], []
    for part, n in distinct.tolist():
        vector, speed = _demand(trace, part, n, capacity, gpus)
        shares.append(np.array([n, vector[0], vector[1]]) / total)
        if fair:
            vector, speed = capacity / gpus * n, 1.0
        vectors.append(vector)
        speeds.append(speed)
    asked, counts = np.array(vectors), distinct[:, 1:]
    per_gpu, share = asked / counts, np.array(shares)
    return (
        packing.Demands(
            cpus=per_gpu[:, 0].copy(),
            memory=per_gpu[:, 1].copy(),
            storage=per_gpu[:, 2].copy(),
            speed=np.array(speeds),
            above_fair=(asked > capacity / gpus * counts).any(axis=1),
            share_gpus=share[:, 0].copy(),
            share_cpus=share[:, 1].copy(),
            share_memory=share[:, 2].copy(),
            hint=np.zeros(len(distinct) + 1, dtype=np.int64),
        ),
        of.ravel(),
    )


def _demand(trace: Trace, part: int, n: int, capacity: Floats, gpus: float) -> tuple[Floats, float]:
    """Return the ideal demand of a job, cut at a server, and the speed that the cut leaves.

    What exceeds a server becomes the fair share, at speed 1, where the GPUs do as well.
    """
    known = trace.sensitivities[part]
    best = int(np.argmax(known.speed))
    cpus = _given(known.demand_cpus, float(known.cpus[best]))
    memory = _given(known.demand_memory_bytes, float(known.memory_bytes[best])) / _GB
    speed = _given(known.demand_speed, float(known.speed[best]))
    fair = capacity / gpus * n
    ideal = n * np.array([cpus, memory, STORAGE_BYTES_PER_S / _MB])
    cut = ideal > capacity
    if n > gpus:
        return np.where(cut, fair, ideal), 1.0 if cut.any() else speed
    vector = np.minimum(ideal, capacity)
    if cut.any() and ideal[0] != fair[0]:
        speed = 1 + (speed - 1) / (ideal[0] - fair[0]) * (vector[0] - fair[0])
    return vector, float(speed)


def _given(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def _jobs(trace: Trace, rows: Longs, demand_of: Longs, speed_of: Floats) -> packing.Jobs:
    count = len(rows)
    seconds = np.array([part.iteration_s for part in trace.sensitivities])
    floats = {name: np.zeros(count) for name in packing.Jobs._fields}
    whole = ("rank", "order", "spare", "chosen", "first_piece", "num_pieces")
    arrival = trace.arrival_s[rows]
    return packing.Jobs(
        **{
            **floats,
            **{name: np.zeros(count, dtype=np.int64) for name in whole},
            "arrival": arrival,
            "total": trace.iterations[rows].astype(np.float64),
            "iteration_s": seconds[trace.sensitivity[rows]],
            "gpus": trace.gpus[rows].astype(np.int64),
            "demand": demand_of[rows].astype(np.int64),
            "last_run": arrival.copy(),
            "speed": speed_of[rows],
            "start": np.full(count, math.nan),
            "finish": np.full(count, math.nan),
        }
    )


def _events(
    trace: Trace, rows: Longs, jobs: packing.Jobs, gpus: int, count: Longs
) -> packing.Events:
    """Return the clock and a heap with all arrivals and the first round.

    It stays empty where all arrivals differ.
    """
    num_jobs = len(rows)
    same = np.concatenate(([False], jobs.arrival[1:] == jobs.arrival[:-1], [False]))
    tied = (same[1:] | same[:-1]).astype(np.int64)
    size = num_jobs + gpus + 1 if tied.any() else 0
    events = packing.Events(
        clock=np.array([_start(trace), ROUND_S]),
        tied=tied,
        place=np.zeros(num_jobs, dtype=np.int64),
        heap=np.zeros(size, dtype=np.int64),
        when=np.zeros(num_jobs + 2, dtype=np.int64),
    )
    if tied.any():
        events.when[:num_jobs] = 3 * np.searchsorted(jobs.arrival, jobs.arrival)
        for j in np.argsort(rows).tolist():
            kernel.push(j, events, count)
        kernel.pass_events(1, 0, jobs, events, count)
        count[packing.TIES_AHEAD] = tied.sum()
    return events


def _room(servers: Servers) -> packing.Room:
    count, pieces = len(servers), servers.num_gpus
    whole = {name: np.zeros(count, dtype=np.int64) for name in ("gpus", "first", "last")}
    columns = ("piece_job", "piece_server", "piece_gpus", "piece_next")
    gpus = float(servers.gpus[0])
    capacity = _capacity(servers)
    return packing.Room(
        **whole,
        **{name: np.zeros(count) for name in ("cpus", "memory", "storage")},
        **{name: np.zeros(pieces, dtype=np.int64) for name in columns},
        fair=capacity / gpus,
        capacity=np.array([gpus, *capacity]),
        walk=np.zeros(2 * (count + pieces), dtype=np.int64),
    )


def _rows() -> packing.Rows:
    whole = {"rounds", "running", "waiting", "gpus"}
    return packing.Rows(
        *(np.zeros(_ROWS, dtype=np.int64 if f in whole else float) for f in packing.Rows._fields)
    )


def _history(
    trace: Trace,
    servers: Servers,
    policy: str,
    by_arrival: Longs,
    jobs: packing.Jobs,
    count: Longs,
    chunks: list[packing.Rows],
) -> FleetHistory:
    back = np.empty(len(trace), dtype=np.int64)
    back[by_arrival] = np.arange(len(trace))
    rows = packing.Rows(*(np.concatenate(parts) for parts in zip(*chunks, strict=True)))
    return FleetHistory(
        **known_before(trace, servers),
        policy=f"{policy} as released",
        round_s=ROUND_S,
        rounds=int(count[packing.ROUNDS]),
        events=int(count[packing.EVENTS]),
        start_s=np.asarray(jobs.start)[back],
        finish_s=np.asarray(jobs.finish)[back],
        attained_gpu_s=np.asarray(jobs.attained)[back] * trace.gpus,
        usage=Usage(
            start_s=rows.start,
            rounds=rows.rounds,
            running=rows.running,
            waiting=rows.waiting,
            gpus=rows.gpus,
            cpus=rows.cpus,
            memory_bytes=rows.memory * _GB,
        ),
    )


def with_storage(servers: Servers) -> Servers:
    """Return servers with the storage that these rules need, where theirs is not known.

    The released code asks for a fixed bandwidth per GPU; storage that is not known does not bind.
    """
    needed = STORAGE_BYTES_PER_S * servers.gpus
    found = np.where(servers.storage_bytes_per_s > 0, servers.storage_bytes_per_s, needed)
    return replace(servers, storage_bytes_per_s=found)


def _knows(policy: str) -> bool:
    ordering, _, allocator = policy.partition(":")
    return ordering in ORDERINGS and allocator in ALLOCATORS


def _simulate(
    trace: Trace,
    servers: Servers,
    policy: Policy,
    rules: Rules | None,
    progress: Progress | None,
) -> FleetHistory:
    del progress  # one call of a kernel
    if rules is not None and rules != Rules():
        raise InvalidInputError(
            "rules of rounds cannot be given with the released ones: 300 s, no restart cost, no "
            "outages, quotas, leases or power cap"
        )
    ordering, _, allocator = policy.name.partition(":")
    return simulate_released(trace, with_storage(servers), ordering=ordering, allocator=allocator)


SIMULATOR = Simulator(
    name="released",
    simulate=_simulate,
    knows=_knows,
    suffix=" as released",
    fixed_rules="by the rules of the released code: rounds of 300 s, no cost of a restart",
    not_counted=("preemptions", "migrations"),
    differences=DIFFERENCES,
)
