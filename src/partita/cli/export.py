"""``partita export``: a plan as code, or as the files of other tools."""

import click

from partita.cli.from_request import takes
from partita.cli.help import Documented
from partita.cli.options import output_options
from partita.flows.export import ExportRequest, export_request


@click.command(
    cls=Documented,
    epilog="Example: partita export gpt.plan.json --to python -o gpt_stages\n\n"
    "partita export gpus=4.txt --to python --model vgg16 -o vgg16_stages\n\n"
    "partita export gpt.plan.json --to sbatch -O time=04:00:00 -- train.py --config my.yaml",
)
@takes(ExportRequest)
@output_options
def command(request: ExportRequest, *, as_json: bool, quiet: bool, debug: bool) -> None:
    """Write PLAN as code, or as the files of the tools that run it. Nothing is submitted.

    python: a package that needs torch alone. megatron, torchtitan, deepspeed, accelerate,
    schedule-csv, device-map: configurations of trainers. fsdp: fully_shard and DTensor for your
    own script. torchrun, sbatch, ray, jobset, trainjob, skypilot: what starts the plan, or your
    COMMAND, on its nodes. pipedream, pipedream-conf: gpus=N.txt and the configurations of
    PipeDream's runtime. PLAN is what 'partita plan' has written, or a gpus=N.txt; of such a file
    the layers are made from their descriptions if no --model is named. A target that cannot hold
    the plan says why, and the command exits with 3.
    """
    del debug  # read by main
    found = export_request(request)
    if as_json:
        from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)

        print_json(found.to_json())
    elif found.refusals:
        width = max(map(len, found.refusals))
        for name, why in found.refusals.items():
            click.echo(f"{name:{width}}  {'no: ' + why if why else 'yes'}")
    elif not quiet:
        for note in found.notes:
            click.echo(f"note: {note}", err=True)
        for part in found.left_to_you:
            click.echo(f"left to you: {part}", err=True)
        for path in found.written:
            click.echo(f"written {path}", err=bool(found.command))
        if found.command:
            click.echo(found.command)
