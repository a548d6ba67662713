"""A run on the devices that are there: replanned when some are lost or come back, and resumed.

A device is lost when the file that names the devices no longer does, or when ranks on it have
failed until the run's restarts were used up. The same planner plans for those that are left, and
the run goes on from its newest checkpoint. When devices come back the ranks stop at the next step,
save, and go on with a plan for all of them.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError, WorkerError
from partita.flows.execute import Execution, Outcome, used_names
from partita.flows.run_requests import RunFields
from partita.flows.summary import describe_plan
from partita.processes import stop_notices
from partita.ranks.failures import first_line
from partita.runtime.executor import Run
from partita.runtime.restarts import Incident, RestartLimit, Survival, never, newest_step
from partita.runtime.saving import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRange:
    """How many devices a run may have: ``--elastic 2:4``."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> "DeviceRange":
        """Return the range that a text says.

        Raises:
            InvalidInputError: It says none.
        """
        least, sign, most = text.partition(":")
        if not sign or not least.isdecimal() or not most.isdecimal():
            raise InvalidInputError(f"--elastic {text!r}; expected LEAST:MOST, such as 2:4")
        found = cls(least=int(least), most=int(most))
        if not 1 <= found.least <= found.most:
            raise InvalidInputError(f"--elastic {text}; expected 1 <= LEAST <= MOST")
        return found


class Available:
    """The devices that a run may use, as they come and go."""

    def __init__(self, names: Sequence[str], size: DeviceRange, file: Path | None = None) -> None:
        """Begin with all devices.

        Args:
            names: All devices, in the order in which they are preferred.
            size: How many may be used.
            file: Names those that can be used, separated by spaces or lines; None, or no such file
                = all can.

        Raises:
            InvalidInputError: There are too few, now.
        """
        self._names, self._size, self._file = tuple(names), size, file
        self._given_up: set[str] = set()
        self.now()

    def now(self) -> tuple[str, ...]:
        """Return the devices to use now.

        Raises:
            InvalidInputError: They are too few.
        """
        found = self._found()
        if len(found) < self._size.least:
            raise InvalidInputError(
                f"{len(found)} of the devices {', '.join(self._names)} can be used; --elastic "
                f"needs {self._size.least} at least"
            )
        return found

    def _found(self) -> tuple[str, ...]:
        wanted: Collection[str] = self._names
        if self._file is not None and self._file.exists():
            wanted = set(self._file.read_text(encoding="utf-8").split())
        there = [name for name in self._names if name in wanted and name not in self._given_up]
        return tuple(there[: self._size.most])

    def give_up(self, name: str) -> bool:
        """Use a device no more; returns whether enough are left without it."""
        if len(set(self._found()) - {name}) < self._size.least:
            return False
        self._given_up.add(name)
        return True

    def change(self, used: Sequence[str]) -> str:
        """Return how the devices differ from those that are used; empty = they do not.

        Where too few are left, nothing changes: what runs may still run.
        """
        found = self._found()
        if len(found) < self._size.least or set(found) == set(used):
            return ""
        lost = [name for name in used if name not in found]
        back = [name for name in found if name not in used]
        words = [f"{', '.join(lost)} lost"] if lost else []
        words += [f"{', '.join(back)} there"] if back else []
        return "devices: " + "; ".join(words)


