"""What the tests of released rules share with those of the fleet."""

import importlib.util
import sys
from pathlib import Path

if "fleet_cluster" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "fleet_cluster", Path(__file__).parents[1] / "fleet" / "cluster.py"
    )
    sys.modules["fleet_cluster"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["fleet_cluster"])
