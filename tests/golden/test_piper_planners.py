"""Piper's published inputs: every recorded row of the full and of the restricted searches.

Source: Tarnawski, Narayanan, Phanishayee, "Piper", NeurIPS 2021; answers of its released program.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from partita.core.problem import Problem
from partita.core.solution import Proof
from partita.errors import InfeasibleError
from partita.formats.piper import read_piper
from partita.planners.piper.planner import plan_piper
from partita.testing.piper_bound import piper_bound

GIB = 2**30
OPTIONS = {
    "": {},
    "noDP": {"data_parallel": False},
    "noTP": {"tensor_parallel": False},
    "noAR": {"recompute": False},
}


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def problem_of(folder: Path, row: dict[str, Any]) -> Problem:
    return read_piper(
        text_of(folder / row["input"]),
        devices=row["k"],
        memory_bytes=row["memGiB"] * GIB,
        microbatches=row["mbs"],
        bandwidth_bytes_per_s=25 * GIB,
    )


def rows_of(shared_data: Path, mode: str) -> list[dict[str, Any]]:
    rows = json.loads(text_of(shared_data / "piper" / "answers.json"))
    return [row for row in rows if row["mode"] == mode]


@pytest.mark.parametrize("mode", OPTIONS, ids=lambda mode: mode or "full")
def test_recorded_rows_are_reproduced_or_improved(shared_data: Path, mode: str) -> None:
    rows = rows_of(shared_data, mode)
    assert len(rows) >= 16
    for row in rows:
        problem = problem_of(shared_data / "piper", row)
        if row["tps"] < 0:
            with pytest.raises(InfeasibleError, match="use more memory"):
                plan_piper(problem, **OPTIONS[mode])
            continue
        found = plan_piper(problem, **OPTIONS[mode])
        assert found.value <= row["tps"] * (1 + 1e-6), row["case"]
        assert found.lower_bound <= found.value
        if mode == "" and row["input"] == "bert32a100.json":
            assert found.proof is Proof.OPTIMAL
            assert found.value == pytest.approx(row["tps"], rel=1e-6)


def test_the_bound_is_below_every_recorded_row(shared_data: Path) -> None:
    for row in rows_of(shared_data, ""):
        if row["k"] in (8, 16, 2048) and row["tps"] > 0:
            bound, term = piper_bound(problem_of(shared_data / "piper", row))
            assert 0 < bound <= row["tps"] * (1 + 1e-9)
            assert term in ("search", "work over devices", "an op that is not split further")
