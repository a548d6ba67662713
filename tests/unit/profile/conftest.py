"""Makes the gallery of models importable by the tests of this directory."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("gallery", Path(__file__).with_name("gallery.py"))
_gallery = importlib.util.module_from_spec(_spec)
sys.modules["gallery"] = _gallery
_spec.loader.exec_module(_gallery)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
