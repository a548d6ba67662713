"""A run under kills, freezes, cut links and a full disk: its losses are those of a quiet one.

* **faults**: 4 forked ranks, 200 steps, 30 SIGKILLs at random instants (a third of them while a
  checkpoint is written) and 5 SIGSTOPs. Losses of all steps equal an undisturbed run bit for bit.
* **disk**: the folder of checkpoints is a small tmpfs that is full from the second checkpoint on.
  Training goes on; needs root.
* **elastic**: a device is lost, the run is replanned for 3 and back for 4; losses to 1e-6.
* **damage**: a newest checkpoint that is truncated, or has one other byte, is never loaded.
* **links**: 2 + 2 fresh ranks in two network namespaces whose link is cut twice; needs root.

No process may be left by any of them. Times lost are shown per fault; they depend on the machine.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _harness import run_groups

from partita.capture.origin import Captures, ModelOrigin
from partita.capture.sources import SourceOptions, load_source
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.flows.runs.elastic import Available, DeviceRange, run_elastic
from partita.runtime import executor
from partita.runtime.emulation.link import emulated_link, why_unavailable
from partita.runtime.executor import Run, make_task, run_forked
from partita.runtime.job import Job, JobDirectory
from partita.runtime.launch import collect
from partita.runtime.rank import RankOptions, StepNews
from partita.runtime.restarts import RestartLimit, Survival
from partita.runtime.training.recipe import Recipe
from partita.runtime.training.saving import AUTO, Saving
from partita.runtime.workload import model_workload
from partita.testing.builders import host_cluster, pipeline

RANKS = 4
MODEL = ModelOrigin(
    text="gpt3-small",
    options=SourceOptions(batch_size=1, sequence_length=8, scale=0.03, dtype="float64"),
)
STALL_LIMIT_S = 4.0
GROUPS = ("faults", "disk", "elastic", "damage", "links")
PIDS: list[int] = []


class NotedPool(executor.RankPool):
    """Ranks whose processes are noted."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        PIDS.extend(self.pids)


executor.RankPool = NotedPool  # type: ignore[misc]


def left_over() -> list[int]:
    """Return the ranks that still run."""
    return [pid for pid in PIDS if Path(f"/proc/{pid}").exists()]


@cache
def captures() -> Captures:
    """Return the model that all of them train."""
    torch.set_num_threads(1)
    return Captures(load_source(MODEL.text, MODEL.options), MODEL)


@cache
def solution_of(count: int) -> Solution:
    """Return a pipeline over some devices of a cluster of four."""
    graph = captures().at(MODEL.options.batch_size).graph
    whole = host_cluster(2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e8)
    cluster = whole.only(whole.device_names[:count])
    problem = Problem(graph=graph, cluster=cluster, objective=Objective())
    plan = pipeline(graph, cluster, list(range(count)), microbatches=4)
    return Solution(problem=problem, plan=plan, metric=Metric.THROUGHPUT, value=1.0, unit="s")


def run(
    steps: int,
    folder: Path | None = None,
    *,
    every: int = 5,
    resume: str = "",
    solution: Solution | None = None,
    on_step: Callable[[int, Any], None] = lambda _, __: None,
    survival: Survival | None = None,
) -> Run:
    """Run some steps in forked ranks, with checkpoints where there is a folder."""
    found = solution_of(RANKS) if solution is None else solution
    workload = model_workload(captures(), found.problem, found.plan)
    saving = None
    if folder is not None:
        saving = Saving(folder=str(folder), every=every, keep=3, resume=resume)
    options = RankOptions(
        steps=steps,
        recipe=Recipe(optimizer="adam"),
        stall_limit_s=STALL_LIMIT_S,
        keep_results=False,
        saving=saving,
    )
    task = make_task(found.problem, found.plan, workload)
    return run_forked(task, workload, options=options, on_step=on_step, survival=survival)


@cache
def quiet(steps: int) -> dict[int, float]:
    """Return the losses of a run that nobody disturbs."""
    return dict(run(steps).losses)


