"""Jobs of a fleet that ``partita fleet serve`` runs: submit, list, look at, cancel, drain.

Each function is one command of ``partita fleet`` and asks the server over HTTP. The token is found
as on the command line: ``token_file``, ``PARTITA_TOKEN``, or what a fleet of this user on this
machine made.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.core.fleet import Sensitivity
from partita.documents import read_text
from partita.errors import InvalidInputError, PartitaError, WorkerError
from partita.fleet.live.client import DEFAULT_URL, PATIENCE_S, FleetClient
from partita.fleet.live.jobfile import JobFile, read_job
from partita.fleet.live.jobspec import JobSpec
from partita.fleet.live.token import fleet_token
from partita.flows.results import Result
from partita.names import escaped
from partita.processes import SERVER_VARIABLE
from partita.requests import OnProgress, Request, declare, make, silent
from partita.units import format_bytes, format_seconds

PROFILES = "profiles"
"""Folder beside a job file in which its profile is kept."""
_PAUSE_S = 0.2
_LOG_PAUSE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class FleetFields(Request):
    """Where a live fleet is."""

    server: str = declare(DEFAULT_URL, environment=(SERVER_VARIABLE,), help="Address of the fleet.")
    token_file: str | None = declare(
        None,
        path="existing file",
        usual="PARTITA_TOKEN, else what a fleet here made",
        help="File with the server's token.",
    )

    def client(
        self, on_progress: OnProgress = silent, *, patience_s: float = PATIENCE_S
    ) -> FleetClient:
        """Return a client of that fleet.

        Args:
            on_progress: Called when the fleet stops to answer and is asked again.
            patience_s: How long it is asked again.

        Raises:
            InvalidInputError: The address or the file of the token is wrong.
        """
        return FleetClient(
            self.server,
            token=fleet_token(self.token_file, self.server),
            patience_s=patience_s,
            on_progress=on_progress,
        )


@dataclass(frozen=True, kw_only=True)
class SubmitRequest(FleetFields):
    """Job files to submit."""

    files: tuple[str, ...] = declare(
        (), is_argument=True, is_required=True, path="file", help="Job files."
    )
    check: bool = declare(False, help="Read the files and submit nothing.")
    wait: float = declare(
        PATIENCE_S,
        minimum=0,
        maximum=1e7,
        help="Seconds to go on asking where no fleet answers; no job is submitted twice.",
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SubmittedJobs(Result):
    """Jobs that were submitted, or only read.

    Attributes:
        files: Their files.
        specs: What the files ask for.
        numbers: Their numbers in the fleet; None where they were only read.
    """

    files: tuple[str, ...]
    specs: tuple[JobSpec, ...]
    numbers: tuple[int | None, ...]

    def lines(self) -> list[str]:
        """Return the jobs, in one line."""
        names = ", ".join(str(row["name"]) for row in self.rows())
        done = "read" if None in self.numbers else "submitted"
        return [f"{len(self.specs)} jobs {done}: {names}"]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each job."""
        return [dict(row) for row in self.to_json()]

    def to_json(self) -> Any:  # noqa: ANN401 (a list, as the command prints it)
        """Return file, name and number of each job."""
        rows = zip(self.files, self.specs, self.numbers, strict=True)
        return [{"file": file, "name": spec.name, "job": number} for file, spec, number in rows]


def submit_jobs(
    *files: str,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of SubmitRequest)
) -> SubmittedJobs:
    """Submit jobs to a live fleet; all files are read before the first job is sent.

    Args:
        *files: Job files, as docs/fleet-live.md describes them.
        on_progress: Called with each step of measuring a job whose sensitivity is ``auto``, and
            when the fleet does not answer and is asked again.
        **options: The fields of :class:`SubmitRequest`: the options of ``partita fleet submit``.

    Raises:
        InvalidInputError: A file is wrong.
        InfeasibleError: The fleet has not the GPUs of a job.
        UnsupportedError: No fleet answers, or it refuses the token.
    """
    return submit_request(make(SubmitRequest, files=files, **options), on_progress)


