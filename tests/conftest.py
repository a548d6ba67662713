"""What several parts' tests share."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, and no time limits: machines are shared.
settings.register_profile("partita", derandomize=True, deadline=None)
settings.load_profile("partita")

# Several test processes share few cores; torch's own threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of published inputs and answers; skip where it is not there."""
    shared = os.environ.get("PARTITA_SHARED")
    root = Path(shared) if shared else Path(__file__).resolve().parents[2] / "shared"
    if not (root / "data").is_dir():
        pytest.skip(f"no published data in {root / 'data'}; set PARTITA_SHARED")
    return root / "data"


RunPage = Callable[[Path], list[list[str]]]


@pytest.fixture
def run_page(tmp_path: Path) -> RunPage:
    """Return what runs the commands that a page shows, in their order; each must end well."""
    environment = {**os.environ, "PARTITA_CACHE": str(tmp_path / "cache")}

    def run(page: Path) -> list[list[str]]:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        shown = [shlex.split(x[2:], comments=True)[1:] for x in lines if x.startswith("$ partita")]
        for arguments in shown:
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
        return shown

    return run
