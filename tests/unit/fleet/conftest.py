"""What the tests of the fleet share."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "fleet_cluster", Path(__file__).with_name("cluster.py")
)
sys.modules["fleet_cluster"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["fleet_cluster"])
