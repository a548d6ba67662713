"""One rank of a job that trains with zeus's own client; started as a process by the tests.

The client is what PyPI's ``zeus`` installs. Three functions of ``torch.cuda`` are faked here, and
the tests put a fake ``pynvml`` on the path of this process and of its clock controller's.
"""

import json
import multiprocessing
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer, common

Config = dict[str, Any]


def main() -> None:
    """Train as the first argument says, and write down the job and the clocks that were fetched."""
    config: Config = json.loads(sys.argv[1])
    multiprocessing.set_start_method(config["start_method"])
    start_torch(config)
    optimizer = PipelineFrequencyOptimizer(
        **config["rank"],
        **config["degrees"],
        device_id=config["rank"]["rank"],
        server_url=config["server_url"],
        job_metadata=config["job_metadata"],
    )
    found = {"job": optimizer.job_id, "schedules": list(train(optimizer, config))}
    end_controller(optimizer.frequency_controller)
    Path(config["answer"]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def start_torch(config: Config) -> None:
    """Make torch pretend to have GPUs, and join the process group."""
    torch.cuda.is_available = lambda: True
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    dist.init_process_group(
        "gloo",
        init_method=f"file://{config['store']}",
        rank=config["rank"]["rank"],
        world_size=config["degrees"]["world_size"],
        timeout=timedelta(seconds=60),
    )


def train(optimizer: Any, config: Config) -> Iterator[list[tuple[str, int]]]:
    """Run steps under one schedule after the other; yields each."""
    for turn in range(config["schedules"]):
        if turn:
            report(optimizer, config)
            optimizer.freq_schedule = optimizer._get_frequency_schedule()
            optimizer.freq_schedule_iter = iter(optimizer.freq_schedule)
        for _ in range(config["steps"]):
            optimizer.on_step_begin()
            for name in config["instructions"]:
                optimizer.on_instruction_begin(name)
                optimizer.on_instruction_end(name)
            optimizer.on_step_end()
        yield optimizer.freq_schedule


def report(optimizer: Any, config: Config) -> None:
    """Send zeus's report of the steps of a schedule; its client has the type but never sends it."""
    steps, names = config["steps"], config["instructions"]
    each = {name: [[0.05] * names.count(name)] * steps for name in set(names)}
    result = common.ProfilingResult(
        rank=optimizer.rank,
        iter_time=[0.05 * len(names)] * steps,
        iter_energy=[12.0 * len(names)] * steps,
        time_breakdown=each,
        energy_breakdown={n: [[12.0] * len(row) for row in rows] for n, rows in each.items()},
    )
    path = common.REPORT_PROFILING_RESULT_URL.format(job_id=optimizer.job_id)
    httpx.post(optimizer.server_url + path, json=result.dict()).raise_for_status()


def end_controller(controller: Any) -> None:
    """Let the clock controller do all it was told; a slow start must not outlast this process."""
    controller.end()
    process = controller._proc
    process.join(60)
    if process.exitcode != 0:
        raise SystemExit(f"the clock controller ended with {process.exitcode}")


if __name__ == "__main__":
    main()
