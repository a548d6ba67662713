"""How the live scheduler is set up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from partita.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Settings of the live scheduler.

    Attributes:
        state: The SQLite file; the jobs' directories are beside it.
        round_s: Length of a round.
        poll_s: Seconds between two looks at the jobs.
        hold_s: How long a job goes on after the end of its lease when nobody renews it.
        backoff_s: Seconds before the first try after a fault; doubled with each in a row.
        restart_s: What a restart is taken to cost a job that does not say.
        quotas: GPUs that a tenant may hold, by name.
    """

    state: Path
    round_s: float = 300.0
    poll_s: float = 0.5
    hold_s: float = 3600.0
    backoff_s: float = 10.0
    restart_s: float = 30.0
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("round_s", "poll_s"):
            if not 0 < getattr(self, name) < 1e9:
                raise InvalidInputError(
                    f"{name} is {getattr(self, name)}; expected more than 0 seconds"
                )

    @property
    def home(self) -> Path:
        """Where the directories of jobs are."""
        return self.state.with_name(f"{self.state.name}.d").resolve()

    def directory(self, job: int) -> Path:
        """Return where lease, progress and log of a job are."""
        return self.home / f"job-{job}"
