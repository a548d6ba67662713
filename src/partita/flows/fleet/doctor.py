"""What a fleet's engine needs and lacks: ``partita fleet doctor``, one line for each."""

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from partita.errors import PartitaError
from partita.fleet.engines.ray import ray_servers
from partita.flows.fields import SLURM
from partita.flows.fleet.inputs import RAY, parse_pairs
from partita.flows.results import Result
from partita.requests import Request, declare, make
from partita.slurm.commands import SlurmCommands, SlurmError
from partita.slurm.nodes import auth_socket, read_nodes

_LIMIT_S = 20.0
_ACCOUNTING = "accounting"
"""Jobs run without it."""


@dataclass(frozen=True, kw_only=True)
class FleetDoctorRequest(Request):
    """The engine to examine."""

    engine: str = declare(SLURM, choices=[SLURM, RAY], help="Engine to examine.")
    engine_option: tuple[str, ...] = declare(
        (), help="Option of the engine, as for serve: partition=gpu, address=http://head:8265."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that an engine needs.

    Attributes:
        name: What it is, in a word.
        ok: Whether it is there.
        detail: What was found, or what is missing and what would do.
        needed: Whether jobs cannot be run without it.
    """

    name: str
    ok: bool
    detail: str
    needed: bool = True

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "missing" if self.needed else "without"
        return f"{verdict:8}{self.name}: {self.detail}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EngineExamination(Result):
    """What an engine needs and whether it is there.

    Attributes:
        engine: The engine.
        checks: What it needs; after one that fails, what depends on it is left out.
    """

    engine: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether jobs can be run."""
        return all(check.ok or not check.needed for check in self.checks)

    def lines(self) -> list[str]:
        """Return a line for each thing."""
        return [str(check) for check in self.checks]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each thing."""
        return [asdict(check) for check in self.checks]

    def to_json(self) -> dict[str, Any]:
        """Return all of it."""
        return {"engine": self.engine, "ok": self.ok, "checks": self.rows()}


def fleet_doctor(**options: Any) -> EngineExamination:  # noqa: ANN401 (of FleetDoctorRequest)
    """Say what an engine needs and lacks on this machine, a line for each thing.

    Args:
        **options: The fields of :class:`FleetDoctorRequest`: the options of
            ``partita fleet doctor``.

    Raises:
        InvalidInputError: There is no such option.
    """
    return fleet_doctor_request(make(FleetDoctorRequest, **options))


def fleet_doctor_request(request: FleetDoctorRequest) -> EngineExamination:
    """Examine what a request asks for; see :func:`fleet_doctor`."""
    options = parse_pairs(request.engine_option, "--engine-option")
    steps = _slurm_steps(options) if request.engine == SLURM else _ray_steps(options)
    checks = []
    for name, leads, look in steps:
        needed = name != _ACCOUNTING
        try:
            checks.append(Check(name=name, ok=True, detail=look(), needed=needed))
        except (PartitaError, OSError, subprocess.SubprocessError) as exc:
            detail = str(exc).splitlines()[0]
            checks.append(Check(name=name, ok=False, detail=detail, needed=needed))
            if leads:
                break
    return EngineExamination(engine=request.engine, checks=tuple(checks))


_Step = tuple[str, bool, Callable[[], str]]
"""A name, whether the rest makes no sense without it, and the look that raises where it lacks."""


def _hinted(look: Callable[[], str], hint: str, *, only_away: bool = False) -> str:
    """Return what is found; a failure says more."""
    try:
        return look()
    except SlurmError as exc:
        if only_away and not exc.is_away:
            raise
        raise SlurmError(f"{exc}; {hint}", is_away=exc.is_away) from exc


def _slurm_steps(options: Mapping[str, str]) -> list[_Step]:
    commands = SlurmCommands(limit_s=_LIMIT_S)
    partition = options.get("partition", "")

    def version() -> str:
        # Without its configuration sbatch asks the network for one, and waits.
        hint = "it may have found no slurm.conf: set SLURM_CONF"
        return _hinted(lambda: commands.call("sbatch", "--version").strip(), hint, only_away=True)

    def munge() -> str:
        # Slurm may have a munged of its own beside the machine's, which its controller knows.
        try:
            socket = auth_socket(commands.call("scontrol", "show", "config"))
        except SlurmError:
            socket = ""
        which = [f"--socket={socket}"] if socket else []
        made = commands.call("munge", "--no-input", *which)
        commands.call("unmunge", *which, text=made)
        return "credentials are made and read" + (f" at {socket}" if socket else "")

    def controller() -> str:
        return commands.call("scontrol", "ping").strip().splitlines()[0]

    def partitions() -> str:
        words = ["sinfo", "--noheader", "--format=%R %a"]
        found = [row.split() for row in commands.call(*words).splitlines() if row]
        up = [name for name, state in found if state == "up"]
        if not up or (partition and partition not in up):
            what = f"partition {partition!r}" if partition else "any partition"
            raise SlurmError(
                f"{what} is not up; there are {', '.join(up) or 'none'}", is_away=False
            )
        return f"{partition or ', '.join(up)} up"

    def gres() -> str:
        nodes = read_nodes(commands.call("scontrol", "show", "node", "--oneliner"))
        mine = [one for one in nodes if not partition or partition in one.partitions]
        gpus = {one.name: sum(count for _, count in one.gpus) for one in mine if one.gpus}
        if not gpus:
            raise SlurmError("no node has GPUs (GresTypes=gpu, Gres=gpu:TYPE:N)", is_away=False)
        away = [one.name for one in mine if one.away and one.gpus]
        rest = f", {len(away)} of them away ({', '.join(away[:4])})" if away else ""
        return f"{sum(gpus.values())} GPUs on {len(gpus)} nodes{rest}"

    def permission() -> str:
        words = ["sbatch", "--test-only", "--gres=gpu:1", "--wrap=true", "--output=/dev/null"]
        words += [f"--{n}={options[n]}" for n in ("partition", "account", "qos") if n in options]
        commands.call(*words)
        return "a job with a GPU may be submitted"

    def accounting() -> str:
        words = ("sacct", "--noheader", "--allocations", "--format=JobID")
        hint = "a job that ends and is forgotten (MinJobAge) while no fleet looks is lost"
        _hinted(lambda: commands.call(*words), hint)
        return "sacct remembers ended jobs"

    return [
        ("commands", True, version),
        ("munge", False, munge),
        ("controller", True, controller),
        ("partition", True, partitions),
        ("gres", False, gres),
        ("permission", False, permission),
        (_ACCOUNTING, False, accounting),
    ]


def _ray_steps(options: Mapping[str, str]) -> list[_Step]:
    def nodes() -> str:
        servers = ray_servers(options)
        return f"{servers.num_gpus} GPUs on {len(servers)} nodes"

    return [("nodes", True, nodes)]
