"""What commands print: tables and lines on stdout, progress on stderr, or JSON alone."""

import json
import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from partita.core.graph import CostOrigin, Graph
from partita.core.plan import Plan
from partita.core.problem import Mode, Problem
from partita.core.solution import Proof
from partita.flows.answer import Answer
from partita.flows.summary import Summary, estimate_basis, is_as_used
from partita.names import escaped, escaped_lines
from partita.units import format_bytes, format_count, format_rate, format_seconds, format_share

if TYPE_CHECKING:
    from partita.cost.memory import MemoryBreakdown
    from partita.cost.proof import CheckReport
    from partita.flows.moves import Replacement


def terminal_width() -> int:
    """Return the width to print at: the terminal's, or 100 where there is none."""
    return max(40, shutil.get_terminal_size((100, 40)).columns)


def stdout_console() -> Console:
    """Return a console for results; plain where stdout is not a terminal.

    It takes texts as they are: a name with brackets is no markup.
    """
    return Console(
        file=sys.stdout,
        width=terminal_width(),
        highlight=False,
        soft_wrap=False,
        markup=False,
        emoji=False,
    )


_JOIN = "\N{NO-BREAK SPACE}"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(%|[kMGT]?B|[kMG]?J|[mnu]?s|h|W|GPUs?|devices?)\b|%)")


def print_point(console: Console, mark: str, text: str) -> None:
    """Print a sentence behind a mark, its further lines below the first word."""
    width = max(20, console.width - len(mark))
    # A number and its unit stay in one line.
    joined = _BEFORE_UNIT.sub(_JOIN, escaped(text))
    lines = textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False) or [""]
    for row, line in enumerate(lines):
        begin = mark if row == 0 else " " * len(mark)
        console.print(f"{begin}{line.replace(_JOIN, ' ')}", soft_wrap=True)


def print_command(console: Console, text: str, *, mark: str = "") -> None:
    """Print a command in one line, however narrow the terminal is: it can be pasted."""
    console.print(f"{mark}{escaped(text)}", soft_wrap=True)


def picture_signs(console: Console) -> tuple[bool, str]:
    """Return whether a picture on a console has colours, and the encoding of its signs.

    ``NO_COLOR`` takes the colours away. Under ``LANG=C`` Python writes UTF-8 all the same, which a
    terminal that was told so does not show: there the signs are ASCII.
    """
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG", "")
    if not os.environ.get("LC_ALL"):
        named = os.environ.get("LC_CTYPE", "C")
        # Python itself sets C.UTF-8 where the locale is C.
        locale = locale if named in ("C", "POSIX", "C.UTF-8") else named
    encoding = "ascii" if locale in ("C", "POSIX") else console.encoding
    return console.is_terminal and not console.no_color, encoding


def print_json(value: object) -> None:
    """Print a result as JSON."""
    click.echo(json.dumps(value, indent=1, allow_nan=False))


_PACE_S = 2.0
"""Seconds between two lines about how far something is, where they stay on the screen."""


@contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Any]:
    """Show what is going on: a spinner on a terminal, a plain line per step elsewhere.

    Yields a function that is called with each step.
    """
    if quiet:
        yield lambda _: None
        return
    if sys.stderr.isatty():
        console = Console(file=sys.stderr)
        with console.status(what) as status:
            yield lambda step: status.update(f"{what}: {step}")
        return
    yield lambda step: click.echo(f"{what}: {step}", err=True)


def paced(on_progress: Callable[[str], None]) -> Callable[[str], None]:
    """Return a callback that passes on at once what begins, and now and then how far it is.

    The latter is what has a colon, as in ``measuring: 3 of 8 rounds``.
    """
    last = [-math.inf]

    def call(words: str) -> None:
        now = time.monotonic()
        if ": " not in words or now - last[0] >= (0.1 if sys.stderr.isatty() else _PACE_S):
            last[0] = now
            on_progress(words)

    return call


def print_remarks(remarks: Sequence[str]) -> None:
    """Print what was done other than asked, a line each, beside the result."""
    for remark in remarks:
        click.echo(escaped(remark), err=True)


_NARROWEST = 16
"""Columns that a name or words are given at least, before figures go to a table below."""


