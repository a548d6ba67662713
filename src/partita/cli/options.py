"""Options that several commands share, declared once."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from partita.cli.from_request import OpenChoice
from partita.core.metrics import Metric, metric_names
from partita.core.schedules import Schedule, schedule_names
from partita.planners.table import DEFAULT_PLANNER, PLANNERS

_F = TypeVar("_F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A range of numbers in which neither NaN nor an infinity is."""

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """Return the number, or fail."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return found


METRIC = OpenChoice(metric_names(), Metric.plugins().names)
SCHEDULE = OpenChoice(schedule_names(), Schedule.plugins().names)
MODES = ("training", "inference")
GRANULARITIES = ("op", "module", "block")
DTYPES = ("float64", "float32", "bfloat16", "float16")
GPU_RESERVE = 0.08
"""Share of a GPU's memory that no plan can use: context, NCCL's buffers, fragmentation."""
OPTIMIZER_BYTES = {"sgd": 0.0, "momentum": 4.0, "adam": 8.0}


def _all(*decorators: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


output_options = _all(
    click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else."),
    click.option("--quiet", "-q", is_flag=True, help="No progress on stderr."),
    click.option("--debug", is_flag=True, help="Show a traceback when something fails."),
)

cluster_options = _all(
    click.option("--cluster", "-c", help="Shorthand such as 2x4xa100+1x2xv100, or a file."),
    click.option("--devices", type=click.IntRange(1, 16), help="N CPU processes of this machine."),
    click.option("--bandwidth", help="Bandwidth by level: host=25GB/s,rack=1e9."),
    click.option("--latency", help="Latency by level: host=5us."),
    click.option("--catalogue", "catalogue_file", help="Your own device types, a YAML file."),
)

change_options = _all(
    click.option(
        "--what-if", "changes", multiple=True, help="Change the cluster: +1x8xa100, memory=1.2x."
    ),
)

shape_options = _all(
    click.option(
        "--sequence-length", type=click.IntRange(2), help="Tokens a sample, not for callables."
    ),
    click.option("--dtype", type=click.Choice(DTYPES), help="Of weights and inputs. [as built]"),
    click.option(
        "--scale", type=float, default=1.0, help="Factor on the widths of a built-in model."
    ),
    click.option(
        "--granularity", type=click.Choice(GRANULARITIES), default="op", show_default=True
    ),
)

source_options = _all(
    shape_options,
    click.option("--seed", type=int, default=0, help="Seed of weights and data."),
)

estimate_options = _all(
    click.option(
        "--kernels",
        type=click.Choice(("fused", "eager")),
        default="fused",
        show_default=True,
        help="Of an estimate: today's kernels, or unfused ones.",
    ),
    click.option("--arithmetic", default="", help="Of an estimate, such as tfloat32. [the dtype]"),
    click.option(
        "--recompute", is_flag=True, help="Of an estimate: blocks keep their inputs alone."
    ),
)

step_options = _all(
    click.option("--mode", type=click.Choice(MODES), default=None, help="Default: training."),
    click.option("--schedule", type=SCHEDULE, default=None, help="Pipeline schedule."),
    click.option("--microbatches", type=click.IntRange(1), help="Microbatches in a step."),
    click.option("--microbatch-size", type=click.IntRange(1), help="Samples in a microbatch."),
    click.option("--batch-size", type=click.IntRange(1), help="Samples in a step: their product."),
    click.option("--memory-factor", type=float, help="Share of each device's memory to use."),
    click.option(
        "--reserve",
        type=FiniteRange(0, 1, max_open=True),
        help="Share of it to leave free for context, buffers and fragmentation. "
        f"[{GPU_RESERVE:g} of GPUs]",
    ),
    click.option(
        "--optimizer",
        type=click.Choice(list(OPTIMIZER_BYTES)),
        default=None,
        help="Its state counts in memory, and a run steps with it. Default: adam.",
    ),
)

problem_options = _all(
    click.option("--objective", "metric", type=METRIC, default=None, help="What to minimise."),
    step_options,
)

rule_options = _all(
    click.option(
        "--pin", "pins", multiple=True, help="Ops that must run there: 'encoder.*=host0/*'."
    ),
    click.option(
        "--forbid", "bans", multiple=True, help="Ops that must not run there: 'head=*/gpu0'."
    ),
)

effort_options = _all(
    click.option(
        "--time-limit", type=click.FloatRange(0, 1e6, min_open=True), help="Seconds to search."
    ),
    click.option(
        "--iterations", type=click.IntRange(1), help="Steps to search: the same plan every time."
    ),
)

choice_options = _all(
    click.option(
        "--planner",
        "-p",
        help=f"{', '.join(PLANNERS)}, or a plug-in; some with an argument: custom:0,8,14. "
        f"[{DEFAULT_PLANNER}]",
    ),
    click.option("--partition", help="The same as --planner."),
    click.option("--option", "-O", "options", multiple=True, help="Option of the planner, k=v."),
    effort_options,
    click.option(
        "--as-released", is_flag=True, help="As the planner's authors released it, faults and all."
    ),
)

planner_options = _all(
    choice_options,
    click.option("--seed", type=int, help="Seed of a random planner."),
)

trace_option = click.option(
    "--trace-search",
    "trace_file",
    help="Write the best value over time: FILE.csv and FILE.svg.",
)
