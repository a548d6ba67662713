"""What several parts' tests share."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of published inputs and answers; skip where it is not there."""
    shared = os.environ.get("PARTITA_SHARED")
    root = Path(shared) if shared else Path(__file__).resolve().parents[2] / "shared"
    if not (root / "data").is_dir():
        pytest.skip(f"no published data in {root / 'data'}; set PARTITA_SHARED")
    return root / "data"
