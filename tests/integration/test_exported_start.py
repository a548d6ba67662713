"""An exported start on two loopback nodes: the rank table is the plan's."""

import os
import subprocess
import sys
from pathlib import Path

from partita.core.grid import Grid
from partita.flows.problem import problem as pose_problem
from partita.testing.daemons import free_ports
from partita.testing.grids import solution_of_grid
from partita.trainers.table import writer
from partita.trainers.target import PlanToWrite

SAY = """import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
open(f"{sys.argv[1]}/rank{os.environ['RANK']}", "w").write(" ".join(os.environ[n] for n in names))
"""


def test_uneven_nodes_have_the_ranks_of_the_plan(tmp_path: Path) -> None:
    problem = pose_problem(
        "gpt-small", cluster="1x1xa100+1x2xv100", microbatches=6, microbatch_size=1
    )
    (tmp_path / "say.py").write_text(SAY)
    plan = PlanToWrite(
        solution=solution_of_grid(problem, Grid(dp=3)),
        step_s=1.0,
        command=(str(tmp_path / "say.py"), str(tmp_path)),
    )
    script = tmp_path / "start_node.sh"
    script.write_text(writer("torchrun")(plan).files["start_node.sh"])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shared = {**os.environ, "PATH": path, "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(free_ports(1)[0])
    names = [node.name for node in plan.nodes]
    # The second node first: the table says who is who, not the order of arrival.
    started = [
        subprocess.Popen(
            ["bash", str(script)],
            env={**shared, "PLAN_NODE": name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in reversed(names)
    ]
    for process in started:
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 0, out
    ranks = [(tmp_path / f"rank{rank}").read_text() for rank in range(3)]
    assert ranks == ["0 3 0 0", "1 3 0 1", "2 3 1 1"]
