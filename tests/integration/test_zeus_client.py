"""The client of PyPI's ``zeus``, as it is, trains against our server.

Faked are NVML (a module on the path of the ranks and of their clock controllers) and three
functions of ``torch.cuda``; the client, its clock controller's process, the process group and the
server are real. What the GPUs were told is compared with the schedule that the ranks were given.
"""

import json
import runpy
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest

for _package in ("zeus", "torch", "aiofiles", "fastapi"):
    pytest.importorskip(_package, reason=f"zeus's client or our server needs {_package}")
httpx = pytest.importorskip("httpx", reason="zeus's client needs httpx")

pytestmark = pytest.mark.slow

EnergyService = runpy.run_path(str(Path(__file__).with_name("energy_service.py")))["EnergyService"]

FAKES = Path(__file__).with_name("fake_pynvml")
RANK = Path(__file__).with_name("zeus_rank.py").read_text(encoding="utf-8")
FAKED = "import sys; sys.modules.pop('pynvml', None)\n"
"""Before the rank: the process that it is forked from may know the real one."""
LIMIT_S = 120.0
TOP_MHZ = 1410
STEP_MHZ = 15
STEPS = 3

# 1F1B of three microbatches on two stages, and on one.
FIRST = ["forward", "forward", "backward", "forward", "backward", "backward"]
LAST = ["forward", "backward", "forward", "backward", "forward", "backward"]

Schedule = list[tuple[str, int]]


class Rank(NamedTuple):
    """Where a rank stands and what it runs in a step."""

    dp_rank: int
    pp_rank: int
    instructions: list[str]


PIPELINE = [Rank(0, 0, FIRST), Rank(0, 1, LAST)]
REPLICAS = [Rank(0, 0, LAST), Rank(1, 0, LAST)]


PIPELINE_PLAN: list[Schedule] = [
    list(zip(FIRST, [1410, 1305, 1200, 1200, 1005, 1410], strict=True)),
    list(zip(LAST, [1395, 1200, 1395, 1380, 1380, 810], strict=True)),
]


class Trained(NamedTuple):
    """What a run left: the job, each rank's schedules, and each GPU's calls."""

    job: str
    schedules: list[list[Schedule]]
    calls: list[list[tuple[str, list[int]]]]


def train(
    commands: Any,
    folder: Path,
    url: str,
    ranks: Sequence[Rank],
    *,
    start_method: str,
    schedules: int,
) -> Trained:
    """Run a rank a process, each with zeus's optimizer, to their end."""
    degrees = {
        "dp_degree": len({rank.dp_rank for rank in ranks}),
        "pp_degree": len({rank.pp_rank for rank in ranks}),
        "tp_degree": 1,
        "world_size": len(ranks),
    }
    environment = {
        "PYTHONPATH": str(FAKES),
        "FAKE_NVML_LOG": str(folder / "nvml.log"),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = []
    try:
        for number, rank in enumerate(ranks):
            place = {"rank": number, "dp_rank": rank.dp_rank, "pp_rank": rank.pp_rank, "tp_rank": 0}
            config = {
                "rank": place,
                "degrees": degrees,
                "start_method": start_method,
                "store": str(folder / "store"),
                "server_url": url,
                "job_metadata": "from zeus",
                "steps": STEPS,
                "schedules": schedules,
                "instructions": rank.instructions,
                "answer": str(folder / f"{number}.json"),
            }
            processes.append(
                commands.start(
                    json.dumps(config), python=FAKED + RANK, folder=FAKES, environment=environment
                )
            )
        for process in processes:
            said = process.communicate(timeout=LIMIT_S)[1]
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    return read(folder, len(ranks))


def read(folder: Path, num_ranks: int) -> Trained:
    answers = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    assert len({answer["job"] for answer in answers}) == 1
    calls: list[list[tuple[str, list[int]]]] = [[] for _ in answers]
    for line in (folder / "nvml.log").read_text().splitlines():
        call = json.loads(line)
        calls[call["gpu"]].append((call["call"], call["values"]))
    return Trained(
        job=answers[0]["job"],
        schedules=[
            [[(name, clock) for name, clock in one] for one in answer["schedules"]]
            for answer in answers
        ],
        calls=calls,
    )


def told(schedules: Sequence[Schedule]) -> list[tuple[str, list[int]]]:
    """Return what a GPU is told in a run: the top clock first, then every change of clock."""
    clocks = [TOP_MHZ]
    for schedule in schedules:
        clocks += [clock for _ in range(STEPS) for _, clock in schedule]
    return [
        ("lock_memory", [1215, 1215]),
        *(("lock", [clock, clock]) for clock, _ in groupby(clocks)),
        ("reset_memory", []),
        ("reset", []),
    ]


@pytest.mark.parametrize(
    ("ranks", "plan", "start_method"),
    [
        pytest.param(PIPELINE, PIPELINE_PLAN, "spawn", id="pipeline"),
        pytest.param(REPLICAS, PIPELINE_PLAN[1:], "fork", id="replicas"),
    ],
)
def test_clocks_of_a_plan_reach_the_gpus(
    commands: Any, tmp_path: Path, ranks: list[Rank], plan: list[Schedule], start_method: str
) -> None:
    file = tmp_path / "freqs_pipeline_00001.py"
    file.write_text(repr(plan), encoding="utf-8")
    options = ("--scheduler", "point-solution", "--scheduler-option", f"solution_path={file}")
    with EnergyService(tmp_path, *options) as service:
        trained = train(
            commands, tmp_path, service.url, ranks, start_method=start_method, schedules=1
        )
        known = httpx.get(f"{service.url}/jobs/{trained.job}").raise_for_status().json()
    for rank, (schedules, calls) in enumerate(zip(trained.schedules, trained.calls, strict=True)):
        assert schedules == [plan[ranks[rank].pp_rank]]
        assert calls == told(schedules)
    assert (known["state"], known["registered"], known["missing"]) == ("deployed", 2, [])


def test_reports_in_zeus_form_move_the_profiler_on(commands: Any, tmp_path: Path) -> None:
    options = ("--scheduler", "instruction-profiler", "--microbatches", "3")
    with EnergyService(tmp_path, *options) as service:
        trained = train(commands, tmp_path, service.url, PIPELINE, start_method="fork", schedules=3)
    for rank, (schedules, calls) in enumerate(zip(trained.schedules, trained.calls, strict=True)):
        names = [[name for name, _ in schedule] for schedule in schedules]
        assert names == [PIPELINE[rank].instructions] * 3
        clocks = [{clock for _, clock in schedule} for schedule in schedules]
        assert clocks == [{TOP_MHZ}, {TOP_MHZ - STEP_MHZ}, {TOP_MHZ - 2 * STEP_MHZ}]
        assert calls == told(schedules)
