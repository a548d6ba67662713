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
from partita.flows.runs.execute import Execution, Outcome, used_names
from partita.flows.runs.requests import RunFields
from partita.flows.runs.stragglers import STRAGGLER, Replanning, StragglerFollower
from partita.flows.summary import describe_plan
from partita.hosts.driver import LostHostError
from partita.processes import stop_notices
from partita.ranks.failures import first_line
from partita.runtime.executor import Run
from partita.runtime.job import Job
from partita.runtime.rank import StepNews
from partita.runtime.restarts import (
    Attempts,
    Incident,
    RestartLimit,
    Survival,
    never,
    newest_step,
)
from partita.runtime.stragglers import StragglerWatch
from partita.runtime.training.saving import AUTO


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
    around_straggler: Callable[[], Solution | None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> ElasticRun:
    """Run a plan on the devices that are there, with another plan whenever they change.

    Args:
        solution: The first plan; its cluster has all devices.
        available: The devices that are there.
        run_plan: Runs a plan until its last step or until it is to stop; resumes where there is a
            checkpoint.
        plan_for: Plans for some of the devices.
        around_straggler: Returns the plan to go on with where the last one was stopped for a
            straggler.
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
        other = around_straggler() if run.stopped.startswith(STRAGGLER) else None
        if not run.stopped.startswith("devices: ") and other is None:
            merged = replace(run, losses=dict(sorted(losses.items())), incidents=tuple(incidents))
            return ElasticRun(solution=solution, run=merged, changes=tuple(changes))
        changes.append(run.stopped)
        say(run.stopped)
        if other is not None:
            solution = other
            changes.append(f"planned around it: {describe_plan(solution.plan)}")
            say(changes[-1])


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
    goes_back = request.max_restarts or request.elastic or request.replan
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
        changes = request.elastic is not None or request.replan
        if changes and execution.host.num_hosts > 1:
            option = "--replan" if request.elastic is None else "--elastic"
            raise UnsupportedError(f"{option} is for the devices of one host; leave it out")
        outcomes: list[Outcome | None] = []
        followers: list[StragglerFollower] = []

        def run_one(found: Solution, change: Callable[[], str], number: int) -> Run | None:
            folder = execution.directory / f"plan{number}" if number else execution.directory
            folder.mkdir(exist_ok=True)
            done = sum(len(each.run.step_s) for each in outcomes if each is not None)
            again = _going_on(job, done, solution, found) if number else job
            replanning = None
            if request.replan:
                replanning = Replanning(solution=found, plan_for=plan_for, steps=job.steps)
            watch = StragglerWatch(found, again.program(found))
            follower = StragglerFollower(watch, execution.on_progress, replanning)
            followers.append(follower)
            watched = replace(survival, stop=lambda: notice() or change() or follower.why)
            one = replace(
                execution,
                job=again,
                directory=folder,
                survival=watched,
                on_step=follower.around(execution.on_step),
            )
            if request.on is None:
                outcomes.append(run_plan(found, one))
            else:
                outcomes.append(_run_on_hosts(found, one, run_plan))
            last = outcomes[-1]
            return None if last is None else last.run

        def with_stragglers(outcome: Outcome) -> Outcome:
            lines = [line for follower in followers for line in follower.lines]
            return replace(outcome, remarks=(*outcome.remarks, *lines))

        if not changes:
            run_one(solution, never, 0)
            return None if outcomes[0] is None else with_stragglers(outcomes[0])
        names = solution.problem.cluster.device_names
        file = Path(request.available) if request.available else None
        size = DeviceRange(least=len(names), most=len(names))
        if request.elastic is not None:
            size = DeviceRange.parse(request.elastic)
        ended = run_elastic(
            solution,
            Available(names, size, file),
            run_one,
            plan_for,
            around_straggler=lambda: followers[-1].other,
            say=execution.on_progress,
        )
        last = outcomes[-1]
        if last is None or ended.run is None:
            return None
        last = with_stragglers(last)
        return replace(last, run=ended.run, remarks=(*last.remarks, *ended.changes))


def _going_on(job: Job, done: int, first: Solution, found: Solution) -> Job:
    """Return how a plan of a run is run after others have done some steps.

    A device that a plan is made around is slow already by the costs of that plan.
    """
    if job.emulate is None:
        return replace(job, resume=AUTO) if newest_step(job.saving()) else job
    speeds = [
        {device.name: device.speed for device in each.problem.cluster.devices}
        for each in (first, found)
    ]
    slow = {
        name: factor * speeds[1].get(name, 1.0) / speeds[0].get(name, 1.0)
        for name, factor in job.emulate.slow.items()
        if found is first or name in found.plan.devices
    }
    return replace(job, steps=job.steps - done, emulate=replace(job.emulate, slow=slow))


def _run_on_hosts(
    solution: Solution,
    execution: Execution,
    run_plan: Callable[[Solution, Execution], Outcome | None],
) -> Outcome | None:
    """Carry out a plan on other hosts, which are got anew where one of them went away.

    Every start has a folder of its own, and goes on from the newest checkpoint. Restarts of ranks
    on hosts that are there are the agents' own business.

    Raises:
        LostHostError: A host went away, and the budget of restarts is used up.
        UnsupportedError: The hosts cannot be had, or a host was lost and they cannot be had again.
    """
    job = execution.job

    def newest() -> int:
        return newest_step(job.saving())

    attempts = Attempts(execution.survival, newest)

    def noted(rank: int, news: StepNews) -> None:
        attempts.note(rank, news)
        execution.on_step(rank, news)

    one = replace(execution, on_step=noted)
    while True:
        try:
            found = run_plan(solution, one)
        except (LostHostError, UnsupportedError) as exc:
            if isinstance(exc, UnsupportedError) and not attempts.number:
                raise  # they were never there
            error = exc if isinstance(exc, WorkerError) else LostHostError(str(exc))
            try:
                attempts.fail(error)
            except WorkerError as last:
                raise _gone(last, job.checkpoints, newest()) from exc
        else:
            if found is None or not attempts.number:
                return found
            record, incidents = attempts.record.losses(), tuple(attempts.incidents)
            incidents = (*incidents, *found.run.incidents)
            return replace(found, run=replace(found.run, losses=record, incidents=incidents))
        folder = execution.directory / f"hosts{attempts.number}"
        folder.mkdir()
        again = replace(job, resume=AUTO) if newest() else job
        one = replace(one, job=again, directory=folder, check=False)


def _gone(error: WorkerError, checkpoints: str, step: int) -> WorkerError:
    """Return an error that says how the run goes on."""
    if not checkpoints:
        how = "nothing was saved: --save-every saves, and --max-restarts goes on by itself"
    elif not step:
        how = f"nothing was saved yet in {checkpoints}"
    else:
        how = f"step {step} is saved: go on with --resume {checkpoints}"
    found = LostHostError(f"{error}\n  {how}")
    found.rank = error.rank
    return found
