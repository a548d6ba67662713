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
from partita.units import format_bytes, format_joules, format_seconds, format_share

TESTS = Path(__file__).parent / "static" / "modules.test.mjs"
NODE = shutil.which("node")
SIZES = (0.0, 0.34e-9, 2.5e-7, 0.00412, 0.0685, 0.5, 1.0, 7.5, 41.0, 999.4, 15506.0, 61.2e9, 3.5e10)


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_modules_do_what_their_tests_say(tmp_path: Path) -> None:
    assert NODE is not None
    static = tmp_path / "static"
    shutil.copytree(str(files("partita.report").joinpath("static")), static)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    columns = {"a": [5, 5, 7, 2**32 - 1, 0], "b": [-3, 0, 2**31 - 1], "none": []}
    packed = pack({name: np.array(values) for name, values in columns.items()})
    units = (("s", format_seconds), ("bytes", format_bytes), ("J", format_joules))
    words = [[size, unit, said(size)] for unit, said in units for size in SIZES]
    words += [[share, "share", format_share(share)] for share in (0.0, 0.0512, 0.0994, 0.25, 7.3)]
    words += [[each, "change", format_share(each, sign=True)] for each in (-0.2, 0.0, 0.03)]
    given = json.dumps({"packed": packed, "columns": columns, "words": words})
    found = subprocess.run(
        [NODE, "--test", str(TESTS)],
        env={**os.environ, "PARTITA_STATIC": str(static), "PARTITA_GIVEN": given},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout
