"""What ``run`` and ``train`` share: options, a YAML file of them, what they print and write."""

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from partita.cli.console import percent, print_json, stdout_console, table
from partita.core.program import TransferMode
from partita.documents import read_text, save, write_text
from partita.energy.client.server_link import check_address
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.flows.summary import Summary
from partita.names import suggest
from partita.runtime.baseline_names import TORCH_WAYS
from partita.units import format_bytes, format_seconds
from partita.yaml_nodes import Table, parse_yaml, read_table, read_value

if TYPE_CHECKING:
    from partita.capture.origin import ModelOrigin
    from partita.core.graph import DeviceKind
    from partita.flows.train import Outcome
    from partita.runtime.job import Job
    from partita.runtime.report import RunReport

_F = TypeVar("_F", bound=Callable[..., Any])
RUNS = "runs"
_WORST = 5


_RUN_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--steps", type=click.IntRange(1), default=10, show_default=True),
    click.option("--learning-rate", type=float, help="[0.1; adam 0.001]"),
    click.option(
        "--order",
        type=click.Choice(("device", "global", "program")),
        default="device",
        show_default=True,
        help="Each device by its schedule, all by one order, or as the model's code runs.",
    ),
    click.option(
        "--transfers",
        type=click.Choice([mode.value for mode in TransferMode]),
        default=TransferMode.OVERLAPPED.value,
        show_default=True,
        help="Whether messages travel beside compute, or hold both devices.",
    ),
    click.option(
        "--repeatable",
        is_flag=True,
        help="Every step sees the same data, by deterministic algorithms.",
    ),
    click.option(
        "--check",
        is_flag=True,
        help="Compare with the captured graph and the untouched module; exit 5 if not equal.",
    ),
    click.option("--report", is_flag=True, help="Predicted against measured, stage by stage."),
    click.option("--recalibrate", help="Write the graph with costs as this run has shown them."),
    click.option(
        "--capture",
        type=click.Choice(("profile", "memory", "none")),
        default="none",
        show_default=True,
        help="A torch.profiler trace of all ranks, or the memory that each held.",
    ),
    click.option("--device-ids", help="GPUs to use, or cores for CPU processes: 0,1."),
    click.option("--emulate", is_flag=True, help="Sleep instead of computing; talk for real."),
    click.option("--emulate-scale", type=float, default=0.0, help="Factor on compute. [suitable]"),
    click.option(
        "--launcher",
        type=click.Choice(("auto", "fork", "torchrun")),
        default="auto",
        show_default=True,
        help="Forked from this process, or fresh processes by torchrun's agent.",
    ),
    click.option(
        "--stall-limit",
        type=float,
        default=300.0,
        show_default=True,
        help="Seconds an instruction may take before the run is given up.",
    ),
    click.option("--energy-server", help="Take clocks from it: http://127.0.0.1:7787."),
    click.option(
        "--energy-wish",
        help="What its clocks keep: slowdown=0.02, deadline=SECONDS, energy=JOULES, power=WATTS, "
        "straggler=SECONDS, least-energy; several with commas. [the fastest]",
    ),
    click.option(
        "--power-device",
        help="nvml, zeus, rapl, modelled:a100, replay:DIR, none. [what there is; the plan's type]",
    ),
    click.option(
        "--profile-steps",
        type=click.IntRange(1),
        default=5,
        show_default=True,
        help="Steps after which the server is told what they took.",
    ),
    click.option(
        "--export-timing-csv", help="Directory for instructions-%d.csv and time-energy-%d.csv."
    ),
    click.option("--runs", default=RUNS, show_default=True, help="Where run directories are."),
    click.option(
        "--config",
        callback=lambda context, _, path: _read_config(context, path),
        is_eager=True,
        expose_value=False,
        help="A YAML file of options, by their long names; the command line wins.",
    ),
)


def run_options(function: _F) -> _F:
    """Add the options of a run to a command."""
    for option in reversed(_RUN_OPTIONS):
        function = option(function)
    return function


