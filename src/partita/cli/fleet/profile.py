"""``partita fleet profile``: how the speed of a training script depends on CPUs and memory."""

import statistics

import click
import numpy as np
from click.core import ParameterSource

from partita.cli.console import print_json, print_remarks, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.core.fleet import Sensitivity
from partita.errors import WorkerError
from partita.fleet.profiler.profile import Profile
from partita.flows.fleet.profile import (
    ProfileScriptRequest,
    ScriptProfile,
    profile_list_request,
    profile_script_request,
)
from partita.processes import ended_by_signals
from partita.requests import fields_of
from partita.units import format_bytes, format_seconds

_GIB = 2.0**30


def _words(word: str) -> str:
    """Synergy spells some options with underscores; both are understood everywhere."""
    return word.replace("_", "-")


@click.command(
    cls=Documented,
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _words},
    epilog="Example: partita fleet profile -b 64 --max-iterations 30 train.py --data images\n\n"
    "partita fleet profile --list jobs.yaml",
)
@takes(ProfileScriptRequest)
@click.option("--list", "list_file", help="YAML file whose scripts are all profiled.")
@output_options
def command(
    request: ProfileScriptRequest,
    *,
    list_file: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Measure how the speed of SCRIPT depends on CPUs and memory.

    SCRIPT must take --batch/-b, --workers/-j, --max_iterations and --data; one iteration checks
    that. An option that is given on both sides is the profiler's. Options may be spelt with - or _.
    An equal command goes on where one before it stopped.
    """
    del debug  # read by main
    context = click.get_current_context()
    if bool(request.script) == bool(list_file):
        raise click.UsageError("name a SCRIPT, or a file by --list", context)
    silent = quiet or as_json
    if list_file is None:
        what = f"fleet profile {request.job_name}"
        with progress(what, quiet=silent) as on_progress, ended_by_signals():
            found = profile_script_request(request, on_progress)
        print_remarks(found.remarks)
        if as_json:
            print_json(found.to_json())
        else:
            _show(found)
        return
    named = [field.name for field in fields_of(ProfileScriptRequest)]
    given = [
        name for name in named if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    with progress("fleet profile", quiet=silent) as on_progress, ended_by_signals():
        listed = profile_list_request(list_file, request, given=given, on_progress=on_progress)
    print_remarks([remark for job in listed.jobs for remark in job.remarks])
    if as_json:
        print_json(listed.to_json())
    else:
        for job in listed.jobs:
            _show(job)
    if listed.failed:
        raise WorkerError("\n".join(f"{name}: {reason}" for name, reason in listed.failed))


def _show(job: ScriptProfile) -> None:
    """Print a profile for people."""
    profile, sensitivity = job.profile, job.profile.sensitivity
    for note in profile.notes:
        click.echo(f"note: {note}", err=True)
    if sensitivity is None:
        click.echo(f"{job.name}: took part in the runs; node 0 has the result")
        return
    click.echo(f"{job.name} · {sensitivity.machine} · limits by {profile.isolation.value}")
    _show_curve(profile, sensitivity)
    click.echo(
        f"{job.num_measured} of {len(profile.curve)} points measured, in {len(profile.runs)} "
        "runs; the others filled in"
    )
    if sensitivity.storage_bandwidth_bytes_per_s > 0:
        _show_memory(sensitivity)
    for what, path in job.written.items():
        click.echo(f"{what} written to {path}")


def _show_curve(profile: Profile, sensitivity: Sensitivity) -> None:
    """Print samples per second over CPUs."""
    samples = profile.curve[-1].rate * sensitivity.iteration_s
    rows = []
    for point in profile.curve:
        runs = [run for run in profile.runs if run.cpus == point.cpus]
        rows.append(
            [
                f"{point.cpus:g}",
                str(runs[0].workers) if runs else "",
                format_seconds(samples / point.rate),
                f"{point.rate:.4g}",
                f"{point.rate / profile.curve[-1].rate:.3f}",
                point.origin.value,
                format_seconds(statistics.median(run.wall_s for run in runs)) if runs else "",
            ]
        )
    columns = [("CPUs", "right"), ("loaders", "right"), ("iteration", "right")]
    columns += [("samples/s", "right"), ("speed", "right"), ("known", "left"), ("run", "right")]
    stdout_console().print(table(columns, rows))


def _show_memory(sensitivity: Sensitivity) -> None:
    """Print the model of memory: speed at the most CPUs and at half of them, by cached data."""
    counts = np.unique(sensitivity.cpus)
    chosen = sorted({float(counts[-1]), float(counts[len(counts) // 2 - 1])}, reverse=True)
    storage = sensitivity.storage_bandwidth_bytes_per_s
    speeds = ", ".join(
        f"{rate:.3g} GiB/s with {cpus:g}"
        for cpus, rate in zip(
            sensitivity.memory_cpus.tolist(),
            (sensitivity.memory_bytes_per_s / _GIB).tolist(),
            strict=True,
        )
    )
    click.echo(
        f"modelled from {format_bytes(sensitivity.dataset_bytes)} of data, "
        f"{sensitivity.dataset_samples:,} samples; measured storage "
        f"{format_bytes(storage)}/s, memory {speeds} CPUs"
    )
    columns = [("memory per GPU", "right"), ("cached", "right")]
    for cpus in chosen:
        columns += [(f"speed, {cpus:g} CPUs per GPU", "right"), ("storage", "right")]
    rows = []
    for row in np.flatnonzero(sensitivity.cpus == chosen[0]).tolist():
        memory = float(sensitivity.memory_bytes[row])
        share = (
            (memory - sensitivity.working_bytes) * _gpus(sensitivity) / sensitivity.dataset_bytes
        )
        cells = [format_bytes(memory), f"{share:.0%}"]
        for cpus in chosen:
            here = np.flatnonzero(
                (sensitivity.cpus == cpus) & (sensitivity.memory_bytes == memory)
            )[0]
            needed = float(sensitivity.storage_bytes_per_s[here])
            cells += [f"{sensitivity.speed[here]:.3f}", f"{format_bytes(needed)}/s"]
        rows.append(cells)
    stdout_console().print(table(columns, rows))


def _gpus(sensitivity: Sensitivity) -> int:
    return max(1, int(sensitivity.gpus[0]))
