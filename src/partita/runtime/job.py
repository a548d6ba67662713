"""A run described by files, so that fresh processes, on this host or on several, can carry it out.

A job directory holds ``plan.json`` (the plan with its problem), ``job.json`` (how it is run), and,
once it runs: ``logs/rank3.log``, ``ranks/rank3.pt`` (what the rank saw), ``ranks/rank3.error`` (why
it failed), ``ranks/rank3.news`` (a line per step) and a board for each host, ``host0.board``. What
ranks leave after the k-th restart is in folders named ``attempt<k>`` below ``logs`` and ``ranks``.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch

from partita.atomic_files import replacing, write_atomically
from partita.capture.origin import ModelOrigin
from partita.core.codec import decode_part, encode_part, parse_json, read_json, write_json
from partita.core.graph import DeviceKind
from partita.core.problem import Problem
from partita.core.program import Program, TransferMode
from partita.core.solution import Solution
from partita.errors import FormatError, InvalidInputError, PartitaError, reading
from partita.http import split_address
from partita.program.lower import lower
from partita.program.order import ListOrder
from partita.ranks.failures import read_error, write_error
from partita.ranks.status import StatusBoard
from partita.runtime.data import DataSpec
from partita.runtime.emulation.rehearsal import Emulation
from partita.runtime.power import Power
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import RankOptions, RankReport, StepNews
from partita.runtime.rank_capture import Capture
from partita.runtime.rendezvous import START_LIMIT_S
from partita.runtime.restarts import PassedData
from partita.runtime.training.evaluation import Evaluation
from partita.runtime.training.recipe import Recipe
from partita.runtime.training.saving import Saving

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How a plan is run.

    Attributes:
        model: The model; None for a plan that is emulated, or run by a script.
        script: A script of the user's, with its arguments, that every rank runs.
        steps: Number of steps.
        recipe: What it trains with.
        seed: Seed of all random numbers.
        order: Whose order the devices list their compute in.
        transfers: Whether transfers run beside compute or hold it.
        same_data: Whether every step sees the data of the first.
        keep_results: Whether outputs, gradients and weights are kept for a comparison.
        capture: What else is noted of the last step.
        stall_limit_s: How long an instruction may take before the run is given up.
        start_limit_s: How long hosts and ranks wait for one another to come.
        device: What the ranks compute on: GPUs with NCCL, or the CPU with gloo.
        emulate: How it is emulated instead, but for steps, transfers and power, which are those of
            the job; None = it is run for real.
        power: How it sees to its energy; None = it does not.
        data: The data that it trains on.
        evaluation: When it is evaluated on held-out data.
        checkpoints: Folder of its checkpoints; empty = it saves nothing.
        save_every: Steps from one checkpoint to the next; 0 = only where it ends before its last.
        keep: Number of checkpoints that stay.
        resume: A checkpoint, or a folder of them, to go on from; ``auto`` = the newest of its own
            folder; None = it begins at the beginning.
        passed: Data that are left out, as steps on them had no numbers.
        weights: File or directory of the first weights; empty = they are drawn.
        compared: Whether whoever made the job has compared the graph with the model, in the modes
            that it runs in. Ranks need not do it again, which takes the memory of a whole model.
    """

    model: ModelOrigin | None = None
    script: tuple[str, ...] = ()
    steps: int = 1
    recipe: Recipe = field(default_factory=Recipe)
    seed: int = 0
    order: ListOrder = ListOrder.DEVICE
    transfers: TransferMode = TransferMode.OVERLAPPED
    same_data: bool = False
    keep_results: bool = True
    capture: Capture = Capture.NONE
    stall_limit_s: float = 300.0
    start_limit_s: float = START_LIMIT_S
    device: DeviceKind = DeviceKind.CPU
    emulate: Emulation | None = None
    power: Power | None = None
    data: DataSpec = field(default_factory=DataSpec)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: str = ""
    save_every: int = 0
    keep: int = 2
    resume: str | None = None
    passed: tuple[PassedData, ...] = ()
    weights: str = ""
    compared: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidInputError(f"steps of a job is {self.steps}; expected 1 or more")
        self.saving()
        for what in ("stall_limit_s", "start_limit_s"):
            if not 0 < getattr(self, what) <= 1e9:
                raise InvalidInputError(f"{what} of a job is {getattr(self, what)}; expected > 0")
        if (self.model is not None) + bool(self.script) + (self.emulate is not None) != 1:
            raise InvalidInputError(
                "a job needs a model to run, or a script, or settings to emulate its plan"
            )
        if self.emulate is not None and self.order is not ListOrder.DEVICE:
            raise InvalidInputError(
                f"order {self.order.value!r} is for real runs; a plan is emulated in the order "
                f"{ListOrder.DEVICE.value!r}"
            )

    def saving(self) -> Saving | None:
        """Return when it saves and what it goes on from; None = it saves nothing.

        Raises:
            InvalidInputError: It is to save or go on, but there is no folder for checkpoints.
        """
        if not self.checkpoints:
            if self.save_every or self.resume:
                raise InvalidInputError(
                    "a job that saves or goes on from a checkpoint needs a folder of checkpoints"
                )
            return None
        return Saving(
            folder=self.checkpoints,
            every=self.save_every,
            keep=self.keep,
            resume=self.resume or "",
        )

    def rank_options(self) -> RankOptions:
        """Return how its ranks run."""
        return RankOptions(
            steps=self.steps,
            recipe=self.recipe,
            seed=self.seed,
            blocking=self.transfers is TransferMode.BLOCKING,
            stall_limit_s=self.stall_limit_s,
            keep_results=self.keep_results,
            capture=self.capture,
            power=self.power,
            evaluation=self.evaluation,
            saving=self.saving(),
        )

    def emulation(self) -> Emulation | None:
        """Return how the plan is emulated, with the steps, transfers and power of the job."""
        if self.emulate is None:
            return None
        blocking = self.transfers is TransferMode.BLOCKING
        return replace(self.emulate, steps=self.steps, blocking=blocking, power=self.power)

    def program(self, solution: Solution) -> Program:
        """Return what the devices of a plan do."""
        return lower(solution.problem, solution.plan, order=self.order)


