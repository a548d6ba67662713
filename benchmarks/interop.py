"""Every target against the real package: plans exported, accepted, read back as the same plan.

For each target random plans that it can hold are written, read by the package itself (an oracle, in
an environment of its own), its values compared with the plan's, and read back by ours where there
is a reader. Plans that are no grids must be refused by us, before any oracle sees them.

Environments are made under the cache directory (``--cache``) on first use; they see the torch of
this one. An oracle that cannot be made is a line of the table, and missed with ``--check``.
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.core.grid import Grid, plan_of_grid
from partita.core.plan import Shard
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.cost.judge import measure
from partita.errors import InfeasibleError, PartitaError
from partita.flows.problem import problem as pose_problem
from partita.testing.grids import broken_solutions, random_grids, solution_of_grid, untied
from partita.testing.slurm import FakeNode, private_slurm
from partita.trainers.deepspeed import bounds_of
from partita.trainers.read import read_configuration
from partita.trainers.rules import TRAINERS
from partita.trainers.schedule_csv import actions_of
from partita.trainers.table import TARGETS, writer
from partita.trainers.target import PlanToWrite
from partita.trainers.torchtitan import parallelism_of

ORACLES = Path(__file__).with_name("_interop_oracles.py")
THIS = "torch"
"""The oracle that is torch alone: this environment."""
PLANS = 30
LIMIT_S = 600
BASE = "torchtitan.models.llama3.config_registry:llama3_debugmodel"


@dataclass(frozen=True)
class Environment:
    """How the packages of an oracle are installed; ``oracles/NAME.txt`` says which.

    ``sees_ours`` = torch and the rest come from this environment.
    """

    sees_ours: bool = True
    first: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


# Apart, as they want different releases of the same packages.
ENVIRONMENTS: Mapping[str, Environment] = {
    "main": Environment(),
    "titan-0.2": Environment(),
    "deepspeed": Environment(
        first=("wheel", "setuptools", "ninja"),
        options=("--no-build-isolation",),
        variables={"DS_BUILD_OPS": "0"},
    ),
    "sky": Environment(sees_ours=False),
}


def installed_oracle(name: str, cache: Path) -> Path | None:
    """Return the interpreter that an oracle runs in; None where it is not there as it should be."""
    if name == THIS:
        return Path(sys.executable)
    done = cache / name / "installed"
    is_there = done.exists() and done.read_text().split() == _packages(name)
    return cache / name / "bin" / "python" if is_there else None


def install_oracle(name: str, cache: Path) -> Path:
    """Return the interpreter of an environment, which is made where it is not there."""
    found = installed_oracle(name, cache)
    if found is not None:
        return found
    folder, row = cache / name, ENVIRONMENTS[name]
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True, with_pip=True)
    if row.sees_ours:
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "torch_of_caller.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {**os.environ, **row.variables}
    packages = _packages(name)
    for words in (row.first, packages):
        if words:
            command = [str(python), "-m", "pip", "install", "-q", *row.options, *words]
            subprocess.run(command, env=environment, check=True, timeout=1800)
    (folder / "installed").write_text("\n".join(packages))
    return python


def _packages(name: str) -> list[str]:
    return (ORACLES.parent / "oracles" / f"{name}.txt").read_text().split()


def ask(target: str, python: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what an oracle says of each case."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-W", "ignore", str(ORACLES), target],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=LIMIT_S,
    )
    if done.returncode:
        return [{"refused": done.stderr.strip().splitlines()[-1][:300]}] * len(cases)
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@dataclass
class Row:
    """What a target came to."""

    target: str
    oracle: str
    wanted: int = PLANS
    plans: int = 0
    accepted: int = 0
    equal: int = 0
    read_back: int = 0
    reads: bool = False
    broken: int = 0
    refused: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def passes(self) -> bool:
        """Whether nothing is missed."""
        whole = self.plans == self.wanted and self.accepted == self.equal == self.plans
        read = not self.reads or self.read_back == self.plans
        return whole and read and self.broken == self.refused and self.broken > 0


def to_write(solution: Solution, **values: Any) -> PlanToWrite:
    """Return a plan as writers take it."""
    made = ("partita: benchmarks/interop.py",)
    return PlanToWrite(solution=solution, step_s=solution.value, made_by=made, **values)


def solutions_for(target: str, rng: random.Random, plans: int) -> list[Solution]:
    """Return random plans that a target can hold, all different."""
    found: list[Solution] = []
    seen: set[str] = set()
    # Steps of several sizes: some targets have few grids of one.
    for count in (16, 8, 32, 64):
        problem = problem_for(target, count)
        grids = random_grids(rng, problem, TRAINERS.get(target))
        for _ in range(20 * plans):
            grid = next(grids)
            if target == "device-map" and grid.dp * grid.tp > 1:
                continue
            key = f"{count} {grid}"
            if key in seen:
                continue
            seen.add(key)
            solution = solution_of_grid(problem, grid)
            try:
                writer(target)(to_write(solution))
            except InfeasibleError:
                continue
            found.append(solution)
            if len(found) == plans:
                return found
    return found


def problem_for(target: str, count: int) -> Problem:
    """Return a problem whose plans a target can hold, with some microbatches."""
    launch = target in ("torchrun", "sbatch", "ray", "jobset")
    one = "1x8xa100" if target == "device-map" else "2x4xa100"
    cluster = "1x4xa100+1x2xv100+1x2xa100" if launch else one
    return untied(pose_problem("gpt-small", cluster=cluster, microbatches=count, microbatch_size=2))


def expected_of(  # noqa: PLR0911 (a target each)
    target: str, plan: PlanToWrite
) -> dict[str, Any]:
    """Return the values that an oracle must find."""
    if target == "device-map":
        return {"devices": list(range(len({s.devices for s in plan.plan.stages})))}
    if target in STARTS:
        return nodes_of(plan) if target in ("jobset", "trainjob", "skypilot") else {}
    grid = plan.grid
    if target == "schedule-csv":
        orders = actions_of(plan, grid)
        return {
            "actions": [[f"{s}{k}{m}" for s, k, m in row] for row in orders],
            "rank_of": [grid.rank_of(stage) for stage in range(grid.num_stages)],
        }
    if target == "megatron":
        return {
            "blocks": list(grid.cuts) if grid.pp > 1 else [grid.num_blocks],
            "tp": grid.tp,
            "pp": grid.pp,
            "recompute": grid.recompute,
            "layers": grid.num_blocks,
        }
    if target.startswith("torchtitan"):
        p = parallelism_of(grid, {}, "lm_head" if target == "torchtitan" else "output")
        local = grid.microbatch_size * (grid.microbatches if grid.pp > 1 else 1)
        return {
            "pp": grid.pp,
            "tp": grid.tp,
            "replicate": p["data_parallel_replicate_degree"],
            "shard": p["data_parallel_shard_degree"],
            "reshard": p["fsdp_reshard_after_forward"],
            "schedule": p.get("pipeline_parallel_schedule", ""),
            "parts": p.get("module_fqns_per_model_part"),
            "local": local,
            "global": grid.batch_size,
            "recompute": grid.recompute,
        }
    if target == "fsdp":
        shard = 1 if grid.shard is Shard.NONE else grid.shard_group or grid.dp
        copies = [grid.dp // shard] if shard < grid.dp else []
        return {
            "units": grid.num_blocks + 1 if grid.dp > 1 else 0,
            "mesh": [*copies, shard] if grid.dp > 1 else [],
            "divided": grid.dp > 1,
            "reshard": [grid.shard is Shard.PARAMETERS] if grid.dp > 1 else [],
            "recompute": grid.num_blocks if grid.recompute else 0,
        }
    if target == "accelerate":
        fsdp = grid.shard is not Shard.NONE or grid.tp > 1
        shard = grid.dp if grid.shard is not Shard.NONE else 1
        return {
            "processes": grid.size,
            "fsdp": fsdp,
            "reshard": str(grid.shard is Shard.PARAMETERS).lower() if fsdp else "",
            "mesh": [grid.dp // shard, shard, grid.tp, grid.cp] if fsdp else [],
            "recompute": bool(grid.recompute) and fsdp,
        }
    bounds = bounds_of(grid)
    return {
        "batch": grid.batch_size,
        "micro": grid.microbatch_size,
        "steps": grid.microbatches,
        "zero": list(Shard).index(grid.shard),
        "slots": [len(node.local) for node in plan.nodes],
        "bounds": [bounds[s : s + 2] for s in range(grid.pp)] if grid.pp > 1 else [],
    }


def case_of(target: str, plan: PlanToWrite, folder: Path) -> dict[str, Any]:
    """Return what an oracle is asked."""
    case: dict[str, Any] = {"folder": str(folder)}
    if target == "megatron":
        script = 'source "$1"; printf "%s\\n" "${PLAN_ARGS[@]}"'
        words = subprocess.run(
            ["bash", "-c", script, "-", str(folder / "megatron_args.sh")],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout.splitlines()
        flags: dict[str, str] = {}
        for word in words:
            if word.startswith("--"):
                name = word
                flags[name] = ""
            else:
                flags[name] = word
        case["flags"] = flags
    elif target == "schedule-csv":
        grid = plan.grid
        case |= {"pp": grid.pp, "stages": grid.num_stages, "microbatches": grid.microbatches}
    elif target in ("device-map", "fsdp"):
        case["ranks"] = len(plan.plan.devices)
        case["parameters"] = list(plan.problem.graph.parameters.names)
    elif target == "deepspeed":
        case["dp"] = plan.grid.dp
    return case


def nodes_of(plan: PlanToWrite) -> dict[str, list[int]]:
    """Return runs of equal nodes, and the processes of a node of each."""
    runs: list[tuple[tuple[object, ...], int, int]] = []
    for node in plan.nodes:
        if runs and runs[-1][0] == node.shape:
            runs[-1] = (node.shape, runs[-1][1] + 1, len(node.local))
        else:
            runs.append((node.shape, 1, len(node.local)))
    return {"nodes": [run[1] for run in runs], "each": [run[2] for run in runs]}


TORCHRUN = """#!/bin/bash
while [ $# -gt 0 ]; do
  case $1 in
    --node-rank) rank=$2 ;; --nproc-per-node) each=$2 ;; --nnodes) nodes=$2 ;;
  esac
  shift
