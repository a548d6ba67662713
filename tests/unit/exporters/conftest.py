"""Writes models as packages, imports them, and compares them with the model."""

import importlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partita.capture.capture import capture
from partita.capture.captured import CapturedModel
from partita.capture.setting import Example, example_inputs
from partita.core.plan import Plan, pipeline_stages
from partita.exporters.blueprint import Blueprint, blueprint_of
from partita.exporters.matched import stages_along_data
from partita.exporters.package import package_files

_turn = itertools.count()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cut(captured: CapturedModel, count: int) -> Plan:
    """Return a plan of equal runs of ops; ops that must be together are."""
    ops = captured.ops
    wanted = {op.name: row * count // len(ops) for row, op in enumerate(ops)}
    stages = stages_along_data(captured.graph, ops, wanted)
    used = sorted(set(stages))
    return Plan(
        fingerprint=captured.graph.fingerprint,
        devices=tuple(f"host0/gpu{row}" for row in used),
        stage_of=np.searchsorted(used, stages).astype(np.int32),
        stages=pipeline_stages([range(row, row + 1) for row in range(len(used))]),
    )


@dataclass(frozen=True)
class Written:
    """A package that has been imported.

    Attributes:
        package: The package.
        model: Its model, with the weights of the original.
        original: The model that it was made from.
        blueprint: What it was written from.
        folder: Where it is.
    """

    package: ModuleType
    model: nn.Module
    original: nn.Module
    blueprint: Blueprint
    folder: Path

    @property
    def source(self) -> str:
        """The source of all stages."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("stage*.py")))

    def named(self, example: Example) -> dict[str, Tensor]:
        """Return an example by the names of the package's arguments."""
        wiring = json.loads((self.folder / "wiring.json").read_text())
        inputs = example_inputs(self.original, example)
        return {entry["variable"]: inputs[entry["tensor"]] for entry in wiring["inputs"]}

    def run(self, example: Example, *, training: bool) -> tuple[Any, Tensor | None]:
        """Return output and loss of the package in a mode."""
        self.model.train(training)
        torch.manual_seed(7)
        return self.model.output_and_loss(**self.named(example))

    def expected(self, example: Example, loss: Any, *, training: bool) -> tuple[Any, Tensor | None]:
        """Return output and loss of the original in a mode."""
        self.original.train(training)
        torch.manual_seed(7)
        output = self.original(*example.args, **example.kwargs)
        return output, None if loss is None else loss(output, example.labels)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the package's parameters by name."""
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Written]]:
    """Write a model as a package and import it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def written(
        model: nn.Module, example: Example, loss: Any = None, stages: int = 3, **options: Any
    ) -> Written:
        captured = capture(model, example, loss=loss, **options)
        inputs = example_inputs(model, example)
        blueprint = blueprint_of(captured, cut(captured, stages), inputs)
        names.append(f"exported{next(_turn)}")
        folder = tmp_path / names[-1]
        folder.mkdir()
        for name, data in package_files(blueprint, names[-1], inputs).items():
            (folder / name).write_bytes(data)
        importlib.invalidate_caches()
        package = importlib.import_module(names[-1])
        made = package.build()
        made.load_state_dict(model.state_dict())
        return Written(package, made, model, blueprint, folder)

    yield written
    for name in [n for n in sys.modules if n.partition(".")[0] in names]:
        del sys.modules[name]
