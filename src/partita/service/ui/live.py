"""What runs now: run directories, which any run writes to while it goes on, and a live fleet."""

import math
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partita.errors import PartitaError
from partita.fleet.live.client import FleetClient
from partita.flows.runs.live import folder_of, look_at_run, runs_in
from partita.http import ServerLink
from partita.runtime.directory import RESULTS, has_results
from partita.service.errors import Refusal, printable
from partita.service.settings import PageSettings

SERVER_TIMEOUT_S = 2.0
MOST_RUNS = 40
MOST_JOBS = 200
_PAUSE_S = 10.0
_ENERGY = (
    *("job_id", "scheduler", "state", "version", "time_s", "energy_j", "iteration_s"),
    *("iteration_j", "stragglers", "silent", "note"),
)
"""What is shown of a job of the energy server: no more than that travels on."""


class LiveView:
    """Looks at runs and at a fleet.

    Args:
        settings: Where they are.
    """

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._ended: dict[str, tuple[int, dict[str, Any]]] = {}
        self._errors: dict[str, tuple[str, float]] = {}

    def look(self) -> dict[str, Any]:
        """Return runs, the latest first, and the fleet, as they are now."""
        runs = runs_in(self._settings.runs)[:MOST_RUNS]
        return {
            "at_s": time.time(),
            "folder": printable(str(self._settings.runs)),
            "command": printable(
                shlex.join(["partita", "results", "--runs", str(self._settings.runs)])
            ),
            "runs": [self._look_at(folder) for folder in runs],
            "fleet": self._asked("fleet", self._fleet),
            "energy": self._asked("energy", self._energy) if self._settings.energy_server else None,
        }

    def _look_at(self, folder: Path) -> dict[str, Any]:
        """Return a run in short; one that has ended is read once."""
        results = folder / RESULTS
        if not results.is_file():
            return look_at_run(folder).to_json()
        stamp = results.stat().st_mtime_ns
        known = self._ended.get(folder.name)
        if known is None or known[0] != stamp:
            known = stamp, look_at_run(folder).to_json()
            self._ended[folder.name] = known
        return known[1]

    def run(self, name: str) -> dict[str, Any]:
        """Return everything about a run as it is now."""
        view = look_at_run(self.folder_of(name), whole=True)
        return {**view.to_json(), "figures": view.figures(), "at_s": time.time()}

    def folder_of(self, name: str) -> Path:
        """Return the directory of a run by its name.

        Raises:
            Refusal: 404: no run has that name.
        """
        try:
            return folder_of(self._settings.runs, name)
        except PartitaError as exc:
            raise Refusal(404, str(exc)) from exc

    @staticmethod
    def has_ended(folder: Path) -> bool:
        """Return whether a run has left its results."""
        return has_results(folder)

    def _asked(self, name: str, ask: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what a server says; where nobody answers it is asked again after a while."""
        error, again_s = self._errors.get(name, ("", -math.inf))
        if time.monotonic() < again_s:
            return {"error": error}
        try:
            return ask()
        except PartitaError as exc:
            error = printable(str(exc))
            self._errors[name] = (error, time.monotonic() + _PAUSE_S)
            return {"error": error}

    def _fleet(self) -> Mapping[str, Any]:
        """Return the fleet and its jobs."""
        client = FleetClient(
            self._settings.fleet,
            token=self._settings.fleet_token,
            timeout_s=SERVER_TIMEOUT_S,
            patience_s=0.0,
        )
        jobs = client.jobs(all_jobs=True)
        command = shlex.join(["partita", "fleet", "queue", "--all", "--server", client.url])
        found = {"url": client.url, **client.info(), "jobs": jobs[-MOST_JOBS:]}
        return {**found, "command": command}

    def _energy(self) -> Mapping[str, Any]:
        """Return the jobs of the energy server, with the version of their clocks."""
        link = ServerLink(
            self._settings.energy_server,
            noun="energy server",
            timeout_s=SERVER_TIMEOUT_S,
            keeps_open=False,
        )
        jobs = [{name: job[name] for name in _ENERGY} for job in link.get("/jobs", {})]
        return {"url": link.url, "jobs": jobs[-MOST_JOBS:]}
