"""The metrics: one row each, with everything that the package knows of one.

A new metric is a file in ``objectives`` with its functions, and a row here; of another package, a
``MetricRow`` that an entry point of the group ``partita.objectives`` names. A row says where its
functions are, ``"module:function"``, and they are loaded when they are first asked for, so that
this table imports nothing: the command line takes its choices from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias

from partita.errors import UnsupportedError
from partita.plugins import OpenNames, PluginGroup, guarded, load_target

PLUGINS = PluginGroup(group="partita.objectives", noun="metric")
Target: TypeAlias = str | Callable[..., Any]
"""A function, or where it is: ``"package.module:function"``; empty = there is none."""


class Metric(OpenNames):
    """What a plan is measured by; all are minimised."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    ENERGY = "energy"
    COST = "cost"
    PIPEDREAM = "pipedream"
    PIPEDREAM_REPAIRED = "pipedream-repaired"
    MAX_LOAD = "max-load"
    SINGLE_SAMPLE_LATENCY = "single-sample-latency"
    PIPER = "piper"
    MAKESPAN_PARALLEL = "makespan-parallel"
    MAKESPAN_SEQUENTIAL = "makespan-sequential"
    SHARDING_COST = "sharding-cost"

    @classmethod
    def plugins(cls) -> PluginGroup:
        """Return the group of entry points that adds metrics."""
        return PLUGINS

    @property
    def words(self) -> str:
        """What is minimised, for people: the highest throughput is that of the shortest step."""
        return "step time" if self is Metric.THROUGHPUT else self.value

    @property
    def row(self) -> "MetricRow":
        """What is known of it.

        Raises:
            UnsupportedError: It is a plug-in that cannot be loaded, or whose entry is no row.
        """
        known = METRICS.get(self)
        return _plugged(self.value) if known is None else known


class MemoryRule(StrEnum):
    """By which rule a plan must keep within the memory of its devices.

    ``program``: the peak of the plan's Program (``cost/memory.py``). ``metric``: what the metric's
    authors count, which its function names among the errors of a value. ``both``: either.
    """

    PROGRAM = "program"
    METRIC = "metric"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """What is known of a metric.

    Attributes:
        value: Function from a problem and a plan to the ``Value`` of the plan.
        whose: Whose metric it is, and of what, in a few words.
        unit: Unit of its values.
        why_not: Function from a problem and a plan to why the metric cannot measure the plan, or
            ``None`` where it can; empty = it can measure every plan.
        bound: Function from a problem and an ``Effort`` to the ``Bound`` of each term that holds;
            empty = nothing is known.
        memory: By which rule plans keep within memory.
        held: Function from a problem to the bytes that each op holds at least by the metric's own
            rule, a shared parameter with the first op that uses it; empty = no such figure.
        published: Whether it is of others, computed from a plan without its Program.
        one_microbatch: Whether it looks at one microbatch alone.
    """

    value: Target
    whose: str = ""
    unit: str = "s"
    why_not: Target = ""
    bound: Target = ""
    memory: MemoryRule = MemoryRule.METRIC
    held: Target = ""
    published: bool = True
    one_microbatch: bool = False

    def load(self, what: str) -> Callable[..., Any] | None:
        """Return one of the row's functions; ``None`` where it has none."""
        target: Target = getattr(self, what)
        if isinstance(target, str):
            return load_target(target) if target else None
        return target


