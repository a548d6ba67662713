"""Test of this machine's own devices: what ``partita.selftest`` and the command ``selftest`` say.

It runs on GPUs with NCCL and on CPU processes with gloo, the same list. What a machine cannot do is
skipped and says why; what gives another result than it should has failed. The report of a machine
that we do not have is one file to attach to an issue.
"""

import json
import logging
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.documents import write_text
from partita.errors import InvalidInputError, PartitaError, UnsupportedError, WorkerError
from partita.flows.doctor import doctor
from partita.flows.extras import torch_needed
from partita.flows.results import Result
from partita.flows.runs.requests import TrainRequest, check_training
from partita.requests import OnProgress, Request, declare, make, silent
from partita.units import format_seconds

if TYPE_CHECKING:
    from partita.flows.runs.execute import Outcome


logger = logging.getLogger(__name__)


class Verdict(StrEnum):
    """What a check came to."""

    PASSED = "passed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        name: Its name.
        verdict: What it came to.
        detail: What was seen, or why it was skipped or failed.
        seconds: How long it took.
    """

    name: str
    verdict: Verdict
    detail: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SelftestRequest(Request):
    """What is tested."""

    devices: int | None = declare(
        None, minimum=2, maximum=16, usual="2", help="Number of devices of this machine to test."
    )
    quick: bool = declare(False, help="Test one tiny model, in about half a minute.")
    output: str = declare(
        "selftest", flags=("-o",), help="Name of the report: NAME.json and NAME.txt are written."
    )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SelftestReport(Result):
    """Report of a machine.

    Attributes:
        checks: The checks, in their order.
        machine: The machine and what is installed.
        written: Names of the files of the report.
    """

    checks: tuple[Check, ...]
    machine: Mapping[str, Any]
    written: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.verdict is Verdict.FAILED)

    def require_passed(self) -> None:
        """Check that nothing failed.

        Raises:
            WorkerError: Something did; names it.
        """
        if self.failed:
            names = ", ".join(check.name for check in self.failed)
            where = f"; the report is {self.written[0]}" if self.written else ""
            raise WorkerError(f"{len(self.failed)} checks failed: {names}{where}")

    def lines(self) -> list[str]:
        """Return how many checks passed, were skipped and failed."""
        count = dict.fromkeys(Verdict, 0)
        for check in self.checks:
            count[check.verdict] += 1
        words = ", ".join(f"{number} {verdict.value}" for verdict, number in count.items())
        return [f"selftest on {self.machine['devices']}: {words}"]

    def rows(self) -> list[Mapping[str, object]]:
        """Return the checks."""
        return [
            {
                "check": check.name,
                "verdict": check.verdict.value,
                "time": format_seconds(check.seconds),
                "detail": check.detail,
            }
            for check in self.checks
        ]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "machine": dict(self.machine),
            "failed": [check.name for check in self.failed],
            "checks": [{**asdict(check), "verdict": check.verdict.value} for check in self.checks],
        }

    def text(self) -> str:
        """Return the report for people."""
        facts = [f"{name}: {value}" for name, value in self.machine.items()]
        checks = [
            f"{check.verdict.value:8} {check.name:32} {format_seconds(check.seconds):>8}  "
            f"{check.detail}"
            for check in self.checks
        ]
        return "\n".join([*self.lines(), "", *facts, "", *checks]) + "\n"


def selftest(
    *,
    on_progress: OnProgress = silent,
    **options: Any,  # noqa: ANN401 (fields of SelftestRequest)
) -> SelftestReport:
    """Test this machine's devices, and write a report.

    Args:
        on_progress: Called with each check.
        **options: The fields of :class:`SelftestRequest`: the options of ``partita selftest``.

    Raises:
        UnsupportedError: torch is not there, or fewer GPUs than are wanted.
        WorkerError: A check failed; the report is written.
    """
    report = selftest_request(make(SelftestRequest, **options), on_progress)
    report.require_passed()
    return report


def selftest_request(request: SelftestRequest, on_progress: OnProgress = silent) -> SelftestReport:
    """Test what a request asks for; see :func:`selftest`."""
    with torch_needed("a selftest needs"):
        from partita.flows.selftest_checks import Machine  # noqa: PLC0415 (torch)
    with tempfile.TemporaryDirectory(prefix="partita-selftest-") as folder:
        tested = Machine(Path(folder), _train, devices=request.devices or 2, quick=request.quick)
        checks = []
        for name, check in tested.checks():
            on_progress(name)
            checks.append(_checked(name, check))
        machine = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "system": platform.platform(),
            **{key: value for key, value in doctor().to_json().items() if key != "ready"},
            **tested.facts(),
        }
    report = SelftestReport(checks=tuple(checks), machine=machine)
    written = (f"{request.output}.json", f"{request.output}.txt")
    write_text(written[0], json.dumps(report.to_json(), indent=1) + "\n")
    write_text(written[1], report.text())
    return SelftestReport(checks=report.checks, machine=machine, written=written)


def _checked(name: str, check: Callable[[], str]) -> Check:
    begin = time.monotonic()
    try:
        verdict, detail = Verdict.PASSED, check()
    except UnsupportedError as exc:
        verdict, detail = Verdict.SKIPPED, str(exc)
    except PartitaError as exc:
        verdict, detail = Verdict.FAILED, str(exc)
    except Exception as exc:  # the report of a machine that we do not have is written in any case
        logger.exception("%s failed", name)
        verdict, detail = Verdict.FAILED, f"{type(exc).__name__}: {exc}".splitlines()[0]
    return Check(name=name, verdict=verdict, detail=detail, seconds=time.monotonic() - begin)


def _train(folder: Path, **options: Any) -> "Outcome":  # noqa: ANN401 (fields of TrainRequest)
    """Train a small model, as ``partita train`` does."""
    from partita.flows.runs.steps import carry_out, prepare_training  # noqa: PLC0415 (torch)

    try:
        request = check_training(make(TrainRequest, runs=str(folder), rounds=1, **options))
    except InvalidInputError as exc:  # an option that is not run yet
        raise UnsupportedError(str(exc)) from exc
    outcome = carry_out(prepare_training(request))
    assert outcome is not None  # there is one host
    outcome.require_equal()
    return outcome
