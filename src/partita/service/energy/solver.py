"""Frontiers solved beside the server: in a process of its own, each of them once.

The kernels hold the interpreter while they run, so that a thread would stop every other request.
One frontier has a limited time, and that of a straggler does not wait for those of other jobs. A
job that is given none is refused again after a restart: the versions that it has seen since depend
on it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

from partita.core.codec import read_json
from partita.core.energy import Frontier
from partita.energy.policies.solving import SolveTask, solve_task, warm_up
from partita.errors import InvalidInputError, PartitaError, WorkerError
from partita.processes import die_with_parent
from partita.service.child import Child, Pipe
from partita.service.energy.store import Answer, EnergyStore

logger = logging.getLogger(__name__)

TRIES = 2
"""Processes that may die over one task."""
RECENT = 64
"""Answers that are held in memory."""


class Solver(Protocol):
    """Where tasks are solved, one after the other."""

    def warm(self) -> None:
        """Get ready for a task that will come; returns at once."""

    async def solve(self, task: SolveTask, limit_s: float) -> str:
        """Return the document of a task's frontier.

        Raises:
            TimeoutError: It takes longer than the limit.
            EOFError: The process died.
        """

    def close(self) -> None:
        """End it, whatever it is doing."""


class SolverProcess:
    """One process, started when it is needed first; a task that takes too long ends it."""

    def __init__(self) -> None:
        self._child = Child(_solve_tasks, "solver")

    async def solve(self, task: SolveTask, limit_s: float) -> str:
        """Return the document of a task's frontier; see ``Solver``."""
        try:
            done, found = await asyncio.to_thread(_ask, self._child.started(), task, limit_s)
        except OSError as exc:  # TimeoutError is one
            self.close()
            raise exc if isinstance(exc, TimeoutError) else EOFError from None
        except (EOFError, asyncio.CancelledError):
            self.close()
            raise
        if not done:
            raise found
        return str(found)

    def warm(self) -> None:
        """Start the process, which loads and compiles what it solves with."""
        self._child.started()

    def close(self) -> None:
        """End the process, whatever it is doing; whoever reads its pipe sees the end."""
        self._child.close()


def _ask(pipe: Pipe, task: SolveTask, limit_s: float) -> tuple[bool, Any]:
    """Return the answer of the process.

    Raises:
        TimeoutError: There is none within the limit.
        EOFError: The process died.
    """
    pipe.send(task)
    if not pipe.poll(limit_s):
        raise TimeoutError
    answer: tuple[bool, Any] = pipe.recv()
    return answer


def _solve_tasks(pipe: Pipe, parent: int) -> None:
    """Be the process that solves; answers are a frontier's document or what was raised."""
    die_with_parent(parent)
    warm_up()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, Any] = True, solve_task(task)
        except Exception as exc:  # noqa: BLE001 (handed to whoever asked)
            answer = False, exc
        pipe.send(answer)


class _Lane:
    """A solver and whose turn it is."""

    def __init__(self, solver: Solver) -> None:
        self.solver = solver
        self.turn = asyncio.Lock()


class EnergySolver:
    """Answers tasks of jobs, from disk where they were solved before.

    Args:
        store: Where answers are kept.
        limit_s: How long one task may take.
        make: Returns where tasks are solved.

    Attributes:
        solved: Tasks that were solved, not only looked up.
        seconds: Seconds that this took in all.
    """

    def __init__(
        self, store: EnergyStore, limit_s: float, make: Callable[[], Solver] = SolverProcess
    ) -> None:
        self._store = store
        self._limit_s = limit_s
        self._usual, self._spare = _Lane(make()), _Lane(make())
        self._recent: OrderedDict[str, Frontier] = OrderedDict()
        self._given_up: dict[str, Answer] = {}
        self.solved = 0
        self.seconds = 0.0

    async def known(self, job: str, task: SolveTask) -> Frontier | None:
        """Return the frontier of a task if it is known without solving.

        Raises:
            InvalidInputError: It is known that the profile does not fit the pipeline.
            WorkerError: It is known that the job gets none.
        """
        key = task.key
        answer = await self._store.answer(job, key)
        if answer is None:
            return None
        if answer.failure:
            raise (WorkerError if answer.ours else InvalidInputError)(answer.failure)
        if key not in self._recent:
            self._recent[key] = await asyncio.to_thread(read_json, answer.body)
        self._recent.move_to_end(key)
        frontier = self._recent[key]
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return frontier

    async def solve(self, job: str, task: SolveTask) -> Frontier:
        """Return the frontier of a task; one that is quick does not wait for others.

        Raises:
            InvalidInputError: The profile does not fit the pipeline.
            WorkerError: It takes too long, or the solving process died, twice.
        """
        lane = self._spare if task.quick and self._usual.turn.locked() else self._usual
        async with lane.turn:
            found = await self.known(job, task)
            if found is None:
                answer = await self._answer(lane.solver, task)
                await self._store.keep_answer(job, task.key, answer)
                found = await self.known(job, task)
        assert found is not None
        return found

    async def _answer(self, solver: Solver, task: SolveTask) -> Answer:
        """Return what comes of a task; what this server gave up once it does not try again."""
        key, loop = task.key, asyncio.get_running_loop()
        if key in self._given_up:
            return self._given_up[key]
        started = loop.time()
        try:
            text = await self._solved(solver, task)
        except WorkerError as exc:
            self._given_up[key] = Answer(failure=str(exc), ours=True)
        except PartitaError as exc:
            return Answer(failure=str(exc))
        except Exception:
            logger.exception("a frontier")
            self._given_up[key] = Answer(failure="an error of the server; see its log", ours=True)
        else:
            self.solved += 1
            self.seconds += loop.time() - started
            return Answer(text)
        return self._given_up[key]

    async def _solved(self, solver: Solver, task: SolveTask) -> str:
        """Return the document of a task's frontier.

        Raises:
            WorkerError: It takes too long, or the process died, twice.
        """
        for _ in range(TRIES):
            try:
                return await solver.solve(task, self._limit_s)
            except TimeoutError:
                raise WorkerError(
                    f"the frontier was not solved within {self._limit_s:g} s (--solve-limit)"
                ) from None
            except EOFError:
                continue
        raise WorkerError("the process that solves frontiers died; is there enough memory?")

    def warm(self) -> None:
        """Get ready for the first task; see ``Solver``."""
        self._usual.solver.warm()

    def close(self) -> None:
        """End the processes."""
        self._usual.solver.close()
        self._spare.solver.close()