def write_job(job: Job) -> str:
    """Return a job as text."""
    return json.dumps(encode_part(job), indent=2) + "\n"


def read_job(text: str) -> Job:
    """Return the job of a text that ``write_job`` wrote.

    Raises:
        FormatError: It is no job.
    """
    values = parse_json(text)
    if isinstance(values, dict) and "recipe" not in values:
        # Before there were recipes, a job had an optimizer and its rate.
        before = {key: values.pop(key) for key in ("optimizer", "learning_rate") if key in values}
        values["recipe"] = before
    return decode_part(values, Job, "job")


@dataclass(frozen=True, slots=True)
class JobDirectory:
    """The files of a job.

    Attributes:
        path: The directory.
        attempt: How often the job was restarted: each attempt has reports, errors, news and logs of
            its own, so that none is taken for that of another.
    """

    path: Path
    attempt: int = 0

    @property
    def ranks(self) -> Path:
        """Where ranks leave what they saw."""
        return self._of_attempt(self.path / "ranks")

    def log(self, rank: int) -> Path:
        """Return where a rank prints."""
        return self._of_attempt(self.path / "logs") / f"rank{rank}.log"

    def _of_attempt(self, folder: Path) -> Path:
        return folder / f"attempt{self.attempt}" if self.attempt else folder

    def attempts(self) -> list["JobDirectory"]:
        """Return the attempts that were made, in order; the first is there even before it is."""
        found = (path.name.removeprefix("attempt") for path in self.path.glob("ranks/attempt*"))
        numbers = sorted(int(name) for name in found if name.isdecimal())
        return [JobDirectory(self.path, number) for number in (0, *numbers)]

    def report(self, rank: int) -> Path:
        """Return where a rank leaves its report."""
        return self.ranks / f"rank{rank}.pt"

    def left_by(self, rank: int) -> list[Path]:
        """Return what a rank has left here in a run before: its report, error and news."""
        paths = (self.ranks / f"rank{rank}{suffix}" for suffix in (".pt", ".error", ".news"))
        return [path for path in paths if path.exists()]

    def open_board(self, host: int, ranks: int) -> StatusBoard:
        """Return the board of a host."""
        return StatusBoard(ranks, self.path / f"host{host}.board")

    def create(self, solution: Solution, job: Job) -> None:
        """Write a plan and how it is run; the directory is made if it is not there."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "plan.json", write_json(solution).encode())
        self.write_job(job)

    def write_job(self, job: Job) -> None:
        """Write how the plan is run, from the next attempt on."""
        # The address of the energy server may have its token in it.
        secret = job.power is not None and split_address(job.power.server)[1]
        write_atomically(
            self.path / "job.json", write_job(job).encode(), mode=0o600 if secret else 0o666
        )

    def prepare(self) -> None:
        """Make the folders that ranks write to."""
        for folder in (self.ranks, self.log(0).parent):
            folder.mkdir(parents=True, exist_ok=True)

    def read_job(self) -> Job:
        """Return how the plan is run.

        Raises:
            FormatError: The file is missing or wrong.
        """
        path = self.path / "job.json"
        with reading(path):
            return read_job(path.read_text(encoding="utf-8"))

    def read_solution(self) -> Solution:
        """Return the plan with its problem.

        Raises:
            FormatError: The file is missing, wrong, or holds something else.
        """
        path = self.path / "plan.json"
        with reading(path):
            solution = read_json(path.read_text(encoding="utf-8"))
        if not isinstance(solution, Solution):
            raise FormatError(
                "expected a partita.solution: a plan with its problem", path=str(path)
            )
        return solution

    def write_report(self, rank: int, report: RankReport) -> None:
        """Leave what a rank saw: whole, or not at all."""
        with replacing(self.report(rank)) as part:
            torch.save(report, part)

    def read_reports(self, ranks: Iterable[int]) -> list[RankReport]:
        """Return what the ranks saw.

        Raises:
            FormatError: A report is missing.
        """
        reports = []
        for rank in ranks:
            path = self.report(rank)
            if not path.exists():
                raise FormatError(f"rank {rank} left no report", path=str(path))
            reports.append(torch.load(path, map_location="cpu", weights_only=False))
        return reports

    def write_error(self, rank: int, error: PartitaError) -> None:
        """Leave why a rank failed."""
        write_atomically(self.ranks / f"rank{rank}.error", write_error(error).encode())

    def read_error(self, rank: int) -> PartitaError | None:
        """Return why a rank failed; None if it has not said."""
        path = self.ranks / f"rank{rank}.error"
        return read_error(path.read_text(encoding="utf-8")) if path.exists() else None

    def news_writer(self, rank: int) -> Callable[[StepNews | str], None]:
        """Return what adds a step that a rank has done, or a sentence that people should read.

        The file stays open as long as the rank's process lives: news come with every step.
        """
        path = self.ranks / f"rank{rank}.news"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        return lambda news: _write_all(file, f"{json.dumps(news)}\n".encode())

    def read_news(self, rank: int, begin: int) -> tuple[list[StepNews | str], int]:
        """Return what a rank has done and said, from a place in the file, and the next place."""
        path = self.ranks / f"rank{rank}.news"
        if not path.exists():
            return [], begin
        with path.open("rb") as file:
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0]
        lines = whole.splitlines()
        end = begin + len(whole) + 1 if lines else begin
        found = map(json.loads, lines)
        return [one if isinstance(one, str) else StepNews(*one) for one in found], end


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


@dataclass(frozen=True, slots=True)
class Placement:
    """Which ranks run on which host, and on which of its devices.

    Attributes:
        hosts: The ranks of each host, ascending.
        local_index: The number of each rank's device on its host.
    """

    hosts: tuple[tuple[int, ...], ...]
    local_index: tuple[int, ...] = field(default=())

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.local_index)


def place_ranks(problem: Problem, program: Program, num_hosts: int) -> Placement:
    """Return where the ranks of a Program run.

    The k-th host that the plan uses is the host with NODE_RANK k. A single host runs all ranks,
    whatever hosts the plan knows.

    Raises:
        InvalidInputError: The plan uses another number of hosts.
    """
    cluster = problem.cluster
    devices = [cluster.index_of[program.devices[device]] for device in used_devices(program)]
    host_of = [cluster.devices[device].host for device in devices]
    used = sorted(set(host_of))
    if num_hosts == 1 and len(used) > 1:
        return Placement((tuple(range(len(devices))),), tuple(range(len(devices))))
    if len(used) != num_hosts:
        names = ", ".join(cluster.hosts[host].name for host in used)
        raise InvalidInputError(
            f"the plan uses {len(used)} hosts ({names}), NNODES is {num_hosts}; set it to "
            f"{len(used)}, or to 1 to run everything here"
        )
    return Placement(
        hosts=tuple(tuple(rank for rank, at in enumerate(host_of) if at == host) for host in used),
        local_index=tuple(_index_on_host(problem, device) for device in devices),
    )


def _index_on_host(problem: Problem, device: int) -> int:
    """Return the number of a device among those of its kind on its host."""
    devices = problem.cluster.devices
    mine = devices[device]
    return sum(d.host == mine.host and d.kind is mine.kind for d in devices[:device])
