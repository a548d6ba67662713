"""Training scripts profiled over CPUs and memory: what ``fleet profile`` does, one or a list."""

import shlex
import statistics
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from partita.core.codec import encode, write_json
from partita.documents import read_text, write_text
from partita.errors import (
    FormatError,
    InvalidInputError,
    PartitaError,
    UnsupportedError,
)
from partita.fleet.profiler.isolation import IsolationRequest, Way
from partita.fleet.profiler.profile import Profile
from partita.fleet.profiler.profile import profile_script as run_profiler
from partita.fleet.profiler.request import ProfileRequest
from partita.fleet.profiler.runner import Ranks
from partita.fleet.profiler.sweep import PointOrigin
from partita.flows.options_file import read_options
from partita.flows.results import Result
from partita.formats.synergy import write_synergy_profile
from partita.report.charts import render, sensitivity_chart
from partita.requests import OnProgress, Request, declare, make, silent
from partita.units import parse_bytes
from partita.yaml_nodes import Items, Node, at_line, parse_yaml, read_items, read_table
from partita.yaml_nodes import read_text as read_yaml_text

_GIB = 2**30
_OWN = ("script", "args")
"""Keys of a job in a list that are no options."""


@dataclass(frozen=True, kw_only=True)
class ScriptFields(Request):
    """How one training script is profiled; also the keys of a job in a list."""

    job_name: str = declare("job-0", help="Name of the job.")
    num_gpus: int = declare(1, minimum=1, help="Number of processes on each machine, one per GPU.")
    nnodes: int = declare(1, minimum=1, help="Number of machines.")
    node_rank: int = declare(0, minimum=0, help="Rank of this machine, 0 to NNODES - 1.")
    master_addr: str = declare("127.0.0.1", help="Address of the machine of rank 0.")
    master_port: int = declare(
        29500, minimum=1, maximum=65535, help="Port of the machine of rank 0."
    )
    cpu: float | None = declare(None, minimum=0, usual="all CPUs", help="Most CPUs of the sweep.")
    cpu_step: float | None = declare(
        None, above=0, usual="1; less on few CPUs", help="CPUs from point to point."
    )
    memory: str | None = declare(
        None, usual="all memory", help="Memory of a run, in GiB or as 64GB."
    )
    batch_size: int | None = declare(
        None, flags=("-b", "--batch"), minimum=1, usual="256", help="Samples per GPU."
    )
    workers: int | None = declare(
        None, flags=("-j",), minimum=1, usual="CPUs of the point", help="Loaders per GPU."
    )
    max_iterations: int | None = declare(
        None, minimum=1, usual="50", help="Number of iterations per run."
    )
    epochs: int | None = declare(
        None, minimum=1, help="Number of epochs; passed on to the script, if given."
    )
    data: str | None = declare(None, usual="./", help="Dataset, as it is passed on to the script.")
    dataset_size: str | None = declare(
        None, usual="that of its files", help="Size of the dataset, such as 150GB."
    )
    dataset_samples: int | None = declare(
        None, minimum=1, usual="its files", help="Number of samples of the dataset."
    )
    docker_img: str = declare(
        "", flags=("--image",), help="Container image, where a container engine runs."
    )
    container_mnt: str = declare(
        "/datadrive",
        flags=("--mount",),
        help="Folder of the container where the data are mounted.",
    )
    container_python: str = declare("python", help="Python interpreter inside the container.")
    isolation: str = declare(
        "auto",
        choices=("auto", *(way.value for way in Way)),
        help="Way to limit CPUs and memory.",
    )
    cgroup: str = declare("", help="Delegated control group, /sys/fs/cgroup/...")
    local_disk: str | None = declare(
        None, usual="the dataset's", help="Folder whose storage is measured."
    )
    str_bw: str = declare("", help="Storage bandwidth: 500MB/s, or a file that keeps MB/s.")
    mem_thr: str = declare("", help="Prefix of files that keep memory GiB/s.")
    profiler_src: str | None = declare(
        None, usual="this one", help="Directory to run in and import from."
    )
    python: str = declare(sys.executable, usual="this one", help="Python interpreter.")
    repeats: int = declare(1, minimum=1, help="Number of runs per point.")
    tolerance: float = declare(
        0.1,
        minimum=0.001,
        maximum=0.5,
        help="Relative error that a filled-in speed may have.",
    )
    limit: float = declare(600.0, above=0, help="Seconds that a run may take.")


