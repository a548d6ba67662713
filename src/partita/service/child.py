"""A process of a server's own that answers over a pipe, started when it is needed first."""

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeAlias

Pipe: TypeAlias = "Connection[Any, Any]"


class Child:
    """One process; the end of the process is the end of its pipe.

    Args:
        target: What it does: a function of a module, of its pipe and the number of this process.
        name: What the process is called.
        given: What the function is given besides.
    """

    def __init__(self, target: Callable[..., None], name: str, *given: object) -> None:
        self._target, self._name, self._given = target, name, given
        self._process: SpawnProcess | None = None
        self._pipe: Pipe | None = None

    def started(self) -> Pipe:
        """Return the pipe to the process, which is started if it is not there."""
        if self._pipe is None:
            context = get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(
                target=self._target,
                args=(theirs, os.getpid(), *self._given),
                name=self._name,
                daemon=True,
            )
            self._process.start()
            theirs.close()
        return self._pipe

    def close(self) -> None:
        """End the process, whatever it is doing; whoever reads its pipe sees the end."""
        process, self._process, self._pipe = self._process, None, None
        if process is not None:
            process.kill()
            process.join()
