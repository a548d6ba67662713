"""Places where agents run: the hosts of a plan, and how an agent is started on one of them."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

from partita.errors import InvalidInputError
from partita.processes import how_it_ended, job_environment

AGENT = "partita.hosts.agent"
_TAIL_BYTES = 4000
_FORWARDED = ("NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_", "HF_", "PARTITA_")
"""Beginnings of the names of variables that ranks on other hosts have as the driver has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHost:
    """A host that a plan uses.

    Attributes:
        name: Its name in the plan's cluster.
        ranks: The ranks on it, ascending.
        gpus: GPUs that they need; 0 = they run on CPUs.
        gpu_type: The type of these GPUs.
        cpus: Cores that its ranks may have; at least one for each.
    """

    name: str
    ranks: tuple[int, ...]
    gpus: int = 0
    gpu_type: str = ""
    cpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RealHost:
    """A host that is there.

    Attributes:
        name: How it is called.
        slots: Ranks that it may have; 0 = as many as the plan wants.
        address: Where other hosts reach it.
        login: How whoever starts an agent there calls it.
    """

    name: str
    slots: int = 0
    address: str = ""
    login: str = ""


def match_hosts(
    wanted: Sequence[PlanHost], there: Sequence[RealHost], source: str
) -> list[RealHost]:
    """Return the host that is there for each host of a plan: by name, or else in their order.

    Args:
        wanted: The hosts of the plan.
        there: The hosts that are there.
        source: What names these, for people.

    Raises:
        InvalidInputError: There are too few, some names are not there, or one has too few slots.
    """
    by_name = {host.name: host for host in there}
    missing = [host.name for host in wanted if host.name not in by_name]
    if not missing:
        found = [by_name[host.name] for host in wanted]
    elif len(missing) < len(wanted):
        raise InvalidInputError(
            f"{source} does not name host {missing[0]} of the plan, but others of it; name all, or "
            "none to take them in their order"
        )
    elif len(there) < len(wanted):
        raise InvalidInputError(
            f"the plan uses {len(wanted)} hosts, {source} has {len(there)}; plan for fewer, or "
            "name more"
        )
    else:
        found = list(there[: len(wanted)])
    for host, real in zip(wanted, found, strict=True):
        if real.slots and real.slots < len(host.ranks):
            raise InvalidInputError(
                f"host {host.name} of the plan has {len(host.ranks)} ranks, {source} gives "
                f"{real.name} {real.slots} slots"
            )
    return found


class Channel(Protocol):
    """An agent, however it was started."""

    def send(self, data: bytes) -> None:
        """Send bytes to its standard input; does nothing where it has ended."""
        ...

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of its standard output until it ends."""
        ...

    def ended(self) -> str:
        """Return how it ended and its last words, for people; ends it if it has not."""
        ...


class Place(Protocol):
    """The hosts of a run: entering it gets them, leaving it gives them back.

    Attributes:
        names: Their own names, in the order of the plan's hosts; known once it is entered.
        addresses: Where each is reached by the others.
    """

    names: Sequence[str]
    addresses: Sequence[str]

    def start(self, index: int) -> Channel:
        """Start the agent of a host, by its number in the plan's order."""
        ...

    def explain(self) -> str:
        """Return what is known of why hosts went away, for people; empty = nothing."""
        ...

    def __enter__(self) -> "Place": ...

    def __exit__(self, *_: object) -> None: ...


def agent_command(python: str) -> list[str]:
    """Return the command that starts an agent, with the search path for modules that is set here.

    Args:
        python: The interpreter on the host; empty = the path of this one.
    """
    path = os.environ.get("PYTHONPATH", "")
    before = ["env", f"PYTHONPATH={path}"] if path else []
    return [*before, python or sys.executable, "-m", AGENT]


def forwarded_environment() -> Mapping[str, str]:
    """Return the variables that ranks on other hosts have as this process has them."""
    found = job_environment().items()
    return {name: value for name, value in found if name.startswith(_FORWARDED)}


class ProcessChannel:
    """An agent behind a process of this machine, such as ssh or srun."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            command: The command.
            environment: Its variables; None = those of this process, but for its token.

        Raises:
            OSError: There is no such command.
        """
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by ``ended``)
        self._name = command[0]
        self._process = subprocess.Popen(
            command,
            env=job_environment() if environment is None else environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,  # Ctrl-C is for the driver, which ends it in order
        )

    def send(self, data: bytes) -> None:
        """Send bytes; a process that has ended is seen at the end of its output."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass

    def lines(self) -> Iterator[bytes]:
        """Yield its lines until it ends."""
        assert self._process.stdout is not None
        yield from self._process.stdout

    def ended(self) -> str:
        """Return how it ended, and what it said on standard error."""
        if self._process.poll() is None:
            try:
                self._process.wait(0.5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            try:
                assert stream is not None
                stream.close()
            except BrokenPipeError:
                pass
        text = self._last_words()
        self._words.close()
        how = f"{self._name} {how_it_ended(self._process.returncode)}"
        return f"{how}: {text}" if text else how

    def _last_words(self) -> str:
        if self._words.closed:
            return ""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _TAIL_BYTES))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
