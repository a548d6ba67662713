"""Policies on a trace, ranked: what ``partita.simulate_fleet`` and ``fleet simulate`` do."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from partita.core.cluster import Cluster
from partita.core.fleet import FleetHistory, Trace
from partita.errors import InvalidInputError
from partita.fleet.policies.resources import Servers
from partita.fleet.policies.table import allocator_names, ordering_names
from partita.fleet.simulate.options import Outage, Rules
from partita.fleet.study.study import Question, Run, Study, study
from partita.fleet.study.traces import TraceOptions, summary_of
from partita.flows.fields import WorkerFields
from partita.flows.fleet.inputs import (
    JobFields,
    declared_servers,
    parse_loads,
    parse_quotas,
    parse_seeds,
    parse_span,
    read_fleet_trace,
    read_profiles,
)
from partita.flows.results import Result
from partita.requests import OnProgress, declare, make, silent
from partita.units import parse_seconds

DEFAULT_CLUSTER = "16x8xv100"
DEFAULT_POLICIES = "fifo:fair,fifo:tune,fifo:joint"


@dataclass(frozen=True, kw_only=True)
class SimulateFleetRequest(JobFields, WorkerFields):
    """A trace, a cluster, and the policies to play it under."""

    trace: str | Trace = declare("", is_argument=True, help="Jobs to play.")
    cluster: str | Cluster = declare(
        DEFAULT_CLUSTER, flags=("-c",), help="Shorthand, a cluster file, or Synergy's INI file."
    )
    cpus: int | None = declare(
        None, minimum=1, usual="the cluster's", help="Number of CPUs per server."
    )
    memory: str | None = declare(
        None, usual="the cluster's", help="Memory per server, such as 500GB."
    )
    policy: tuple[str, ...] | str = declare(
        (),
        flags=("-p",),
        usual=DEFAULT_POLICIES,
        help=f"ORDERING:ALLOCATOR, several by commas or options; orderings are "
        f"{', '.join(ordering_names())}; allocators are {', '.join(allocator_names())}.",
    )
    loads: str | float | None = declare(
        None, help="Jobs per hour of new Poisson arrivals: 4, 1,2,4, 1:10 or 0.5:8:0.5."
    )
    seeds: str | None = declare(
        None, help="Seeds to play everything with, instead of --seed: 0,1,2 or 0:9."
    )
    jobs: int | None = declare(None, minimum=1, help="Number of first jobs to play.")
    window: str | None = declare(None, help="Ids FIRST:LAST of the jobs that count in the figures.")
    as_released: bool = declare(False, help="Decide as Synergy's released code, oddities too.")
    both: bool = declare(
        False, help="Play by our rules and by the released ones, and say what differs."
    )
    round: str | float = declare("300", help="Length of a round: 300, 5min.")
    restart_cost: str | float = declare(
        "30", help="Seconds that a resumption or move takes, where a job does not say."
    )
    quota: tuple[str, ...] = declare((), help="GPUs that a tenant may hold: NAME=8.")
    outage: tuple[str, ...] = declare(
        (), help="Server that fails: NAME=START:END in seconds, or NAME=START."
    )
    power_cap: float | None = declare(None, above=0, help="Power that all GPUs may take, in kW.")
    record: bool = declare(False, help="Record which job ran where and when.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FleetResult(Result):
    """Policies on a trace, the best mean completion time of each load first.

    Attributes:
        study: All runs with their figures, and what a power cap costs.
        remarks: What of the trace does not count as it stands, a sentence each.
    """

    study: Study
    remarks: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs, by load and then by mean completion time."""
        return self.study.runs

    @property
    def best(self) -> Run:
        """The run with the least mean completion time, of the first load."""
        return self.study.runs[0]

    @property
    def history(self) -> FleetHistory:
        """What became of the jobs in the best run: what is saved to a file."""
        return self.best.history

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        question, servers = self.study.question, self.study.question.servers
        rules = question.rules
        return {
            "trace": summary_of(question.trace).to_json(),
            "cluster": {
                "servers": len(servers),
                "gpus": servers.num_gpus,
                "cpus": float(servers.cpus.sum()),
                "memory_bytes": float(servers.memory_bytes.sum()),
                "gpu_types": list(servers.gpu_types),
            },
            "round_s": rules.round_s,
            "restart_s": rules.restart_s,
            "window": list(question.window) if question.window else None,
            "seed": question.seed,
            "seeds": list(question.traces),
            "over_seeds": [each.to_json() for each in self.study.over_seeds],
            "runs": [run.to_json() for run in self.runs],
            "power_cap": [each.to_json() for each in self.study.capped],
            "differences": self.study.differences,
        }

    def lines(self) -> list[str]:
        """Return the trace, the servers and the best policy."""
        question, best = self.study.question, self.best
        servers, over = question.servers, self.study.over_seeds
        asked = (
            f"{question.trace.name}: {len(question.trace):,} jobs on {servers.num_gpus:,} GPUs in "
            f"{len(servers):,} servers"
        )
        if over:
            return [
                asked,
                f"best over {len(question.traces)} seeds: {over[0].title}, mean completion time "
                f"{over[0].mean_s / 3600:.3g} h, standard deviation "
                f"{over[0].deviation_s / 3600:.2g} h",
            ]
        return [
            asked,
            f"best of {len(self.runs)}: {best.title}, mean completion time "
            f"{best.metrics.mean_s / 3600:.3g} h",
        ]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row per run."""
        return [
            {
                "policy": run.title,
                "jobs/h": None if math.isnan(run.load) else run.load,
                **({"seed": run.seed} if self.study.question.further else {}),
                "mean h": run.metrics.mean_s / 3600,
                "median h": run.metrics.median_s / 3600,
                "p99 h": run.metrics.p99_s / 3600,
                "makespan h": run.metrics.makespan_s / 3600,
            }
            for run in self.runs
        ]

    def document(self) -> object:
        """Return the runs, whose curves a notebook draws."""
        return tuple(self.runs)


def simulate_fleet(
    trace: str | Trace,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of SimulateFleetRequest)
) -> FleetResult:
    """Play the jobs of a trace under several policies and rank them by mean completion time.

    Args:
        trace: The trace itself, a file, or ``generated[:jobs=100,load=9,seed=1]``.
        on_progress: Called with each run, and how far it is.
        **options: The fields of :class:`SimulateFleetRequest`: the options of
            ``partita fleet simulate``.

    >>> result = simulate_fleet("generated:jobs=5,short", cluster="1x8xv100", policy="fifo:tune")
    >>> [run.policy for run in result.runs]
    ['fifo:tune']

    Raises:
        InvalidInputError: There is no such trace, cluster, policy or option.
        InfeasibleError: A job can never run.
    """
    return simulate_fleet_request(make(SimulateFleetRequest, trace=trace, **options), on_progress)


def simulate_fleet_request(
    request: SimulateFleetRequest, on_progress: OnProgress = silent
) -> FleetResult:
    """Play what a request asks for; see :func:`simulate_fleet`."""
    if request.as_released and request.both:
        raise InvalidInputError("--as-released and --both exclude each other")
    seeds = _seeds(request)
    options = TraceOptions(
        jobs=request.jobs, published_filter=request.published_filter, seed=seeds[0]
    )
    profiles = read_profiles(request)
    trace, remarks = read_fleet_trace(
        request.trace, profiles, options, power_model=request.power_model
    )
    further = {
        seed: read_fleet_trace(
            request.trace, profiles, replace(options, seed=seed), power_model=request.power_model
        )[0]
        for seed in seeds[1:]
    }
    if further and request.loads is None and all(each == trace for each in further.values()):
        raise InvalidInputError("--seeds: nothing of these jobs is drawn; add --loads")
    if request.power_cap is not None:
        _check_powers(trace)
    servers = declared_servers(request.cluster, None, request.cpus, request.memory)
    typed = (request.policy,) if isinstance(request.policy, str) else request.policy
    question = Question(
        trace=trace,
        servers=servers,
        policies=[
            name.strip() for text in typed or (DEFAULT_POLICIES,) for name in text.split(",")
        ],
        loads=parse_loads(None if request.loads is None else str(request.loads)),
        rules=_rules(request, servers),
        simulators=_simulators(request),
        window=parse_span(request.window, "--window"),
        seed=seeds[0],
        further=further,
    )
    with request.working() as workers:
        found = study(question, workers=workers, on_progress=on_progress)
    return FleetResult(study=found, remarks=remarks)


def _seeds(request: SimulateFleetRequest) -> tuple[int, ...]:
    """Return the seeds to play with.

    Raises:
        InvalidInputError: A seed stands twice, or is given in another way, too.
    """
    if request.seeds is None:
        return (request.seed,)
    if "seed" in request.given() or (
        isinstance(request.trace, str) and ",seed=" in request.trace.replace(":", ",")
    ):
        raise InvalidInputError("--seeds: another seed is given, too; leave one of them out")
    found = parse_seeds(request.seeds)
    if len(set(found)) < len(found):
        raise InvalidInputError(f"--seeds {request.seeds}: a seed stands twice")
    return found


def _simulators(request: SimulateFleetRequest) -> tuple[str, ...]:
    if request.as_released:
        return ("released",)
    return ("ours", "released") if request.both else ("ours",)


def _check_powers(trace: Trace) -> None:
    for part in trace.sensitivities:
        if not len(part.frontier_w):
            raise InvalidInputError(
                f"--power-cap: jobs of {part.name!r} carry no frontier of watts by speed; "
                "--power-model TYPE models one for a type of GPU"
            )


def _rules(request: SimulateFleetRequest, servers: Servers) -> Rules:
    cap = request.power_cap
    return Rules(
        round_s=parse_seconds(str(request.round), "--round"),
        restart_s=parse_seconds(str(request.restart_cost), "--restart-cost"),
        outages=tuple(_outage(text, servers) for text in request.outage),
        quotas=parse_quotas(request.quota),
        record=request.record and not request.as_released,
        power_cap_w=math.inf if cap is None else cap * 1e3,
    )


def _outage(text: str, servers: Servers) -> Outage:
    name, sign, span = text.rpartition("=")
    first, colon, last = span.partition(":")
    if not sign or not first or (colon and not last):
        raise InvalidInputError(f"--outage {text!r} is not of the form SERVER=START:END")
    if name not in servers.names:
        shown = ", ".join(servers.names[:4]) + (", ..." if len(servers) > 4 else "")
        raise InvalidInputError(f"--outage: there is no server {name!r}; there are {shown}")
    return Outage(
        server=servers.names.index(name),
        start_s=parse_seconds(first, "--outage"),
        end_s=parse_seconds(last, "--outage") if colon else math.inf,
    )
