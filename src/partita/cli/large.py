"""A plan of a large transformer on the terminal: layout, time, memory, money, alternatives."""

import math

from rich.text import Text

from partita.cli.console import (
    percent,
    print_json,
    replacement_table,
    stdout_console,
    table,
)
from partita.documents import save
from partita.flows.large import LargePlanResult
from partita.transformer.choices import Choice
from partita.transformer.kernels import accuracy_line
from partita.units import format_count, format_seconds

LESS = 0.8
"""Share of the usual MFU below which the one of causal attention is said, too."""
_PARTS = {
    "compute_s": "compute",
    "recompute_s": "of it again",
    "tensor_s": "tensor",
    "context_s": "context",
    "expert_s": "experts",
    "pipeline_s": "sends",
    "bubble_s": "bubble",
    "data_s": "data",
    "optimizer_s": "optimizer",
    "loading_s": "loading",
    "offload_s": "offload",
}


def finish_large(result: LargePlanResult, target: str | None, *, as_json: bool) -> None:
    """Write the plan of a large transformer, if a file is named, and show it."""
    if target is not None:
        save(result.solution, target)
    if as_json:
        print_json({**result.to_json(), "written": target})
    elif target != "-":
        show_large(result, target)


def show_large(result: LargePlanResult, written: str | None = None) -> None:
    """Print a plan as a person reads it: what, how fast, what takes time and memory, what else."""
    console, task, best = stdout_console(), result.task, result.best
    shape = task.shape
    active = f", {shape.active_params / 1e9:.1f} G active" if shape.experts else ""
    trained = f", {1 - task.frozen:.2%} trained" if task.frozen else ""
    console.print(
        f"{shape.name}: {shape.params / 1e9:.1f} G parameters{active}{trained}, {shape.layers} "
        f"layers of width {shape.hidden}; on {result.cluster.name} ({len(result.plan.devices)} "
        "devices)"
    )
    sequences = f"{task.batch:,} sequence{'s' * (task.batch != 1)}"
    console.print(
        f"estimated: {task.precision}, {task.framework}, {task.optimizer}, "
        f"{task.sequence_length:,} tokens per sequence, {sequences} "
        f"({format_count(task.tokens)} tokens) per step; nothing was measured"
    )
    console.print(Text.assemble("layout: ", (best.title, "bold")))
    console.print(_rate_line(result))
    for line in (_money_line(result), _free_line(result), _rival_line(result)):
        if line:
            console.print(line)
    console.print(_parts_table([best, *result.others]))
    console.print(_memory_table([best, *result.others]))
    share = task.limit_bytes / task.machine.memory_bytes
    console.print(
        f"memory: {share:.0%} of each device may be used (--reserve), the rest is for fragments; "
        "context and communicators are counted as fixed",
        style="dim",
    )
    console.print(
        f"bound: {format_seconds(result.solution.lower_bound)} by kernels at the rates that "
        f"large ones reach; bound by: {binding(best)}"
    )
    if (replacement := result.replacement) is not None:
        if replacement.candidates:
            console.print(replacement_table(replacement, result.solution.unit))
        console.print(replacement.line)
    console.print(accuracy_line(result.accuracy), style="dim")
    for remark in result.remarks:
        console.print(remark, style="dim")
    if written:
        console.print(f"written to {written}", soft_wrap=True)
        console.print(
            f"next: partita explain {written} · partita simulate {written}",
            style="dim",
            soft_wrap=True,
        )


def binding(choice: Choice) -> str:
    """Return what takes most of a step, and what comes next."""
    shares = {k: v / choice.step_s for k, v in choice.parts.items() if k != "recompute_s"}
    first, second, *_ = sorted(shares, key=lambda key: -shares[key])
    words = _PARTS[first] + ("" if first == "compute_s" else f" ({shares[first]:.0%} of a step)")
    if shares[second] < 0.02:
        return words
    return f"{words}, then {_PARTS[second]} ({shares[second]:.0%} of a step)"


