"""A job as its user describes it, and as the policies see it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from partita.core.codec import decode_as, encode
from partita.core.fleet import MAX_JOB_GPUS, Job, Sensitivity, SensitivityOrigin
from partita.errors import InvalidInputError
from partita.names import check_plain, same_product

DEFAULT_RETRIES = 3
DEFAULT_GRACE_S = 30.0


class Progress(StrEnum):
    """How a job reports its progress."""

    LEASE = "lease"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """GPUs that would do.

    Attributes:
        least: The fewest.
        most: The most.
        type: Their type; empty = any.
    """

    least: int
    most: int
    type: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most <= MAX_JOB_GPUS:
            raise InvalidInputError(
                f"GPUs are {self.least} to {self.most}; expected 1 or more, the fewest first"
            )
        check_plain(self.type, "type of GPU")

    def __str__(self) -> str:
        count = f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"
        return f"{count} {self.type}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a user submits.

    Attributes:
        name: What tables call it.
        command: Program and arguments.
        folder: Working directory.
        gpus: GPUs that would do, the best first.
        steps: Steps of the whole job.
        progress: How it reports its progress.
        sensitivity: How its speed depends on what it gets.
        checkpoint: Directory of its checkpoints; None = it keeps them elsewhere, or has none.
        environment: Further variables.
        priority: Higher goes first.
        tenant: Who pays; may be empty.
        deadline_s: Seconds after the submission by which it should be done; NaN = none.
        retries: Faults in a row without progress after which it is given up.
        grace_s: Seconds from SIGTERM to SIGKILL.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    gpus: tuple[GpuChoice, ...] = (GpuChoice(least=1, most=1),)
    steps: int
    progress: Progress = Progress.LEASE
    sensitivity: Sensitivity
    checkpoint: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    priority: float = 0.0
    tenant: str = ""
    deadline_s: float = math.nan
    retries: int = DEFAULT_RETRIES
    grace_s: float = DEFAULT_GRACE_S

    def __post_init__(self) -> None:
        check_plain(self.name, "name")
        check_plain(self.tenant, "tenant")
        if not self.command or not self.command[0]:
            raise InvalidInputError(f"job {self.name!r} has no command")
        if not self.gpus:
            raise InvalidInputError(f"job {self.name!r} asks for no GPUs")
        if self.steps < 1:
            raise InvalidInputError(
                f"job {self.name!r}: steps are {self.steps}; expected 1 or more"
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return {
            "name": self.name,
            "command": list(self.command),
            "folder": str(self.folder),
            "gpus": [[each.least, each.most, each.type] for each in self.gpus],
            "steps": self.steps,
            "progress": str(self.progress),
            "sensitivity": encode(self.sensitivity),
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "environment": dict(self.environment),
            "priority": self.priority,
            "tenant": self.tenant,
            "deadline_s": None if math.isnan(self.deadline_s) else self.deadline_s,
            "retries": self.retries,
            "grace_s": self.grace_s,
        }


def read_spec(values: Mapping[str, Any]) -> JobSpec:
    """Return the job that a JSON object describes.

    Raises:
        InvalidInputError: A value is wrong.
    """
    rest = {
        key: values[key] for key in ("name", "steps", "priority", "tenant", "retries", "grace_s")
    }
    deadline, checkpoint = values["deadline_s"], values["checkpoint"]
    return JobSpec(
        **rest,
        command=tuple(values["command"]),
        folder=Path(values["folder"]),
        gpus=tuple(GpuChoice(least=a, most=b, type=kind) for a, b, kind in values["gpus"]),
        progress=Progress(values["progress"]),
        sensitivity=decode_as(values["sensitivity"], Sensitivity),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        environment=dict(values["environment"]),
        deadline_s=math.nan if deadline is None else float(deadline),
    )


def plain_sensitivity(
    name: str, *, iteration_s: float, cpus: float, memory_bytes: float, restart_s: float = math.nan
) -> Sensitivity:
    """Return the curve of a job that only gives what it wants: slower in proportion below that.

    Args:
        name: Of the job.
        iteration_s: Seconds of a step.
        cpus: CPUs per GPU.
        memory_bytes: Memory per GPU; 0 = not given, and not limited.
        restart_s: Seconds that a start from a checkpoint takes.
    """
    return Sensitivity(
        name=name,
        origin=SensitivityOrigin.MODELLED,
        iteration_s=iteration_s,
        cpus=np.array([cpus]),
        memory_bytes=np.array([memory_bytes]),
        speed=np.array([1.0]),
        measured=np.array([False]),
        restart_s=restart_s,
    )


def core_job(spec: JobSpec, number: int, arrival_s: float, gpus: Mapping[str, int]) -> Job:
    """Return a job as policies see it, on a cluster with some GPUs of each type.

    Of several choices those count whose GPUs are there. A policy knows one range for all types: the
    counts that all these choices allow, or where there are none in common, the first choice.

    Raises:
        InvalidInputError: The cluster has none of the types.
    """
    known = [kind for kind in gpus if kind]
    there = []
    for each in spec.gpus:
        # An engine's own name of a type may be longer: a100 is nvidia_a100_80gb there.
        meant = same_product(each.type, known) if each.type and known else each.type
        if meant is not None:
            there.append(replace(each, type=meant))
    if not there:
        wanted = " or ".join(str(each) for each in spec.gpus)
        raise InvalidInputError(
            f"job {spec.name!r} wants {wanted} GPUs; the cluster has {', '.join(known)}"
        )
    enough = [each for each in there if each.least <= gpus.get(each.type, each.least)]
    there = enough or there
    least, most = max(each.least for each in there), min(each.most for each in there)
    if least > most:
        there = there[:1]
        least, most = there[0].least, there[0].most
    named = tuple(dict.fromkeys(each.type for each in there if each.type and known))
    anywhere = any(not each.type for each in there)
    return Job(
        job_id=number,
        sensitivity=spec.sensitivity,
        arrival_s=arrival_s,
        iterations=spec.steps,
        gpus=least if least == most else there[0].most if there[0].most <= most else most,
        min_gpus=least,
        max_gpus=most,
        gpu_types=() if anywhere else named,
        tenant=spec.tenant,
        priority=spec.priority,
        deadline_s=arrival_s + spec.deadline_s,
    )
