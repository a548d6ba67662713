"""Profiling a script: contract, sweep over CPUs, storage, memory, and the sensitivity of it all.

After each run what is known goes to a file, so that an equal request goes on where it stopped.
With several nodes each runs the same command at the same time. The points are then a fixed choice,
since a node cannot know what another has measured; node 0 has the result.
"""

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from partita.core.fleet import Sensitivity
from partita.errors import InvalidInputError, WorkerError
from partita.fleet.profiler.containers import host_path
from partita.fleet.profiler.contract import Attempt, Clause, find_spellings
from partita.fleet.profiler.dataset import Dataset, measure_dataset, read_into_memory
from partita.fleet.profiler.isolation import Isolation, Limits, Way, choose_isolation
from partita.fleet.profiler.machine_speeds import MEASURED_WAYS, memory_speeds, storage_speed
from partita.fleet.profiler.record import Run, fingerprint, open_record
from partita.fleet.profiler.request import ProfileRequest, ScriptOptions, script_options
from partita.fleet.profiler.results import Measured, machine_memory_bytes, make_sensitivity
from partita.fleet.profiler.runner import Outcome, Speed, Workplace, run_script, speed_of_two
from partita.fleet.profiler.sweep import CurvePoint, cpu_grid, fill, halvings, sweep, usual_step
from partita.processes import machine_cores, other_load
from partita.units import format_bytes

_WARM_LIMIT_S = 120.0
OnProgress = Callable[[str], None]
"""Called with each step, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What profiling a script has found.

    Attributes:
        sensitivity: Speed over CPUs and memory; None on nodes other than 0.
        directory: Where its files are.
        curve: Samples per second over the CPUs of this machine, all data cached.
        runs: Every run that ended well, with its raw figures.
        isolation: How limits were enforced.
        notes: Lines for people: what was not possible, what was assumed.
    """

    sensitivity: Sensitivity | None
    directory: Path
    curve: tuple[CurvePoint, ...]
    runs: tuple[Run, ...]
    isolation: Way
    notes: tuple[str, ...]


def profile_script(
    request: ProfileRequest, parent: Path, *, on_progress: OnProgress, again: bool = False
) -> Profile:
    """Profile a script and return how its speed depends on CPUs and memory.

    Args:
        request: The script, and how.
        parent: Folder in which the job gets a directory by its name.
        on_progress: Called with each step.
        again: Whether to measure anew what an equal request has measured before.

    Raises:
        InvalidInputError: The script does not take the options that profiling needs.
        UnsupportedError: The machine cannot do what is asked.
        WorkerError: A run failed or hung.
    """
    return _Profiler(request, parent, on_progress, again=again).profile()


