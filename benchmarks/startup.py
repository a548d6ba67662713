"""Start-up: what ``partita --help`` costs against ``import click``, and what planning imports."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from _harness import ROOT, run_benchmark

from partita.core.graph import EdgeTable, Graph, OpCosts, OpTable, TensorTable
from partita.documents import save

WANTED_RATIO = 3.0
ROUNDS = 15


def child_cpu_s(arguments: list[str]) -> float:
    """Return the CPU seconds, user and system, of a child process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(
        [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=environment
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def help_ratio() -> tuple[float, float, float]:
    """Return the least CPU seconds of both commands, in turns, and their ratio."""
    click_s, help_s = [], []
    for _ in range(ROUNDS):
        click_s.append(child_cpu_s(["-c", "import click"]))
        help_s.append(child_cpu_s(["-m", "partita.cli.main", "--help"]))
    return min(click_s), min(help_s), min(help_s) / min(click_s)


def planning_imports() -> dict[str, bool]:
    """Plan a saved graph of 100 ops in a fresh process and return which packages it imported."""
    ops = 100
    graph = Graph(
        name="hundred",
        ops=OpTable(names=[f"op{i}" for i in range(ops)]),
        costs=(OpCosts(forward_s=np.ones(ops), backward_s=np.ones(ops)),),
        tensors=TensorTable(
            names=[f"t{i}" for i in range(ops)], producer=np.arange(ops), bytes=1e6
        ),
        edges=EdgeTable(tensor=np.arange(ops - 1), reader=np.arange(1, ops)),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hundred.json"
        save(graph, path)
        plan = f"{path}.plan"
        code = (
            "import sys, json\n"
            "from partita.cli.main import main\n"
            "try:\n"
            f"    main(['plan', {str(path)!r}, '-c', '4xa100', '--json', '-o', {plan!r}])\n"
            "except SystemExit as stop:\n"
            "    assert stop.code == 0, stop.code\n"
            "names = ('torch', 'numba', 'scipy')\n"
            "print(json.dumps({name: name in sys.modules for name in names}))\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        output = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        ).stdout
    return json.loads(output.strip().splitlines()[-1])


def measure() -> tuple[dict, list[str]]:
    """Measure both."""
    missed = []
    click_s, help_s, ratio = help_ratio()
    print(f"import click {1e3 * click_s:.1f} ms, --help {1e3 * help_s:.1f} ms: {ratio:.2f} times")
    if ratio > WANTED_RATIO:
        missed.append(
            f"--help takes {ratio:.2f} times the CPU of import click, limit {WANTED_RATIO}"
        )
    imported = planning_imports()
    print(
        "planning a saved graph of 100 ops imports: "
        + ", ".join(k for k, v in imported.items() if v)
    )
    if imported["torch"]:
        missed.append("planning a saved graph imports torch")
    return {
        "help_ratio": ratio,
        "imports_torch": imported["torch"],
        "imports_numba": imported["numba"],
    }, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
