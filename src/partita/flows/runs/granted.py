"""Runs that a fleet has started: as many devices as were granted, its checkpoints, its lease.

A fleet starts a job anew with every grant of other devices. ``partita train`` plans for those that
it was granted, on one host or on several, and ``partita run`` plans again where they are fewer than
its plan uses; both go on from the newest checkpoint, report their steps, and save and end well when
the lease ends.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from partita.errors import InvalidInputError
from partita.fleet.lease import (
    CHECKPOINT_VARIABLE,
    GPUS_VARIABLE,
    SERVER_GPUS_VARIABLE,
    SERVERS_VARIABLE,
    STEPS_VARIABLE,
    RunLease,
)
from partita.fleet.live.news import DIRECTORY_VARIABLE, URL_VARIABLE
from partita.flows.runs.requests import RunRequest, TrainRequest
from partita.runtime.baselines.names import TORCH_WAYS
from partita.runtime.checkpoint.files import newest_in, newest_step
from partita.runtime.rendezvous import Host
from partita.runtime.training.saving import AUTO

_R = TypeVar("_R", TrainRequest, RunRequest)
_SAVES = 10
"""Checkpoints of a run that was not told how often it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a fleet gives to a start of a job.

    Attributes:
        devices: Number of devices.
        steps: Steps of the whole job.
        checkpoints: Folder of its checkpoints; empty = it has none.
        servers: Hosts of the devices.
        gpus: Number of devices of each of them.
    """

    devices: int
    steps: int
    checkpoints: str = ""
    servers: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Grant | None":
        """Return what the variables of a job say; None = no fleet has started this process."""
        has_lease = environment.get(DIRECTORY_VARIABLE) or environment.get(URL_VARIABLE)
        devices, steps = (environment.get(name, "") for name in (GPUS_VARIABLE, STEPS_VARIABLE))
        if not has_lease or not devices.isdecimal() or not steps.isdecimal():
            return None
        return cls(
            devices=int(devices),
            steps=int(steps),
            checkpoints=environment.get(CHECKPOINT_VARIABLE, ""),
            servers=_words(environment, SERVERS_VARIABLE),
            gpus=tuple(
                int(word) for word in _words(environment, SERVER_GPUS_VARIABLE) if word.isdecimal()
            ),
        )

    def on(self, host: Host) -> int:
        """Return how many devices a host of the run has; a single host has all.

        Raises:
            InvalidInputError: They are of another number of hosts.
        """
        if host.num_hosts == 1:
            return self.devices
        if len(self.gpus) != host.num_hosts:
            raise InvalidInputError(
                f"NNODES is {host.num_hosts}, but {SERVER_GPUS_VARIABLE} has the devices of "
                f"{len(self.gpus)} hosts"
            )
        return self.gpus[host.index]


def _words(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(filter(None, environment.get(name, "").split(",")))


def by_grant(request: _R, grant: Grant | None, host: Host) -> _R:
    """Return a request whose devices, steps and checkpoints are those of a grant where it is open.

    Args:
        request: What was asked.
        grant: What the fleet gave; None = no fleet has started this process.
        host: This host among those of the run; its devices are those of the request.

    Raises:
        InvalidInputError: It asks for other devices than were granted.
    """
    if grant is None or request.emulate:
        return request
    if isinstance(request, TrainRequest) and request.on is None:
        request = replace(request, devices=_devices(request, grant.on(host)))
    given, script = request.given(), isinstance(request, RunRequest) and request.script
    if not script and not {"steps", "epochs", "tokens"} & set(given):
        request = replace(request, steps=grant.steps)
    if not grant.checkpoints or getattr(request, "baseline", None) in TORCH_WAYS:
        return request
    folder = request.checkpoints or grant.checkpoints
    return replace(
        request,
        checkpoints=folder,
        resume=request.resume or AUTO,
        save_every=request.save_every or max(1, grant.steps // _SAVES),
        # A run that goes on has no first steps to compare.
        check=request.check and newest_in(Path(folder)) is None,
    )


def _devices(request: TrainRequest, granted: int) -> int:
    if request.devices not in (None, granted):
        raise InvalidInputError(
            f"--devices {request.devices}: the fleet granted {granted}; leave it out, and each "
            "start is planned for what was granted"
        )
    return granted


def lease_of(
    request: TrainRequest | RunRequest, grant: Grant | None, steps: int, host: Host
) -> RunLease | None:
    """Return the lease of a run; None = no fleet has started it.

    Args:
        request: What was asked, as the grant has completed it.
        grant: What the fleet gave.
        steps: Steps of the run; those of a script are the job's.
        host: This host among those of the run, of which the first one reports.
    """
    if grant is None:
        return None
    folder = None if request.checkpoints is None else Path(request.checkpoints)
    is_script = isinstance(request, RunRequest) and bool(request.script)
    return RunLease(
        steps=grant.steps if is_script else steps,
        saved=lambda: 0 if folder is None else newest_step(folder),
        speaks=host.index == 0,
    )
