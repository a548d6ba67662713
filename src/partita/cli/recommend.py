"""``partita recommend``: which machines to rent for a large transformer."""

import math

import click

from partita.cli.console import (
    percent,
    print_json,
    print_remarks,
    progress,
    stdout_console,
    table,
    terminal_width,
)
from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.documents import write_bytes
from partita.flows.recommend import (
    Option,
    Recommendation,
    RecommendRequest,
    TargetMissedError,
    recommend_request,
)
from partita.report.charts import TradeOff, check_ending, render, trade_off_chart
from partita.units import format_bytes, format_count, format_duration, format_money


@click.command(
    cls=Documented,
    epilog="Example: partita recommend llama3-70b --within '30 days' --tokens 2T "
    "--machines dgx-h100,dgx-a100\n\n"
    "partita recommend llama3-8b --target '500k tokens/s' --offer offer.yaml --picture offers.svg",
)
@takes(RecommendRequest)
@click.option("--picture", help="Write speed and money as a chart: .svg, .png, .pdf.")
@output_options
def command(
    request: RecommendRequest, *, picture: str | None, as_json: bool, quiet: bool, debug: bool
) -> None:
    """Say which machines, and how many, train MODEL fast enough for least money.

    MODEL is a large transformer (llama3-70b, qwen3-235b-a22b, ...) or its config.json. The target
    is a speed (--target), a time for some tokens (--within and --tokens), money (--budget), or
    several of them. Machines are those of the catalogue with its list prices, some of them
    (--machines), or your own offer (--offer). For each number of machines the best layout is
    searched. Printed are all choices that none beats in both speed and money.

    Where nothing keeps the target it exits with 3, and says what is missing. All figures are
    estimates.
    """
    del debug  # read by main
    if picture:
        check_ending(picture)
    with progress("recommending", quiet=quiet or as_json) as on_progress:
        try:
            found = recommend_request(request, on_progress)
        except TargetMissedError as exc:
            if as_json:
                print_json(exc.to_json())
            raise
    if picture:
        write_bytes(picture, _draw(found, picture))
    print_remarks(found.remarks)
    if as_json:
        print_json(found.to_json())
        return
    _show(found)
    if picture:
        click.echo(f"wrote {picture}")


_COLUMNS = (
    ("machines", "left"),
    ("best", "left"),
    ("layout", "left"),
    ("GPUs", "right"),
    ("tokens/s", "right"),
    ("MFU", "right"),
    ("memory", "right"),
    ("price/h", "right"),
    ("per G tokens", "right"),
    ("tokens", "right"),
    ("time", "right"),
    ("money", "right"),
)


_WIDE = 150
"""Columns of a terminal from which on the table has the layouts."""


def _show(found: Recommendation) -> None:
    console = stdout_console()
    console.print(
        f"{found.model}, {found.sequence_length} tokens per sequence: {found.goal.words()}"
    )
    # Layouts of the three answers stand below; those of all need room.
    kept = [
        i for i, (title, _) in enumerate(_COLUMNS) if title != "layout" or terminal_width() >= _WIDE
    ]
    rows = [_row(found, option) for option in found.front]
    console.print(table([_COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows]))
    for line in found.lines()[1:]:
        console.print(line)
    console.print(f"the plan of the most economical: {found.plan_command(found.economical)}")


def _row(found: Recommendation, option: Option) -> list[str]:
    goal = found.goal
    seconds = goal.training_s(option.tokens_per_s, option.price_per_hour)
    bought = math.isnan(goal.tokens)  # tokens that the budget buys differ from row to row
    return [
        option.name,
        ", ".join(found.titles(option)),
        option.title,
        str(option.devices),
        format_count(option.tokens_per_s),
        percent(option.mfu),
        format_bytes(option.memory_bytes),
        format_money(option.price_per_hour),
        format_money(1e3 * option.price_per_million_tokens),
        format_count(seconds * option.tokens_per_s) if bought else "",
        format_duration(seconds),
        format_money(seconds * option.price_per_hour / 3600),
    ]


def _draw(found: Recommendation, path: str) -> bytes:
    goal, timed = found.goal, not math.isnan(found.goal.tokens)

    def point(option: Option) -> TradeOff:
        seconds = goal.training_s(option.tokens_per_s, option.price_per_hour)
        money = option.price_per_hour
        if goal.is_by_token:
            money = 1e3 * option.price_per_million_tokens
        return TradeOff(
            x=seconds / 86_400 if timed else option.tokens_per_s,
            y=seconds * option.price_per_hour / 3600 if timed else money,
            group=" + ".join(name for name, _ in option.machines),
            on_front=any(option is best for best in found.front),
            words=", ".join(found.titles(option)),
        )

    by_token = "money per billion tokens ($)" if goal.is_by_token else "money per hour ($)"
    return render(
        lambda: trade_off_chart(
            [point(option) for option in found.options],
            title=f"{found.model}: {goal.words()}\nestimates, nothing was measured",
            x="days of training" if timed else "tokens/s",
            y="money of the training ($)" if timed else by_token,
        ),
        path,
    )
