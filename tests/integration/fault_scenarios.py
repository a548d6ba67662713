"""Runs a job in forked ranks again and again, with another fault each time; prints what came of it.

A process of its own, as ranks are forked from a process with one thread.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from partita.capture.origin import Captures
from partita.capture.sources import load_source
from partita.errors import WorkerError
from partita.ranks.member import Member
from partita.ranks.pool import RankPool
from partita.ranks.status import StatusBoard, StatusView
from partita.runtime import executor
from partita.runtime.clocks import read_clock, to_rank_0
from partita.runtime.executor import make_task, run_forked
from partita.runtime.job import JobDirectory
from partita.runtime.rank import run_rank
from partita.runtime.workload import Workload, model_workload

pools: list[RankPool] = []


class NotedPool(RankPool):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pools.append(self)
        super().__init__(*arguments, **options)


executor.RankPool = NotedPool  # type: ignore[misc]


class FaultyCode:
    """Fails in stage 1 at microbatch 2 of step 1."""

    def __init__(self, code: Any, fault: Callable[[], None]) -> None:
        self._code, self._fault = code, fault

    def run(self, stage: int, inputs: Any, parameters: Any, call: Any) -> Mapping[str, Any]:
        if stage == 1 and call.microbatch == 2 and call.step == 1:
            self._fault()
        return self._code.run(stage, inputs, parameters, call)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code, name)


def send(number: int, *ranks: int) -> Callable[[int, Any], None]:
    """Return what sends a signal to ranks once step 1 is done."""
    sent: list[int] = []

    def told(_: int, news: Any) -> None:
        if news.step == 1 and not sent:
            sent.extend(ranks)
            for rank in ranks:
                os.kill(pools[-1].pids[rank], number)

    return told


def fail() -> None:
    raise KeyError("no such thing")


class Scenarios:
    def __init__(self, files: JobDirectory) -> None:
        self.job, solution = files.read_job(), files.read_solution()
        assert self.job.model is not None
        source = load_source(self.job.model.text, self.job.model.options)
        problem, plan = solution.problem, solution.plan
        self.workload = model_workload(Captures(source, self.job.model), problem, plan)
        self.task = make_task(problem, plan, self.workload)
        self.options = self.job.rank_options()

    def run(self, told: Callable[[int, Any], None] = lambda _, __: None) -> None:
        run_forked(self.task, self.workload, options=self.options, on_step=told)

    def run_with_code(self, fault: Callable[[], None]) -> None:
        self.task.code = FaultyCode(self.workload.code, fault)
        try:
            self.run()
        finally:
            self.task.code = self.workload.code

    def run_changed(self, change: Callable[[Member, Workload], Workload]) -> None:
        """Run with another workload on some rank."""
        world, board = 3, StatusBoard(3)

        def main(member: Member, _: object) -> object:
            workload = change(member, self.workload)
            return run_rank(self.task, member, workload, options=self.options, board=board)

        with NotedPool(world, main, limit_s=60.0, stall_limit_s=2.0, board=board) as pool:
            pool.call(None, view=StatusView(board, self.task.program, range(world)))

    def reuse(self) -> None:
        """Use ranks again that have failed."""

        def main(member: Member, request: object) -> object:
            if request == "fail" and member.rank == 2:
                raise ArithmeticError("on request")
            return member.rank

        with NotedPool(3, main, limit_s=60.0) as pool:
            assert pool.call("answer") == [0, 1, 2]
            with suppress(WorkerError):
                pool.call("fail")
            pool.call("answer")

    def shape_lie(self, member: Member, workload: Workload) -> Workload:
        if member.rank != 1:
            return workload

        def shape_of(tensor: int, microbatch: int) -> Any:
            sizes, dtype = workload.shape_of(tensor, microbatch)
            return (*sizes[:-1], sizes[-1] + 1), dtype

        return replace(workload, shape_of=shape_of)

    def other_torch(self, member: Member, workload: Workload) -> Workload:
        if member.rank == 1:
            torch.__version__ = "1.0.0"  # type: ignore[attr-defined]
        return workload

    def stuck_at_start(self, member: Member, workload: Workload) -> Workload:
        if member.rank == 1:
            time.sleep(600)
        return workload

    def interrupted(self, rank: int, news: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def terminated(self, rank: int, news: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def clock_readings(skew_ns: int, drift: float) -> list[Any]:
    """Return how far the clock of rank 1 seems to be ahead, twice, if it is by so much."""
    begin = time.perf_counter_ns()

    def skewed() -> int:
        now = time.perf_counter_ns()
        return now + skew_ns + round(drift * (now - begin))

    def main(member: Member, _: object) -> list[Any]:
        clock = skewed if member.rank == 1 else time.perf_counter_ns
        readings = [read_clock(member, clock=clock)]
        time.sleep(0.2)
        readings.append(read_clock(member, clock=clock))
        moved = to_rank_0(readings)
        true_ns = time.perf_counter_ns()
        return [readings, int(moved(np.array(clock())) - true_ns)]

    with NotedPool(3, main, limit_s=60.0) as pool:
        return pool.call(None)


def main(path: str) -> None:
    # A shell that starts tests in the background lets them ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    begin = Scenarios(JobDirectory(Path(path)))
    scenarios: dict[str, Callable[[], None]] = {
        "killed": lambda: begin.run_with_code(lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "frozen": lambda: begin.run_with_code(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
        "all frozen": lambda: begin.run(send(signal.SIGSTOP, 0, 1, 2)),
        "raises": lambda: begin.run_with_code(fail),
        "sleeps": lambda: begin.run_with_code(lambda: time.sleep(600)),
        "aborts": lambda: begin.run_with_code(os.abort),
        "wrong shape": lambda: begin.run_changed(begin.shape_lie),
        "other torch": lambda: begin.run_changed(begin.other_torch),
        "stuck at start": lambda: begin.run_changed(begin.stuck_at_start),
        "reused": begin.reuse,
        "interrupted": lambda: begin.run(begin.interrupted),
        "terminated": lambda: begin.run(begin.terminated),
    }
    outcomes: dict[str, Any] = {"clocks": clock_readings(5_000_000_000, 0.001)}
    for name, scenario in scenarios.items():
        since = time.monotonic()
        try:
            scenario()
            kind, text, code = "", "", 0
        except BaseException as exc:  # noqa: BLE001 (the test looks at it)
            kind, text = type(exc).__name__, str(exc)
            code = getattr(exc, "exit_code", getattr(exc, "code", 0))
        outcomes[name] = {
            "kind": kind,
            "text": text,
            "code": code,
            "seconds": time.monotonic() - since,
            "left": [pid for pid in pools[-1].pids if Path(f"/proc/{pid}").exists()],
        }
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1])
