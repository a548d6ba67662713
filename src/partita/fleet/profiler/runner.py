"""One run of a training script within limits: started, watched, ended, and its report read.

A run that fails or does not end in time is an `Outcome` with a failure, never a figure. The
speed is what the job reported, or follows from wall times where it reported nothing.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from partita.errors import UnsupportedError, WorkerError, reason_of
from partita.fleet.profiler import inside
from partita.fleet.profiler.cgroups import group_name, limited_groups
from partita.fleet.profiler.containers import Container, container_command, kill_container
from partita.fleet.profiler.isolation import Isolation, Limits, Way
from partita.fleet.report import SPEED_VARIABLE
from partita.processes import how_it_ended, job_environment, last_lines

SPEED_FILE = "speed.json"
_PEAK_FILE = "peak_bytes"


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one run.

    Attributes:
        iteration_s: Mean seconds of an iteration.
        source: Where that comes from.
    """

    iteration_s: float
    source: str


def clear_reports(directory: Path, folder: Path, name: str) -> None:
    """Remove what an earlier run has left, so that it cannot be taken for this one's report."""
    own = (directory / SPEED_FILE, directory / _PEAK_FILE)
    for path in (*own, folder / f"PERF_{name}.txt", *_perf_files(directory)):
        path.unlink(missing_ok=True)


def read_speed(directory: Path, folder: Path, name: str) -> Speed | None:
    """Return what a run has reported: by our own helper, or as Synergy's ``Register`` does.

    A script that brings Synergy's own ``Register`` writes to its working directory; that file is
    moved to the run's.

    Args:
        directory: Of the run.
        folder: Working directory of the script.
        name: Name of the job, as it was passed to the script.

    Raises:
        WorkerError: The report is not a time.
    """
    own = directory / SPEED_FILE
    if own.is_file():
        return _speed(own, lambda text: json.loads(text)["iteration_s"], "reported by the script")
    beside = folder / f"PERF_{name}.txt"
    if beside.is_file():
        with suppress(OSError):
            (directory / beside.name).write_bytes(beside.read_bytes())
            beside.unlink()
    for path in _perf_files(directory):
        return _speed(path, lambda text: text.splitlines()[0], "reported through Register")
    return None


def _perf_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("PERF_*.txt"))


def _speed(path: Path, value_of: Callable[[str], object], source: str) -> Speed:
    try:
        seconds = float(str(value_of(path.read_text(encoding="utf-8"))))
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        raise WorkerError(f"{path} holds no seconds of an iteration") from exc
    if not (seconds > 0 and math.isfinite(seconds)):
        raise WorkerError(f"{path} holds {seconds:g} seconds per iteration; expected more than 0")
    return Speed(seconds, source)


def speed_of_two(long: tuple[int, float], short: tuple[int, float], what: str) -> Speed:
    """Return the speed from the wall times of two runs with different numbers of iterations.

    What a start costs is the same in both, so the difference is that of the iterations.

    Raises:
        WorkerError: The longer run was not slower.
    """
    (more, longer_s), (fewer, shorter_s) = long, short
    seconds = (longer_s - shorter_s) / (more - fewer)
    if seconds <= 0:
        raise WorkerError(
            f"{what}: {more} iterations took {longer_s:.2f} s and {fewer} took {shorter_s:.2f} s, "
            "so a start hides the iterations; raise --max-iterations, or report the speed"
        )
    return Speed(seconds, f"wall time of {more} less that of {fewer} iterations")