def submit_request(request: SubmitRequest, on_progress: OnProgress = silent) -> SubmittedJobs:
    """Submit what a request asks for; see :func:`submit_jobs`."""

    def profile(job: JobFile) -> Sensitivity:
        return profile_first(job, on_progress)

    specs = [read_job(read_text(file), Path(file), profile=profile) for file in request.files]
    client = request.client(on_progress, patience_s=request.wait)
    numbers: list[int | None] = []
    for file, spec in zip(request.files, specs, strict=True):
        try:
            numbers.append(None if request.check else client.submit(spec))
        except PartitaError as exc:
            if numbers:
                # Whoever sends all of them again would have the first ones twice.
                done = ", ".join(map(str, numbers))
                words = f"{exc}; {file} was not submitted, those before it are: job {done}"
                raise type(exc)(words) from exc
            raise
    return SubmittedJobs(files=request.files, specs=tuple(specs), numbers=tuple(numbers))


def profile_first(job: JobFile, on_progress: OnProgress = silent) -> Sensitivity:
    """Measure a job whose sensitivity is ``auto``; what was measured before is not run again.

    Raises:
        InvalidInputError: Its command is not ``python SCRIPT ...``, or the script cannot be
            profiled.
    """
    from partita.fleet.profiler.profile import profile_script  # noqa: PLC0415 (rarely needed)
    from partita.fleet.profiler.request import ProfileRequest  # noqa: PLC0415 (likewise)
    from partita.fleet.profiler.runner import Ranks  # noqa: PLC0415 (likewise)

    words = job.command
    if len(words) < 2 or not words[1].endswith(".py") or "python" not in Path(words[0]).name:
        raise InvalidInputError(
            f"sensitivity is 'auto', but the command is {' '.join(words)[:60]!r}; only "
            "'python SCRIPT.py ...' can be profiled"
        )
    request = ProfileRequest(
        script=job.folder / words[1],
        arguments=words[2:],
        name=job.name,
        ranks=Ranks(per_node=job.gpus),
        python=words[0],
        source=job.folder,
    )
    on_progress(f"{job.name}: profiled first")
    found = profile_script(request, job.folder / PROFILES, on_progress=on_progress)
    if found.sensitivity is None:
        raise InvalidInputError(f"{job.name}: profiling gave no sensitivity")
    return found.sensitivity


@dataclass(frozen=True, kw_only=True)
class ListJobsRequest(FleetFields):
    """Which jobs of a fleet to list."""

    all: bool = declare(False, help="List jobs that have ended, too.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FleetJobs(Result):
    """The jobs of a fleet, in the order in which they came.

    Attributes:
        info: How the fleet is set up and what is in use, as its server answers.
        jobs: The jobs, as its server answers.
    """

    info: Mapping[str, Any]
    jobs: tuple[Mapping[str, Any], ...]

    def lines(self) -> list[str]:
        """Return what is in use, in one line."""
        return [server_line(self.info)]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each job."""
        keys = ("id", "name", "state", "step", "steps", "tenant", "note")
        return [{key: job[key] for key in keys} for job in self.jobs]

    def to_json(self) -> Any:  # noqa: ANN401 (a list, as the command prints it)
        """Return the jobs as the server answers."""
        return list(self.jobs)


def list_jobs(**options: Any) -> FleetJobs:  # noqa: ANN401 (fields of ListJobsRequest)
    """List the jobs of a live fleet that wait or run; ``all=True`` adds those that have ended.

    Args:
        **options: The fields of :class:`ListJobsRequest`: the options of ``partita fleet queue``.

    Raises:
        UnsupportedError: No fleet answers, or it refuses the token.
    """
    return list_jobs_request(make(ListJobsRequest, **options))


def list_jobs_request(request: ListJobsRequest) -> FleetJobs:
    """List what a request asks for; see :func:`list_jobs`."""
    client = request.client()
    return FleetJobs(info=client.info(), jobs=tuple(client.jobs(all_jobs=request.all)))


@dataclass(frozen=True, kw_only=True)
class JobRequest(FleetFields):
    """One job of a fleet."""

    job: int = declare(0, is_argument=True, minimum=1, help="Number of the job.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class JobStatus(Result):
    """Everything about a job: what it holds, what its process holds, what became of it.

    Attributes:
        status: The job, as the server answers.
    """

    status: Mapping[str, Any]

    def lines(self) -> list[str]:
        """Return the state of the job and what it asks for."""
        return status_lines(self.status)[:2]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each event."""
        return [dict(event) for event in self.status["events"]]

    def to_json(self) -> dict[str, Any]:
        """Return the job as the server answers."""
        return dict(self.status)


def job_status(job: int, /, **options: Any) -> JobStatus:  # noqa: ANN401 (fields of JobRequest)
    """Return everything about a job of a live fleet.

    Args:
        job: Number of the job.
        **options: The fields of :class:`JobRequest`: the options of ``partita fleet status``.

    Raises:
        InvalidInputError: There is no such job.
        UnsupportedError: No fleet answers, or it refuses the token.
    """
    return job_status_request(make(JobRequest, job=job, **options))


def job_status_request(request: JobRequest) -> JobStatus:
    """Return what a request asks for; see :func:`job_status`."""
    return JobStatus(status=request.client().status(request.job))


@dataclass(frozen=True, kw_only=True)
class JobLogRequest(JobRequest):
    """The log of one job."""

    follow: bool = declare(False, flags=("-f",), help="Go on until the job has ended.")


def job_log(
    job: int,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of JobLogRequest)
) -> Iterator[str]:
    """Yield the text that a job of a live fleet has printed, all its starts one after the other.

    Args:
        job: Number of the job.
        on_progress: Called when the fleet stops to answer and is asked again.
        **options: The fields of :class:`JobLogRequest`: the options of ``partita fleet logs``.

    Raises:
        InvalidInputError: There is no such job.
        UnsupportedError: No fleet answers, or it refuses the token.
    """
    return job_log_request(make(JobLogRequest, job=job, **options), on_progress)