def table(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str | Text]]
) -> Table | Group:
    """Return a table; a column is a title and how it is justified. Empty columns are left out.

    Cells are shown as they are, without what a terminal would take for a command. Where the
    terminal is too narrow for all figures, the others stand in tables below, each with the names of
    the rows again: no figure and no name is cut.
    """
    kept = [
        index
        for index in range(len(columns))
        if not rows or any(str(row[index]) not in ("", "-") for row in rows)
    ]
    blocks = _blocks(columns, rows, kept)
    tables = [_one_table(columns, rows, block) for block in blocks]
    return tables[0] if len(tables) == 1 else Group(*tables)


def _blocks(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str | Text]], kept: list[int]
) -> list[list[int]]:
    """Return the columns of each table: as few as are as narrow as the terminal."""
    least = {}
    for index in kept:
        title, justify = columns[index]
        cells = [cell_len(line) for row in rows for line in str(row[index]).split("\n")]
        widest = max(cells, default=0)
        # Names and words may be folded, figures may not.
        cut = widest if justify == "right" else min(widest, _NARROWEST)
        least[index] = max(cell_len(title), cut) + 2  # and the gap
    named = next((place for place, i in enumerate(kept[:2]) if columns[i][1] == "left"), 0)
    key, rest = kept[: named + 1], kept[named + 1 :]
    width, blocks = terminal_width(), [list(key)]
    for index in rest:
        if sum(least[i] for i in blocks[-1]) + least[index] > width and len(blocks[-1]) > len(key):
            blocks.append(list(key))
        blocks[-1].append(index)
    return blocks


def _one_table(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str | Text]], kept: list[int]
) -> Table:
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for index in kept:
        title, justify = columns[index]
        # A narrow terminal takes its toll on names and words first, never on figures.
        fixed = justify == "right"
        result.add_column(
            title,
            justify=justify,  # type: ignore[arg-type]
            overflow="fold",
            no_wrap=fixed,
            min_width=None if fixed else min(len(title), _NARROWEST),
        )
    for row in rows:
        cells = (row[index] for index in kept)
        result.add_row(
            *(Text(escaped_lines(cell)) if isinstance(cell, str) else cell for cell in cells)
        )
    return result


