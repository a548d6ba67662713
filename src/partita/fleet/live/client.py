"""The way to a live fleet: its routes as functions."""

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
from partita.fleet.live.jobspec import JobSpec
from partita.http import ServerError, ServerLink

DEFAULT_PORT = 7788
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"
_PAUSE_S = 0.2
_T = TypeVar("_T")


class FleetClient:
    """Speaks to a fleet's server.

    Args:
        url: Its address.
        token: What it wants to be shown; may be empty.
        timeout_s: How long an answer may take.
        patience_s: How long a submission is tried again where nobody answers.

    Raises:
        InvalidInputError: It is no such address.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        token: str = "",
        timeout_s: float = 30.0,
        patience_s: float = 3.0,
    ) -> None:
        self._link = ServerLink(
            url, noun="fleet server", token=token, timeout_s=timeout_s, keeps_open=False
        )
        self.url, self._patience_s = self._link.url, patience_s

    def submit(self, spec: JobSpec) -> int:
        """Submit a job and return its number; asks again where the answer was lost."""
        body = {**spec.to_json(), "key": uuid.uuid4().hex}
        last_s = time.monotonic() + self._patience_s
        while True:
            try:
                return int(
                    self._asked(lambda: self._link.post("/fleet/jobs", body), submits=True)["id"]
                )
            except UnsupportedError as exc:
                why = exc.__cause__
                is_passing = isinstance(why, ServerError) and why.is_passing
                if not is_passing or time.monotonic() > last_s:
                    raise
                time.sleep(_PAUSE_S)

    def info(self) -> Any:  # noqa: ANN401 (JSON)
        """Return how the fleet is set up."""
        return self._get("/fleet")

    def jobs(self, *, all_jobs: bool = False) -> Any:  # noqa: ANN401 (JSON)
        """Return the jobs that are not done, or all."""
        return self._get("/fleet/jobs", all=str(all_jobs).lower())

    def status(self, job: int) -> Any:  # noqa: ANN401 (JSON)
        """Return everything about a job."""
        return self._get(f"/fleet/jobs/{job}")

    def cancel(self, job: int) -> None:
        """Let a job end."""
        self._asked(lambda: self._link.delete(f"/fleet/jobs/{job}"))

    def log(self, job: int, offset: int) -> tuple[str, int, bool]:
        """Return what a job printed, where to go on, and whether that is all."""
        answer = self._get(f"/fleet/jobs/{job}/log", offset=offset)
        return answer["text"], answer["offset"], answer["ended"]

    def drain(self, *, on: bool) -> None:
        """Drain the fleet, or let it go on."""
        self._asked(lambda: self._link.post("/fleet/drain", {"on": on}), submits=True)

    def history(self) -> Any:  # noqa: ANN401 (JSON)
        """Return who ran where and when, as a document."""
        return self._get("/fleet/history")

    def _get(self, path: str, **query: Any) -> Any:  # noqa: ANN401 (JSON)
        return self._asked(lambda: self._link.get(path, query))

    def _asked(self, ask: Callable[[], _T], *, submits: bool = False) -> _T:
        """Return an answer; what a refusal stands for is raised."""
        try:
            return ask()
        except ServerError as exc:
            if exc.status > 200:
                raise _refusal(exc, submits=submits) from exc
            raise UnsupportedError(
                f"no fleet answers at {self.url} ({exc.detail}); start one by 'partita fleet "
                "serve', or give its --server"
            ) from exc


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