done
echo "$nodes $rank $each"
"""


def start_by_bash(plan: PlanToWrite, folder: Path) -> dict[str, Any]:
    """Return what each node would start, by a torchrun that tells what it was asked for."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "torchrun").write_text(TORCHRUN)
    (bin_folder / "torchrun").chmod(0o755)
    said = []
    for node in plan.nodes:
        done = subprocess.run(
            ["bash", str(folder / "start_node.sh")],
            env={"PATH": f"{bin_folder}:/usr/bin:/bin", "PLAN_NODE": node.name},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        said.append(done.stdout.split() or done.stderr[:200])
    wanted = [
        [str(len(plan.nodes)), str(rank), str(len(node.local))]
        for rank, node in enumerate(plan.nodes)
    ]
    return {"values": {}} if said == wanted else {"refused": f"{said} is not {wanted}"}


def start_by_ray(plan: PlanToWrite, folder: Path) -> dict[str, Any]:
    """Return whether the driver is Python whose table is the plan's."""
    tree = ast.parse((folder / "run_on_ray.py").read_text())
    found = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "NODES"
    )
    wanted = [len(node.local) for node in plan.nodes]
    each = [row["processes"] for row in found]
    return {"values": {}} if each == wanted else {"refused": f"{each} is not {wanted}"}


