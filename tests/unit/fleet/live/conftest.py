"""Makes the builders importable by the tests below."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "live_builders", Path(__file__).with_name("live_builders.py")
)
sys.modules["live_builders"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["live_builders"])
