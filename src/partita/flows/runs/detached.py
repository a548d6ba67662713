"""Runs that are left to themselves: a process in the background drives them from their directory.

``python -m partita.flows.runs.detached RUN`` is that process. It is told by ``request.json`` what
was asked, has the plan from ``plan.json``, and leaves what a run in the foreground leaves;
``partita results --follow`` shows how far it is.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.documents import save, write_text
from partita.errors import PartitaError, WorkerError
from partita.flows.results import Result
from partita.flows.runs.follow import DRIVER_LOG
from partita.flows.runs.requests import RunFields, RunRequest, SavingFields
from partita.flows.runs.steps import PreparedRun, carry_out, prepare_run, run_directory_of
from partita.processes import how_it_ended, last_lines
from partita.requests import fields_of, make
from partita.runtime.run_state import STATE

REQUEST = "request.json"
_DECIDED = {"detach", "epochs", "tokens"}
"""Options that have done their part."""
_LIMIT_S = 300.0
_LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DetachedRun(Result):
    """A run that was left to itself.

    Attributes:
        directory: The run directory.
        pid: The process that drives it.
    """

    directory: Path
    pid: int

    def lines(self) -> list[str]:
        """Return where it is, and how it is seen again."""
        return [
            f"{self.directory}: driven by process {self.pid}",
            f"partita results --follow {self.directory} shows it, --cancel ends it",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"directory": str(self.directory), "pid": self.pid}


def detach(prepared: PreparedRun) -> DetachedRun:
    """Let a process in the background carry out a plan; returns once it drives the run.

    Raises:
        WorkerError: It does not come; its log says why.
    """
    directory = run_directory_of(prepared).absolute()
    save(prepared.solution, directory / "plan.json")
    given = _given(prepared)
    write_text(directory / REQUEST, json.dumps(given, indent=2) + "\n")
    with (directory / DRIVER_LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _LIMIT_S
    while not (directory / STATE).exists():
        if process.poll() is not None or time.monotonic() > deadline:
            said = " ".join(last_lines(directory / DRIVER_LOG, 1))
            raise WorkerError(
                f"the driver of {directory} {how_it_ended(process.poll())} before it began: {said}"
            )
        time.sleep(_LOOK_S)
    return DetachedRun(directory=directory, pid=process.pid)


def _given(prepared: PreparedRun) -> dict[str, Any]:
    """Return how the plan is carried out; the plan itself has all that it was made of."""
    request = prepared.request
    kept = {field.name for kind in (RunFields, SavingFields) for field in fields_of(kind)}
    kept |= {"script", "seed", "optimizer", "precision"}
    if isinstance(request, RunRequest):
        kept.add("model")
    given = {name: value for name, value in request.given().items() if name in kept - _DECIDED}
    return {**given, "steps": prepared.steps}


def main(arguments: list[str]) -> int:
    """Drive the run of a directory; returns the exit code."""
    directory = Path(arguments[0])

    def tell(text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    try:
        given = json.loads((directory / REQUEST).read_text(encoding="utf-8"))
        prepared = prepare_run(make(RunRequest, plan=str(directory / "plan.json"), **given))
        outcome = carry_out(prepared, tell, directory=directory)
        assert outcome is not None  # the driver has it
        outcome.require_equal()
    except PartitaError as exc:
        tell(str(exc))
        return exc.exit_code
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
