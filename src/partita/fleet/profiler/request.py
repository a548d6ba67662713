"""What is profiled and how: the request, and the arguments of a script in each run."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from partita.errors import InvalidInputError
from partita.fleet.profiler.contract import (
    REQUIRED,
    SPELLINGS,
    Clause,
    first_spelling,
    take_option,
)
from partita.fleet.profiler.isolation import IsolationRequest
from partita.fleet.profiler.runner import Ranks

DEFAULT_BATCH = 256
DEFAULT_ITERATIONS = 50
_GIVEN_IF_TAKEN = (Clause.JOB_NAME, Clause.LOCAL_RANK, Clause.NODES, Clause.NODE_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """A script, and how it is to be profiled. None = the script's own value, or the usual one.

    Attributes:
        script: The training script.
        arguments: Its own arguments.
        name: Of the job.
        ranks: Its processes, one per GPU.
        max_cpus: Top of the sweep; None = all CPUs of this machine.
        cpu_step: From a point of the sweep to the next; None = by the number of CPUs.
        memory_bytes: Memory of a run; None = all of this machine.
        batch_size: Samples per iteration and GPU.
        workers: Loading processes per GPU; None = one for each CPU a GPU has.
        iterations: Of each run.
        epochs: Of each run.
        data: The dataset, as it is passed to the script.
        dataset_bytes: Its size; None = of its files.
        dataset_samples: Its samples; None = its files.
        repeats: Runs of each point; their median counts.
        tolerance: Relative error that a filled-in speed may have.
        local_disk: Folder whose storage is measured; None = that of the dataset.
        storage: Bandwidth such as ``500MB/s``, or a file that keeps it in MB/s.
        memory_prefix: Prefix of files that keep the throughput of memory, in GiB/s.
        source: Directory that the script runs in and may import from; None = this one.
        python: The interpreter, where no container brings one.
        isolation: How limits are to be enforced.
        limit_s: Seconds that a run may take.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    name: str = "job-0"
    ranks: Ranks = field(default_factory=Ranks)
    max_cpus: float | None = None
    cpu_step: float | None = None
    memory_bytes: int | None = None
    batch_size: int | None = None
    workers: int | None = None
    iterations: int | None = None
    epochs: int | None = None
    data: str | None = None
    dataset_bytes: int | None = None
    dataset_samples: int | None = None
    repeats: int = 1
    tolerance: float = 0.1
    local_disk: Path | None = None
    storage: str = ""
    memory_prefix: str = ""
    source: Path | None = None
    python: str = sys.executable
    isolation: IsolationRequest = field(default_factory=IsolationRequest)
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.script.is_file():
            raise InvalidInputError(f"{self.script} is no file; name a training script")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise InvalidInputError(f"job name {self.name!r} cannot name a folder")
        ranks = self.ranks
        if not 0 <= ranks.node_rank < ranks.nodes:
            raise InvalidInputError(
                f"--node_rank {ranks.node_rank} with --nnodes {ranks.nodes}; expected 0 to "
                f"{ranks.nodes - 1}"
            )
        if ranks.nodes > 1 and self.max_cpus is None:
            raise InvalidInputError(
                "several nodes sweep the same CPU counts: name the top of the sweep by --cpu"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """Arguments of the script, with the profiler's values before its own.

    Attributes:
        batch_size: Samples per iteration and GPU.
        iterations: Of each run.
        data: The dataset.
        epochs: Of each run; None = the script's affair.
        workers: Loading processes per GPU; None = by the CPUs of the point.
        rest: The script's arguments without those above.
        first: Spellings to begin with.
        required: What the script must take.
        unseen: What of that neither its text nor its arguments name.
    """

    batch_size: int
    iterations: int
    data: str
    epochs: int | None
    workers: int | None
    rest: tuple[str, ...]
    first: Mapping[Clause, str]
    required: tuple[Clause, ...]
    unseen: tuple[Clause, ...] = ()

    def workers_at(self, cpus: float, ranks: Ranks) -> int:
        """Return the loading processes of each rank: one for each CPU, or part of one, it has."""
        return self.workers or max(1, math.ceil(cpus) // ranks.per_node)

    def arguments(
        self,
        spellings: Mapping[Clause, str],
        ranks: Ranks,
        *,
        name: str,
        cpus: float,
        iterations: int,
    ) -> list[str]:
        """Return the arguments of a run; each rank gets its number when it starts."""
        values: dict[Clause, object] = {
            Clause.BATCH: self.batch_size,
            Clause.WORKERS: self.workers_at(cpus, ranks),
            Clause.ITERATIONS: iterations,
            Clause.DATA: self.data,
            Clause.EPOCHS: self.epochs,
            Clause.JOB_NAME: name,
            Clause.NODES: ranks.nodes,
            Clause.NODE_RANK: ranks.node_rank,
        }
        options = [
            word
            for clause, value in values.items()
            if clause in spellings
            for word in (spellings[clause], str(value))
        ]
        end = self.rest.index("--") if "--" in self.rest else len(self.rest)
        return [*self.rest[:end], *options, *self.rest[end:]]


def script_options(request: ProfileRequest, source: str) -> ScriptOptions:
    """Return the arguments of a script.

    Args:
        request: The profiler's side.
        source: The text of the script.

    Raises:
        InvalidInputError: The script's own batch size or number of iterations is no number.
    """
    rest = list(request.arguments)
    given: dict[Clause, str | None] = {}
    taken = [*REQUIRED, *_GIVEN_IF_TAKEN]
    if request.epochs is not None:
        taken.append(Clause.EPOCHS)
    for clause in taken:
        given[clause], rest = take_option(rest, clause)
    required = (*REQUIRED, *((Clause.EPOCHS,) if request.epochs is not None else ()))
    named = {clause: first_spelling(clause, source, request.arguments) for clause in required}
    first = {clause: spelling or SPELLINGS[clause][0] for clause, spelling in named.items()}
    for clause in _GIVEN_IF_TAKEN:
        spelling = first_spelling(clause, source, request.arguments)
        if spelling is not None:
            first[clause] = spelling
    return ScriptOptions(
        batch_size=_number(request.batch_size, given[Clause.BATCH], DEFAULT_BATCH, "batch size"),
        iterations=_number(
            request.iterations, given[Clause.ITERATIONS], DEFAULT_ITERATIONS, "number of iterations"
        ),
        data=request.data or given[Clause.DATA] or "./",
        epochs=request.epochs,
        workers=request.workers,
        rest=tuple(rest),
        first=first,
        required=required,
        unseen=tuple(clause for clause, spelling in named.items() if spelling is None),
    )


def _number(ours: int | None, theirs: str | None, usual: int, what: str) -> int:
    if ours is not None:
        return ours
    if theirs is None:
        return usual
    if not theirs.isdigit() or int(theirs) < 1:
        raise InvalidInputError(f"{what} {theirs!r} of the script; expected a whole number from 1")
    return int(theirs)
