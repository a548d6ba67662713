"""Metrics of a run while it runs: one row per step, put together from what the ranks say.

``metrics.jsonl`` in the run directory has every row, whatever else is asked for; TensorBoard and
Weights & Biases get the same numbers under the same names, both in files of the run directory:
nothing is sent anywhere.
"""

import importlib.util
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from partita.errors import UnsupportedError
from partita.runtime.metric_rows import METRICS, StepRow
from partita.runtime.rank import StepNews
from partita.runtime.training.recipe import Recipe

OnRow = Callable[[StepRow], None]


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: StepRow) -> None:
        """Take a row."""
        ...

    def close(self) -> None:
        """Finish what is written."""
        ...


class JsonLines:
    """A file with one JSON object per row, readable while the run goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, row: StepRow) -> None:
        """Add a line."""
        self._file.write(json.dumps(row.to_json()) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files that TensorBoard reads."""

    def __init__(self, folder: Path) -> None:
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (an extra)

        self._writer = SummaryWriter(str(folder))

    def write(self, row: StepRow) -> None:
        """Add the numbers of a row."""
        for name, value in row.numbers().items():
            if name != "step":
                self._writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """An offline run of Weights & Biases, which ``wandb sync`` may send later."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        _require("wandb")
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            mode="offline", dir=str(folder), name=folder.name, config=dict(settings)
        )

    def write(self, row: StepRow) -> None:
        """Log a row."""
        values = row.numbers()
        self._run.log(values, step=values.pop("step"))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UnsupportedError(
            f"--metrics {package} needs the package: pip install 'partita[{package}]'; {METRICS} "
            "in the run directory is always written"
        )


def check_sinks(names: Iterable[str]) -> None:
    """Check that what rows are to go to is installed.

    Raises:
        UnsupportedError: It is not; names the package.
    """
    for name in names:
        if name != "jsonl":
            _require(name)


def open_sinks(names: Iterable[str], folder: Path, settings: Mapping[str, Any]) -> list[Sink]:
    """Return where rows go: always to ``metrics.jsonl``, and to what is named.

    Raises:
        UnsupportedError: A package is missing.
    """
    sinks: list[Sink] = [JsonLines(folder / METRICS)]
    if "tensorboard" in names:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if "wandb" in names:
        sinks.append(WeightsAndBiases(folder, settings))
    return sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the rows of a run need besides the news of its ranks.

    Attributes:
        ranks: Number of ranks that send news.
        samples: Samples of a step.
        tokens: Tokens of a step; 0 where samples are no texts.
        recipe: What it trains with.
        has_loss: Whether there is a loss.
    """

    ranks: int
    samples: int
    tokens: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    has_loss: bool = True


class Tracker:
    """Puts the news of all ranks together, and hands the rows on."""

    def __init__(
        self, facts: RunFacts, sinks: Sequence[Sink], on_row: OnRow = lambda _: None
    ) -> None:
        self._facts, self._sinks, self._on_row = facts, sinks, on_row
        self._news: dict[int, dict[int, StepNews]] = {}
        self._memory: dict[int, float] = {}
        self._begin_s = time.monotonic()
        self._last = (-1, math.nan)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, *_: object) -> None:
        for sink in self._sinks:
            sink.close()

    def __call__(self, rank: int, news: StepNews) -> None:
        """Take note of a step that a rank has done."""
        if news.memory_bytes:
            self._memory[rank] = max(news.memory_bytes, self._memory.get(rank, 0.0))
        reported = self._news.setdefault(news.step, {})
        reported[rank] = news
        if len(reported) < self._facts.ranks:
            return
        del self._news[news.step]
        row = self._row(news.step, list(reported.values()))
        for sink in self._sinks:
            sink.write(row)
        self._on_row(row)

    def _row(self, step: int, reported: Sequence[StepNews]) -> StepRow:
        facts, now_s = self._facts, time.monotonic()
        before, before_s = self._last
        self._last = (step, now_s)
        held_out = [news.held_out for news in reported if news.held_out is not None]
        follows = before == step - 1 and not held_out
        return StepRow(
            step=step + 1,
            loss=sum(news.loss for news in reported) if facts.has_loss else math.nan,
            held_out_loss=sum(held_out) if held_out else None,
            learning_rate=facts.recipe.rate * facts.recipe.schedule.factor(step),
            samples=(step + 1) * facts.samples,
            tokens=(step + 1) * facts.tokens,
            time_s=now_s - self._begin_s,
            step_s=now_s - before_s if follows else math.nan,
            memory_bytes=max(self._memory.values(), default=0.0),
            rank_memory_bytes=dict(sorted(self._memory.items())),
        )
