"""How a run sees to its energy: which devices, which server, and one client a rank."""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in its stubs

from partita.core.cluster import Device
from partita.core.codec import encode
from partita.core.solution import Solution
from partita.energy.client.client import ClientOptions, EnergyClient
from partita.energy.client.registration import JobInfo, RankInfo, register_job
from partita.energy.devices.modelled import ModelledDevice
from partita.energy.devices.protocol import PowerDevice, WorkingDevice
from partita.energy.devices.table import DEVICES, open_device
from partita.energy.frontier.choose import parse_limits
from partita.errors import InvalidInputError
from partita.http import ServerError, check_address, split_address
from partita.ranks.device import seam_of
from partita.ranks.member import Member
from partita.runtime.metering import EnergyMeter, Meter, NoMeter
from partita.runtime.process_transport import used_devices
from partita.runtime.task import Task

_NOT_REAL = ("modelled", "replay", "none")
_REGISTER_S = 5.0
_FIRST_ANSWER = "job"
_LATE_NAME = "late job"
_LATER = "later"
"""What rank 0 says of a job that a server may still name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """How a run sees to its energy.

    Attributes:
        device: The power device of every rank, as ``open_device`` takes it; empty = what there is,
            and in an emulated run a modelled one of the type that the plan names.
        server: Address of an energy server; empty = none.
        wish: Limits that the clocks have to keep, as text; empty = the server decides.
        profile_steps: Steps after which results are reported.
        keep_log: Whether all instructions and readings are kept for files.
    """

    device: str = ""
    server: str = ""
    wish: str = ""
    profile_steps: int = 5
    keep_log: bool = False

    def __post_init__(self) -> None:
        if self.profile_steps < 1:
            raise InvalidInputError(f"profile_steps is {self.profile_steps}; expected 1 or more")
        if self.server:
            check_address(self.server, noun="energy server")
        if self.wish:
            parse_limits(self.wish)  # refuses one that makes no sense before anything runs
        name = self.device.partition(":")[0]
        if name == "modelled":
            open_device(self.device)  # refuses options that make no sense before anything runs
        elif name and name not in DEVICES:
            raise InvalidInputError(
                f"power device {self.device!r} is not known; there are {', '.join(DEVICES)}"
            )

    def check_emulated(self) -> None:
        """Refuse a device that is really there, for a run that is not.

        Raises:
            InvalidInputError: It would measure a machine that sleeps.
        """
        name = self.device.partition(":")[0]
        if name and name not in _NOT_REAL:
            raise InvalidInputError(
                f"power device {self.device!r} would measure a machine that sleeps; an emulated "
                f"run takes one of {', '.join(_NOT_REAL)}"
            )


class RankPower(NamedTuple):
    """What meters a rank.

    Attributes:
        meter: Called with what it does.
        worker: Says how long instructions of an emulated rank take; None = as the cost model says.
    """

    meter: Meter
    worker: WorkingDevice | None = None


def open_power(
    power: Power | None,
    task: Task,
    member: Member,
    *,
    job: str = "job",
    clock: Callable[[], float] | None = None,
) -> RankPower:
    """Return what meters a rank; all ranks call it.

    Args:
        power: How the run sees to its energy; None = it does not.
        task: What is run.
        member: This process.
        job: Name of the run in the store.
        clock: The clock of an emulated device; None = the rank really computes.

    Raises:
        UnsupportedError: The power device is not here, or may not be read.
    """
    if power is None:
        return RankPower(NoMeter())
    found = _open_device(power, task, member, emulated=clock is not None)
    if clock is not None and isinstance(found, ModelledDevice):
        found.clock = clock
    shared = PrefixStore(f"{job}/energy", member.store)
    options = ClientOptions(
        profile_steps=power.profile_steps,
        keep_log=power.keep_log,
        back_to_back=True,
        clock=clock or time.perf_counter,
        synchronize=_synchronize(member.device),
        peers=_Peers(shared, member.rank, member.world),
        say=_say,
    )
    rank = RankInfo(rank=member.rank, pp_rank=member.rank, device=_device_of(task, member).name)
    client = EnergyClient(found, rank=rank, options=options)
    if power.server and (name := _agree_on_job(power, task, member, shared)):
        client.connect(power.server, name)
    worker = found if isinstance(found, WorkingDevice) else None
    if clock is not None:
        return RankPower(EnergyMeter(client), worker)
    return RankPower(EnergyMeter(client, worker))


def _device_of(task: Task, member: Member) -> Device:
    cluster, program = task.problem.cluster, task.program
    name = program.devices[used_devices(program)[member.rank]]
    return cluster.devices[cluster.index_of[name]]


def _open_device(power: Power, task: Task, member: Member, *, emulated: bool) -> PowerDevice:
    index = member.device.index if member.device.type == "cuda" else member.rank
    usual = f"modelled:{_device_of(task, member).type}" if emulated else "auto"
    return open_device(power.device or usual, index or 0, rank=member.rank)


def _synchronize(device: torch.device) -> Callable[[], None]:
    """Return what waits until a GPU has done what it was given."""
    return seam_of(device).synchronize


def _say(text: str) -> None:
    """Say something in the log of the rank."""
    sys.stderr.write(f"energy: {text}\n")
    sys.stderr.flush()


def _agree_on_job(
    power: Power, task: Task, member: Member, shared: Store
) -> str | Callable[[], str]:
    """Return the name that the server has given the run, or what finds it later; empty = never.

    Rank 0 asks, and passes the name on. A run whose server does not answer goes on, and rank 0 asks
    again while it runs; one that the server refuses goes on without it.
    """
    if member.rank:
        first: str = shared.get(_FIRST_ANSWER).decode()
        return _LateName(power.server, shared) if first == _LATER else first
    register = _Registration(power, task, shared)
    try:
        name = register()
    except ServerError as exc:
        later = exc.is_passing
        _say(f"{exc}; training goes on {'and asks again' if later else 'without it'}")
        shared.set(_FIRST_ANSWER, _LATER if later else "")
        return register if later else ""
    shared.set(_FIRST_ANSWER, name)
    return name


class _Registration:
    """Registers a run, and tells the other ranks its name."""

    def __init__(self, power: Power, task: Task, shared: Store) -> None:
        self._server, self._shared = power.server, shared
        program = task.program
        self._info = JobInfo(
            pp=len(used_devices(program)),
            metadata=task.graph.name,
            microbatches=program.num_microbatches,
            solution=encode(_solution(task)),
            wish=asdict(parse_limits(power.wish)) if power.wish else None,
        )

    def __call__(self) -> str:
        """Return the name of the run.

        Raises:
            ServerError: The server does not answer, or refuses.
        """
        name = register_job(self._server, self._info, limit_s=_REGISTER_S)
        self._shared.set(_LATE_NAME, name)
        return name


class _LateName:
    """Waits for the name that rank 0 is given when a server answers at last."""

    def __init__(self, server: str, shared: Store) -> None:
        self._server, self._shared = server, shared

    def __call__(self) -> str:
        """Return the name of the run.

        Raises:
            ServerError: Rank 0 has not been given one yet.
        """
        if not self._shared.check([_LATE_NAME]):
            where, _ = split_address(self._server)
            raise ServerError(f"energy server {where} has not answered rank 0 yet")
        return str(self._shared.get(_LATE_NAME).decode())


def _solution(task: Task) -> Solution:
    """Return the plan that runs; its value does not matter."""
    metric = task.problem.objective.metric
    return Solution(problem=task.problem, plan=task.plan, metric=metric, value=0.0, unit="s")


class _Peers:
    """Tells the slowdowns of the ranks that have one to one another."""

    def __init__(self, shared: Store, rank: int, world: int) -> None:
        self._shared, self._rank = shared, rank
        self._others = [f"slowdown/{other}" for other in range(world) if other != rank]

    def __call__(self, slowdown: float) -> list[float]:
        """Say this rank's slowdown, and return those of the others; 1 where they say nothing."""
        self._shared.set(f"slowdown/{self._rank}", repr(slowdown))
        return [
            float(self._shared.get(key)) if self._shared.check([key]) else 1.0
            for key in self._others
        ]
