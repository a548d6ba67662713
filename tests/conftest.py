"""What several parts' tests share."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, and no time limits: machines are shared.
settings.register_profile("partita", derandomize=True, deadline=None)
settings.load_profile("partita")

# Several test processes share few cores; torch's own threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

IN_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    """Let all tests, in whatever process, share one empty cache of profiles: none of the user's."""
    if not IN_A_WORKER:  # workers inherit it
        cache = tempfile.TemporaryDirectory(prefix="partita-profiles-")
        config.add_cleanup(cache.cleanup)
        os.environ["PARTITA_CACHE"] = cache.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules with slow tests first: workers that share the rest end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of published inputs and answers; skip where it is not there."""
    shared = os.environ.get("PARTITA_SHARED")
    root = Path(shared) if shared else Path(__file__).resolve().parents[2] / "shared"
    if not (root / "data").is_dir():
        pytest.skip(f"no published data in {root / 'data'}; set PARTITA_SHARED")
    return root / "data"


class Commands:
    """Runs ``partita`` in processes of their own, forked from one that is warm."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, *arguments: str, folder: Path, timeout_s: float = 240.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return what it printed; one that takes longer is killed."""
        server = self._server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        with tempfile.TemporaryDirectory() as place:
            out, err = Path(place) / "out", Path(place) / "err"
            request = {
                "arguments": arguments,
                "folder": str(folder),
                "environment": {**os.environ, **environment},
                "out": str(out),
                "err": str(err),
            }
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            watch = threading.Timer(timeout_s, os.killpg, (child, signal.SIGKILL))
            watch.start()
            code = int(server.stdout.readline())
            watch.cancel()
            return subprocess.CompletedProcess(
                arguments, code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
            )

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, Path(__file__).with_name("command_server.py")],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the warm process."""
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.close()
            self._server.stdout.close()
            self._server.wait()


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Return what runs commands as processes of their own."""
    found = Commands()
    yield found
    found.close()


RunPage = Callable[[Path], list[list[str]]]


@pytest.fixture
def run_page(tmp_path: Path, commands: Commands) -> RunPage:
    """Return what runs the commands that a page shows, in their order; each must end well."""

    def run(page: Path) -> list[list[str]]:
        text = page.read_text(encoding="utf-8")
        blocks = re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
        lines = [line for block in blocks for line in block.splitlines()]
        shown = [shlex.split(x[2:], comments=True)[1:] for x in lines if x.startswith("$ partita")]
        for arguments in shown:
            done = commands.run(*arguments, folder=tmp_path)
            assert not done.returncode, f"{arguments}: {done.stderr}"
        return shown

    return run
