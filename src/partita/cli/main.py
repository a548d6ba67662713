"""The command ``partita``: commands are loaded when they are used, so that help comes at once."""

import errno
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

import click

from partita import __version__
from partita.cli.lazy import LazyGroup
from partita.errors import PartitaError, UnsupportedError, WorkerError, reason_of
from partita.names import escaped, escaped_lines, nearest

COMMANDS: Mapping[str, str] = {
    "demo": "Measure a small GPT here, plan it here and over a mixed cluster.",
    "advise": "Say in one page what to do: does it fit, which plan, how long, for how much.",
    "profile": "Measure a model op by op and write it as a graph.",
    "estimate": "Say whether a model fits on a cluster, and what would make it fit.",
    "plan": "Plan a model over a cluster and write the plan.",
    "recommend": "Say which machines to rent for a large transformer, for a speed, time or budget.",
    "compare": "Run several planners on one problem and rank them.",
    "simulate": "Play a plan and show its pipeline, utilisation and memory.",
    "explain": "Say where time and memory of a plan go, and what would change it.",
    "report": "Write a plan, a run, a frontier or a fleet as one page for any browser.",
    "robustness": "Say how much worse a plan gets when costs are not what was thought.",
    "run": "Run a plan for real, over processes.",
    "train": "Profile, plan, check and run a model in one command.",
    "replan": "Learn from a measured run whether another plan is faster.",
    "results": "List and compare past runs.",
    "checkpoint": "List and verify checkpoints, and write them in other forms.",
    "energy": "Trade time for energy: frontiers, clock plans, the server.",
    "fleet": "Share a cluster among many jobs, knowing what each really needs.",
    "ui": "Serve a page for the whole flow: plan, edit, compare, energy, fleet, what runs now.",
    "calibrate": "Measure devices and links and write them as a cluster.",
    "devices": "List the device types and machines that a cluster may name.",
    "models": "List the models that can be built by name.",
    "convert": "Translate between Partita's documents and its ancestors' formats.",
    "export": "Write a plan as code, or as the files of the trainers and launchers that run it.",
    "selftest": "Test this machine's devices, and write a report.",
    "doctor": "Say what this machine has and lacks, or where a run hangs.",
    "completion": "Print what a shell needs to complete commands and their values.",
}


_GROUPS = ("checkpoint", "energy", "fleet")


def _module_of(name: str) -> str:
    """Return the module of a command, or of a group of commands."""
    return f"partita.cli.{name}.group" if name in _GROUPS else f"partita.cli.{name}"


_INTERRUPTED = 130
"""What shells report of a program that Ctrl-C ended: 128 + SIGINT."""
_FORKING = ("demo", "run", "selftest", "train")
_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says, without the name of a file, to whoever writes to one that is open."""


def _prepare(name: str) -> None:
    if name in _FORKING:
        # Ranks are forked from a process with one thread; numpy's library would start more.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@click.command(
    cls=LazyGroup,
    table=COMMANDS,
    module_of=_module_of,
    prepare=_prepare,
    context_settings={"max_content_width": 100},
    epilog="Every command has --help with an example, and --json.",
)
@click.version_option(__version__, "-V", "--version", prog_name="partita")
def partita() -> None:
    """Plan, simulate and run neural networks on more than one device.

    \b
    Example: partita plan gpt-small --cluster 2x4xa100+1x2xv100
    """  # noqa: D301 (\b is click's)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code.

    0 = done, 1 = an error of ours, 2 = usage or bad input, 3 = infeasible, 4 = the environment
    cannot, 5 = a run failed, 130 = stopped by Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows another
    try:
        try:
            _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where a full disk can still be said in one line
    except BrokenPipeError:
        _drop_output()
        sys.stderr.close()
        sys.exit(0)
    except OSError as exc:
        if "--debug" in arguments:
            raise
        _fail(_reason(exc), UnsupportedError.exit_code)


def _run(arguments: Sequence[str]) -> None:
    """Run the command line and exit; what the system refuses is left to the caller."""
    try:
        if arguments and arguments[0] == "help":
            arguments = [*arguments[1:], "--help"]  # as git and others have it
            _check_command(arguments[:-1])
        code = partita.main(
            args=list(arguments), standalone_mode=False, complete_var="_PARTITA_COMPLETE"
        )
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message())
        sys.exit(0)
    except click.ClickException as exc:
        context = getattr(exc, "ctx", None)
        where = f" (see {context.command_path} --help)" if context is not None else ""
        _fail(f"{exc.format_message()}{_meant(exc)}{where}", 2)
    except click.exceptions.Exit as exc:
        sys.exit(exc.exit_code)
    except click.Abort as exc:
        _fail("stopped", _INTERRUPTED if isinstance(exc.__cause__, KeyboardInterrupt) else 1)
    except PartitaError as exc:
        if "--debug" in arguments:
            raise
        _fail(str(exc), exc.exit_code, lines=isinstance(exc, WorkerError))
    except MemoryError:
        _fail("this needs more memory than there is", 4)


def _check_command(words: Sequence[str]) -> None:
    """Check that words name a command and nothing more; a group says itself what it does not have.

    Raises:
        click.UsageError: There are words after a command that has none below it.
    """
    command: click.Command | None = partita
    context = click.Context(partita, info_name="partita")
    for number, word in enumerate(words):
        if not isinstance(command, click.Group):
            raise click.UsageError(
                f"{' '.join(words[:number])!r} has no commands of its own, such as {word!r}"
            )
        command = command.get_command(context, word)
        if command is None:
            return


def _meant(exc: click.ClickException) -> str:
    """Return what was meant where a value is near one of an option's choices."""
    kind = getattr(getattr(exc, "param", None), "type", None)
    wrong = re.match(r"'(.*)' is not one of ", exc.message)
    if wrong is None or not isinstance(kind, click.Choice):
        return ""
    near = nearest(wrong.group(1), map(str, kind.choices))
    return f"; did you mean {near!r}?" if near else ""


def _reason(exc: OSError) -> str:
    """Return what the system refused, and where.

    An error without a name of a file is that of standard output if that cannot be written still.
    """
    reason = reason_of(exc)
    if exc.filename is not None:
        return f"{exc.filename}: {reason}"
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop_output()
        return f"standard output cannot be written: {reason}"
    if exc.errno in _WRITING:
        return f"standard output or a file cannot be written: {reason}"
    return reason


def _drop_output() -> None:
    """Let what is still to be written to standard output go nowhere, or Python tries at exit."""
    with suppress(OSError, ValueError):  # it may be no file of the system
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _fail(message: str, code: int, *, lines: bool = False) -> None:
    """Print what is wrong, in one line; of a run that failed also a line for each rank."""
    text = escaped_lines(message) if lines else escaped(" ".join(message.split()))
    print(f"partita: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
