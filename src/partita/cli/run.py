"""``partita run``: carry out a plan for real."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread

import click

from partita.cli.console import print_remarks, stdout_console, step_line
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.cli.run_options import StepLine, config_option, show_detached, show_outcome
from partita.flows.extras import torch_needed
from partita.flows.runs.requests import RunRequest, check_run
from partita.flows.summary import describe_plan


@click.command(
    cls=Documented, epilog="Example: partita run gpt3-small.plan.json --steps 20 --check --report"
)
@takes(RunRequest)
@config_option(RunRequest)
@output_options
def command(request: RunRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Run PLAN over processes, and compare it with its prediction.

    PLAN is what 'partita plan' wrote for a graph that 'partita profile' made; the graph says which
    model it is. 'partita run PLAN -- script.py ARGUMENTS' runs a script of your own in every rank,
    which trains by the plan through partita.parallelize.
    """
    del debug  # read by main
    check_run(request)
    with torch_needed("a run needs"):
        from partita.flows.runs.steps import carry_out, prepare_run, run_directory_of  # noqa: PLC0415 (torch)
    silent = quiet or as_json
    prepared = prepare_run(request)
    print_remarks(prepared.remarks)
    solution = prepared.solution
    if not silent:
        console = stdout_console()
        console.print(f"plan      {solution.problem.graph.name} · {describe_plan(solution.plan)}")
        console.print(f"          {step_line(solution.problem, solution.plan)}")
    if request.detach:
        show_detached(prepared, as_json=as_json)
        return
    steps, directory = StepLine(prepared, quiet=silent), run_directory_of(prepared)
    prints = request.script and not as_json
    with printed(directory / "logs" / "rank0.log") if prints else nullcontext():
        outcome = carry_out(
            prepared,
            lambda text: None if silent else click.echo(f"run: {text}", err=True),
            on_row=steps,
            on_line=lambda rank, line: (
                click.echo(f"rank {rank}: {line}", err=True)
                if request.script and not silent
                else None
            ),
            directory=directory,
        )
    steps.end()
    if outcome is None:
        return
    show_outcome(outcome, request, as_json=as_json)


_LOOK_S = 0.1


@contextmanager
def printed(log: Path) -> Iterator[None]:
    """Print what is written to a log while it is written, and the rest of it at the end."""
    over = Event()

    def follow() -> None:
        place = 0
        while True:
            last = over.wait(_LOOK_S)
            place += _print_from(log, place, whole=last)
            if last:
                return

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _print_from(log: Path, place: int, *, whole: bool) -> int:
    """Print the lines of a log from a place on; returns how many bytes that are."""
    try:
        with log.open("rb") as file:
            file.seek(place)
            new = file.read()
    except FileNotFoundError:  # no rank has begun
        return 0
    if not whole:
        new = new[: new.rfind(b"\n") + 1]  # a line that is half written waits
    click.echo(new.decode("utf-8", errors="replace"), nl=False)
    return len(new)