@dataclass(frozen=True, kw_only=True)
class ProfileScriptRequest(ScriptFields):
    """A training script with its arguments, how it is profiled, and where the results go."""

    script: tuple[str, ...] = declare(
        (),
        is_argument=True,
        metavar="[--] SCRIPT [ARGUMENTS]",
        help="Training script and its arguments.",
    )
    output: str = declare("profiles", flags=("-o",), help="Folder of results.")
    again: bool = declare(False, help="Measure anew what was measured before.")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ScriptProfile(Result):
    """How the speed of a script depends on CPUs and memory, and where the files of it are.

    Attributes:
        name: Name of the job.
        command: The script and its arguments.
        profile: The measurements; ``profile.sensitivity`` is None on machines other than the first.
        written: Files by what they hold.
        remarks: What was left out, a sentence each.
    """

    name: str
    command: str
    profile: Profile
    written: Mapping[str, str]
    remarks: tuple[str, ...] = ()

    @property
    def num_measured(self) -> int:
        """Number of points that were measured; the others are filled in."""
        return sum(point.origin is PointOrigin.MEASURED for point in self.profile.curve)

    def lines(self) -> list[str]:
        """Return how the script was measured, and its speed at both ends of the sweep."""
        profile, sensitivity = self.profile, self.profile.sensitivity
        if sensitivity is None:
            return [f"{self.name}: took part in the runs; node 0 has the result"]
        first, last = profile.curve[0], profile.curve[-1]
        return [
            f"{self.name} · {sensitivity.machine} · limits by {profile.isolation.value}",
            f"{self.num_measured} of {len(profile.curve)} points measured, in "
            f"{len(profile.runs)} runs; the others filled in",
            f"{first.rate:.4g} samples/s with {first.cpus:g} CPUs, {last.rate:.4g} with "
            f"{last.cpus:g}",
        ]

    def rows(self) -> list[Mapping[str, object]]:
        """Return samples per second over CPUs."""
        return [
            {
                "cpus": point.cpus,
                "samples_per_s": point.rate,
                "origin": point.origin.value,
                "run_s": statistics.median(walls) if walls else None,
            }
            for point in self.profile.curve
            for walls in [[run.wall_s for run in self.profile.runs if run.cpus == point.cpus]]
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        profile, sensitivity = self.profile, self.profile.sensitivity
        return {
            "job": self.name,
            "command": self.command,
            "isolation": profile.isolation.value,
            "points": len(profile.curve),
            "measured": self.num_measured,
            "curve": [
                {"cpus": p.cpus, "samples_per_s": p.rate, "origin": p.origin.value}
                for p in profile.curve
            ],
            "runs": [asdict(run) for run in profile.runs],
            "notes": list(profile.notes),
            "directory": str(profile.directory),
            "written": dict(self.written),
            "sensitivity": None if sensitivity is None else encode(sensitivity),
        }


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ScriptProfiles(Result):
    """Profiles of the scripts of a list.

    Attributes:
        jobs: The profiles, in the order of the list.
        failed: Names of the jobs that failed, and why.
    """

    jobs: tuple[ScriptProfile, ...]
    failed: tuple[tuple[str, str], ...] = ()

    def lines(self) -> list[str]:
        """Return how many scripts were profiled, and which failed."""
        failed = [f"failed: {', '.join(name for name, _ in self.failed)}"] if self.failed else []
        return [f"{len(self.jobs)} scripts profiled", *failed]

    def rows(self) -> list[Mapping[str, object]]:
        """Return a row for each script."""
        return [
            {"job": job.name, "command": job.command, "directory": str(job.profile.directory)}
            for job in self.jobs
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the profiles, and the failures with their reasons."""
        failed = [{"job": name, "reason": reason} for name, reason in self.failed]
        return {"jobs": [job.to_json() for job in self.jobs], "failed": failed}


def profile_script(
    script: str,
    /,
    *arguments: str,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of ProfileScriptRequest)
) -> ScriptProfile:
    """Measure how the speed of a training script depends on CPUs and memory.

    Args:
        script: A script that takes ``--batch``, ``--workers``, ``--max_iterations`` and ``--data``.
        *arguments: Its own arguments.
        on_progress: Called with each step.
        **options: The fields of :class:`ProfileScriptRequest`: the options of
            ``partita fleet profile``.

    Raises:
        InvalidInputError: There is no such script or option, or it does not take what is needed.
        UnsupportedError: The machine cannot do what is asked.
        WorkerError: A run failed or hung.
    """
    words = (str(script), *arguments)
    return profile_script_request(make(ProfileScriptRequest, script=words, **options), on_progress)


def profile_script_request(
    request: ProfileScriptRequest, on_progress: OnProgress = silent
) -> ScriptProfile:
    """Profile the script of a request and write its files; see :func:`profile_script`."""
    return _profiled(request, profiler_request(request), on_progress)


def profile_scripts(
    path: str,
    /,
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of ProfileScriptRequest)
) -> ScriptProfiles:
    """Profile every script of a list; one that fails does not keep the others.

    Args:
        path: A YAML file with ``jobs``, a list of mappings with ``script``, ``args`` and options,
            and ``defaults``, options of all jobs.
        on_progress: Called with each step, with the name of the job before it.
        **options: The fields of :class:`ProfileScriptRequest`: the options of
            ``partita fleet profile``, which win over those of the list.

    Raises:
        InvalidInputError: The list is wrong; nothing has run.
    """
    request = make(ProfileScriptRequest, **options)
    return profile_list_request(path, request, given=tuple(options), on_progress=on_progress)


def profile_list_request(
    path: str,
    request: ProfileScriptRequest,
    *,
    given: Collection[str],
    on_progress: OnProgress = silent,
) -> ScriptProfiles:
    """Profile the scripts of a list; see :func:`profile_scripts`.

    Args:
        path: The list.
        request: The options; what is not among ``given`` holds where the list says nothing.
        given: Names of the options that win over those of the list.
        on_progress: Called with each step.
    """
    jobs = read_job_list(read_text(path), path, request, given)
    asked = [(job, profiler_request(job)) for job in jobs]  # all are checked before any runs
    done: list[ScriptProfile] = []
    failed: list[tuple[str, str]] = []
    for job, what in asked:

        def report(step: str, name: str = job.job_name) -> None:
            on_progress(f"{name}: {step}")

        try:
            done.append(_profiled(job, what, report))
        except PartitaError as exc:
            failed.append((job.job_name, str(exc)))
            on_progress(f"{job.job_name} failed: {exc}")
    return ScriptProfiles(jobs=tuple(done), failed=tuple(failed))


def read_job_list(
    text: str, path: str, request: ProfileScriptRequest, given: Collection[str] = ()
) -> list[ProfileScriptRequest]:
    """Return the jobs of a list.

    ``jobs`` is a list of mappings with ``script``, ``args`` (a text or a list) and options;
    ``defaults`` holds options of all. Without ``job-name`` a job is called by its script.

    Args:
        text: The file.
        path: Its name, for errors.
        request: The options that the list may change.
        given: Names of those that it may not change.

    Raises:
        FormatError: It is not such a list; knows the line.
    """
    try:
        root = read_table(parse_yaml(text), "the list", ("defaults", "jobs"))
        if "jobs" not in root.entries:
            raise FormatError("the key jobs is missing", line=root.line)
        shared: dict[str, Any] = {}
        if "defaults" in root.entries:
            shared = read_options(read_table(root.entries["defaults"], "defaults"), ScriptFields)
        jobs: list[ProfileScriptRequest] = []
        line_of: dict[str, int] = {}
        for node in read_items(root.entries["jobs"], "jobs"):
            job = _job(node, shared, request, given)
            if job.job_name in line_of:  # whose results would be one job's
                raise FormatError(
                    f"job {job.job_name!r} stands twice, first on line {line_of[job.job_name]}; "
                    "give one a job-name",
                    line=node.line,
                )
            line_of[job.job_name] = node.line
            jobs.append(job)
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc
    return jobs


def _job(
    node: Node, shared: Mapping[str, Any], request: ProfileScriptRequest, given: Collection[str]
) -> ProfileScriptRequest:
    table = read_table(node, "a job")
    if "script" not in table.entries:
        raise FormatError("a job has no script", line=table.line)
    script = read_yaml_text(table.entries["script"], "script")
    arguments = _arguments(table.entries["args"]) if "args" in table.entries else []
    stem = script.rpartition("/")[2].partition(".")[0] or "job"
    options = {"job_name": stem, **shared, **read_options(table, ScriptFields, own=_OWN)}
    changes = {name: value for name, value in options.items() if name not in given}
    return replace(request, script=(script, *arguments), **changes)


def _arguments(node: Node) -> list[str]:
    if isinstance(node, Items):
        return [read_yaml_text(part, "args") for part in node.nodes]
    with at_line(node.line):
        try:
            return shlex.split(read_yaml_text(node, "args"))
        except ValueError as exc:
            raise FormatError(f"args: {str(exc).lower()}", line=node.line) from exc


def profiler_request(request: ProfileScriptRequest) -> ProfileRequest:
    """Return what the profiler is asked for, with sizes in bytes and folders that are there.

    Raises:
        InvalidInputError: There is no such script or folder, or a size is wrong.
    """
    if not request.script:
        raise InvalidInputError("name a training script")
    script, *arguments = request.script
    return ProfileRequest(
        script=Path(script),
        arguments=tuple(arguments),
        name=request.job_name,
        ranks=Ranks(
            per_node=request.num_gpus,
            nodes=request.nnodes,
            node_rank=request.node_rank,
            master_addr=request.master_addr,
            master_port=request.master_port,
        ),
        max_cpus=request.cpu or None,
        cpu_step=request.cpu_step,
        memory_bytes=_memory(request.memory),
        batch_size=request.batch_size,
        workers=request.workers,
        iterations=request.max_iterations,
        epochs=request.epochs,
        data=request.data,
        dataset_bytes=(
            None
            if request.dataset_size is None
            else int(parse_bytes(request.dataset_size, "--dataset-size"))
        ),
        dataset_samples=request.dataset_samples,
        repeats=request.repeats,
        tolerance=request.tolerance,
        local_disk=_folder(request.local_disk, "--local-disk"),
        storage=request.str_bw,
        memory_prefix=request.mem_thr,
        source=_folder(request.profiler_src, "--profiler-src"),
        python=request.python,
        isolation=IsolationRequest(
            wanted=None if request.isolation == "auto" else Way(request.isolation),
            image=request.docker_img,
            mount=request.container_mnt.rstrip("/") or "/",
            python=request.container_python,
            group=request.cgroup,
        ),
        limit_s=request.limit,
    )


def _memory(text: str | None) -> int | None:
    """Return a memory limit; a bare number is in GiB, as containers take it."""
    if text is None:
        return None
    bare = text.replace(".", "", 1).isdigit()
    size = float(text) * _GIB if bare else parse_bytes(text, "--memory")
    return int(size) or None


def _folder(text: str | None, what: str) -> Path | None:
    if text is None:
        return None
    if not Path(text).is_dir():
        raise InvalidInputError(f"{what} {text} is no folder")
    return Path(text)


def _profiled(
    request: ProfileScriptRequest, asked: ProfileRequest, on_progress: OnProgress
) -> ScriptProfile:
    """Profile one script and write its files."""
    profile = run_profiler(
        asked, Path(request.output), on_progress=on_progress, again=request.again
    )
    written = {"runs": str(profile.directory / "runs.json")}
    remarks: list[str] = []
    sensitivity = profile.sensitivity
    if sensitivity is not None:
        texts = {"sensitivity.json": write_json(sensitivity)}
        try:
            drawn = render(lambda: sensitivity_chart(sensitivity), "curve.svg")
            texts["curve.svg"] = drawn.decode("utf-8")
        except UnsupportedError as exc:  # the figures are worth more than their picture
            remarks.append(f"no curve.svg: {exc}")
        if sensitivity.storage_bandwidth_bytes_per_s > 0:
            texts["profile.json"] = write_synergy_profile(sensitivity)
        for name, text in texts.items():
            path = profile.directory / name
            write_text(path, text)
            written[name.partition(".")[0]] = str(path)
    return ScriptProfile(
        name=asked.name,
        command=shlex.join([str(asked.script), *asked.arguments]),
        profile=profile,
        written=written,
        remarks=tuple(remarks),
    )
