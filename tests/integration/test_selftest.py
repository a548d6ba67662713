"""``partita selftest`` on CPU processes: the same list as on GPUs, with gloo."""

import json
from pathlib import Path
from typing import Any

import pytest

from partita.errors import UnsupportedError, WorkerError
from partita.flows import selftest as flow
from partita.flows.selftest import SelftestReport, Verdict, selftest

pytestmark = pytest.mark.slow


def test_this_machine_passes_the_quick_form(tmp_path: Path, commands: Any) -> None:
    done = commands.run("selftest", "--quick", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert report["failed"] == []
    for name in ("transfers", "collectives", "every rank of a larger plan"):
        assert verdicts[name] == "passed"
    assert verdicts["graph-mlp, pipeline: equals one process"] == "passed"
    assert verdicts["memory against forecast"] == "passed"
    assert json.loads((tmp_path / "selftest.json").read_text())["checks"] == report["checks"]
    assert "selftest on CPU processes with gloo" in (tmp_path / "selftest.txt").read_text()


def test_a_failed_check_is_named_and_the_report_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def right() -> str:
        return "fine"

    def missing() -> str:
        raise UnsupportedError("not here")

    def wrong() -> str:
        raise WorkerError("1 is not 2")

    class Machine:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def facts(self) -> dict[str, Any]:
            return {"devices": "nothing"}

        def checks(self) -> Any:
            yield from (("a", right), ("b", missing), ("c", wrong))

    monkeypatch.setattr("partita.flows.selftest_checks.Machine", Machine)
    output = tmp_path / "report"
    with pytest.raises(WorkerError, match="1 checks failed: c"):
        selftest(output=str(output))
    found = json.loads(output.with_suffix(".json").read_text())
    assert [check["verdict"] for check in found["checks"]] == ["passed", "skipped", "FAILED"]
    assert "1 is not 2" in output.with_suffix(".txt").read_text()
    report = SelftestReport(checks=(), machine={"devices": "x"})
    assert report.failed == ()
    assert Verdict.FAILED in flow.Verdict