ALL_TARGETS = (*TARGETS, "torchtitan-toml")
STARTS = ("torchrun", "sbatch", "ray", "jobset", "trainjob", "skypilot")
HOMES = {"torchtitan-toml": "titan-0.2", "deepspeed": "deepspeed", "skypilot": "sky"}
HOMES |= {"torchrun": "bash", "ray": "python", "sbatch": "slurmctld", "schedule-csv": THIS}
HOMES["fsdp"] = THIS
NODES = (
    FakeNode(name="host0", gpus=4, gpu_type="a100", cpus=4),
    FakeNode(name="host1", gpus=2, gpu_type="v100", cpus=4),
    FakeNode(name="host2", gpus=2, gpu_type="a100", cpus=4),
)
"""Nodes of the cluster that ``sbatch`` is asked about."""


def home_of(target: str) -> str:
    """Return the name of a target's oracle."""
    return HOMES.get(target, "main")


def measure_target(target: str, cache: Path, slurm: Any = None, plans: int = PLANS) -> Row:
    """Return what a target comes to on some plans."""
    rng = random.Random(11)
    name, release = target.removesuffix("-toml"), "0.2" if target.endswith("-toml") else ""
    row = Row(target, home_of(target), plans)
    begin = time.monotonic()
    solutions = solutions_for(name, rng, plans)
    row.plans = len(solutions)
    row.reads = name in ("megatron", "deepspeed", "accelerate") or release == "0.2"
    with tempfile.TemporaryDirectory() as scratch:
        written, cases = write_all(row, solutions, Path(scratch))
        if name == "torchrun":
            answers = [
                start_by_bash(p, Path(c["folder"])) for p, c in zip(written, cases, strict=True)
            ]
        elif name == "ray":
            answers = [
                start_by_ray(p, Path(c["folder"])) for p, c in zip(written, cases, strict=True)
            ]
        elif name == "sbatch":
            answers = [slurm(Path(case["folder"])) for case in cases]
        else:
            answers = ask(target, install_oracle(row.oracle, cache), cases)
    for plan, answer in zip(written, answers, strict=True):
        weigh(row, plan, answer)
    refuse_broken(row, solutions, rng)
    row.seconds = time.monotonic() - begin
    return row


