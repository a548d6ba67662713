"""``partita selftest``: test this machine's devices."""

import click

from partita.cli.console import print_json, progress, stdout_console, table
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.selftest import SelftestRequest, selftest_request

_COLUMNS = (("check", "left"), ("verdict", "left"), ("time", "right"), ("detail", "left"))


@click.command(cls=Documented, epilog="Example: partita selftest --quick -o selftest")
@takes(SelftestRequest)
@output_options
def command(request: SelftestRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Test transfers, collectives, overlap, equivalence, memory and counters of this machine.

    GPUs are tested with NCCL; without any, CPU processes with gloo. The report is one file to
    attach to an issue; the exit code is 5 if a check failed.
    """
    del debug  # read by main
    with progress("selftest", quiet=quiet or as_json) as on_progress:
        report = selftest_request(request, on_progress)
    if as_json:
        print_json(report.to_json())
    else:
        console = stdout_console()
        rows = [[str(row[name]) for name, _ in _COLUMNS] for row in report.rows()]
        console.print(table(_COLUMNS, rows))
        console.print(report.lines()[0])
        console.print(f"wrote {', '.join(report.written)}")
    report.require_passed()
