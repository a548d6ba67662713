"""The energy server as a process of its own that tests start, kill and start again."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

START_LIMIT_S = 60.0
END_LIMIT_S = 30.0


class EnergyService:
    """A server with its database in a folder; its port stays the same after the first start.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.state = folder / "energy.sqlite"
        self.options = options
        self.url = ""
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.stop()

    @property
    def log(self) -> str:
        """What it has said since its last start."""
        return self._log.read_text(encoding="utf-8")

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it listens."""
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "partita", "energy", "serve", "--port", port]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--state", str(self.state), *self.options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self.url = self._await_url()

    def kill(self) -> None:
        """End it with SIGKILL: it can neither finish nor tidy up."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end; it must do so by itself."""
        assert self._end(signal.SIGTERM) == 0, self.log

    def _end(self, how: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(how)
        try:
            return self._process.wait(END_LIMIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _await_url(self) -> str:
        """Return the address that it prints."""
        assert self._process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while not (found := re.search(r"http://[\d.]+:\d+", self.log)):
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, f"the server does not listen: {self.log}"
            time.sleep(0.02)
        return found.group()