def _read_config(context: click.Context, path: str | None) -> None:
    """Take the defaults of a command from a YAML file."""
    if path is None:
        return
    by_name = {
        spelling.lstrip("-"): parameter.name
        for parameter in context.command.params
        for spelling in (*parameter.opts, *parameter.secondary_opts)
        if parameter.name
    }
    defaults: dict[str, Any] = {}
    try:
        root = parse_yaml(read_text(path), empty=Table(1, {}, {}))
        found = read_table(root, "the file of options")
        for key, node in found.entries.items():
            name = by_name.get(key.replace("_", "-")) or by_name.get(key)
            if name is None:
                known = sorted(spelling for spelling in by_name if len(spelling) > 1)
                problem = f"there is no option {key!r}{suggest(key, known)}"
                raise FormatError(problem, line=found.line_of[key])
            defaults[name] = read_value(node, f"option {key!r}")
    except FormatError as exc:
        raise (exc if exc.path else exc.at(path)) from exc
    context.default_map = {**(context.default_map or {}), **defaults}


def read_job(rest: Mapping[str, Any], model: "ModelOrigin | None", kind: "DeviceKind") -> "Job":
    """Return how to run, as the options say."""
    from partita.program.order import ListOrder  # noqa: PLC0415 (only where something is run)
    from partita.runtime.emulation import Emulation  # noqa: PLC0415 (imports torch)
    from partita.runtime.job import Job  # noqa: PLC0415 (likewise)
    from partita.runtime.power import Power  # noqa: PLC0415 (likewise)
    from partita.runtime.rank_capture import Capture  # noqa: PLC0415 (likewise)

    rate, transfers = rest["learning_rate"], TransferMode(rest["transfers"])
    if rate is not None and not rate > 0:
        raise InvalidInputError(f"--learning-rate {rate}; expected more than 0")
    emulation = None
    if rest["emulate"]:
        emulation = Emulation(
            scale=rest["emulate_scale"],
            steps=rest["steps"],
            blocking=transfers is TransferMode.BLOCKING,
        )
    power = None
    if rest["energy_server"] or rest["power_device"] or rest["export_timing_csv"]:
        power = Power(
            device=rest["power_device"] or "",
            server=rest["energy_server"] or "",
            wish=rest["energy_wish"] or "",
            profile_steps=rest["profile_steps"],
            keep_log=bool(rest["export_timing_csv"]),
        )
    return Job(
        model=None if emulation else model,
        steps=rest["steps"],
        optimizer=rest["optimizer"] or "adam",
        learning_rate=rate,
        seed=rest["seed"] or 0,
        order=ListOrder(rest["order"]),
        transfers=transfers,
        same_data=rest["repeatable"],
        keep_results=False,
        capture=Capture(rest["capture"]),
        stall_limit_s=rest["stall_limit"],
        device=kind,
        emulate=emulation,
        power=power,
    )


def given(context: click.Context, *names: str) -> list[str]:
    """Return those of some options that the user gave, as they are written."""
    default = (ParameterSource.DEFAULT, None)
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if context.get_parameter_source(name) not in default
    ]


def refuse_given(context: click.Context, why: str, *names: str) -> None:
    """Refuse options that would be ignored."""
    if found := given(context, *names):
        raise InvalidInputError(f"{found[0]}: {why}")


def check_together(context: click.Context, baseline: str | None = None) -> None:
    """Check that the options of a run go together.

    Raises:
        InvalidInputError: One would be ignored, or means nothing here.
    """
    values = context.params
    if values["emulate"]:
        why = "an emulated run computes nothing"
        refuse_given(context, why, "check", "capture", "order", "recalibrate", "repeatable")
        refuse_given(context, why, "learning_rate")
    elif values["emulate_scale"]:
        raise InvalidInputError("--emulate-scale needs --emulate")
    if values["energy_server"]:
        check_address(values["energy_server"])
    else:
        why = "it says when the energy server is told: add --energy-server"
        refuse_given(context, why, "profile_steps")
        why = "it says what the energy server's clocks keep: add --energy-server"
        refuse_given(context, why, "energy_wish")
    if baseline in TORCH_WAYS:
        why = f"{baseline} is torch's own way, without a plan of ours"
        refuse_given(context, why, "capture", "order", "transfers", "report", "recalibrate")
        refuse_given(context, why, "launcher", "energy_server", "power_device")
        refuse_given(context, why, "export_timing_csv")


