"""The way to a live fleet: its routes as functions, with the standard library alone."""

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from partita.errors import (
    InfeasibleError,
    InvalidInputError,
    PartitaError,
    UnsupportedError,
    WorkerError,
)
from partita.fleet.live.jobspec import JobSpec

DEFAULT_URL = "http://127.0.0.1:7788"
_PAUSE_S = 0.2


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
        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidInputError(f"server {url!r}; expected an address like {DEFAULT_URL}")
        self.url = url.rstrip("/")
        self._token, self._timeout_s, self._patience_s = token, timeout_s, patience_s

    def submit(self, spec: JobSpec) -> int:
        """Submit a job and return its number; asks again where the answer was lost."""
        body = {**spec.said(), "key": uuid.uuid4().hex}
        last_s = time.monotonic() + self._patience_s
        while True:
            try:
                return int(self._request("POST", "/fleet/jobs", body)["id"])
            except UnsupportedError:
                if time.monotonic() > last_s:
                    raise
                time.sleep(_PAUSE_S)

    def info(self) -> Any:  # noqa: ANN401 (JSON)
        """Return how the fleet is set up."""
        return self._request("GET", "/fleet")

    def jobs(self, *, all_jobs: bool = False) -> Any:  # noqa: ANN401 (JSON)
        """Return the jobs that are not done, or all."""
        return self._request("GET", f"/fleet/jobs?all={str(all_jobs).lower()}")

    def status(self, job: int) -> Any:  # noqa: ANN401 (JSON)
        """Return everything about a job."""
        return self._request("GET", f"/fleet/jobs/{job}")

    def cancel(self, job: int) -> None:
        """Let a job end."""
        self._request("DELETE", f"/fleet/jobs/{job}")

    def log(self, job: int, offset: int) -> tuple[str, int, bool]:
        """Return what a job printed, where to go on, and whether that is all."""
        said = self._request("GET", f"/fleet/jobs/{job}/log?offset={offset}")
        return said["text"], said["offset"], said["ended"]

    def drain(self, *, on: bool) -> None:
        """Drain the fleet, or let it go on."""
        self._request("POST", "/fleet/drain", {"on": on})

    def history(self) -> Any:  # noqa: ANN401 (JSON)
        """Return who ran where and when, as a document."""
        return self._request("GET", "/fleet/history")

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 (JSON)
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as exc:
            raise _refusal(exc, submits=method == "POST") from exc
        except (OSError, ValueError) as exc:
            raise UnsupportedError(
                f"no fleet answers at {self.url} ({getattr(exc, 'reason', exc)}); start one by "
                "'partita fleet serve', or give its --server"
            ) from exc


def _refusal(exc: urllib.error.HTTPError, *, submits: bool) -> PartitaError:
    """Return the error that an answer stands for."""
    try:
        detail = json.loads(exc.read())["detail"]
    except (OSError, ValueError, KeyError, TypeError):
        detail = exc.reason
    if isinstance(detail, list):
        detail = "; ".join(
            f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}" for each in detail
        )
    if exc.code == 401:
        return UnsupportedError(
            f"the server refuses: {detail}; give --token-file or PARTITA_TOKEN (a fleet that was "
            "given none keeps its own in token, in the folder beside its --state)"
        )
    if exc.code in (403, 421, 503):
        return UnsupportedError(f"the server refuses: {detail}")
    if exc.code == 409 and submits:
        return InfeasibleError(str(detail))
    if exc.code >= 500:
        return WorkerError(f"the server failed: {detail}")
    return InvalidInputError(str(detail))
