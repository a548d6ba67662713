"""The scripts of docs/tutorial.md; its commands are those of two stories (tests/stories)."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "training"


@pytest.mark.parametrize("name", ["gpt", "images", "graphnet"])
def test_a_ported_script_has_at_most_ten_new_lines(name: str) -> None:
    plain, ported = (
        (SCRIPTS / f"{name}_{kind}.py").read_text(encoding="utf-8").splitlines()
        for kind in ("plain", "ported")
    )
    new = [line for line in ported if line not in plain and line.strip()]
    assert "import partita" in new
    assert len(new) <= 10
