"""Runs that are killed or lose a device and go on: a short ``benchmarks/chaos.py``.

In a process of its own, as ranks are forked from a process with one thread.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHORT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import chaos
folder = Path(sys.argv[2])
found = chaos.faults(folder, steps=16, kills=3, stops=0)
found |= chaos.elastic(folder, steps=24)
sys.stderr.flush()
sys.stdout.write("\\n" + json.dumps({**found, "left": chaos.left_over()}))
"""


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory, commands: Any) -> Any:
    folder = tmp_path_factory.mktemp("chaos")
    result = commands.run(
        str(BENCHMARKS), str(folder), python=SHORT, folder=folder, timeout_s=300.0
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_losses_after_three_kills_are_those_of_a_quiet_run(figures: Any) -> None:
    assert figures["kills"] == 3
    assert figures["restarts"] >= 3
    assert figures["faults_steps"] == 16
    assert figures["faults_equal"]
    assert figures["left"] == []


def test_a_run_goes_on_with_three_devices_and_again_with_four(figures: Any) -> None:
    assert figures["elastic_devices"] == [4, 3, 4]
    assert figures["elastic_gap"] <= 1e-6
    assert figures["elastic_steps"] == 24
