"""What several parts' tests share."""

import os
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
