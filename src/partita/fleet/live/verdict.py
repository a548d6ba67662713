"""What the end of an attempt means: the job is done, goes on later, or has a fault."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from partita.fleet.engines.protocol import Cause, Status
from partita.fleet.engines.shim import CANNOT_START
from partita.fleet.lease import LoopState
from partita.fleet.live.files import figure
from partita.fleet.live.jobspec import JobSpec, Progress
from partita.fleet.live.store import AttemptRow
from partita.processes import how_it_ended


class End(StrEnum):
    """What becomes of the job."""

    FINISHED = "finished"
    WAITS = "waits"
    FAULT = "fault"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the end of an attempt means.

    Attributes:
        end: What becomes of the job.
        how: How the attempt ended, in a line.
        step: Steps that are safe.
    """

    end: End
    how: str
    step: int


def judge(
    spec: JobSpec,
    attempt: AttemptRow,
    status: Status,
    progress: Mapping[str, Any],
    last_line: str = "",
) -> Verdict:
    """Return what the end of an attempt means.

    A job that reports its steps is done when it reported so after its last checkpoint, however its
    process ended; an exit code of 0 is not enough. One that reports none is done when it ends
    with 0 without having been asked to stop. What the engine or somebody else ended is no fault of
    the job.

    Args:
        spec: The job.
        attempt: The attempt that has ended.
        status: How its process ended.
        progress: The last word of the job, of this attempt or of an earlier one.
        last_line: The last line it printed.
    """
    step = min(int(figure(progress, "saved_step") or 0), spec.steps)
    if progress.get("state") == LoopState.DONE and step >= spec.steps:
        return Verdict(end=End.FINISHED, how=f"{spec.steps} steps done", step=spec.steps)
    ended = how_it_ended(status.exit_code) if status.exit_code is not None else "was killed"
    ended = status.why or ended
    asked = attempt.stop_s is not None
    if spec.progress is Progress.NONE and status.exit_code == 0 and not asked:
        return Verdict(end=End.FINISHED, how=ended, step=spec.steps)
    if asked:
        if attempt.killed:
            ended = f"ignored the end of its lease: SIGKILL {spec.grace_s:g} s after SIGTERM"
        return Verdict(end=End.WAITS, how=ended, step=step)
    if status.cause is not Cause.ITSELF:
        end = End.WAITS if status.cause is Cause.ENGINE else End.CANCELLED
        return Verdict(end=end, how=ended, step=step)
    if _gave_back(attempt, progress, status):
        return Verdict(end=End.WAITS, how="its lease was not renewed in time", step=step)
    if status.exit_code == 0:
        ended += f" after {step} of {spec.steps} steps" if progress else " and reported no steps"
    elif last_line and status.exit_code is not None:
        what = "could not be started" if status.exit_code == CANNOT_START else ended
        ended = f"{what}: {last_line.strip()[:200]}"
    return Verdict(end=End.FAULT, how=ended, step=step)


def _gave_back(attempt: AttemptRow, progress: Mapping[str, Any], status: Status) -> bool:
    """Whether the job stopped by itself because nobody renewed its lease."""
    return (
        status.exit_code == 0
        and progress.get("attempt") == attempt.id.number
        and progress.get("state") == LoopState.STOPPED
    )
