"""What rank 0 of a script prints is shown while it is printed."""

from pathlib import Path

import pytest

from partita.cli.run import printed


def test_lines_are_shown_once_and_the_rest_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "rank0.log"
    with printed(log):
        log.write_text("first\nhalf")
        with log.open("a") as file:
            file.write(" a line\nno end")
    assert capsys.readouterr().out == "first\nhalf a line\nno end"


def test_what_was_printed_is_shown_where_the_run_fails_and_no_log_is_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.log").write_text("before\n")
    with pytest.raises(ValueError, match="mine"), printed(tmp_path / "rank0.log"):
        raise ValueError("mine")
    assert capsys.readouterr().out == "before\n"
    with printed(tmp_path / "none.log"):
        pass
    assert capsys.readouterr().out == ""