def write_all(
    row: Row, solutions: list[Solution], scratch: Path
) -> tuple[list[PlanToWrite], list[dict[str, Any]]]:
    """Write all plans, each into a folder; return them and what an oracle is asked."""
    name, release = row.target.removesuffix("-toml"), "0.2" if "-toml" in row.target else ""
    options = {"jobset": {"image": "me"}, "trainjob": {"image": "me"}}
    options["sbatch"] = {"time": "10", "partition": "main", "cpus": "1"}
    plans, cases = [], []
    for number, solution in enumerate(solutions):
        plan = to_write(
            solution,
            release=release,
            base=BASE if name == "torchtitan" else "",
            command=("train.py",) if name in STARTS else (),
            options=options.get(name, {}),
        )
        folder = scratch / str(number)
        folder.mkdir()
        files = writer(name)(plan).files
        for file, text in files.items():
            (folder / file).write_text(text)
        plans.append(plan)
        cases.append(case_of(name, plan, folder))
        if row.reads:
            row.read_back += is_read_back(name, files, solution, row)
    return plans, cases


def weigh(row: Row, plan: PlanToWrite, answer: Mapping[str, Any]) -> None:
    """Count an answer: accepted, and with the values of the plan."""
    if "values" not in answer:
        row.problems.append(answer["refused"])
        return
    row.accepted += 1
    wanted = expected_of(row.target, plan)
    found = {key: answer["values"].get(key) for key in wanted}
    row.equal += found == wanted
    if found != wanted:
        row.problems.append(f"{found} is not {wanted}")


