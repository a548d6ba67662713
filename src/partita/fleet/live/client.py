"""The way to a live fleet: its routes as functions, which outlive a restart of its server."""

import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from partita.errors import (
    InfeasibleError,
    InvalidInputError,
    PartitaError,
    UnsupportedError,
    WorkerError,
)
from partita.fleet.gigabytes import in_bytes
from partita.fleet.live.jobspec import JobSpec
from partita.http import ServerError, ServerLink

DEFAULT_PORT = 7788
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
PATIENCE_S = 30.0
"""How long a fleet that does not answer is asked again, unless said otherwise."""
_PAUSE_S = 0.2
_AWAY = (0, 408, 429, 502, 503, 504)
"""Statuses of a server that is busy or starts again, or of a proxy before such a one."""
_T = TypeVar("_T")


class FleetClient:
    """Speaks to a fleet's server, and asks again while it is away.

    A server that has never answered may not be there at all: only a submission, which somebody
    wants to be rid of, is tried again then. Every request may be sent twice: a submission carries
    a key by which the server knows it again.

    Args:
        url: Its address.
        token: What it wants to be shown; may be empty.
        timeout_s: How long an answer may take.
        patience_s: How long a request is tried again where nobody answers.
        on_progress: Called once in each such time, with why.

    Raises:
        InvalidInputError: It is no such address.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str = "",
        timeout_s: float = 30.0,
        patience_s: float = PATIENCE_S,
        on_progress: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._link = ServerLink(
            url, noun="fleet server", token=token, timeout_s=timeout_s, keeps_open=False
        )
        self.url, self._patience_s, self._on_progress = self._link.url, patience_s, on_progress
        self._has_answered = False

    def submit(self, spec: JobSpec) -> int:
        """Submit a job and return its number."""
        body = {**spec.to_json(), "key": uuid.uuid4().hex}
        return int(self._asked(lambda: self._link.post("/fleet/jobs", body), submits=True)["id"])

    def info(self) -> Any:  # noqa: ANN401 (JSON)
        """Return how the fleet is set up."""
        return in_bytes(self._get("/fleet"))

    def jobs(self, *, all_jobs: bool = False) -> Any:  # noqa: ANN401 (JSON)
        """Return the jobs that are not done, or all."""
        return in_bytes(self._get("/fleet/jobs", all=str(all_jobs).lower()))

    def status(self, job: int) -> Any:  # noqa: ANN401 (JSON)
        """Return everything about a job."""
        return in_bytes(self._get(f"/fleet/jobs/{job}"))

    def cancel(self, job: int) -> None:
        """Let a job end."""
        self._asked(lambda: self._link.delete(f"/fleet/jobs/{job}"))

    def log(self, job: int, offset: int) -> tuple[str, int, bool]:
        """Return what a job printed, where to go on, and whether that is all."""
        answer = self._get(f"/fleet/jobs/{job}/log", offset=offset)
        return answer["text"], answer["offset"], answer["ended"]

    def drain(self, *, on: bool) -> None:
        """Drain the fleet, or let it go on."""
        self._asked(lambda: self._link.post("/fleet/drain", {"on": on}))

    def history(self) -> Any:  # noqa: ANN401 (JSON)
        """Return who ran where and when, as a document."""
        return self._get("/fleet/history")

    def _get(self, path: str, **query: Any) -> Any:  # noqa: ANN401 (JSON)
        return self._asked(lambda: self._link.get(path, query))

    def _asked(self, ask: Callable[[], _T], *, submits: bool = False) -> _T:
        """Return an answer; what a refusal stands for is raised."""
        is_patient = submits or self._has_answered
        last_s = time.monotonic() + (self._patience_s if is_patient else 0.0)
        is_told = False
        while True:
            try:
                found = ask()
            except ServerError as exc:
                if exc.status not in _AWAY or time.monotonic() >= last_s:
                    raise self._refusal(exc, submits=submits) from exc
                if not is_told:
                    self._on_progress(
                        f"the fleet at {self.url} does not answer ({exc.detail}); it is asked "
                        f"again for {self._patience_s:g} s"
                    )
                    is_told = True
                time.sleep(min(_PAUSE_S, max(0.0, last_s - time.monotonic())))
            else:
                self._has_answered = True
                return found

    def _refusal(self, exc: ServerError, *, submits: bool) -> PartitaError:
        """Return the error that an answer stands for, or that there is none."""
        if exc.status > 200:
            return _refusal(exc, submits=submits)
        return UnsupportedError(
            f"no fleet answers at {self.url} ({exc.detail}); start one by 'partita fleet serve', "
            "or give its --server"
        )


def _refusal(exc: ServerError, *, submits: bool) -> PartitaError:
    """Return the error that an answer stands for."""
    detail = exc.detail
    if isinstance(detail, list):
        detail = "; ".join(
            f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}" for each in detail
        )
    if exc.status == 401:
        return UnsupportedError(
            f"the server refuses: {detail}; give --token-file or PARTITA_TOKEN (a fleet that was "
            "given none keeps its own in token, in the folder beside its --state)"
        )
    if exc.status in (403, 408, 421, 429, 503):
        return UnsupportedError(f"the server refuses: {detail}")
    if exc.status == 409 and submits:
        return InfeasibleError(str(detail))
    if exc.status >= 500:
        return WorkerError(f"the server failed: {detail}")
    return InvalidInputError(str(detail))