RunPlan = Callable[[Solution, Callable[[], str], int], Run | None]
"""Runs a plan, given what says when to stop and how many plans were run before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ElasticRun:
    """A run that may have changed its plan.

    Attributes:
        solution: The plan that it ended with.
        run: All of it: every step once; None on other hosts than the first.
        changes: What changed, a sentence each.
    """

    solution: Solution
    run: Run | None
    changes: tuple[str, ...] = ()


def run_elastic(
    solution: Solution,
    available: Available,
    run_plan: RunPlan,
    plan_for: Callable[[Problem], Solution],
    *,
    say: Callable[[str], None] = lambda _: None,
) -> ElasticRun:
    """Run a plan on the devices that are there, with another plan whenever they change.

    Args:
        solution: The first plan; its cluster has all devices.
        available: The devices that are there.
        run_plan: Runs a plan until its last step or until it is to stop; resumes where there is a
            checkpoint.
        plan_for: Plans for some of the devices.
        say: Called with each change.

    Raises:
        WorkerError: The run failed, and no device can be given up for it.
    """
    whole, first = solution.problem, solution
    losses: dict[int, float] = {}
    incidents: list[Incident] = []
    changes: list[str] = []
    used = whole.cluster.device_names
    while True:
        now = available.now()
        if set(now) != set(used):
            used = now
            solution = first
            if set(now) != set(whole.cluster.device_names):
                problem = replace(whole, cluster=whole.cluster.only(used))
                solution = plan_for(problem)
            changes.append(f"planned for {len(used)} devices: {describe_plan(solution.plan)}")
            say(changes[-1])
        why = _Change(available, used)
        try:
            run = run_plan(solution, why, len(changes))
        except WorkerError as exc:
            if why():
                reason = why()
            else:
                name = _device_of(solution.plan, exc.rank)
                if not name or not available.give_up(name):
                    raise
                reason = f"{name} is given up: {first_line(exc)}"
            changes.append(reason)
            say(reason)
            continue
        if run is None:
            return ElasticRun(solution=solution, run=None, changes=tuple(changes))
        losses |= run.losses
        incidents += run.incidents
        if not run.stopped.startswith("devices: "):
            merged = replace(run, losses=dict(sorted(losses.items())), incidents=tuple(incidents))
            return ElasticRun(solution=solution, run=merged, changes=tuple(changes))
        changes.append(run.stopped)
        say(run.stopped)


class _Change:
    """Says how devices have changed since a plan was made."""

    def __init__(self, available: Available, used: Sequence[str]) -> None:
        self._available, self._used = available, used

    def __call__(self) -> str:
        return self._available.change(self._used)


def _device_of(plan: Plan, rank: int) -> str:
    """Return the device of a rank; empty = it is not known which rank failed."""
    used = used_names(plan)
    return used[rank] if 0 <= rank < len(used) else ""


def execute_surviving(
    solution: Solution,
    execution: Execution,
    request: RunFields,
    run_plan: Callable[[Solution, Execution], Outcome | None],
    plan_for: Callable[[Problem], Solution],
    *,
    stop: Callable[[], str] = never,
) -> Outcome | None:
    """Carry out a plan, started again and replanned as a request allows.

    Where the run saves, SIGTERM and SIGUSR1 let it save and end well.

    Args:
        solution: The plan.
        execution: How it is carried out.
        request: What was asked.
        run_plan: Carries out a plan.
        plan_for: Plans for some of the devices.
        stop: Returns why the run is to save and end, besides signals; empty = it is not.

    Raises:
        InvalidInputError: The folder of checkpoints is another run's.
        WorkerError: A rank failed, and the budget of restarts is used up.
    """
    job, limit = execution.job, RestartLimit(restarts=request.max_restarts)
    goes_back = request.max_restarts or request.elastic
    if goes_back and not job.resume and newest_step(job.saving()):
        raise InvalidInputError(
            f"{job.checkpoints} holds checkpoints of another run, which a restart would take; add "
            "--resume auto, or name another folder"
        )
    with ExitStack() as stack:
        signalled: Callable[[], str] = never
        if job.checkpoints:
            signalled = stack.enter_context(stop_notices())

        def notice() -> str:
            return signalled() or stop()

        survival = Survival(limit=limit, stop=notice, say=execution.on_progress)
        execution = replace(execution, survival=survival)
        if request.elastic is None:
            return run_plan(solution, execution)
        if execution.host.num_hosts > 1:
            raise UnsupportedError("--elastic is for the devices of one host; leave it out")
        outcomes: list[Outcome | None] = []

        def run_one(found: Solution, change: Callable[[], str], number: int) -> Run | None:
            folder = execution.directory / f"plan{number}" if number else execution.directory
            folder.mkdir(exist_ok=True)
            again = replace(job, resume=AUTO) if newest_step(job.saving()) else job
            watched = replace(survival, stop=lambda: notice() or change())
            one = replace(execution, job=again, directory=folder, survival=watched)
            outcomes.append(run_plan(found, one))
            last = outcomes[-1]
            return None if last is None else last.run

        file = Path(request.available) if request.available else None
        names = solution.problem.cluster.device_names
        available = Available(names, DeviceRange.parse(request.elastic), file)
        ended = run_elastic(solution, available, run_one, plan_for, say=execution.on_progress)
        last = outcomes[-1]
        if last is None or ended.run is None:
            return None
        return replace(last, run=ended.run, remarks=(*last.remarks, *ended.changes))
