"""Calls of Slurm's commands: within a time limit, errors in one line, and told why they fail."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from partita.errors import PartitaError, UnsupportedError

_AWAY = (
    "unable to contact slurm controller",
    "connection refused",
    "connection failure",
    "connect failure",
    "socket timed out",
    "zero bytes were transmitted",
    "unexpected message received",
    "unable to establish controller machine",
    "slurm backup controller in standby",
)


class SlurmError(PartitaError):
    """A command of Slurm that failed.

    Attributes:
        is_away: Whether the controller could not be reached, or did not answer in time: the same
            may succeed later, and what was asked for may have happened.
    """

    def __init__(self, text: str, *, is_away: bool) -> None:
        super().__init__(text)
        self.is_away = is_away


class SlurmCommands:
    """Slurm's commands on this machine.

    Args:
        environment: Their environment; None = this process's.
        limit_s: How long each may take.

    Attributes:
        calls: How many were called.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, *, limit_s: float = 30.0
    ) -> None:
        self._environment = dict(os.environ if environment is None else environment)
        self._limit_s = limit_s
        self.calls = 0

    def call(self, *words: str, text: str = "") -> str:
        """Return what a command prints.

        Args:
            *words: The command and its arguments.
            text: Its standard input.

        Raises:
            UnsupportedError: Slurm is not installed here.
            SlurmError: It failed.
        """
        program = shutil.which(words[0], path=self._environment.get("PATH"))
        if program is None:
            raise UnsupportedError(f"{words[0]} is not installed here; Slurm's commands are needed")
        self.calls += 1
        try:
            done = subprocess.run(
                [program, *words[1:]],
                input=text,
                env=self._environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            why = f"{words[0]} gave no answer in {self._limit_s:g} s"
            raise SlurmError(why, is_away=True) from exc
        if done.returncode != 0:
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
            why = lines[-1] if lines else f"exit code {done.returncode}"
            away = any(word in done.stderr.lower() for word in _AWAY)
            raise SlurmError(f"{words[0]}: {why.removeprefix(f'{words[0]}: ')}", is_away=away)
        return done.stdout