def job_log_request(request: JobLogRequest, on_progress: OnProgress = silent) -> Iterator[str]:
    """Yield what a request asks for; see :func:`job_log`."""
    client, offset = request.client(on_progress), 0
    while True:
        text, end, ended = client.log(request.job, offset)
        more, offset = end > offset, end
        yield text
        if ended or (not request.follow and not more):
            return
        if not more:
            time.sleep(_LOG_PAUSE_S)


@dataclass(frozen=True, kw_only=True)
class CancelRequest(FleetFields):
    """Jobs to end."""

    jobs: tuple[int, ...] = declare(
        (), is_argument=True, is_required=True, minimum=1, help="Numbers of the jobs."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class CancelledJobs(Result):
    """Jobs that were ended."""

    jobs: tuple[int, ...]

    def lines(self) -> list[str]:
        """Return their numbers, in one line."""
        return [f"cancelled: {', '.join(map(str, self.jobs))}"]

    def to_json(self) -> dict[str, Any]:
        """Return their numbers."""
        return {"cancelled": list(self.jobs)}


def cancel_jobs(*jobs: int, **options: Any) -> CancelledJobs:  # noqa: ANN401 (of CancelRequest)
    """End jobs of a live fleet for good; those that run may checkpoint first.

    Args:
        *jobs: Numbers of the jobs.
        **options: The fields of :class:`CancelRequest`: the options of ``partita fleet cancel``.

    Raises:
        InvalidInputError: There is no such job, or it has ended already.
        UnsupportedError: No fleet answers, or it refuses the token.
    """
    return cancel_request(make(CancelRequest, jobs=jobs, **options))


def cancel_request(request: CancelRequest) -> CancelledJobs:
    """End what a request asks for; see :func:`cancel_jobs`."""
    client = request.client()
    for job in request.jobs:
        client.cancel(job)
    return CancelledJobs(jobs=request.jobs)


@dataclass(frozen=True, kw_only=True)
class DrainRequest(FleetFields):
    """Whether a fleet stops or goes on, and how long to wait for it."""

    resume: bool = declare(False, help="Go on: jobs start again.")
    wait: float = declare(
        0.0, minimum=0, maximum=1e7, help="Seconds to wait until nothing runs any more."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DrainedFleet(Result):
    """A fleet that drains or goes on.

    Attributes:
        info: How the fleet is set up and what is in use, as its server answers.
        is_resumed: Whether it goes on.
    """

    info: Mapping[str, Any]
    is_resumed: bool

    def lines(self) -> list[str]:
        """Return how many jobs run and wait, in one line."""
        what = "goes on" if self.is_resumed else "drains"
        return [f"the fleet {what}: {self.info['running']} running, {self.info['waiting']} waiting"]

    def to_json(self) -> dict[str, Any]:
        """Return the fleet as its server answers."""
        return dict(self.info)


def drain_fleet(
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of DrainRequest)
) -> DrainedFleet:
    """Stop all jobs of a live fleet with their checkpoints and start none; they stay in the queue.

    Args:
        on_progress: Called when the fleet stops to answer and is asked again.
        **options: The fields of :class:`DrainRequest`: the options of ``partita fleet drain``.

    Raises:
        UnsupportedError: No fleet answers, or it refuses the token.
        WorkerError: Jobs still run after ``wait`` seconds.
    """
    return drain_request(make(DrainRequest, **options), on_progress)


def drain_request(request: DrainRequest, on_progress: OnProgress = silent) -> DrainedFleet:
    """Drain as a request asks for; see :func:`drain_fleet`."""
    client = request.client(on_progress)
    client.drain(on=not request.resume)
    last_s = time.monotonic() + request.wait
    info = client.info()
    while request.wait and not request.resume and info["running"]:
        if time.monotonic() > last_s:
            stuck = [job["id"] for job in client.jobs() if job["state"] != "waiting"]
            raise WorkerError(f"after {request.wait:g} s still run: {', '.join(map(str, stuck))}")
        time.sleep(_PAUSE_S)
        info = client.info()
    return DrainedFleet(info=info, is_resumed=request.resume)


def server_line(info: Mapping[str, Any]) -> str:
    """Return what of a fleet is in use, in a line."""
    gpus = sum(server["gpus"] for server in info["servers"])
    used = sum(server["gpus_in_use"] for server in info["servers"])
    cpus = sum(server["cpus"] for server in info["servers"])
    granted = sum(server["cpus_granted"] for server in info["servers"])
    parts = [
        f"{info['policy']} on {info['engine']}",
        f"rounds of {format_seconds(info['round_s'])}",
        f"GPUs {used}/{gpus}",
        f"CPUs {granted:g}/{cpus:g}",
        f"{info['running']} running, {info['waiting']} waiting",
    ]
    if info["draining"]:
        parts.append("draining")
    if info["failure"]:
        parts.append(f"the scheduler fails: {info['failure']}")
    return escaped(" · ".join(parts))


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """Return the lines about a job, as a terminal may show them."""
    note = f": {status['note']}" if status["note"] else ""
    owner = f" of {status['owner']}" if status.get("owner") else ""
    lines = [
        f"job {status['id']} {status['name']}{owner} · {status['state']}{note}",
        f"steps {status['step']} of {status['steps']} · asks for {gpus_words(status['gpus'])} "
        f"GPUs · {status['attempts']} starts, {status['preemptions']} preemptions, "
        f"{status['migrations']} moves, {status['faults']} faults in a row",
    ]
    lines += [
        f"holds {place['server']}: GPUs {gpu_list(place)}, {place['cpus']:g} CPUs, "
        f"{format_bytes(place['memory_bytes'])}"
        for place in status["places"]
    ]
    if status["places"]:
        lines.append(f"runs on {status['engine']} · {lease_words(status)} · {speed_words(status)}")
    if status["read_back"]:
        lines.append(f"read back from its process: {status['read_back']}")
    lines.append(f"command {' '.join(status['command'])}")
    lines += [f"{_clock(event['at_s'])}  {event['what']}" for event in status["events"]]
    return [escaped(line) for line in lines]


def lease_words(job: Mapping[str, Any]) -> str:
    """Return until when a job holds its lease."""
    end_s = job["lease_end_s"]
    if end_s is None:
        return "its lease has ended"
    return f"lease for {format_seconds(max(0.0, end_s - time.time()))} more"


def speed_words(job: Mapping[str, Any]) -> str:
    """Return how fast a job runs against what its curve says for its grant."""
    curve, measured = job["curve_speed"], job["measured_speed"]
    if measured is None:
        return f"speed {curve:.2f} by its curve, not measured yet"
    return f"speed {measured:.2f}, {measured / curve:.0%} of its curve's {curve:.2f}"


def gpu_list(place: Mapping[str, Any]) -> str:
    """Return the numbers of a place's GPUs."""
    return ",".join(map(str, place["gpus"]))


def gpus_words(choices: Sequence[tuple[int, int, str]]) -> str:
    """Return the GPUs that a job asks for, as its file writes them."""
    words = []
    for least, most, kind in choices:
        count = f"{least}" if least == most else f"{least} to {most}"
        words.append(f"{count} {kind}".rstrip())
    return " or ".join(words)


def _clock(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
