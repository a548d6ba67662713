"""A job that is bound by its loaders: real decompression on the CPUs that it may use.

Each step needs some compressed records, which threads unpack ahead of it (zlib lets them run side
by side); a sleep stands for the accelerator's step, during which the CPUs are free for the loaders.
The checkpoint keeps steps and seconds by the CPUs that were granted, so that it shows how the speed
depends on the grant.

    python loader_job.py --blocks 4 --step-s 0.005
"""

import argparse
import json
import os
import random
import time
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from partita.fleet.lease import Lease

AHEAD = 2
"""Steps whose records are loaded ahead."""
RECORDS = 20
"""Records of 64 KiB in a block."""


class Checkpoint:
    """Steps done, and how fast with how many CPUs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoint.json"
        folder.mkdir(parents=True, exist_ok=True)
        said = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.step: int = said.get("steps", 0)
        self.by_cpus: dict[str, list[float]] = said.get("by_cpus", {})

    def note(self, cpus: float, seconds: float) -> None:
        """Count a step."""
        row = self.by_cpus.setdefault(f"{cpus:g}", [0, 0.0])
        row[0] += 1
        row[1] += seconds

    def save(self, step: int) -> None:
        """Keep all of it; a kill meanwhile leaves the file as it was."""
        self.step = step
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps({"steps": step, "by_cpus": self.by_cpus}))
        unfinished.replace(self.path)


def unpack(record: bytes, count: int) -> int:
    """Do the work of a loader on some records."""
    return sum(len(zlib.decompress(record)) for _ in range(count))


def loaded(threads: int, blocks: int) -> Iterator[int]:
    """Yield batches, unpacked ahead by threads."""
    record = zlib.compress(bytes(random.Random(0).choices(b"abcdefgh", k=2**16)), 6)
    with ThreadPoolExecutor(threads) as pool:
        ready: deque[list[Future[int]]] = deque()
        while True:
            while len(ready) < AHEAD:
                ready.append([pool.submit(unpack, record, RECORDS) for _ in range(blocks)])
            yield sum(part.result() for part in ready.popleft())


def main() -> None:
    """Run the job until it is done or its lease ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=4, help=f"of a step, {RECORDS} records each")
    parser.add_argument("--step-s", type=float, default=0.005, help="the accelerator's part")
    parser.add_argument("--steps", type=int, help="without a scheduler")
    options = parser.parse_args()
    checkpoint = Checkpoint(Path(os.environ.get("PARTITA_CHECKPOINT", "checkpoint")))
    lease = Lease(checkpoint.save, step=checkpoint.step, steps=options.steps, checkpoint_every=10)
    print(f"from step {lease.step} of {lease.steps}; the accelerator is emulated", flush=True)
    begin_s = time.monotonic()
    for _ in lease.over(loaded(os.cpu_count() or 1, options.blocks)):
        time.sleep(options.step_s)
        now_s = time.monotonic()
        cpus = lease.grant.get("cpus") or len(os.sched_getaffinity(0))
        checkpoint.note(float(cpus), now_s - begin_s)
        begin_s = now_s
    print(f"{lease.state} at step {lease.step}: {checkpoint.by_cpus}", flush=True)


if __name__ == "__main__":
    main()