def refuse_broken(row: Row, solutions: list[Solution], rng: random.Random) -> None:
    """Count plans that are no grids, and those of them that are refused.

    Launchers start any plan; an option that they do not have stands for what is broken there.
    """
    name, release = row.target.removesuffix("-toml"), "0.2" if "-toml" in row.target else ""
    broken = [
        to_write(changed, release=release)
        for solution in solutions[:12]
        for rule, changed in broken_solutions(rng, solution)
        # Microbatches and the order of stages are not in a device map.
        if name != "device-map" or rule not in ("G2", "G3")
    ]
    if name in STARTS:
        broken = [to_write(solutions[0], options={"no-such": "1"})]
    for plan in broken:
        row.broken += 1
        try:
            writer(name)(plan)
            row.problems.append("a broken plan was written")
        except PartitaError:
            row.refused += 1


def is_read_back(name: str, files: Mapping[str, str], solution: Solution, row: Row) -> bool:
    """Return whether our reader makes the same plan of a written file, with the same step."""
    grid = read_configuration(next(iter(files.values())))
    if not isinstance(grid, Grid):
        return False
    given = TRAINERS[name].title
    cut = solution.plan
    if name == "deepspeed" and len({stage.devices for stage in cut.stages}) > 1:
        # The cut stands in planned_pipeline.py, degrees and batch in the JSON.
        return grid.batch_size == cut.samples and grid.dp == cut.stages[0].num_replicas
    if name == "deepspeed" and bool(cut.recompute.any()):
        return grid.batch_size == cut.samples
    plan = plan_of_grid(solution.problem, grid)
    if plan.stages != cut.stages and grid.sequence_parallel:
        plan = plan_of_grid(solution.problem, _without_sequence(grid))
    same = plan == cut and measure(solution.problem, plan).value == solution.value
    if not same:
        row.problems.append(f"{given}: another plan was read back")
    return same


def _without_sequence(grid: Grid) -> Grid:
    """Return a grid without sequence parallelism, torchtitan 0.2's way of tensor parallelism."""
    return replace(grid, sequence_parallel=False)


def main() -> int:
    """Measure the targets and print the table; with ``--check`` 1 where something is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 where something is missed")
    parser.add_argument("--only", action="append", help="a target")
    usual = Path.home() / ".cache" / "partita" / "oracles"
    parser.add_argument("--cache", type=Path, default=usual, help="where oracles are installed")
    parser.add_argument("--install", action="store_true", help="install all oracles, ask none")
    chosen = parser.parse_args()
    if chosen.install:
        for name in ENVIRONMENTS:
            print(install_oracle(name, chosen.cache))
        return 0
    targets = chosen.only or ALL_TARGETS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if "sbatch" in targets:
            with private_slurm(Path(folder), NODES) as slurm:
                rows.append(measure_target("sbatch", chosen.cache, sbatch_of(slurm)))
                show(rows[-1])
        for target in targets:
            if target != "sbatch":
                rows.append(measure_target(target, chosen.cache))
                show(rows[-1])
    print(f"{'target':16} {'oracle':10} plans accepted equal read-back broken refused  seconds")
    for row in rows:
        back = f"{row.read_back:9}" if row.reads else "        -"
        print(
            f"{row.target:16} {row.oracle:10} {row.plans:5} {row.accepted:8} {row.equal:5} {back} "
            f"{row.broken:6} {row.refused:7} {row.seconds:8.1f} {'' if row.passes else 'MISSED'}"
        )
    missed = [row.target for row in rows if not row.passes]
    print(json.dumps({"targets": len(rows), "missed": missed}))
    return 1 if chosen.check and missed else 0


def sbatch_of(slurm: Any) -> Callable[[Path], dict[str, Any]]:
    """Return a function that asks the scheduler whether it would take a job."""

    def test(folder: Path) -> dict[str, Any]:
        done = subprocess.run(
            ["sbatch", "--test-only", str(folder / "job.sbatch")],
            env=slurm.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        said = f"{done.stdout} {done.stderr}".strip()
        return {"values": {}} if not done.returncode else {"refused": said[:300]}

    return test


def show(row: Row) -> None:
    """Print what went wrong, a line each of the first."""
    for text in row.problems[:3]:
        print(f"  {row.target}: {re.sub(chr(10), ' ', text)[:240]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
