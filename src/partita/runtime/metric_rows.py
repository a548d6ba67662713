"""Rows of ``metrics.jsonl``: what a run says of each step, written and read without torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
SINKS = ("jsonl", "tensorboard", "wandb")
"""Where rows can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of a run.

    Attributes:
        step: Steps that are done.
        loss: Loss of the step; NaN without one.
        held_out_loss: Loss on held-out data after it; None = it was not taken.
        learning_rate: Rate that it was made with.
        samples: Samples that were read so far.
        tokens: Tokens that were read so far; 0 where samples are no texts.
        time_s: Seconds since the ranks were started.
        step_s: Seconds since the step before; NaN for the first, and where an evaluation or a
            restart lies in between.
        memory_bytes: Most memory of a rank that has said so; 0 = unknown.
        rank_memory_bytes: The same of each rank, by rank.
    """

    step: int
    loss: float
    learning_rate: float
    samples: int
    tokens: int = 0
    time_s: float = 0.0
    step_s: float = math.nan
    held_out_loss: float | None = None
    memory_bytes: float = 0.0
    rank_memory_bytes: Mapping[int, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, Any]:
        """Return what is known of the whole step, by name: numbers alone."""
        values = self.to_json()
        ranks = values.pop("rank_memory_bytes", {})
        return values | {f"memory_bytes/rank{rank}": value for rank, value in ranks.items()}

    def to_json(self) -> dict[str, Any]:
        """Return what is known, by name."""
        values: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "held_out_loss": self.held_out_loss,
            "learning_rate": self.learning_rate,
            "samples": self.samples,
            "tokens": self.tokens or None,
            "time_s": round(self.time_s, 6),
            "step_s": self.step_s,
            "memory_bytes": self.memory_bytes or None,
            "rank_memory_bytes": {str(k): v for k, v in self.rank_memory_bytes.items()} or None,
        }
        return {
            name: value
            for name, value in values.items()
            if value is not None and not (isinstance(value, float) and math.isnan(value))
        }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run, by step; empty where it left none.

    A step that was done again after a restart has the row of its last time.
    """
    path = folder / METRICS
    if not path.exists():
        return []
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):  # the last line of a run that was killed
            continue
    return [rows[step] for step in sorted(rows)]