def use_device_ids(text: str | None, gpus: int) -> int:
    """Let ranks see some GPUs only, or run on some cores only; returns how many GPUs are seen.

    Raises:
        InvalidInputError: There is no such device.
        UnsupportedError: This system cannot choose cores.
    """
    if text is None:
        return gpus
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--device-ids {text!r}; expected numbers like 0,1") from None
    if not gpus and not hasattr(os, "sched_setaffinity"):
        raise UnsupportedError("--device-ids chooses cores, which this system does not let us do")
    there = list(range(gpus)) if gpus else sorted(os.sched_getaffinity(0))
    missing = sorted(set(ids) - set(there))
    if missing:
        what = "GPUs" if gpus else "cores"
        known = ", ".join(map(str, there))
        raise InvalidInputError(
            f"--device-ids {text}: there is no {missing[0]}; {what} are {known}"
        )
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        named = visible if len(visible) == gpus else [str(number) for number in there]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named[number] for number in ids)
        return len(ids)
    os.sched_setaffinity(0, ids)
    return 0


def gpus_wanted() -> int:
    """Return what NUM_GPUS says; 0 = nothing.

    Raises:
        InvalidInputError: It is no number.
    """
    text = os.environ.get("NUM_GPUS", "0")
    if not text.isdecimal():
        raise InvalidInputError(f"NUM_GPUS is {text!r}; expected a number")
    return int(text)