@dataclass
class Tormentor:
    """Sends signals to ranks at random instants, from the process that started them.

    A fault is due after a step of its own; the instant is drawn from then on. One that is for a
    save waits until a checkpoint is being written, and any but the first until other ranks are
    there: those of one attempt would be struck twice for one restart.
    """

    due: dict[int, tuple[int, bool]]
    folder: Path
    rng: random.Random
    done: list[tuple[str, bool]] = field(default_factory=list)
    _next: tuple[int, bool] | None = None
    _ending: tuple[int, ...] = ()

    def on_step(self, _: int, news: Any) -> None:
        """Prepare the fault that is due after a step."""
        # Another may have waited while its step went by.
        step = min(self.due, default=news.step + 1)
        if self._next is None and step <= news.step:
            self._next = self.due.pop(step)
            signal.setitimer(signal.ITIMER_REAL, self.rng.uniform(0.001, 0.3))

    def strike(self, *_: object) -> None:
        """Send a signal to a rank that is there."""
        assert self._next is not None
        number, while_saving = self._next
        ranks = tuple(PIDS[-RANKS:])
        alive = [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
        if (
            ranks == self._ending
            or not alive
            or (while_saving and not list(self.folder.glob("*.tmp")))
        ):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            return
        with suppress(ProcessLookupError):
            os.kill(self.rng.choice(alive), number)
            self.done.append((signal.Signals(number).name, while_saving))
            self._ending = ranks
        self._next = None


def tormented(
    steps: int, folder: Path, *, kills: int, stops: int, seed: int = 0
) -> tuple[Run, Tormentor]:
    """Run under kills and freezes."""
    rng = random.Random(seed)
    numbers = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    rng.shuffle(numbers)
    at = sorted(rng.sample(range(1, steps - 4), len(numbers)))
    due = {
        step: (int(number), number is signal.SIGKILL and place % 3 == 0)
        for place, (step, number) in enumerate(zip(at, numbers, strict=True))
    }
    tormentor = Tormentor(due, folder, rng)
    before = signal.signal(signal.SIGALRM, tormentor.strike)
    try:
        survival = Survival(
            limit=RestartLimit(restarts=20, pause_s=0.0),
            say=lambda text: print(f"  {text}", flush=True),
        )
        found = run(steps, folder, on_step=tormentor.on_step, survival=survival)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found, tormentor


def faults(folder: Path, steps: int = 200, kills: int = 30, stops: int = 5) -> dict[str, Any]:
    """Return what became of a run under kills and freezes."""
    found, tormentor = tormented(steps, folder / "faults", kills=kills, stops=stops)
    lost = [i.seconds for i in found.incidents if i.seconds == i.seconds]
    struck = [name for name, _ in tormentor.done]
    return {
        "faults_equal": dict(found.losses) == quiet(steps),
        "faults_steps": len(found.losses),
        "kills": struck.count("SIGKILL"),
        "kills_while_saving": sum(saving for _, saving in tormentor.done),
        "stops": struck.count("SIGSTOP"),
        "restarts": len(found.incidents),
        "lost_s_median": statistics.median(lost) if lost else 0.0,
        "lost_s_most": max(lost, default=0.0),
    }


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Yield a folder that holds so much."""
    folder.mkdir()
    size = f"size={size_bytes}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def disk(folder: Path, steps: int = 20) -> dict[str, Any]:
    """Return what became of a run whose disk is full from the second checkpoint on."""
    if os.geteuid() != 0:
        return {"disk": "not run: a small file system needs root"}
    run(5, folder / "one", every=5)
    needed = sum(file.stat().st_size for file in (folder / "one").rglob("*") if file.is_file())
    with small_disk(folder / "small", int(1.6 * needed)) as small:
        found = run(steps, small, every=5)
        names = sorted(path.name for path in small.glob("step-*"))
        again = run(steps, small, every=0, resume=AUTO)
    expected = {step: quiet(steps)[step] for step in range(5, steps)}
    return {
        "disk_equal": dict(found.losses) == quiet(steps),
        "disk_checkpoints": len(names),
        "disk_resumed_equal": dict(again.losses) == expected,
    }


def elastic(folder: Path, steps: int = 60) -> dict[str, Any]:
    """Return how far losses are from a quiet run's when it is replanned to 3 and back to 4."""
    names = solution_of(RANKS).problem.cluster.device_names
    file = folder / "devices"
    file.write_text(" ".join(names))
    seen: list[int] = []

    def on_step(_: int, news: Any) -> None:
        # The device is back once the three have done a step: before, nothing would have changed.
        if len(seen) == 1 and news.step == steps // 4:
            file.write_text(" ".join(names[:3]))
        if len(seen) == 2:
            file.write_text(" ".join(names))

    def run_plan(solution: Solution, stop: Callable[[], str], number: int) -> Run:
        seen.append(len(solution.problem.cluster))
        return run(
            steps,
            folder / "elastic",
            resume=AUTO if number else "",
            solution=solution,
            on_step=on_step,
            survival=Survival(limit=RestartLimit(restarts=2), stop=stop),
        )

    available = Available(names, DeviceRange(least=3, most=4), file)
    found = run_elastic(
        solution_of(RANKS),
        available,
        run_plan,
        lambda problem: solution_of(len(problem.cluster)),
        say=lambda text: print(f"  {text}", flush=True),
    )
    assert found.run is not None
    expected, losses = quiet(steps), found.run.losses
    gap = max(abs(losses[step] / loss - 1) for step, loss in expected.items())
    return {"elastic_devices": seen, "elastic_gap": gap, "elastic_steps": len(losses)}


def damage(folder: Path, steps: int = 12) -> dict[str, Any]:
    """Return how many damaged checkpoints were loaded."""
    loaded = equal = cases = 0
    run(10, folder / "whole", every=5)
    newest = "step-000010"
    files = sorted(path.name for path in (folder / "whole" / newest).iterdir())
    for name in files:
        for how in ("truncated", "flipped"):
            copy = folder / f"{how}-{name}"
            shutil.copytree(folder / "whole", copy)
            path = copy / newest / name
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data if how == "flipped" else data[: len(data) // 2])
            found = run(steps, copy, every=0, resume=AUTO)
            cases += 1
            loaded += min(found.losses) >= 10
            equal += dict(found.losses) == {s: quiet(steps)[s] for s in range(5, steps)}
    return {"damaged": cases, "damaged_loaded": loaded, "damaged_equal": equal}


LAUNCHER = """
import os, sys
from pathlib import Path
from partita.errors import PartitaError
from partita.runtime.emulation.link import enter_namespace
from partita.runtime.launch import launch
from partita.runtime.rendezvous import Host
from partita.runtime.restarts import RestartLimit, Survival
enter_namespace(sys.argv[2])
survival = Survival(limit=RestartLimit(restarts=5), say=lambda text: print(text, flush=True))
try:
    launch(Path(sys.argv[1]), Host.of(os.environ), survival=survival)
except PartitaError as exc:
    sys.stderr.write(str(exc))
    sys.exit(exc.exit_code)
"""


def links(folder: Path, steps: int = 120, cuts: int = 2) -> dict[str, Any]:
    """Return what became of a run over two hosts whose link is cut."""
    reason = why_unavailable()
    if reason is not None:
        return {"links": f"not run: {reason}"}
    files = JobDirectory(folder / "job")
    job = Job(
        model=MODEL,
        steps=steps,
        recipe=Recipe(optimizer="adam"),
        stall_limit_s=STALL_LIMIT_S,
        start_limit_s=120.0,
        keep_results=False,
        checkpoints=str(folder / "links"),
        save_every=5,
    )
    files.create(solution_of(RANKS), job)
    with emulated_link(rate_bytes_per_s=2e7, delay_s=0.001) as ends:
        launchers = [
            subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(files.path), end.name],
                env={
                    **os.environ,
                    "NNODES": "2",
                    "NODE_RANK": str(host),
                    "MASTER_ADDR": ends[0].address,
                    "MASTER_PORT": "29513",
                },
            )
            for host, end in enumerate(ends)
        ]
        for cut in range(cuts):
            _await_step(files, (cut + 1) * steps // (cuts + 2), launchers)
            for state in ("down", "up"):
                end = ends[1]
                subprocess.run(
                    ["ip", "-n", end.name, "link", "set", end.interface, state], check=True
                )
                if state == "down":
                    time.sleep(STALL_LIMIT_S + 3.0)
        codes = [launcher.wait(timeout=600) for launcher in launchers]
    losses = dict(collect(files.path).losses)
    return {
        "links_codes": codes,
        "links_cuts": cuts,
        "links_attempts": len(files.attempts()),
        "links_equal": losses == quiet(steps),
        "links_steps": len(losses),
    }


def _await_step(files: JobDirectory, step: int, launchers: list[Any]) -> None:
    """Wait until the newest attempt has done a step."""
    deadline = time.monotonic() + 300.0
    while time.monotonic() < deadline:
        news = [item for each in files.attempts() for item in each.read_news(0, 0)[0]]
        if any(isinstance(item, StepNews) and item.step >= step for item in news):
            return
        if any(launcher.poll() is not None for launcher in launchers):
            return
        time.sleep(0.05)


def measure(groups: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Run some groups; returns their figures and what is missed."""
    runs = {"faults": faults, "disk": disk, "elastic": elastic, "damage": damage, "links": links}
    figures: dict[str, Any] = {}
    for name in groups:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            found = runs[name](Path(folder))
        print(f"{name}: {json.dumps(found)}", flush=True)
        figures |= found
    figures["processes_left"] = len(left_over())
    wanted: dict[str, Callable[[Any], bool]] = {
        "faults_equal": bool,
        "kills": lambda n: n == 30,
        "stops": lambda n: n == 5,
        "disk_equal": bool,
        "disk_resumed_equal": bool,
        "elastic_devices": lambda seen: seen == [4, 3, 4],
        "elastic_gap": lambda gap: gap <= 1e-6,
        "damaged_loaded": lambda n: n == 0,
        "links_equal": bool,
        "links_codes": lambda codes: codes == [0, 0],
        "processes_left": lambda n: n == 0,
    }
    missed = [
        f"{k} is {figures[k]}" for k, ok in wanted.items() if k in figures and not ok(figures[k])
    ]
    missed += [f"{k} {v}" for k, v in figures.items() if str(v).startswith("not run")]
    return figures, missed


if __name__ == "__main__":
    run_groups(__doc__ or "", GROUPS, measure)