def _rate_line(result: LargePlanResult) -> str:
    each = result.tokens_per_s / len(result.plan.devices)
    again = f" ({percent(result.hfu)} with what is computed again)" * (
        result.best.parts["recompute_s"] > 0
    )
    # Long sequences: twice what kernels compute would look like more than devices can.
    half = f" ({percent(result.mfu_causal)} what its mask leaves)" * (
        result.mfu_causal < LESS * result.mfu
    )
    return (
        f"{format_seconds(result.best.step_s)} per step · {format_count(result.tokens_per_s)} "
        f"tokens/s · {each:,.0f} tokens/s per device · MFU {percent(result.mfu)}{again}, attention "
        f"counted whole{half}"
    )


def _money_line(result: LargePlanResult) -> str:
    price, words = result.price_per_hour, []
    if math.isfinite(price):
        per_million = price / 3600 / result.tokens_per_s * 1e6
        words.append(f"${price:,.0f} per hour, ${per_million:.3g} per million tokens (list prices)")
    joules = result.joules_per_token
    if math.isfinite(joules):
        words.append(f"{joules:.3g} J per token (modelled)")
    if math.isfinite(result.tokens):
        days = result.training_s / 86_400
        takes = [f"{days:,.1f} days"]
        if math.isfinite(price):
            takes.append(f"${price * result.training_s / 3600:,.0f}")
        if math.isfinite(joules):
            takes.append(f"{joules * result.tokens / 3.6e9:,.0f} MWh")
        *first, last = takes
        listed = f"{', '.join(first)} and {last}" if first else last
        words.append(f"{format_count(result.tokens)} tokens take {listed}")
    return "; ".join(words)


def _free_line(result: LargePlanResult) -> str:
    free = result.free
    if free is None:
        return ""
    gain = result.best.step_s / free.step_s - 1
    if gain < 0.005:
        return "the degrees that are fixed cost nothing: no free choice is faster"
    return f"free degrees would be {gain:.1%} faster: {free.title}"


def _rival_line(result: LargePlanResult) -> str:
    rival = result.rival
    if rival is None:
        return ""
    mine, other = result.task.framework, rival.layout.framework
    paid = result.best.step_s / rival.step_s - 1
    if paid < 0.0005:
        return f"a plan that {mine} can run: no other framework is faster"
    return (
        f"a plan that {mine} can run: {paid:.1%} slower than the best for {other} ({rival.title})"
    )


def _parts_table(choices: list[Choice]) -> object:
    used = [k for k in _PARTS if any(c.parts[k] > 5e-4 * c.step_s for c in choices)]
    columns = [("layout", "left"), ("step", "right"), *((_PARTS[k], "right") for k in used)]
    rows = [
        [_short(c), format_seconds(c.step_s), *(_share(c.parts[k], c.step_s) for k in used)]
        for c in choices
    ]
    return table(columns, rows)


def _short(choice: Choice) -> str:
    """Return the degrees in as few letters as can be."""
    text = choice.title
    for long, brief in (
        ("microbatch ", "b"),
        ("recompute ", "again:"),
        ("shards of ", "of"),
        ("experts overlapped", "overlap"),
    ):
        text = text.replace(long, brief)
    for name in ("tp", "pp", "vp", "dp", "cp", "ep", "etp", "zero"):
        text = text.replace(f"{name} ", name)
    return text.replace(", ", " ")


def _share(value: float, whole: float) -> str:
    return f"{value / whole:.1%}" if value > 0 else "-"


def _memory_table(choices: list[Choice]) -> object:
    used = [name for name in choices[0].memory if any(c.memory[name] > 0 for c in choices)]
    columns = [("GB per device", "left"), *((_MEMORY.get(n, n), "right") for n in used)]
    columns += [("total", "right"), ("free", "right")]
    rows = [[_short(c), *_gigabytes(c, used)] for c in choices]
    return table(columns, rows)


_MEMORY = {"gradients": "grads", "activations": "activ.", "buffers": "buff."}


def _gigabytes(choice: Choice, used: list[str]) -> list[str]:
    total = choice.total_bytes
    values = [*(choice.memory[name] for name in used), total, choice.limit_bytes - total]
    return [f"{value / 1e9:.1f}" if abs(value) >= 5e7 else "-" for value in values]
