"""What several parts' tests share."""

import gc
import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import settings

# The same examples in every run, and no time limits: machines are shared.
settings.register_profile("partita", derandomize=True, deadline=None)
settings.load_profile("partita")

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
"""Whether every property is tried on as many examples as its test asks for."""
SHARE, FEWEST = 0.3, 8
"""Part of those examples that other runs try, and how many at least, where a test asks for them."""
STEPS = "PARTITA_TEST_STEPS"
"""Variable of the environment: the steps of searches whose effort nobody gives, in other runs."""

# Hundreds of processes import the same modules, and tests are rewritten to explain themselves:
# images that forbid to keep the bytecode of either would double the time of the suite.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several test processes share few cores; torch's own threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
# What a result says of a busy machine would differ from run to run: here every machine is idle.
os.getloadavg = lambda: (0.0, 0.0, 0.0)

IN_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    """Let all tests, in whatever process, share what is not the user's: a cache, warm processes."""
    if not IN_A_WORKER:  # workers inherit it
        cache = tempfile.TemporaryDirectory(prefix="partita-profiles-")
        config.add_cleanup(cache.cleanup)
        os.environ["PARTITA_CACHE"] = cache.name
        if not THOROUGH:
            os.environ[STEPS] = "12"
        start_command_server(config)
    else:
        collect_from_elsewhere(config)
    search_briefly()


def collect_from_elsewhere(config: pytest.Config) -> None:
    """Let each worker begin its collection at another folder: what one compiles, others load."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    unit = HERE / "unit"
    found = [path for folder in (HERE, unit) for path in folder.iterdir() if path != unit]
    tests = sorted(path for path in found if path.is_dir() or path.name.startswith("test_"))
    tests = [str(path) for path in tests if path.name != "__pycache__"]
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    begin = len(tests) * number // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    config.args = tests[begin:] + tests[:begin]


def search_briefly() -> None:
    """Let a search whose effort nobody gives end early: how good plans are, tests of effort say."""
    if STEPS in os.environ:
        planner = importlib.import_module("partita.planners.auto.planner")
        planner.USUAL_STEPS, planner.FEWEST_STEPS = int(os.environ[STEPS]), 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so that workers do nothing twice and end at about the same time."""
    items.sort(key=lambda item: str(item.path))
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if not THOROUGH:
        try_fewer_examples(items)