_INSIDE = Path(inside.__file__).parent
_POLL_S = 0.05
_SAMPLE_S = 1.0
_GRACE_S = 8.0
_LOG_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where the processes of this machine stand in the job.

    Attributes:
        per_node: Processes on each machine, one per GPU.
        nodes: Machines.
        node_rank: Which of them this is.
        master_addr: Where rank 0 listens.
        master_port: On which port.
    """

    per_node: int = 1
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29500

    @property
    def world(self) -> int:
        """Processes of the whole job."""
        return self.per_node * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What all runs of a script have in common.

    Attributes:
        script: The training script.
        folder: Its working directory.
        directory: Where logs and reports go.
        isolation: How limits are enforced.
        ranks: Its processes.
        python: The interpreter, where no container brings one.
        search: Further directories that it may import from.
        limit_s: Seconds that a run may take.
    """

    script: Path
    folder: Path
    directory: Path
    isolation: Isolation
    ranks: Ranks
    python: str = sys.executable
    search: tuple[Path, ...] = ()
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run went.

    Attributes:
        failure: What went wrong, in a line; empty where nothing did.
        log: The last lines it printed.
        wall_s: How long it took.
        peak_bytes: Most memory of its processes, as sampled, and at least the most that the
            system has counted for one rank; 0 = was not seen.
        speed: What it reported; None = nothing.
    """

    failure: str
    log: str
    wall_s: float
    peak_bytes: int
    speed: Speed | None


def run_script(
    place: Workplace,
    arguments: Sequence[str],
    limits: Limits,
    *,
    name: str,
    rank_option: str = "",
) -> Outcome:
    """Run a script within limits and return how that went.

    Args:
        place: What all runs have in common.
        arguments: Those of the script.
        limits: What it may use.
        name: Of this run, unique among those of the job.
        rank_option: Option that passes each process its local rank; empty = none.

    Raises:
        UnsupportedError: It cannot be started, or not within these limits.
    """
    log = place.directory / f"{name}.log"
    clear_reports(place.directory, place.folder, name)
    with _command(place, arguments, limits, name, rank_option) as (command, environment):
        begin_s = time.monotonic()
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=place.folder,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as exc:
                raise UnsupportedError(f"{command[0]} cannot be started: {reason_of(exc)}") from exc
        try:
            peak_bytes = _wait(process, begin_s + place.limit_s)
        finally:
            hung = process.poll() is None
            _end(process, place.isolation.container, name)
        wall_s = time.monotonic() - begin_s
    outcome = Outcome(
        failure="",
        log="\n".join(last_lines(log, _LOG_LINES)),
        wall_s=wall_s,
        peak_bytes=max(peak_bytes, _counted_bytes(place.directory / _PEAK_FILE)),
        speed=None,
    )
    if hung:
        failure = f"did not end within {place.limit_s:g} s (--limit){_last_words(outcome.log)}"
        return replace(outcome, failure=failure)
    if code := process.returncode:
        how = how_it_ended(code if code <= 128 else 128 - code)
        return replace(outcome, failure=f"{how}{_last_words(outcome.log)}")
    return replace(outcome, speed=read_speed(place.directory, place.folder, name))


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return f"; its last line: {lines[-1][:200]}" if lines else "; it printed nothing"


@contextmanager
def _command(
    place: Workplace, arguments: Sequence[str], limits: Limits, name: str, rank_option: str
) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    """Yield the command of a run and its environment, while the limits hold."""
    container = place.isolation.container
    if container is not None:
        yield (
            contained_command(place, container, arguments, limits, name, rank_option),
            job_environment(),
        )
        return
    own = {
        "OUT_DIR": str(place.directory),
        SPEED_VARIABLE: str(place.directory / SPEED_FILE),
        "PYTHONPATH": os.pathsep.join(
            [
                *filter(None, [os.environ.get("PYTHONPATH")]),
                *(str(path) for path in (*place.search, _INSIDE)),
            ]
        ),
    }
    extra = ["--affinity", ",".join(map(str, limits.cpu_numbers))]
    launch = [
        *(place.python, str(_INSIDE / "launch.py"), "--peak-file"),
        *(str(place.directory / _PEAK_FILE), *_launch_options(place.ranks, rank_option)),
    ]
    job = ["--", str(place.script), *arguments]
    if place.isolation.way is Way.PLAIN:
        if limits.memory_bytes is not None:
            extra += ["--data-bytes", str(limits.memory_bytes // place.ranks.per_node)]
        yield [*launch, *extra, *job], job_environment() | own
        return
    with limited_groups(
        place.isolation.hierarchies,
        group_name(name),
        cpus=limits.cpus,
        memory_bytes=limits.memory_bytes,
    ) as joined:
        extra += [word for path in joined for word in ("--join", str(path))]
        yield [*launch, *extra, *job], job_environment() | own


def contained_command(
    place: Workplace,
    container: Container,
    arguments: Sequence[str],
    limits: Limits,
    name: str,
    rank_option: str,
) -> list[str]:
    """Return the engine's command for a run in a container."""
    environment = {
        "OUT_DIR": container.inside(place.directory),
        SPEED_VARIABLE: container.inside(place.directory / SPEED_FILE),
        "PYTHONPATH": ":".join(container.inside(path) for path in (*place.search, _INSIDE)),
    }
    return container_command(
        container,
        [
            container.inside(_INSIDE / "launch.py"),
            *("--peak-file", container.inside(place.directory / _PEAK_FILE)),
            *_launch_options(place.ranks, rank_option),
            "--",
            container.inside(place.script),
            *arguments,
        ],
        name=group_name(name),
        folder=place.folder,
        writable=(place.directory,),
        environment=environment,
        cpus=limits.cpus,
        cpu_numbers=limits.cpu_numbers,
        memory_bytes=limits.memory_bytes,
    )


def _launch_options(ranks: Ranks, rank_option: str) -> list[str]:
    options = {
        "--ranks": ranks.per_node,
        "--nodes": ranks.nodes,
        "--node-rank": ranks.node_rank,
        "--master-addr": ranks.master_addr,
        "--master-port": ranks.master_port,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [*words, f"--rank-option={rank_option}"] if rank_option else words


def _wait(process: "subprocess.Popen[bytes]", last_s: float) -> int:
    """Wait for the end of a run or of its time; returns the most memory that was seen."""
    peak_bytes, sample_s = 0, time.monotonic() + _SAMPLE_S / 4
    while process.poll() is None and (now_s := time.monotonic()) < last_s:
        if now_s >= sample_s:
            peak_bytes = max(peak_bytes, session_bytes(process.pid))
            sample_s = now_s + _SAMPLE_S
        time.sleep(_POLL_S)
    return peak_bytes


def _counted_bytes(path: Path) -> int:
    """Return what the launcher wrote of the largest rank; 0 where it did not come that far.

    Samples miss what lies between them, and a system may hide the memory of other processes.
    """
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def session_bytes(session: int) -> int:
    """Return the memory of all processes of a session; what several share counts once."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            after_name = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(after_name[3]) != session:
                continue
            for line in (entry / "smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


def _end(process: "subprocess.Popen[bytes]", container: Container | None, name: str) -> None:
    """End what is left of a run: the processes of its session, and its container."""
    running = process.poll() is None
    if running and container is not None:
        kill_container(container.engine, group_name(name))
    if running:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
