"""Settings of the app and of the energy server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from partita.core.schedules import DEFAULT_SCHEDULE, Schedule
from partita.energy.policies.table import check_scheduler
from partita.errors import InvalidInputError
from partita.http import is_loopback
from partita.service.users import Users

DEFAULT_PORT = 7787
DEFAULT_POLL_LIMIT_S = 1800.0
DEFAULT_MAX_BODY_BYTES = 2**26
DEFAULT_BODY_LIMIT_S = 60.0
DEFAULT_MAX_IDLE_S = 7 * 24 * 3600.0
DEFAULT_SOLVE_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySettings:
    """Settings of the energy server.

    Attributes:
        state: The SQLite file that holds what was acknowledged.
        scheduler: Name in ``SCHEDULERS`` of the scheduler of new jobs.
        options: Its options.
        profile_steps: Iterations that clients are asked to report on at each clock.
        microbatches: Microbatches of jobs that give none; ``None`` = they have to.
        schedule: Schedule of jobs that give none.
        dump: Folder for the artifact's files; ``None`` = none are written.
        poll_limit_s: How long a long-poll lasts at most.
        max_idle_s: A job that nobody speaks of for so long is closed; after as long again its rows
            are dropped.
        solve_limit_s: How long one frontier may be solved.
    """

    state: Path
    scheduler: str = "all-max"
    options: Mapping[str, Any] = field(default_factory=dict)
    profile_steps: int = 5
    microbatches: int | None = None
    schedule: Schedule = DEFAULT_SCHEDULE
    dump: Path | None = None
    poll_limit_s: float = DEFAULT_POLL_LIMIT_S
    max_idle_s: float = DEFAULT_MAX_IDLE_S
    solve_limit_s: float = DEFAULT_SOLVE_LIMIT_S

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", Schedule(self.schedule))
        check_scheduler(self.scheduler, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    """Settings of the page.

    Attributes:
        runs: Folder whose runs are shown.
        fleet: Address of the live fleet that is shown.
        fleet_token: What that fleet wants to be shown; empty = nothing.
        energy_server: Address of the energy server whose jobs are shown; empty = none are.
        jobs: Processes that work at a time.
        waiting: Pieces of work that may wait for them.
        kept: Pieces of work whose results are kept.
        time_limit_s: How long a piece of work may take.
        memory_bytes: Memory that its process may take.
        answer_bytes: Longest part of its answer.
        upload_bytes: Largest document that may be sent.
        store_bytes: Length of all documents that are held, and of all results.
        tls: Whether it is served over TLS.
    """

    runs: Path = Path("runs")
    fleet: str = "http://127.0.0.1:7788"
    fleet_token: str = field(default="", repr=False)
    energy_server: str = field(default="", repr=False)
    jobs: int = 2
    waiting: int = 16
    kept: int = 64
    time_limit_s: float = 600.0
    memory_bytes: int = 8 * 2**30
    answer_bytes: int = 2**28
    upload_bytes: int = 2**25
    store_bytes: int = 2**29
    tls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the app.

    Attributes:
        host: Address that it is bound to.
        allow_hosts: Names that clients call it by, besides its address and those of loopback.
        users: Who may ask, by token; none = everybody, on loopback and without a fleet alone.
        max_body_bytes: Largest body of a request.
        body_limit_s: How long a body may take to arrive.
        version: Version of the package, as it is sent to clients.
        energy: The energy server; ``None`` = its routes are not there.
        page: The page; ``None`` = its routes are not there.
    """

    host: str = "127.0.0.1"
    allow_hosts: tuple[str, ...] = ()
    users: Users = field(default_factory=Users, repr=False)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    body_limit_s: float = DEFAULT_BODY_LIMIT_S
    version: str = "0"
    energy: EnergySettings | None = None
    page: PageSettings | None = None

    def __post_init__(self) -> None:
        # The page has keys of its own.
        if not (self.users or is_loopback(self.host) or self.is_page_alone):
            raise InvalidInputError(
                f"{self.host!r} can be reached from other machines: a token is needed; give "
                "--token-file, --users or PARTITA_TOKEN, or bind to 127.0.0.1"
            )

    @property
    def is_page_alone(self) -> bool:
        """Whether the page is all that is served, so that its cookie is asked for everywhere."""
        return self.page is not None and self.energy is None and not self.users
