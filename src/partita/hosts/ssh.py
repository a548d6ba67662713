"""Hosts that ssh reaches: a file names them, a line each, as DeepSpeed, MPI and pdsh read it.

Lines are ``gpu10 slots=4``, ``gpu10:4`` or ``gpu10``, with ``user@`` before the name and
``address=10.0.0.7`` behind it where the other hosts reach it by another name than ssh does.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from partita.errors import FormatError, reading
from partita.hosts.places import (
    PlanHost,
    ProcessChannel,
    RealHost,
    agent_command,
    match_hosts,
)
from partita.hosts.table import PlaceFields

SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
"""Asks for no password, and sees within a minute that a host is gone."""
_NAME = re.compile(r"([\w.-]+@)?[A-Za-z0-9][\w.-]*")


def read_hostfile(text: str) -> list[RealHost]:
    r"""Return the hosts that a file names, in its order.

    >>> [host.name for host in read_hostfile("gpu10 slots=3  # the big one\nuser@gpu2:1\n")]
    ['gpu10', 'gpu2']

    Raises:
        FormatError: A line names no host, or one twice.
    """
    found: dict[str, RealHost] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, colon, count = words[0].partition(":")
        values = {"slots": count} if colon else {}
        for word in words[1:]:
            key, sign, value = word.partition("=")
            if not sign or key not in ("slots", "address") or key in values:
                raise FormatError(f"{word!r}; expected slots=N or address=NAME", line=number)
            values[key] = value
        slots = values.get("slots", "0")
        if not _NAME.fullmatch(name) or not slots.isdecimal():
            raise FormatError(f"{line.strip()!r} is not of the form HOST slots=N", line=number)
        if name in found:
            raise FormatError(f"host {name!r} stands twice", line=number)
        plain = name.rpartition("@")[2]
        address = values.get("address", plain)
        found[name] = RealHost(name=plain, slots=int(slots), address=address, login=name)
    if not found:
        raise FormatError("no host is named")
    return list(found.values())


def load_hostfile(path: Path) -> list[RealHost]:
    """Return the hosts of a file.

    Raises:
        FormatError: It cannot be read.
    """
    with reading(path):
        return read_hostfile(path.read_text(encoding="utf-8"))


def ssh_place(hostfile: str, hosts: Sequence[PlanHost], request: PlaceFields) -> "SshPlace":
    """Return the hosts of a file for the hosts of a plan."""
    return SshPlace(
        Path(hostfile),
        hosts,
        command=request.ssh_command or SSH,
        python=request.host_python or "",
    )


class SshPlace:
    """The hosts of a file, on each of which ssh starts an agent."""

    def __init__(
        self,
        hostfile: Path,
        hosts: Sequence[PlanHost],
        *,
        command: str = SSH,
        python: str = "",
    ) -> None:
        """Choose the hosts.

        Args:
            hostfile: Names those that are there.
            hosts: Those of the plan.
            command: What is called with the name of a host and a command for it.
            python: The interpreter on the hosts; empty = the path of this one.

        Raises:
            InvalidInputError: The file does not have them.
        """
        found = match_hosts(hosts, load_hostfile(hostfile), str(hostfile))
        self.names = [host.name for host in found]
        self.addresses = [host.address for host in found]
        self._logins = [host.login for host in found]
        self._command, self._python = shlex.split(command), python

    def start(self, index: int) -> ProcessChannel:
        """Start the agent of a host."""
        remote = shlex.join(["exec", *agent_command(self._python)])
        return ProcessChannel([*self._command, self._logins[index], remote])

    def explain(self) -> str:
        """Return nothing: ssh has said all it knows."""
        return ""

    def __enter__(self) -> "SshPlace":
        return self

    def __exit__(self, *_: object) -> None:
        pass
