"""Options and the table of jobs that the commands on a live fleet share."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from partita.cli.console import table
from partita.flows.fleet.live import gpu_list, gpus_words
from partita.units import format_seconds

_F = TypeVar("_F", bound=Callable[..., Any])
_JOB_COLUMNS = (
    ("job", "right"),
    ("name", "left"),
    ("state", "left"),
    ("steps", "right"),
    ("GPUs", "left"),
    ("where", "left"),
    ("CPUs", "right"),
    ("speed", "right"),
    ("lease", "right"),
    ("age", "right"),
    ("tenant", "left"),
    ("note", "left"),
)


def answer_options(function: _F) -> _F:
    """Add the options of commands that show an answer of the fleet."""
    debug = click.option("--debug", is_flag=True, help="Show a traceback when something fails.")
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
    return as_json(debug(function))


def job_table(jobs: Sequence[Mapping[str, Any]]) -> Any:
    """Return the table of some jobs."""
    return table(_JOB_COLUMNS, [_job_row(job) for job in jobs])


def _job_row(job: Mapping[str, Any]) -> list[str]:
    end_s = job["finished_s"] or time.time()
    return [
        str(job["id"]),
        job["name"],
        job["state"],
        f"{job['step']}/{job['steps']}",
        gpus_words(job["gpus"]),
        "; ".join(f"{place['server']}:{gpu_list(place)}" for place in job["places"]) or "-",
        f"{sum(place['cpus'] for place in job['places']):g}" if job["places"] else "-",
        _speed(job),
        _lease(job),
        format_seconds(max(0.0, end_s - job["submitted_s"])),
        job["tenant"] or "-",
        job["note"] or "-",
    ]


def _speed(job: Mapping[str, Any]) -> str:
    """Return how fast a job runs, in parts of what its curve says."""
    if job["measured_speed"] is None:
        return "-"
    return f"{job['measured_speed'] / job['curve_speed']:.0%}"


def _lease(job: Mapping[str, Any]) -> str:
    if job["lease_end_s"] is None:
        return "-"
    return format_seconds(max(0.0, job["lease_end_s"] - time.time()))
