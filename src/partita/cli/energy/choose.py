"""``partita energy choose``: a point of a frontier, its clocks, and how they look."""

import click

from partita.cli.console import print_json, progress, stdout_console
from partita.cli.energy.frontier import clock_picture
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import write_text
from partita.energy.frontier.savings import sources_of
from partita.errors import InvalidInputError
from partita.flows.energy.choose import ChooseRequest, choose_request
from partita.flows.summary import describe_plan


@click.command(
    cls=Documented,
    epilog="Example: partita energy choose frontier.json --slowdown 0.02 -o clocks.py "
    "--picture clocks.svg",
)
@takes(ChooseRequest)
@click.option("-o", "--output", help="Write the clocks as a plan that Zeus and Perseus read.")
@click.option("--unnamed", is_flag=True, help="Clocks without names, as Perseus's artifact reads.")
@click.option("--picture", help="Write the step coloured by clock, an SVG file.")
@output_options
def command(
    request: ChooseRequest,
    *,
    output: str | None,
    unnamed: bool,
    picture: str | None,
    as_json: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Choose the point of FRONTIER that keeps some limits; without any the fastest.

    FRONTIER is what 'partita energy frontier -o' wrote. Within limits of time the cheapest point is
    taken, solved for where the frontier has none at the limit; within limits of energy and power
    the fastest of its points. With a straggler it is the point at min(T*, T').
    """
    del debug  # read by main
    if unnamed and not output:
        raise InvalidInputError("--unnamed needs -o, the plan that it is about")
    with progress("choosing", quiet=quiet or as_json) as on_progress:
        result = choose_request(request, on_progress)
    written = []
    if picture:
        plan = sources_of(result.frontier)[0].plan
        title = f"{describe_plan(plan)}, point {result.point}"
        written.append(clock_picture(picture, result.step(), result.frontier.origin, title))
    if output:
        write_text(output, result.clock_plan(named=not unnamed))
        written.append(output)
    if as_json:
        print_json({**result.to_json(), "written": written})
        return
    console = stdout_console()
    for line in result.lines():
        console.print(line)
    for path in written:
        console.print(f"written: {path}")
