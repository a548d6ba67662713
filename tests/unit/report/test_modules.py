"""The modules that draw figures, tested by node's own runner where there is one."""

import json
import os
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from partita.report.columns import pack

TESTS = Path(__file__).parent / "static" / "modules.test.mjs"
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_modules_do_what_their_tests_say(tmp_path: Path) -> None:
    assert NODE is not None
    static = tmp_path / "static"
    shutil.copytree(str(files("partita.report").joinpath("static")), static)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    columns = {"a": [5, 5, 7, 2**32 - 1, 0], "b": [-3, 0, 2**31 - 1], "none": []}
    packed = pack({name: np.array(values) for name, values in columns.items()})
    given = json.dumps({"packed": packed, "columns": columns})
    found = subprocess.run(
        [NODE, "--test", str(TESTS)],
        env={**os.environ, "PARTITA_STATIC": str(static), "PARTITA_PACKED": given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout
