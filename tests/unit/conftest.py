"""Makes the gallery of models importable by the tests below."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location("gallery", Path(__file__).with_name("gallery.py"))
sys.modules["gallery"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["gallery"])
