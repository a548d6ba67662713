"""``partita fleet simulate``: policies on a trace, ranked."""

import math
from typing import TYPE_CHECKING, Any

import click

from partita.cli.console import print_json, progress, stdout_console
from partita.cli.fleet.inputs import (
    parse_loads,
    parse_quotas,
    parse_span,
    profile_options,
    published_filter_option,
    read_fleet_trace,
    read_profiles,
)
from partita.cli.options import output_options
from partita.errors import InvalidInputError
from partita.units import parse_seconds

if TYPE_CHECKING:
    from partita.core.fleet import Trace
    from partita.fleet.policies.resources import Servers
    from partita.fleet.simulate.options import Outage, Rules
    from partita.fleet.study.study import Question

DEFAULT_CLUSTER = "16x8xv100"
DEFAULT_POLICIES = "fifo:fair,fifo:tune,fifo:joint"


@click.command(
    name="simulate",
    epilog="Example: partita fleet simulate generated:jobs=200,load=6 --cluster 4x8xv100 "
    "--policy fifo:fair,fifo:tune,srtf:joint --picture study.svg\n\n"
    "partita fleet simulate trace.csv --profiles model_profiles.json --policy fifo:tune "
    "--loads 1:10 --csv sweep.csv",
)
@click.argument("trace")
@click.option(
    "--cluster",
    "-c",
    default=DEFAULT_CLUSTER,
    show_default=True,
    help="Shorthand, a cluster file, or Synergy's INI file.",
)
@click.option("--cpus", type=click.IntRange(1), help="CPUs of each server. [the cluster's]")
@click.option("--memory", help="Memory of each server, such as 500GB. [the cluster's]")
@click.option(
    "--policy",
    "-p",
    "policies",
    multiple=True,
    help=f"ORDERING:ALLOCATOR, several by commas or options. [{DEFAULT_POLICIES}]",
)
@click.option("--loads", help="New Poisson arrivals, jobs an hour: 4, 1,2,4, 1:10 or 0.5:8:0.5.")
@click.option("--jobs", type=click.IntRange(1), help="The first N jobs alone.")
@published_filter_option
@click.option("--window", help="Only jobs with ids FIRST:LAST count in the figures.")
@click.option(
    "--as-released", is_flag=True, help="Decide as Synergy's released code, oddities too."
)
@click.option("--both", is_flag=True, help="By our rules and the released ones, and what differs.")
@click.option("--round", "round_text", default="300", show_default=True, help="Length of a round.")
@click.option(
    "--restart-cost",
    "restart_text",
    default="30",
    show_default=True,
    help="Seconds that a resumption or move takes, where a job does not say.",
)
@click.option("--quota", "quotas", multiple=True, help="GPUs a tenant may hold: NAME=8.")
@click.option(
    "--outage",
    "outages",
    multiple=True,
    help="A server fails: NAME=START:END in seconds, or NAME=START.",
)
@click.option(
    "--power-cap", type=click.FloatRange(0, min_open=True), help="kW that all GPUs may take."
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of arrivals.")
@profile_options
@click.option("--picture", help="File for all diagrams (.svg, .png or .pdf), or a folder of them.")
@click.option("--csv", "csv_file", help="Write the figures of every run as a table.")
@click.option("--results", "results", help="Write every job's end, in Synergy's columns: FILE.csv.")
@click.option("-o", "--output", help="Write the history: FILE.json; of several runs one a run.")
@output_options
def command(trace: str, **rest: Any) -> None:
    """Play the jobs of TRACE under several policies and rank them by mean completion time.

    TRACE is a 'partita.trace' document, Synergy's CSV (with --profiles), a log of submissions
    (Philly's JSON, or a CSV), or generated[:jobs=100,load=9,seed=1,static,short,multi-gpu]. Rounds
    in which nothing changes cost nothing.
    """
    from partita.cli.fleet.simulate_view import (  # noqa: PLC0415 (with what it shows)
        paced,
        show,
        study_figures,
        write_study,
    )
    from partita.fleet.study.study import study  # noqa: PLC0415

    quiet = rest["quiet"] or rest["as_json"]
    with progress("fleet", quiet=quiet) as tell:
        question = _question(trace, rest)
        found = study(question, on_progress=paced(tell))
    written = write_study(
        found,
        picture=rest["picture"],
        table_file=rest["csv_file"],
        results=rest["results"],
        output=rest["output"],
    )
    if rest["as_json"]:
        print_json({**study_figures(found), "written": written})
    else:
        show(stdout_console(), found, written)


def _question(source: str, rest: dict[str, Any]) -> "Question":
    from partita.cli.fleet.serve import declared_servers  # noqa: PLC0415
    from partita.fleet.study.study import Question  # noqa: PLC0415
    from partita.fleet.study.traces import TraceWish  # noqa: PLC0415

    if rest["as_released"] and rest["both"]:
        raise InvalidInputError("--as-released and --both exclude each other")
    models = read_profiles(rest["profiles"], rest["profile_set"], rest["power_model"])
    wish = TraceWish(
        jobs=rest["jobs"], published_filter=rest["published_filter"], seed=rest["seed"]
    )
    trace = read_fleet_trace(source, models, wish, power_model=rest["power_model"])
    if rest["power_cap"] is not None:
        _check_powers(trace)
    servers = declared_servers(rest["cluster"], None, rest["cpus"], rest["memory"])
    typed = rest["policies"] or (DEFAULT_POLICIES,)
    policies = [name.strip() for text in typed for name in text.split(",")]
    simulators = ("ours", "released") if rest["both"] else ("ours",)
    simulators = ("released",) if rest["as_released"] else simulators
    return Question(
        trace=trace,
        servers=servers,
        policies=policies,
        loads=parse_loads(rest["loads"]),
        rules=_rules(rest, servers),
        simulators=simulators,
        window=parse_span(rest["window"], "--window"),
        seed=rest["seed"],
    )


def _check_powers(trace: "Trace") -> None:
    for part in trace.sensitivities:
        if not len(part.frontier_w):
            raise InvalidInputError(
                f"--power-cap: jobs of {part.name!r} carry no frontier of watts by speed; "
                "--power-model TYPE models one for a type of GPU"
            )


def _rules(rest: dict[str, Any], servers: "Servers") -> "Rules":
    from partita.fleet.simulate.options import Rules  # noqa: PLC0415

    cap = rest["power_cap"]
    return Rules(
        round_s=parse_seconds(rest["round_text"], "--round"),
        restart_s=parse_seconds(rest["restart_text"], "--restart-cost"),
        outages=tuple(_outage(text, servers) for text in rest["outages"]),
        quotas=parse_quotas(rest["quotas"]),
        record=bool(rest["output"]) and not rest["as_released"],
        power_cap_w=math.inf if cap is None else cap * 1e3,
    )


def _outage(text: str, servers: "Servers") -> "Outage":
    from partita.fleet.simulate.options import Outage  # noqa: PLC0415

    name, sign, span = text.rpartition("=")
    first, colon, last = span.partition(":")
    if not sign or not first or (colon and not last):
        raise InvalidInputError(f"--outage {text!r} is not of the form SERVER=START:END")
    if name not in servers.names:
        shown = ", ".join(servers.names[:4]) + (", ..." if len(servers) > 4 else "")
        raise InvalidInputError(f"--outage: there is no server {name!r}; there are {shown}")
    return Outage(
        server=servers.names.index(name),
        start_s=parse_seconds(first, "--outage"),
        end_s=parse_seconds(last, "--outage") if colon else math.inf,
    )
