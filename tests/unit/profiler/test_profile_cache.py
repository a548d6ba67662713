"""Keys of the cache change with all that a measurement depends on."""

import importlib
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from partita.capture.capture import capture
from partita.capture.captured import CaptureMode, Granularity
from partita.capture.setting import Example
from partita.capture.sources import ModelSource
from partita.profiler.cache import ProfileCache, code_of, profile_key
from partita.profiler.measure.measure import ProfileOptions
from partita.profiler.measure.model import CaptureOptions, profile_source

SOURCE = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x):
        return self.layer(x).{function}().sum()
"""


def make_net(folder: Path, name: str, function: str = "relu") -> type[nn.Module]:
    (folder / f"{name}.py").write_text(SOURCE.format(function=function))
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return importlib.import_module(name).Net


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def key_of(model: nn.Module, *, batch: int = 2, facts=None, **options) -> str:
    captured = capture(model, Example(args=(torch.ones(batch, 4),)), **options)
    return profile_key(captured, facts or {"rounds": 8})


def test_the_same_model_has_the_same_key(folder: Path) -> None:
    net = make_net(folder, "net_same")
    assert key_of(net()) == key_of(net())


def test_every_change_gives_another_key(folder: Path) -> None:
    net = make_net(folder, "net_changes")
    keys = [
        key_of(net()),
        key_of(net(), batch=3),
        key_of(net(5)),
        key_of(net(), facts={"rounds": 9}),
        key_of(net(), mode=CaptureMode.EVAL),
        key_of(net(), granularity=Granularity.MODULE),
        key_of(net().requires_grad_(False)),
    ]
    assert len(set(keys)) == len(keys)


def test_another_source_gives_another_key_even_where_ops_are_the_same(folder: Path) -> None:
    before = key_of(make_net(folder, "net_source")())
    path = folder / "net_source.py"
    path.write_text(path.read_text() + "\n# changed\n")
    sys.modules.pop("net_source")
    assert key_of(importlib.import_module("net_source").Net()) != before


HELPED = """
import torch
from torch import nn
{imported}

class Leaf(nn.Module):
    def forward(self, x):
        {inside}
        return helped(x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.leaf = Leaf()

    def forward(self, x):
        return self.leaf(self.layer(x)).sum()
"""
IMPORTS = {
    "module": ("from {helper} import helped", "pass"),
    "name": ("import {helper}\nhelped = lambda x: {helper}.helped(x)", "pass"),
    "late": ("", "from {helper} import helped"),
}


@pytest.mark.parametrize("way", IMPORTS)
def test_a_helper_in_a_file_without_module_classes_is_part_of_the_key(
    folder: Path, way: str
) -> None:
    helper, name = f"helper_{way}", f"net_helped_{way}"
    imported, inside = (text.format(helper=helper) for text in IMPORTS[way])
    (folder / f"{name}.py").write_text(HELPED.format(imported=imported, inside=inside))
    keys = []
    for function in ("relu", "relu", "tanh"):
        (folder / f"{helper}.py").write_text(f"def helped(x):\n    return x.{function}()\n")
        for loaded in (helper, name):
            sys.modules.pop(loaded, None)
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        net = importlib.import_module(name).Net()
        keys.append(key_of(net, granularity=Granularity.MODULE))
    assert keys[0] == keys[1] != keys[2]


def test_a_helper_of_a_helper_in_a_package_is_found(folder: Path) -> None:
    package = folder / "helpful"
    package.mkdir()
    (package / "__init__.py").write_text("from .outer import outer\n")
    (package / "outer.py").write_text("from . import inner\nouter = inner.inner\n")
    (package / "inner.py").write_text("def inner(x):\n    return x\n")
    importlib.invalidate_caches()
    importlib.import_module("helpful")
    found = code_of(["helpful"])
    assert set(found) == {"helpful", "helpful.inner", "helpful.outer"}


def test_code_without_a_file_is_told_by_its_byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(text: str) -> bytes:
        prompt = ModuleType("prompt")
        exec(text, vars(prompt))
        monkeypatch.setitem(sys.modules, "prompt", prompt)
        return code_of(["prompt"])["prompt"]

    text = "def outer(x):\n    def inner(y):\n        return y * 2\n    return inner(x)\n"
    assert loaded(text) == loaded(text) != loaded(text.replace("2", "3"))


def test_an_installed_package_is_told_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_of(["numpy"])
    monkeypatch.setattr("numpy.__version__", "0.0")
    after = code_of(["numpy"])
    assert {name for name in after if after[name] != before[name]} == {"numpy (version)"}


def source_of(net: type[nn.Module]) -> ModelSource:
    return ModelSource(
        name="net",
        model=net(),
        example=lambda size: Example(args=(torch.ones(size or 2, 4),)),
    )


def test_a_second_profile_comes_from_the_cache_and_is_equal(folder: Path) -> None:
    net, cache = make_net(folder, "net_cached"), ProfileCache(folder / "cache")
    options = ProfileOptions(rounds=1, warmup=0)
    first = profile_source(source_of(net), options=options, cache=cache)
    again = profile_source(source_of(net), options=options, cache=cache)
    assert (first.is_cached, again.is_cached) == (False, True)
    assert again.graph == first.graph
    assert again.record == first.record
    other = replace(options, rounds=2)
    assert not profile_source(source_of(net), options=other, cache=cache).is_cached


def test_a_damaged_file_is_measured_anew(folder: Path) -> None:
    net, cache = make_net(folder, "net_damaged"), ProfileCache(folder / "cache")
    options = ProfileOptions(rounds=1, warmup=0)
    profile_source(source_of(net), options=options, cache=cache)
    (file,) = (folder / "cache").iterdir()
    file.write_text("{")
    assert not profile_source(source_of(net), options=options, cache=cache).is_cached
    assert profile_source(source_of(net), options=options, cache=cache).is_cached


def test_a_profile_is_kept_though_the_cache_cannot_be_written(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "taken").write_text("a file where the cache should be")
    net, cache = make_net(folder, "net_uncached"), ProfileCache(folder / "taken" / "cache")
    found = profile_source(source_of(net), options=ProfileOptions(rounds=1, warmup=0), cache=cache)
    assert found.graph.costs[0].forward_s.sum() > 0
    (record,) = [r for r in caplog.records if "cannot be written" in r.getMessage()]
    assert "taken/cache cannot be written: not a directory" in record.getMessage()


def test_a_graph_that_does_not_fit_on_the_disk_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("partita.profiler.cache.write_json", full)
    net, cache = make_net(folder, "net_full"), ProfileCache(folder / "full")
    profile_source(source_of(net), options=ProfileOptions(rounds=1, warmup=0), cache=cache)
    assert not list((folder / "full").iterdir())


def test_a_second_batch_size_is_recorded(folder: Path) -> None:
    net = make_net(folder, "net_grown")
    found = profile_source(
        source_of(net),
        options=ProfileOptions(rounds=1, warmup=0),
        capture_options=CaptureOptions(second_batch_size=6),
    )
    assert found.record.second_batch_size == 6
    inputs = found.graph.tensors
    assert inputs.fixed_bytes[inputs.names.index("x")] == 0
    assert inputs.fixed_bytes[found.graph.loss] == 4