class _Profiler:
    """The state of profiling one script."""

    def __init__(
        self, request: ProfileRequest, parent: Path, on_progress: OnProgress, *, again: bool
    ) -> None:
        self._request = request
        self._on_progress = on_progress
        self._isolation: Isolation = choose_isolation(request.isolation)
        self._notes = list(self._isolation.notes)
        options = script_options(
            request, request.script.read_text(encoding="utf-8", errors="replace")
        )
        self._options: ScriptOptions = self._host_data(options)
        self._grid = self._cpu_counts()
        mark = fingerprint(request.script, self._marks())
        several = request.ranks.nodes > 1  # which all run what node 0 runs
        directory, self._file = open_record(parent, request.name, mark, again=again or several)
        self._file.update(command=(str(request.script), *request.arguments))
        folder = Path.cwd() if request.source is None else request.source
        self._place = Workplace(
            script=request.script.absolute(),
            folder=folder,
            directory=directory.absolute(),
            isolation=self._isolation,
            ranks=request.ranks,
            python=request.python,
            search=() if request.source is None else (request.source.absolute(),),
            limit_s=request.limit_s,
        )

    def profile(self) -> Profile:
        """Measure all that is not known yet, and return the result."""
        spellings = self._spellings()
        dataset = self._dataset()
        self._warm(dataset)
        curve = self._sweep(spellings)
        sensitivity = None
        if self._request.ranks.node_rank == 0:
            self._measure_machine(dataset)
            sensitivity = make_sensitivity(
                Measured(
                    name=self._request.name,
                    ranks=self._request.ranks,
                    batch_size=self._options.batch_size,
                    curve=curve,
                    dataset=dataset,
                    record=self._file.record,
                    gpus=_gpu_words(),
                )
            )
        self._file.update(is_done=True)
        return Profile(
            sensitivity=sensitivity,
            directory=self._place.directory,
            curve=curve,
            runs=self._file.record.runs,
            isolation=self._isolation.way,
            notes=tuple(self._notes),
        )

    def _marks(self) -> list[object]:
        """Return all that makes figures comparable, besides the text of the script."""
        request = self._request
        values = asdict(request) | {"repeats": None, "limit_s": None, "arguments": None}
        for settled in ("tolerance", "max_cpus", "cpu_step", "storage", "memory_prefix"):
            values.pop(settled)
        return [values, self._options.rest, self._isolation.way, os.cpu_count()]

    def _host_data(self, options: ScriptOptions) -> ScriptOptions:
        """Without a container, data below the mount are where they are on the host."""
        if self._isolation.way is Way.CONTAINER:
            return options
        seen = host_path(options.data, self._request.isolation.mount)
        if seen == options.data or Path(options.data).exists():
            return options
        self._notes.append(f"without a container the data are passed on as {seen}")
        return replace(options, data=seen)

    def _cpu_counts(self) -> tuple[float, ...]:
        """Return the CPU counts of the sweep, within what this machine has."""
        there = machine_cores()
        top = self._request.max_cpus or float(there)
        if top > there:
            self._notes.append(f"--cpu {top:g}: this machine has {there}, so the sweep ends there")
            top = float(there)
        fractions = self._isolation.has_fractions
        step = self._request.cpu_step or usual_step(top, fractions=fractions)
        if not fractions and (top % 1 or step % 1):
            raise InvalidInputError(
                f"{top:g} CPUs in steps of {step:g}: parts of CPUs need control groups or a "
                "container"
            )
        return cpu_grid(top, step)

    def _spellings(self) -> Mapping[Clause, str]:
        """Return how the script spells the contract, by runs of one iteration."""
        known = self._file.record.spellings
        if known:
            return {Clause(clause): word for clause, word in known.items()}

        def attempt(spellings: Mapping[Clause, str]) -> Attempt:
            self._on_progress("checking the script with one iteration")
            outcome = self._run(spellings, self._grid[-1], 1, f"{self._request.name}_check")
            return Attempt(outcome.failure, outcome.log)

        found = find_spellings(
            str(self._request.script),
            self._options.first,
            attempt,
            required=self._options.required,
            unseen=self._options.unseen,
        )
        self._file.update(spellings={str(clause): word for clause, word in found.items()})
        return found

    def _run(
        self, spellings: Mapping[Clause, str], cpus: float, iterations: int, name: str
    ) -> Outcome:
        ranks = self._request.ranks
        return run_script(
            self._place,
            self._options.arguments(spellings, ranks, name=name, cpus=cpus, iterations=iterations),
            Limits(cpus=cpus, memory_bytes=self._memory_limit()),
            name=name,
            rank_option=spellings.get(Clause.LOCAL_RANK, ""),
        )

    def _memory_limit(self) -> int | None:
        """Return the limit to enforce; none where it is all of the machine."""
        asked = self._request.memory_bytes
        return None if asked is None or asked >= machine_memory_bytes() else asked

    def _dataset(self) -> Dataset | None:
        """Return the size of the dataset, as given or as found."""
        request = self._request
        found = measure_dataset(
            Path(host_path(self._options.data, request.isolation.mount))
            if self._isolation.way is Way.CONTAINER
            else Path(self._place.folder, self._options.data)
        )
        size = request.dataset_bytes or (found.size_bytes if found else 0)
        samples = request.dataset_samples or (found.samples if found else 0)
        if size and samples:
            return Dataset(size, samples)
        self._notes.append(
            f"the size of the dataset {self._options.data} is not known, so there is no memory "
            "axis; --dataset-size 150GB --dataset-samples 1281167 give it"
        )
        return None

    def _warm(self, dataset: Dataset | None) -> None:
        """Bring the data into memory once, since the sweep is to see them cached."""
        path = Path(self._place.folder, self._options.data)
        if dataset is None or self._file.record.is_done or not path.exists():
            return
        memory = self._memory_limit() or machine_memory_bytes()
        if dataset.size_bytes > memory / 2:
            self._notes.append(
                f"the dataset of {format_bytes(dataset.size_bytes)} may not stay in memory during "
                "the sweep, whose runs then include reading it"
            )
            return
        self._on_progress("reading the dataset into memory")
        read_into_memory(path, limit_s=_WARM_LIMIT_S)

    def _sweep(self, spellings: Mapping[Clause, str]) -> tuple[CurvePoint, ...]:
        """Return samples per second over the grid."""
        self._note_other_load()
        samples = self._options.batch_size * self._request.ranks.world

        def measure(cpus: float) -> float:
            seconds = [run.iteration_s for run in self._runs_at(spellings, cpus)]
            return samples / statistics.median(seconds)

        if self._request.ranks.nodes == 1:
            return sweep(self._grid, measure, tolerance=self._request.tolerance)
        chosen = halvings(self._grid)
        if self._request.ranks.node_rank == 0:
            known = {cpus: measure(cpus) for cpus in chosen}
            return fill(self._grid, known, tolerance=self._request.tolerance)
        for cpus in chosen:  # points that node 0 measures, with the ranks of this node
            for number in range(self._request.repeats):
                self._measure(spellings, cpus, number + 1)
        return ()

    def _note_other_load(self) -> None:
        """Say so where other programs keep the CPUs busy, whose share the job does not get."""
        busy = other_load()
        if busy and not self._file.record.is_done:
            self._notes.append(
                f"{busy}; speeds may be too low, most of all with many CPUs; --again measures anew"
            )

    def _runs_at(self, spellings: Mapping[Clause, str], cpus: float) -> list[Run]:
        """Return the runs of a point: those known, and those that are still missing."""
        known = [run for run in self._file.record.runs if run.cpus == cpus]
        while len(known) < self._request.repeats:
            outcome, speed = self._measure(spellings, cpus, len(known) + 1)
            known.append(
                Run(
                    cpus=cpus,
                    workers=self._options.workers_at(cpus, self._request.ranks),
                    iterations=self._options.iterations,
                    iteration_s=speed.iteration_s,
                    source=speed.source,
                    wall_s=outcome.wall_s,
                    peak_bytes=outcome.peak_bytes,
                )
            )
            self._file.update(runs=(*self._file.record.runs, known[-1]))
        return known

    def _measure(
        self, spellings: Mapping[Clause, str], cpus: float, number: int
    ) -> tuple[Outcome, Speed]:
        """Return how a run at a CPU count went, and its speed."""
        iterations = self._options.iterations
        name = f"{self._request.name}_cpu_{cpus:g}" + (f"_{number}" if number > 1 else "")
        self._on_progress(f"CPUs {cpus:g}, {iterations} iterations")
        outcome = self._checked(spellings, cpus, iterations, name)
        if outcome.speed is not None:
            return outcome, outcome.speed
        if self._request.ranks.node_rank:
            return outcome, Speed(outcome.wall_s / iterations, "wall time")
        if self._request.ranks.nodes > 1 or iterations < 2:
            raise WorkerError(
                f"{self._request.script} reports no speed; call partita.fleet.report.report_speed, "
                "or give it --max-iterations of 2 or more on one node"
            )
        fewer = iterations // 2
        self._on_progress(f"CPUs {cpus:g}, {fewer} iterations (the script reports no speed)")
        shorter = self._checked(spellings, cpus, fewer, f"{name}_short")
        pair = (iterations, outcome.wall_s), (fewer, shorter.wall_s)
        return outcome, speed_of_two(*pair, f"{self._request.script} with --cpu {cpus:g}")

    def _checked(
        self, spellings: Mapping[Clause, str], cpus: float, iterations: int, name: str
    ) -> Outcome:
        """Return a run that ended well.

        Raises:
            WorkerError: It did not; what was measured before is kept.
        """
        outcome = self._run(spellings, cpus, iterations, name)
        if outcome.failure:
            raise WorkerError(
                f"{self._request.script} with --cpu {cpus:g} {outcome.failure} (whole log: "
                f"{self._place.directory / name}.log)"
            )
        return outcome

    def _measure_machine(self, dataset: Dataset | None) -> None:
        """Measure storage and memory, unless that was done before."""
        record = self._file.record
        if dataset is None:
            return
        if self._request.storage or record.storage_way not in MEASURED_WAYS:
            self._on_progress("storage bandwidth")
            disk = self._request.local_disk or _writable(
                Path(self._place.folder, self._options.data), self._place.directory
            )
            speed = storage_speed(disk, self._request.storage)
            self._file.update(storage_bytes_per_s=speed.bytes_per_s, storage_way=speed.way)
        if self._request.memory_prefix or not record.memory_cpus:
            self._on_progress("throughput of memory")
            speeds = memory_speeds(self._grid[-1], self._request.memory_prefix)
            self._file.update(memory_cpus=tuple(speeds), memory_bytes_per_s=tuple(speeds.values()))


def _writable(data: Path, other: Path) -> Path:
    """Return the folder of the data, or another where that cannot be written."""
    folder = data if data.is_dir() else data.parent
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else other


def _gpu_words() -> str:
    """Return the GPUs that the driver lists, for people; empty where there are none."""
    found = [
        line.partition(":")[2].strip()
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Model")
    ]
    return ", ".join(f"{found.count(name)}x {name}" for name in dict.fromkeys(found))