def alike(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return rows whose first cell is a name, those that are equal beside it as one.

    >>> alike([["gpu0", "80 %"], ["gpu1", "80 %"], ["gpu2", "5 %"]])
    [['gpu0 +1', '80 %'], ['gpu2', '5 %']]
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        found.setdefault(tuple(cells), []).append(name)
    return [
        [f"{names[0]} +{len(names) - 1}" if len(names) > 1 else names[0], *cells]
        for cells, names in found.items()
    ]


percent = format_share


def model_line(graph: Graph) -> str:
    """Return one line about a graph."""
    parts = [graph.name]
    if len(graph.parameters):
        elements = float(graph.parameters.elements[~graph.parameters.buffer].sum())
        parts.append(f"{format_count(elements)} parameters")
    layers = len(graph.ops.layers.names)
    counts = f"{len(graph):,} ops"
    parts.append(f"{layers} layers, {counts}" if layers else counts)
    origins = dict.fromkeys(costs.origin for costs in graph.costs)
    parts.append(" and ".join(_costs_words(graph, origin) for origin in origins))
    return " · ".join(parts)


def _costs_words(graph: Graph, origin: CostOrigin) -> str:
    """Return one origin of costs with the types of devices that have them."""
    types = [costs.device_type for costs in graph.costs if costs.origin is origin]
    named = ", ".join(name for name in types if name)
    return f"{origin.value} costs" + (f" ({named})" if named else "")


def step_line(problem: Problem, plan: Plan | None = None) -> str:
    """Return one line about a step of a problem, or of a plan for it."""
    cluster, objective = problem.cluster, problem.objective
    sizes = [problem.microbatch_size] * problem.microbatches
    if plan is not None:
        sizes = plan.microbatch_sizes.tolist()
    unit = "sample" if problem.graph.sample_unit.value == "sample" else "minibatch"
    each = f"{min(sizes)} to {max(sizes)}" if min(sizes) != max(sizes) else f"{sizes[0]}"
    count = f"{len(sizes)} microbatch{'es' if len(sizes) > 1 else ''}"
    total = f"{sum(sizes):,} {unit}{'' if sum(sizes) == 1 else 'es' if unit[-1] == 'h' else 's'}"
    words = f"{objective.mode.value} on {cluster.name} ({len(cluster)} devices)"
    return f"{words} · {count} of {each} = {total} per step"


def memory_cell(summary: Summary) -> str:
    """Return the peak of the fullest device against its limit."""
    timeline = summary.evaluation.timeline
    share = timeline.peak_bytes / timeline.limit_bytes
    worst = int(share.argmax())
    peak = float(timeline.peak_bytes[worst if share[worst] > 0 else timeline.peak_bytes.argmax()])
    limit = float(timeline.limit_bytes[worst])
    if not math.isfinite(limit):
        return format_bytes(peak)
    if peak >= 1e8 and limit < 1e13:
        return f"{peak / 1e9:.3g} / {limit / 1e9:.3g} GB"
    return f"{format_bytes(peak)} / {format_bytes(limit)}"


SUMMARY_COLUMNS = (
    ("#", "right"),
    ("planner", "left"),
    ("plan", "left"),
    ("value", "right"),
    ("step", "right"),
    ("samples/s", "right"),
    ("tokens/s", "right"),
    ("busy", "right"),
    ("MFU", "right"),
    ("peak / memory", "right"),
    ("cost/step", "right"),
    ("vs bound", "right"),
)


DISPENSABLE = ("MFU", "tokens/s", "busy", "cost/step", "samples/s")
"""Columns that a narrow terminal goes without, in this order."""


def summary_table(rows: Sequence[Sequence[str]]) -> Table | Group:
    """Return the ranked table, without some columns where the terminal is narrow."""
    for count in range(len(DISPENSABLE) + 1):
        kept = [i for i, (t, _) in enumerate(SUMMARY_COLUMNS) if t not in DISPENSABLE[:count]]
        shown = table([SUMMARY_COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows])
        if isinstance(shown, Table):
            break
    return shown


def overfull_line(summary: Summary) -> str:
    """Return a warning about a plan that our memory model finds too large."""
    rule = summary.solution.metric.value
    return (
        f"does not fit by our memory model: {summary.overfull} (metric {rule!r} has its own rule)"
    )


def summary_row(rank: int, summary: Summary, label: str) -> list[str]:
    """Return the row of a solution in a ranked table."""
    solution, evaluation = summary.solution, summary.evaluation
    own = solution.metric.value != "throughput"
    value = format_value(solution.value, solution.unit) if own else ""
    gap = solution.gap
    return [
        str(rank),
        label,
        summary.title,
        f"{value} {solution.metric.value}" if own else "",
        format_seconds(evaluation.step_s),
        format_rate(evaluation.samples_per_s),
        format_count(evaluation.tokens_per_s) if evaluation.tokens_per_s > 0 else "-",
        percent(summary.utilisation),
        percent(evaluation.flop_utilisation),
        memory_cell(summary),
        f"${evaluation.price_per_step:.3g}" if evaluation.price_per_step > 0 else "-",
        percent(gap, sign=True) if math.isfinite(gap) else "-",
    ]


def format_value(value: float, unit: str) -> str:
    """Return the value of an objective for people."""
    return format_seconds(value) if unit == "s" else f"{value:.6g}"


def bound_line(summary: Summary, what: str = "this plan") -> str:
    """Return what is known about the best possible plan."""
    solution = summary.solution
    if solution.lower_bound <= 0:
        return "no lower bound is known for this objective"
    bound = format_value(solution.lower_bound, solution.unit)
    line = f"no plan can beat {bound} ({summary.bound_term})"
    if solution.proof is Proof.OPTIMAL:
        return f"{line}; {what} is proven to be the best"
    gap = percent(solution.gap) if solution.gap < 10 else f"{solution.gap:,.0f} times that"
    return f"{line}; {what} is {gap} above"


def basis_line(graph: Graph) -> str:
    """Return what the costs of a model were computed for; empty where they were not computed."""
    basis = estimate_basis(graph)
    if basis is None:
        return ""
    origin = graph.costs[0].origin.value
    types = ", ".join(costs.device_type for costs in graph.costs if costs.device_type)
    weights = [f"{basis['dtype']} weights"] if basis["dtype"] else []
    tokens = basis["tokens_per_sample"]
    length = [f"{tokens:,} tokens per sample"] if tokens else []
    size = basis["microbatch_size"]
    samples = f"{size:,} sample{'s' * (size != 1)} per microbatch"
    words = ", ".join([*weights, f"{basis['arithmetic']} arithmetic", *length, samples])
    usual = "; arithmetic is what such devices are used with (--arithmetic names another)"
    return (
        f"{origin} profile{f' for {types}' * bool(types)}: {words}; nothing was measured"
        f"{usual * is_as_used(graph)}"
    )


def precision_line(problem: Problem) -> str:
    """Return the dtypes of training state and collectives; empty without a policy."""
    policy = problem.objective.precision
    if policy is None or problem.objective.mode is Mode.INFERENCE:
        return ""
    master = f"{policy.master} master copy" if policy.master else "no master copy"
    return (
        f"precision {policy.name}: {policy.weights} weights, {policy.gradients} gradients, "
        f"{master}; reduced in {policy.reduction}, gathered in {policy.gather}"
    )


def reserve_line(problem: Problem) -> str:
    """Return what of the devices' memory plans leave free; empty where they may use all."""
    factor = problem.objective.memory_factor
    if factor >= 1:
        return ""
    sizes = {device.type: device.memory_bytes for device in problem.cluster.devices}
    limited = {kind: size for kind, size in sizes.items() if math.isfinite(size)}
    if not limited:
        return ""
    words = [
        f"{format_bytes(size * factor)} of {format_bytes(size)}"
        + (f" ({kind})" if len(limited) > 1 and kind else "")
        for kind, size in limited.items()
    ]
    return (
        f"memory limit {', '.join(words)}: {100 * (1 - factor):.3g} % reserved for context, "
        "buffers and fragmentation (--reserve)"
    )


def rules_line(problem: Problem) -> str:
    """Return where ops must and must not run; empty without rules."""
    return f"rules: {', '.join(map(str, problem.rules))}" if problem.rules else ""


def unused_line(summary: Summary) -> str:
    """Return the devices that a plan leaves idle; empty where it uses all."""
    used = set(summary.solution.plan.devices)
    idle = [name for name in summary.solution.problem.cluster.device_names if name not in used]
    if not idle:
        return ""
    more = ", ..." if len(idle) > 6 else ""
    return f"not used: {', '.join(idle[:6])}{more} ({len(idle)} of {len(idle) + len(used)})"


def effort_line(answer: Answer) -> str:
    """Return what the search spent; empty where a planner does not report it."""
    effort = answer.effort
    is_cut = effort.pop("cut_short", False)
    limit = [f"time limit {effort.pop('time_limit'):g} s"] if "time_limit" in effort else []
    parts = [_figure(name.replace("_", " "), value) for name, value in effort.items()]
    words = [*limit, *filter(None, parts)]
    cut = "; the time was up before all steps were made: another run may find another plan"
    return f"searched: {', '.join(words)}{cut * is_cut}" if words else ""


def _figure(name: str, value: object) -> str:
    """Return a figure of a search for people; empty where it is none."""
    if isinstance(value, bool):
        return name if value else f"not {name}"
    if isinstance(value, int):
        return f"{value:,} {name}"
    if isinstance(value, float):
        return f"{name} {value:.4g}"
    return f"{len(value)} {name}" if isinstance(value, dict) else ""


_MEMORY_COLUMNS = (
    ("device", "left"),
    ("type", "left"),
    ("stages", "left"),
    ("busy", "right"),
    ("memory", "right"),
    ("limit", "right"),
    ("full", "right"),
)
MOST_DEVICES = 16


def memory_table(summary: Summary) -> Table | Group:
    """Return what each device of a plan does and holds; of very many the fullest."""
    problem, plan = summary.solution.problem, summary.solution.plan
    timeline = summary.evaluation.timeline
    held: dict[str, list[int]] = {name: [] for name in plan.devices}
    for index, stage in enumerate(plan.stages):
        for device in {device for group in stage.devices for device in group}:
            held[plan.devices[device]].append(index)
    rows = []
    share = timeline.peak_bytes / timeline.limit_bytes
    order = np.argsort(-share, kind="stable") if len(held) > MOST_DEVICES else range(len(held))
    for index in order:
        name = timeline.devices[index]
        peak, limit = float(timeline.peak_bytes[index]), float(timeline.limit_bytes[index])
        limited = math.isfinite(limit)
        rows.append(
            [
                name,
                problem.cluster.devices[problem.cluster.index_of[name]].type,
                _ranges(held[name]),
                percent(float(timeline.utilisation[index])),
                format_bytes(peak),
                format_bytes(limit) if limited else "-",
                percent(peak / limit) if limited else "-",
            ]
        )
    rows = alike(rows)
    if len(rows) > MOST_DEVICES:
        rest = len(rows) - MOST_DEVICES + 1
        rows = rows[: MOST_DEVICES - 1]
        rows.append([f"{rest} more rows", "", "", "", "", "", f"<= {rows[-1][-1]}"])
    return table(_MEMORY_COLUMNS, rows)


def breakdown_titles(memory: "MemoryBreakdown") -> list[str]:
    """Return the titles of :func:`breakdown_cells`; logits only where a device holds some."""
    if memory.logits.any():
        held = ["weights", "grads", "master", "state", "activ.", "logits", "buffers"]
    else:
        held = ["weights", "gradients", "master", "state", "activations", "buffers"]
    return [*held, "fixed", "free"]


def breakdown_table(names: Sequence[str], memory: "MemoryBreakdown") -> Table | Group:
    """Return where the memory of each device goes at its peak, devices with the same in one row.

    Buffers are received tensors, gathered copies and the workspace of ops; fixed is the reserve.
    """
    rows = alike([[name, *breakdown_cells(memory, i)] for i, name in enumerate(names)])
    titles = breakdown_titles(memory)
    if len(rows) > MOST_DEVICES:
        more = [f"{len(rows) - MOST_DEVICES + 1} more", *[""] * len(titles)]
        rows = [*rows[: MOST_DEVICES - 1], more]
    columns = [("where memory goes", "left"), *((title, "right") for title in titles)]
    return table(columns, rows)


def breakdown_cells(memory: "MemoryBreakdown", device: int) -> tuple[str, ...]:
    """Return the bytes of a device by what holds them, as text."""
    logits = [memory.logits] if memory.logits.any() else []
    held = (*memory[:5], *logits, memory.buffers + memory.workspace, memory.fixed, memory.free)
    sizes = [float(part[device]) for part in held]
    return tuple(
        ("-" * (size < 0) + format_bytes(abs(size))) if size and math.isfinite(size) else "-"
        for size in sizes
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers for people, neighbours as a range; of very many the first."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    words = ["-".join(map(str, part)) for part in parts[:6]]
    return ", ".join(words) + (", ..." if len(parts) > 6 else "")


_ALTERNATIVE_COLUMNS = (("#", "right"), ("other plans", "left"), ("value", "right"), ("", "right"))


def alternatives_table(answer: Answer) -> Table | Group:
    """Return the other plans, with how much worse they are."""
    unit = answer.summary.solution.unit
    return table(
        _ALTERNATIVE_COLUMNS,
        [
            [
                str(rank),
                each.words,
                format_value(each.value, unit),
                percent(each.ratio - 1, sign=True),
            ]
            for rank, each in enumerate(answer.alternatives, 2)
        ],
    )


_MOVE_COLUMNS = (
    *(("plan by moves", "left"), ("value", "right"), ("vs best", "right"), ("step", "right")),
    *(("copied", "right"), ("over links", "right"), ("from checkpoint", "right")),
)


def replacement_table(replacement: "Replacement", unit: str) -> Table | Group:
    """Return plans that may take the place of another: their values against what moves."""
    best = replacement.candidates[0].value
    rows = []
    for each in replacement.candidates:
        mark = " (chosen)" if each is replacement.chosen else ""
        moves, step = each.moves, format_seconds(each.step_s)
        rows.append(
            [
                each.words + mark,
                format_value(each.value, unit),
                percent(each.value / best - 1, sign=True) if best > 0 else "-",
                "-" if step == format_value(each.value, unit) else step,
                format_bytes(moves.copied_bytes),
                format_seconds(moves.copy_s),
                format_bytes(moves.read_bytes) if moves.read_bytes else "-",
            ]
        )
    return table(_MOVE_COLUMNS, rows)


def check_line(report: "CheckReport") -> str:
    """Return what the checker proved."""
    return (
        f"checked: {report.num_instructions:,} instructions, {report.num_messages:,} messages "
        f"({format_bytes(report.sent_bytes)}): complete, no deadlock, fits"
    )