class StepLine:
    """Shows the steps of a run as they are done: one line on a terminal, a few elsewhere."""

    def __init__(self, steps: int, summary: Summary, *, emulated: bool, quiet: bool) -> None:
        plan = summary.solution.plan
        used = {d for stage in plan.stages for group in stage.devices for d in group}
        self._steps, self._samples, self._ranks = steps, plan.samples, len(used)
        self._emulated, self._quiet, self._live = emulated, quiet, sys.stderr.isatty()
        self._predicted_s = math.nan if emulated else summary.evaluation.step_s
        self._losses: dict[int, list[float]] = {}
        self._first_s = math.nan

    def __call__(self, _: int, news: Any) -> None:
        """Take note of a step that a rank has done."""
        losses = self._losses.setdefault(news.step, [])
        losses.append(news.loss)
        if self._quiet or len(losses) < self._ranks:
            return
        del self._losses[news.step]
        number, now_s = news.step + 1, time.monotonic()
        words = [f"run: step {number}/{self._steps}"]
        if not self._emulated:
            words.append(f"loss {sum(losses):.4f}")
        if news.step == 0:
            self._first_s = now_s
        elif now_s > self._first_s:
            words.append(f"{news.step * self._samples / (now_s - self._first_s):.3g} samples/s")
        if self._live:
            if not math.isnan(self._predicted_s):
                words.append(f"(predicted {self._samples / self._predicted_s:.3g})")
            click.echo(f"\r{'  '.join(words)}\x1b[K", err=True, nl=number == self._steps)
        elif number in (1, self._steps) or number % max(1, self._steps // 5) == 0:
            click.echo("  ".join(words), err=True)


def write_run(outcome: "Outcome", directory: Path, order: str = "device") -> list[str]:
    """Write plan, results, timeline and traces of a run into its directory; returns their names."""
    from partita.program.lower import lower  # noqa: PLC0415 (only where something was run)
    from partita.program.order import ListOrder  # noqa: PLC0415 (likewise)
    from partita.report.trace import chrome_trace  # noqa: PLC0415 (likewise)
    from partita.runtime.directory import write_results  # noqa: PLC0415 (likewise)

    problem, plan = outcome.solution.problem, outcome.solution.plan
    save(outcome.solution, directory / "plan.json")
    written = ["results.json", "plan.json"]
    if outcome.run.timelines:
        last = outcome.run.timelines[-1]
        save(last, directory / "timeline.json")
        program = lower(problem, plan, order=ListOrder(order))
        names = problem.graph.tensors.names
        write_text(
            directory / "trace.json", chrome_trace(last, program=program, tensor_names=names)
        )
        written += ["timeline.json", "trace.json (open in Perfetto)"]
    if outcome.run.trace:
        write_text(directory / "profiler.json", outcome.run.trace)
        written.append("profiler.json")
    write_results(directory, {"name": directory.name, **outcome.to_json()})
    return [*written, "logs/"]


def write_recalibrated(outcome: "Outcome", path: str) -> None:
    """Write the graph with costs as the run has shown them."""
    from partita.runtime.report import recalibrated  # noqa: PLC0415 (only here)

    assert outcome.report is not None  # torch's ways are refused
    save(recalibrated(outcome.solution.problem, outcome.solution.plan, outcome.report), path)


def show_outcome(outcome: "Outcome", directory: Path, rest: Mapping[str, Any]) -> None:
    """Write what a run came to, print it, and end with an error if it is not right.

    Raises:
        WorkerError: It does not equal the captured graph, or the untouched module.
    """
    from partita.errors import WorkerError  # noqa: PLC0415 (only here)

    written = write_run(outcome, directory, rest["order"])
    if rest["recalibrate"]:
        write_recalibrated(outcome, rest["recalibrate"])
        written.append(rest["recalibrate"])
    if rest["export_timing_csv"]:
        from partita.flows.run_energy import export_timing  # noqa: PLC0415 (only here)

        written += export_timing(outcome.run, Path(rest["export_timing_csv"]))
    if rest["as_json"]:
        print_json({"directory": str(directory), **outcome.to_json()})
    else:
        _print(outcome, directory, written, report=rest["report"])
    for verdict in outcome.verdicts:
        if not verdict.is_equal:
            worst = verdict.differences[0] if verdict.differences else None
            what = (
                f"{worst.what} {worst.name!r} of step {worst.step}" if worst else "nothing compared"
            )
            raise WorkerError(
                f"the run differs from {verdict.against}: {what} by {verdict.worst:.1e}"
            )


def _print(outcome: "Outcome", directory: Path, written: list[str], *, report: bool) -> None:
    from partita.flows.run_energy import energy_lines  # noqa: PLC0415 (only here)

    console, figures = stdout_console(), outcome.report
    differing = [verdict for verdict in outcome.verdicts if not verdict.is_equal]
    if differing:
        worst = differing[0].differences[:_WORST]
        rows = [[str(d.step), d.what, d.name, f"{d.value:.1e}"] for d in worst]
        titles = (("step", "right"), ("what", "left"), ("name", "left"), ("difference", "right"))
        console.print(table(titles, rows))
    for line in (*run_lines(outcome), *energy_lines(outcome.run)):
        console.print(line)
    if figures is not None:
        if report:
            _print_report(figures)
        name, factor = figures.slowest
        console.print(f"slowest   {name}: compute {factor:.2f} x its prediction")
    for remark in outcome.remarks:
        console.print(f"          {remark}")
    console.print(f"{directory}: {', '.join(written)}")


def run_lines(outcome: "Outcome") -> list[str]:
    """Return the verdict of a run, and its speed beside the predicted one."""
    steps = len(outcome.run.step_s)
    words = [f"step {steps}/{steps}"]
    if outcome.losses[0] is not None and outcome.losses[-1] is not None:
        words.append(f"loss {outcome.losses[0]:.4g} -> {outcome.losses[-1]:.4g}")
    words += [
        f"{format_seconds(outcome.step_s)} a step {outcome.origin}",
        f"predicted {format_seconds(outcome.predicted.makespan_s)}"
        f" ({percent(outcome.error, sign=True)})",
        f"{outcome.solution.plan.samples / outcome.step_s:.3g} samples/s",
    ]
    if outcome.report is not None:
        bubbles = [row.bubble[1] for row in outcome.report.devices]
        words.append(f"bubble {percent(sum(bubbles) / len(bubbles))}")
    checks = [verdict.line() for verdict in outcome.verdicts]
    if isinstance(outcome.module_verdict, str):
        checks.append(f"not compared with the untouched module: {outcome.module_verdict}")
    return [*(f"check     {line}" for line in checks), "run       " + "  ".join(words)]


def _pair(values: tuple[float, float], text: Callable[[float], str]) -> str:
    return " / ".join("-" if math.isnan(value) else text(value) for value in values)


def _print_report(report: "RunReport") -> None:
    console = stdout_console()
    console.print("predicted / measured, by stage:")
    stages = [
        [
            str(row.stage),
            ", ".join(row.devices),
            _pair(row.forward_s, format_seconds),
            _pair(row.backward_s, format_seconds),
            _pair(row.compute_s, format_seconds),
        ]
        for row in report.stages
    ]
    titles = ["forward", "backward", "compute a step"]
    columns = [("stage", "right"), ("devices", "left"), *((title, "right") for title in titles)]
    console.print(table(columns, stages))
    console.print("by device:")
    devices = [
        [
            row.device,
            _pair(row.busy_s, format_seconds),
            _pair(row.bubble, percent),
            _pair(row.transfer_s, format_seconds),
            _pair(row.peak_bytes, format_bytes),
        ]
        for row in report.devices
    ]
    titles = ["busy", "bubble", "a message", "peak memory"]
    by_device = [("device", "left"), *((title, "right") for title in titles)]
    console.print(table(by_device, devices))
