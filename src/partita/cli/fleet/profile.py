"""``partita fleet profile``: how the speed of a training script depends on CPUs and memory."""

import click
from click.core import ParameterSource

from partita.cli.console import print_json, print_remarks, progress
from partita.cli.fleet.profile_view import show
from partita.cli.from_request import takes
from partita.cli.options import output_options
from partita.errors import WorkerError
from partita.flows.fleet.profile import (
    ProfileScriptRequest,
    profile_list_request,
    profile_script_request,
)
from partita.processes import ended_by_signals
from partita.requests import fields_of


def _words(word: str) -> str:
    """Synergy spells some options with underscores; both are understood everywhere."""
    return word.replace("_", "-")


@click.command(
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
            show(found)
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
            show(job)
    if listed.failed:
        raise WorkerError("\n".join(f"{name}: {reason}" for name, reason in listed.failed))
