"""The visible table of places where a run may take place: who starts an agent on a host."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from partita.errors import InvalidInputError
from partita.hosts.places import Place, PlanHost
from partita.names import suggest
from partita.plugins import load_target
from partita.requests import Request, declare


@dataclass(frozen=True, kw_only=True)
class PlaceFields(Request):
    """Where a plan is run."""

    group = "place"
    on: str | None = declare(
        None,
        often=True,
        usual="this machine",
        metavar="slurm|ray[:ADDRESS]|ssh:HOSTFILE",
        help="Run on other hosts: an agent on each, started by Slurm, Ray or ssh.",
    )
    detach: bool = declare(
        False, help="With --on: leave the run to itself; partita results --follow shows it again."
    )
    ssh_command: str | None = declare(
        None,
        usual="ssh without passwords",
        help="With --on ssh: command that is given a host and a command to run there.",
    )
    slurm_options: str | None = declare(
        None, help='With --on slurm: options of salloc, such as "--partition=gpu --time=4:00:00".'
    )
    host_python: str | None = declare(
        None, usual="the path of this one", help="With --on: Python interpreter on the hosts."
    )
    queue_limit: float = declare(
        86400.0, above=0, help="With --on slurm or ray: seconds to wait until the hosts are free."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceEntry:
    """A kind of place.

    Attributes:
        target: Function that makes one of what follows the colon, the hosts of a plan and the
            options, as ``"module:name"``; imported when it is asked for.
        options: Options that only this kind has.
        needs: What must follow the colon; empty = nothing need.
    """

    target: str
    options: tuple[str, ...] = ()
    needs: str = ""


PLACES: Mapping[str, PlaceEntry] = {
    "ssh": PlaceEntry(
        target="partita.hosts.ssh:ssh_place", options=("ssh_command",), needs="HOSTFILE"
    ),
    "slurm": PlaceEntry(
        target="partita.hosts.slurm:slurm_place", options=("slurm_options", "queue_limit")
    ),
    "ray": PlaceEntry(target="partita.hosts.ray:ray_place", options=("queue_limit",)),
}


def check_place(request: PlaceFields) -> None:
    """Check where a plan is to be run, and that no option would be ignored.

    Raises:
        InvalidInputError: There is no such place, or an option for another.
    """
    given = request.given()
    if request.on is None:
        for name in ("detach", "host_python", "queue_limit", "ssh_command", "slurm_options"):
            if name in given:
                raise InvalidInputError(
                    f"--{name.replace('_', '-')} is for runs on other hosts: add --on"
                )
        return
    kind, entry = _entry(request.on)
    others = {name: other for other, row in PLACES.items() for name in row.options}
    for name, other in others.items():
        if name in given and name not in entry.options:
            raise InvalidInputError(
                f"--{name.replace('_', '-')} is for --on {other}, not for {kind}"
            )


def _entry(text: str) -> tuple[str, PlaceEntry]:
    kind, _, rest = text.partition(":")
    if kind not in PLACES:
        raise InvalidInputError(f"--on {text!r}: there is no {kind!r}{suggest(kind, PLACES)}")
    if PLACES[kind].needs and not rest:
        raise InvalidInputError(f"--on {kind}: add what follows, {kind}:{PLACES[kind].needs}")
    return kind, PLACES[kind]


def make_place(request: PlaceFields, hosts: Sequence[PlanHost]) -> Place:
    """Return the place that a request names, for the hosts of a plan.

    Raises:
        InvalidInputError: There is no such place, or it has not the hosts of the plan.
        UnsupportedError: What it needs is not installed.
    """
    assert request.on is not None
    _, entry = _entry(request.on)
    rest = request.on.partition(":")[2]
    return cast("Place", load_target(entry.target)(rest, hosts, request))