METRICS: Mapping[Metric, MetricRow] = {
    Metric.THROUGHPUT: MetricRow(
        value="partita.cost.judge:step_time",
        whose="ours: seconds of a step",
        bound="partita.bounds.step:step_bounds",
        memory=MemoryRule.PROGRAM,
        published=False,
    ),
    Metric.LATENCY: MetricRow(
        value="partita.cost.judge:latency",
        whose="ours: one microbatch from input to output",
        bound="partita.bounds.placed:latency_bounds",
        memory=MemoryRule.PROGRAM,
        published=False,
        one_microbatch=True,
    ),
    Metric.ENERGY: MetricRow(
        value="partita.cost.judge:energy",
        whose="ours: modelled joules of a step with every clock at its highest, over its samples",
        unit="J/sample",
        memory=MemoryRule.PROGRAM,
        published=False,
    ),
    Metric.COST: MetricRow(
        value="partita.cost.judge:money",
        whose="ours: US dollars of a step for the devices that a plan uses",
        unit="$",
        memory=MemoryRule.PROGRAM,
        published=False,
    ),
    Metric.PIPEDREAM: MetricRow(
        value="partita.objectives.pipedream:pipedream_time",
        whose="PipeDream's pipeline time as released",
        why_not="partita.objectives.pipedream:why_not_pipedream",
        bound="partita.bounds.pipelines:pipedream_bounds",
        # The released rule is one version short and never binds the last stage.
        memory=MemoryRule.BOTH,
        held="partita.objectives.pipedream:held_bytes_released",
    ),
    Metric.PIPEDREAM_REPAIRED: MetricRow(
        value="partita.objectives.repaired:pipedream_repaired_time",
        whose="PipeDream's pipeline time with its faults repaired",
        why_not="partita.objectives.repaired:why_not_repaired",
        bound="partita.bounds.pipelines:pipedream_bounds",
        held="partita.objectives.repaired:held_bytes_repaired",
    ),
    Metric.MAX_LOAD: MetricRow(
        value="partita.objectives.tarnawski:max_load",
        whose="Tarnawski et al. 2020: largest load of a device",
        why_not="partita.objectives.tarnawski:why_not_max_load",
        bound="partita.bounds.placed:max_load_bounds",
        held="partita.objectives.tarnawski:held_bytes_placed",
    ),
    Metric.SINGLE_SAMPLE_LATENCY: MetricRow(
        value="partita.objectives.tarnawski:single_sample_latency",
        whose="Tarnawski et al. 2020: one sample, forward",
        why_not="partita.objectives.tarnawski:why_not_latency",
        bound="partita.bounds.placed:single_sample_bounds",
        held="partita.objectives.tarnawski:held_bytes_placed",
        one_microbatch=True,
    ),
    Metric.PIPER: MetricRow(
        value="partita.objectives.piper:piper_time",
        whose="Piper's time per sample",
        why_not="partita.objectives.piper:why_not_piper",
        bound="partita.bounds.pipelines:piper_bounds",
    ),
    Metric.MAKESPAN_PARALLEL: MetricRow(
        value="partita.objectives.makespan:makespan_parallel",
        whose="Baechi's, transfers in parallel",
        why_not="partita.objectives.makespan:why_not_makespan",
        bound="partita.bounds.placed:makespan_bounds",
        held="partita.objectives.makespan:held_bytes_baechi",
        one_microbatch=True,
    ),
    Metric.MAKESPAN_SEQUENTIAL: MetricRow(
        value="partita.objectives.makespan:makespan_sequential",
        whose="Baechi's, one channel per device",
        why_not="partita.objectives.makespan:why_not_makespan",
        bound="partita.bounds.placed:makespan_bounds",
        held="partita.objectives.makespan:held_bytes_baechi",
        one_microbatch=True,
    ),
    Metric.SHARDING_COST: MetricRow(
        value="partita.objectives.sharding:sharding_cost",
        whose="DynamicMLTrainer's variance plus cut",
        unit="cost",
        why_not="partita.objectives.sharding:why_not_sharding",
        bound="partita.bounds.sharding:sharding_bounds",
        one_microbatch=True,
    ),
}


def metric_names() -> list[str]:
    """Return the names of the metrics of this package."""
    return [metric.value for metric in METRICS]


@cache
def _plugged(name: str) -> MetricRow:
    row = PLUGINS.find(name)
    if not isinstance(row, MetricRow):
        raise UnsupportedError(
            f"metric {name!r} is a plug-in whose entry point names no MetricRow; got {row!r}"
        )
    functions = {what: row.load(what) for what in ("value", "why_not", "bound", "held")}
    safe: dict[str, Any] = {
        what: guarded("metric", name, function) if function else ""
        for what, function in functions.items()
    }
    return replace(row, **safe)
