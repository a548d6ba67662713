"""``partita fleet submit``: hand job files to a live fleet."""

from pathlib import Path

import click

from partita.cli.console import print_json
from partita.cli.fleet.live import client_of, server_options
from partita.core.fleet import Sensitivity
from partita.documents import read_text
from partita.errors import InvalidInputError
from partita.fleet.live.jobfile import JobFile, read_job

PROFILES = "profiles"


@click.command(name="submit", epilog="Example: partita fleet submit job.yaml")
@click.argument("files", type=click.Path(dir_okay=False, path_type=Path), nargs=-1, required=True)
@click.option("--check", is_flag=True, help="Read the files and submit nothing.")
@server_options
def command(
    files: tuple[Path, ...],
    check: bool,
    server: str,
    token_file: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Submit jobs; all files are read before the first is sent. See docs/fleet-live.md."""
    del debug
    specs = [read_job(read_text(str(file)), file, profile=profile_first) for file in files]
    client = client_of(server, token_file)
    numbers = [None if check else client.submit(spec) for spec in specs]
    if as_json:
        rows = zip(files, specs, numbers, strict=True)
        print_json([{"file": str(f), "name": s.name, "job": n} for f, s, n in rows])
        return
    for file, spec, number in zip(files, specs, numbers, strict=True):
        click.echo(f"{file}: {spec.name} is right" if check else f"job {number} {spec.name}")


def profile_first(job: JobFile) -> Sensitivity:
    """Measure a job whose sensitivity is ``auto``; what was measured before is not run again.

    Raises:
        InvalidInputError: Its command is not ``python SCRIPT ...``, or the script cannot be
            profiled.
    """
    from partita.fleet.profiler.profile import profile_script  # noqa: PLC0415 (rarely needed)
    from partita.fleet.profiler.request import ProfileRequest  # noqa: PLC0415
    from partita.fleet.profiler.runner import Ranks  # noqa: PLC0415

    words = job.command
    if len(words) < 2 or not words[1].endswith(".py") or "python" not in Path(words[0]).name:
        raise InvalidInputError(
            f"sensitivity is 'auto', but the command is {' '.join(words)[:60]!r}; only "
            "'python SCRIPT.py ...' can be profiled"
        )
    request = ProfileRequest(
        script=job.folder / words[1],
        arguments=words[2:],
        name=job.name,
        ranks=Ranks(per_node=job.gpus),
        python=words[0],
        source=job.folder,
    )
    click.echo(f"{job.name}: profiled first", err=True)
    found = profile_script(
        request, job.folder / PROFILES, on_progress=lambda step: click.echo(step, err=True)
    )
    if found.sensitivity is None:
        raise InvalidInputError(f"{job.name}: profiling gave no sensitivity")
    return found.sensitivity