def dealt(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return tests in the order in which workers take them: each begins with a part of the list.

    A part begins with modules of slow tests, dealt whole, as what their tests share is made once
    per worker. The first has all that need Slurm or Ray, one after the other, so that one of each
    is started. Other tests fill the parts up: a worker that has done its part takes tests from the
    end of another one's, which are quick.
    """
    by_module: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_module.setdefault(item.path, []).append(item)
    engines = [tests for tests in by_module.values() if any(map(needs_engine, tests))]
    slow = [t for t in by_module.values() if t not in engines and any(map(is_slow, t))]
    quick = [item for t in by_module.values() if t not in engines and t not in slow for item in t]
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    parts[0] = [item for tests in engines for item in sorted(tests, key=engine_of)]
    for turn, tests in enumerate(slow, start=1):
        parts[turn % workers] += tests
    left = len(items)
    for place, part in enumerate(parts):
        filled = max(0, left // (workers - place) - len(part))  # as many as a worker is sent
        part.extend(quick[:filled])
        del quick[:filled]
        left -= len(part)
    return [item for part in parts for item in part]


ENGINES = ("ray", "slurm")
"""Fixtures that start what takes long to start, for all tests of a process."""


def engine_of(item: pytest.Item) -> str:
    """Return the engine that a test needs; empty = none."""
    return next((name for name in ENGINES if name in getattr(item, "fixturenames", ())), "")


def needs_engine(item: pytest.Item) -> bool:
    """Return whether a test needs an engine."""
    return bool(engine_of(item))


def is_slow(item: pytest.Item) -> bool:
    """Return whether a test is marked so."""
    return item.get_closest_marker("slow") is not None


def pytest_collection_finish() -> None:
    """Keep what is there before the first test from being looked through for garbage again.

    What tests leave is looked through less often than is usual: most of it goes by itself.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def try_fewer_examples(items: list[pytest.Item]) -> None:
    """Let each property be tried on the first examples of those that its test asks for."""
    for test in {getattr(item.obj, "__func__", item.obj) for item in items}:  # type: ignore[attr-defined]
        # Hypothesis has no public way to change what a test asks for.
        asked = getattr(test, "_hypothesis_internal_use_settings", None)
        if getattr(test, "is_hypothesis_test", False) and asked is not None:
            fewer = min(asked.max_examples, max(FEWEST, round(SHARE * asked.max_examples)))
            test._hypothesis_internal_use_settings = settings(asked, max_examples=fewer)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of published inputs and answers; skip where it is not there."""
    shared = os.environ.get("PARTITA_SHARED")
    root = Path(shared) if shared else Path(__file__).resolve().parents[2] / "shared"
    if not (root / "data").is_dir():
        pytest.skip(f"no published data in {root / 'data'}; set PARTITA_SHARED")
    return root / "data"


class WarmProcess:
    """A process that was forked from a warm one; what tests use of ``subprocess.Popen``."""

    def __init__(self, pid: int, place: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._place = place

    def poll(self) -> int | None:
        """Return the exit code, or that of a signal below 0; nothing while it runs."""
        if self.returncode is None:
            with suppress(FileNotFoundError):
                self.returncode = int((self._place / "code").read_text())
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Wait until it has ended and return the exit code."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a warm process", timeout)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait until it has ended and return what it printed."""
        self.wait(timeout)
        files = (self._place / "out", self._place / "err")
        out, err = (file.read_text(encoding="utf-8") if file.exists() else "" for file in files)
        return out, err

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


COMMANDS = "PARTITA_TEST_COMMANDS"
"""Variable of the environment: the socket of the process that commands are forked from."""


def start_command_server(config: pytest.Config) -> None:
    """Start what commands of all test processes are forked from.

    It gets warm when it is needed, or at once if all tests are to run.
    """
    folder = tempfile.TemporaryDirectory(prefix="partita-commands-")
    config.add_cleanup(folder.cleanup)
    os.environ[COMMANDS] = str(Path(folder.name) / "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.environ[COMMANDS])
        listening.listen()
        server = subprocess.Popen(
            [
                sys.executable,
                Path(__file__).with_name("command_server.py"),
                str(listening.fileno()),
                *(["--now"] if config.args_source is pytest.Config.ArgsSource.TESTPATHS else []),
            ],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # it ends with this process, however that ends
            stdout=subprocess.DEVNULL,
            pass_fds=[listening.fileno()],
        )

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.terminate()
        server.wait()

    config.add_cleanup(end)


class Commands:
    """Runs ``partita``, or Python, in processes of their own, forked from one that is warm."""

    def __init__(self) -> None:
        self._files = tempfile.TemporaryDirectory()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(os.environ[COMMANDS])
        self._words = self._server.makefile("rw", encoding="utf-8")

    def start(
        self,
        *arguments: str,
        folder: Path,
        python: str | None = None,
        out: str | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> WarmProcess:
        """Start a command.

        Args:
            *arguments: What stands after ``partita``, or after ``python -c``.
            folder: Where it runs.
            python: A text to run instead of the command.
            out: Where it prints to, if not to what ``communicate`` returns.
            environment: Set besides that of the tests.
        """
        place = Path(tempfile.mkdtemp(dir=self._files.name))
        files = {name: str(place / name) for name in ("out", "err", "code")}
        request = {
            "arguments": arguments,
            "folder": str(folder),
            "environment": {**os.environ, **environment},
            "python": python,
            **files,
            **({} if out is None else {"out": out}),
        }
        self._words.write(json.dumps(request) + "\n")
        self._words.flush()
        return WarmProcess(int(self._words.readline()), place)

    def run(
        self,
        *arguments: str,
        folder: Path,
        timeout_s: float = 240.0,
        python: str | None = None,
        out: str | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and return what it printed; one that takes longer is killed."""
        process = self.start(
            *arguments, folder=folder, python=python, out=out, environment=environment
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        printed = process.communicate(timeout_s)
        return subprocess.CompletedProcess(arguments, process.wait(0), *printed)

    def close(self) -> None:
        """Leave the warm process."""
        self._words.close()
        self._server.close()
        self._files.cleanup()


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
