"""What the benchmarks share: arguments, public data, CPU time, the last line with the figures."""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def shared_data() -> Path:
    """Return the folder of public inputs, or exit 4 where it is absent."""
    folder = Path(os.environ.get("PARTITA_SHARED", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        print(f"no public data at {folder}; set PARTITA_SHARED", file=sys.stderr)
        raise SystemExit(4)
    return folder


@cache
def load_script(data: Path, name: str) -> ModuleType:
    """Return a script of the data folder as a module, such as its scorer ``evaluate``."""
    spec = importlib.util.spec_from_file_location(name, data / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(data / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cpu_s(work: Callable[[], object], *, repeats: int = 1) -> float:
    """Return the least CPU seconds of this process over some calls."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


Measured = tuple[dict[str, Any], list[str]]


def run_benchmark(description: str, measure: Callable[[], Measured]) -> None:
    """Run a benchmark: ``measure`` returns figures and what is missed.

    With ``--check`` the exit code is 1 when something is missed; the last line holds the figures.
    """
    _run(_parser(description).parse_args(), measure)


def run_groups(
    description: str, groups: Iterable[str], measure: Callable[[list[str]], Measured]
) -> None:
    """Run a benchmark of several groups, all or those that ``--group`` names."""
    names = list(groups)
    parser = _parser(description)
    parser.add_argument("--group", action="append", choices=names, help="only these groups")
    options = parser.parse_args()
    _run(options, lambda: measure(options.group or names))


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="exit 1 when a number is missed")
    parser.add_argument("--json", action="store_true", help="print only the figures, as JSON")
    return parser


def _run(options: argparse.Namespace, measure: Callable[[], Measured]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) if options.json else contextlib.nullcontext():
        figures, missed = measure()
    if options.json:
        print(json.dumps({"figures": figures, "missed": missed}))
    else:
        for line in missed:
            print(f"missed: {line}")
        parts = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        print(f"{'FAIL' if missed else 'ok'} " + " ".join(parts))
    raise SystemExit(1 if options.check and missed else 0)
