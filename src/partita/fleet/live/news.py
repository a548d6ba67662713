"""The way between a job and its scheduler: the fleet's HTTP API, else two files.

A job that runs elsewhere finds an address and a token of its own in its environment: what it has to
say goes there, and the answer is its lease. Where nobody answers, or no address is given, the files
in the job's directory serve, if it sees them: the scheduler reads and writes the same two.

Imports the standard library alone; speaks past all proxies and follows no redirection, so that the
token goes to the fleet and nowhere else.
"""

import hmac
import http.client
import json
import os
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from partita.fleet.live.files import LEASE, PROGRESS, read_json, write_json
from partita.processes import retry_pause_s

DIRECTORY_VARIABLE = "PARTITA_LEASE"
URL_VARIABLE = "PARTITA_NEWS"
TOKEN_VARIABLE = "PARTITA_NEWS_TOKEN"
NEWS_PATH = "/fleet/news/"
"""Path of the route, before the number of the job; jobs show their own token there."""
_LIMIT_S = 3.0
_WORD_PAUSE_S = 0.5
"""Pause before a last word that was not heard is said again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0


def news_token(secret: str, job: int, attempt: int) -> str:
    """Return the token of one attempt, by which it can speak of itself and of nothing else."""
    return hmac.new(secret.encode(), f"{job}/{attempt}".encode(), sha256).hexdigest()


class News:
    """A job's end of the way.

    Args:
        directory: The job's directory; None = there is none, or it is not to be seen here.
        url: Address of the news of the job; empty = none.
        token: The job's token.
    """

    def __init__(self, directory: Path | None, url: str = "", token: str = "") -> None:
        self._directory = directory
        self._url, self._token = url, token
        self._failures = 0
        self._again_s = 0.0

    @classmethod
    def of_environment(cls) -> "News":
        """Return the way that the environment of this process names."""
        name = os.environ.get(DIRECTORY_VARIABLE)
        return cls(
            Path(name) if name else None,
            os.environ.get(URL_VARIABLE, ""),
            os.environ.get(TOKEN_VARIABLE, ""),
        )

    @property
    def is_there(self) -> bool:
        """Whether there is a scheduler."""
        return self._directory is not None or bool(self._url)

    @property
    def is_far(self) -> bool:
        """Whether asking costs a call over the network."""
        return bool(self._url)

    def lease(self, attempt: int) -> dict[str, Any]:
        """Return the lease; empty where nobody knows it now."""
        return self._exchange(attempt, None)

    def report(self, attempt: int, words: Mapping[str, Any], *, patience_s: float = 0.0) -> None:
        """Report how far the job is; what is not heard is tried again for as long as given."""
        last_s = time.monotonic() + patience_s
        while not self._exchange(attempt, words) and time.monotonic() < last_s:
            time.sleep(_WORD_PAUSE_S)
            self._again_s = 0.0

    def _exchange(self, attempt: int, words: Mapping[str, Any] | None) -> dict[str, Any]:
        if self._url and time.monotonic() >= self._again_s:
            try:
                answer = self._post({"attempt": attempt, "progress": words})
            except (OSError, ValueError, http.client.HTTPException):
                self._failures += 1
                self._again_s = time.monotonic() + retry_pause_s(
                    self._failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S
                )
            else:
                self._failures = 0
                return answer
        if self._directory is None:
            return {}
        if words is not None:
            try:
                write_json(self._directory / PROGRESS, words)
            except OSError:
                return {}
        return read_json(self._directory / LEASE)

    def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        address = urlsplit(self._url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else None
        connection = (kind or http.client.HTTPConnection)(
            address.hostname or "", address.port, timeout=_LIMIT_S
        )
        try:
            headers = {
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/json",
            }
            connection.request("POST", address.path, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read(2**20)
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise ValueError(f"the fleet answers {answer.status}")
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("the fleet answers with no object")
        return value
