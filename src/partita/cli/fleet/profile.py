"""``partita fleet profile``: how the speed of a training script depends on CPUs and memory."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from partita.cli.options import output_options
from partita.documents import write_text
from partita.errors import InvalidInputError, PartitaError, UnsupportedError, WorkerError
from partita.units import parse_bytes

if TYPE_CHECKING:
    from partita.cli.fleet.profile_view import ProfiledJob
    from partita.fleet.profiler.request import ProfileRequest

_GIB = 2**30
_F = TypeVar("_F", bound=Callable[..., Any])
_OF_ALL = ("script", "list_file", "output", "again", "as_json", "quiet", "debug")
"""Parameters of the whole command, not of a job."""


def _words(word: str) -> str:
    """Synergy spells some options with underscores; both are understood everywhere."""
    return word.replace("_", "-")


def _job_options(function: _F) -> _F:
    """Declare the options of a job, on the command line or in a list."""
    count, above = click.IntRange(1), click.FloatRange(0, min_open=True)
    options = [
        click.option("--job-name", default="job-0", show_default=True, help="Name of the job."),
        click.option(
            "--num-gpus",
            type=count,
            default=1,
            show_default=True,
            help="Number of processes on each machine, one per GPU.",
        ),
        click.option(
            "--nnodes", type=count, default=1, show_default=True, help="Number of machines."
        ),
        click.option(
            "--node-rank",
            type=click.IntRange(0),
            default=0,
            help="Rank of this machine, 0 to NNODES - 1.",
        ),
        click.option(
            "--master-addr",
            default="127.0.0.1",
            show_default=True,
            help="Address of the machine of rank 0.",
        ),
        click.option(
            "--master-port",
            type=click.IntRange(1, 65535),
            default=29500,
            help="Port of the machine of rank 0.",
        ),
        click.option("--cpu", type=click.FloatRange(0), help="Most CPUs of the sweep. [all CPUs]"),
        click.option(
            "--cpu-step", type=above, help="CPUs from point to point. [1; less on few CPUs]"
        ),
        click.option("--memory", help="Memory of a run, in GiB or as 64GB. [all memory]"),
        click.option("-b", "--batch-size", "--batch", type=count, help="Samples per GPU. [256]"),
        click.option("-j", "--workers", type=count, help="Loaders per GPU. [CPUs of the point]"),
        click.option("--max-iterations", type=count, help="Number of iterations per run. [50]"),
        click.option(
            "--epochs", type=count, help="Number of epochs; passed on to the script, if given."
        ),
        click.option("--data", help="Dataset, as it is passed on to the script. [./]"),
        click.option(
            "--dataset-size", help="Size of the dataset, such as 150GB. [that of its files]"
        ),
        click.option(
            "--dataset-samples", type=count, help="Number of samples of the dataset. [its files]"
        ),
        click.option(
            "--docker-img",
            "--image",
            default="",
            help="Container image, where a container engine runs.",
        ),
        click.option(
            "--container-mnt",
            "--mount",
            default="/datadrive",
            show_default=True,
            help="Folder of the container where the data are mounted.",
        ),
        click.option(
            "--container-python", default="python", help="Python interpreter inside the container."
        ),
        click.option(
            "--isolation",
            type=click.Choice(("auto", "container", "cgroup", "plain")),
            default="auto",
            show_default=True,
            help="Way to limit CPUs and memory.",
        ),
        click.option("--cgroup", default="", help="Delegated control group, /sys/fs/cgroup/..."),
        click.option("--local-disk", help="Folder whose storage is measured. [the dataset's]"),
        click.option(
            "--str-bw", default="", help="Storage bandwidth: 500MB/s, or a file that keeps MB/s."
        ),
        click.option("--mem-thr", default="", help="Prefix of files that keep memory GiB/s."),
        click.option("--profiler-src", help="Directory to run in and import from. [this one]"),
        click.option("--python", default=sys.executable, help="Python interpreter. [this one]"),
        click.option(
            "--repeats", type=count, default=1, show_default=True, help="Number of runs per point."
        ),
        click.option(
            "--tolerance",
            type=click.FloatRange(0.001, 0.5),
            default=0.1,
            show_default=True,
            help="Relative error that a filled-in speed may have.",
        ),
        click.option(
            "--limit",
            type=above,
            default=600.0,
            show_default=True,
            help="Seconds that a run may take.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _words},
    epilog="Example: partita fleet profile -b 64 --max-iterations 30 train.py --data images\n\n"
    "partita fleet profile --list jobs.yaml",
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[--] SCRIPT [ARGUMENTS]")
@_job_options
@click.option("--list", "list_file", help="YAML file whose scripts are all profiled.")
@click.option("-o", "--output", default="profiles", show_default=True, help="Folder of results.")
@click.option("--again", is_flag=True, help="Measure anew what was measured before.")
@output_options
@click.pass_context
def command(context: click.Context, /, **rest: Any) -> None:
    """Measure how the speed of SCRIPT depends on CPUs and memory.

    SCRIPT must take --batch/-b, --workers/-j, --max_iterations and --data; one iteration checks
    that. An option that is given on both sides is the profiler's. Options may be spelt with - or _.
    An equal command goes on where one before it stopped.
    """
    rest.pop("debug")
    if bool(rest["script"]) == bool(rest["list_file"]):
        raise click.UsageError("name a SCRIPT, or a file by --list", context)
    if rest["list_file"] is None:
        found = _profile(_request(rest), rest)
        _print([found], [], rest)
        return
    done, failed = _profile_list(context, rest)
    _print(done, failed, rest)
    if failed:
        raise WorkerError("\n".join(f"{name}: {reason}" for name, reason in failed))


def _profile_list(
    context: click.Context, rest: dict[str, Any]
) -> "tuple[list[ProfiledJob], list[tuple[str, str]]]":
    """Profile every script of a list; one that fails does not keep the others."""
    from partita.cli.fleet.profile_list import read_job_list  # noqa: PLC0415 (only for a list)
    from partita.documents import read_text  # noqa: PLC0415 (likewise)

    given = {
        name: value
        for name, value in rest.items()
        if name not in _OF_ALL and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    known = {
        _words(spelling.lstrip("-"))
        for option in command.params
        if option.name not in _OF_ALL
        for spelling in option.opts
    }
    jobs = read_job_list(read_text(rest["list_file"]), rest["list_file"], known)
    done: list[ProfiledJob] = []
    failed: list[tuple[str, str]] = []
    for job in jobs:
        try:
            inner = command.make_context("profile", job.words, parent=context.parent)
            request = _request({**inner.params, **given})
        except click.ClickException as exc:
            raise InvalidInputError(
                f"{rest['list_file']}:{job.line}: {exc.format_message()}"
            ) from exc
        try:
            done.append(_profile(request, rest))
        except PartitaError as exc:
            failed.append((request.name, str(exc)))
            if not (rest["quiet"] or rest["as_json"]):
                click.echo(f"fleet profile: {request.name} failed: {exc}", err=True)
    return done, failed


def _request(rest: dict[str, Any]) -> "ProfileRequest":
    """Return what the options ask for."""
    from partita.fleet.profiler.isolation import IsolationRequest, Way  # noqa: PLC0415 (numpy)
    from partita.fleet.profiler.request import ProfileRequest  # noqa: PLC0415 (likewise)
    from partita.fleet.profiler.runner import Ranks  # noqa: PLC0415 (likewise)

    wanted = rest["isolation"]
    script, *arguments = rest["script"]
    return ProfileRequest(
        script=Path(script),
        arguments=tuple(arguments),
        name=rest["job_name"],
        ranks=Ranks(
            per_node=rest["num_gpus"],
            nodes=rest["nnodes"],
            node_rank=rest["node_rank"],
            master_addr=rest["master_addr"],
            master_port=rest["master_port"],
        ),
        max_cpus=rest["cpu"] or None,
        cpu_step=rest["cpu_step"],
        memory_bytes=_memory(rest["memory"]),
        batch_size=rest["batch_size"],
        workers=rest["workers"],
        iterations=rest["max_iterations"],
        epochs=rest["epochs"],
        data=rest["data"],
        dataset_bytes=_size(rest["dataset_size"], "--dataset-size"),
        dataset_samples=rest["dataset_samples"],
        repeats=rest["repeats"],
        tolerance=rest["tolerance"],
        local_disk=_folder(rest["local_disk"], "--local-disk"),
        storage=rest["str_bw"],
        memory_prefix=rest["mem_thr"],
        source=_folder(rest["profiler_src"], "--profiler-src"),
        python=rest["python"],
        isolation=IsolationRequest(
            wanted=None if wanted == "auto" else Way(wanted),
            image=rest["docker_img"],
            mount=rest["container_mnt"].rstrip("/") or "/",
            python=rest["container_python"],
            group=rest["cgroup"],
        ),
        limit_s=rest["limit"],
    )


def _memory(text: str | None) -> int | None:
    """Return a memory limit; a bare number is in GiB, as containers take it."""
    if text is None:
        return None
    bare = text.replace(".", "", 1).isdigit()
    size = float(text) * _GIB if bare else parse_bytes(text, "--memory")
    return int(size) or None


def _size(text: str | None, what: str) -> int | None:
    return None if text is None else int(parse_bytes(text, what))


def _folder(text: str | None, what: str) -> Path | None:
    if text is None:
        return None
    if not Path(text).is_dir():
        raise InvalidInputError(f"{what} {text} is no folder")
    return Path(text)


def _profile(request: "ProfileRequest", rest: dict[str, Any]) -> "ProfiledJob":
    """Profile one script and write its files."""
    from partita.cli.console import progress  # noqa: PLC0415 (rich only where it prints)
    from partita.cli.fleet.profile_view import ProfiledJob  # noqa: PLC0415 (likewise)
    from partita.core.codec import write_json  # noqa: PLC0415 (numpy)
    from partita.fleet.profiler.profile import profile_script  # noqa: PLC0415 (likewise)
    from partita.formats.synergy import write_synergy_profile  # noqa: PLC0415 (likewise)
    from partita.processes import ended_by_signals  # noqa: PLC0415 (only for runs)
    from partita.report.charts import render, sensitivity_chart  # noqa: PLC0415 (numpy)

    silent = rest["quiet"] or rest["as_json"]
    with progress(f"fleet profile {request.name}", quiet=silent) as on_progress, ended_by_signals():
        profile = profile_script(
            request, Path(rest["output"]), on_progress=on_progress, again=rest["again"]
        )
    written: dict[str, str] = {"runs": str(profile.directory / "runs.json")}
    sensitivity = profile.sensitivity
    if sensitivity is not None:
        texts = {"sensitivity.json": write_json(sensitivity)}
        try:
            drawn = render(lambda: sensitivity_chart(sensitivity), "curve.svg")
            texts["curve.svg"] = drawn.decode("utf-8")
        except UnsupportedError as exc:  # the figures are worth more than their picture
            click.echo(f"no curve.svg: {exc}", err=True)
        if sensitivity.storage_bandwidth_bytes_per_s > 0:
            texts["profile.json"] = write_synergy_profile(sensitivity)
        for name, text in texts.items():
            path = profile.directory / name
            write_text(path, text)
            written[name.partition(".")[0]] = str(path)
    return ProfiledJob(
        request.name, shlex.join([str(request.script), *request.arguments]), profile, written
    )


def _print(found: "list[ProfiledJob]", failed: list[tuple[str, str]], rest: dict[str, Any]) -> None:
    from partita.cli.console import print_json  # noqa: PLC0415 (rich only where it prints)
    from partita.cli.fleet.profile_view import show  # noqa: PLC0415 (likewise)

    if rest["as_json"]:
        values = [job.to_json() for job in found]
        if rest["list_file"] is None:
            print_json(values[0])
            return
        problems = [{"job": name, "reason": reason} for name, reason in failed]
        print_json({"jobs": values, "failed": problems})
        return
    for job in found:
        show(job)
