"""Every command of the pages for users of other systems runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "coming-from").glob("*.md"))


def commands(page: Path) -> list[list[str]]:
    """Return the commands of a page, in their order."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line[2:])[1:] for line in lines if line.startswith("$ partita")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    found = commands(page)
    assert len(found) >= 3
    environment = {**os.environ, "PARTITA_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for arguments in found:
        done = subprocess.run(
            [sys.executable, "-m", "partita", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert not done.returncode, f"{arguments}: {done.stderr}"
