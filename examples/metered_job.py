"""A job whose loading work is metered to its CPU grant: EMULATED, it sleeps instead of loading.

With c CPUs per GPU a step takes ``--iteration`` seconds over the speed of ``--curve`` at c. The
grant is read back: from the CPUs that this process may run on (``--grant affinity``), or where more
CPUs are declared than the machine has, from the lease (``--grant lease``).

The meter has a clock of its own, which the real one follows: a start takes ``--start`` seconds from
the beginning of its round (or longer, if the process is slower than that), a new grant counts from
the beginning of a round, and at the end of one loading waits until the scheduler has said how it
goes on. So what is done in a round depends on the grant alone, not on how busy the machine is.

The checkpoint is a small JSON file. It says how many steps are done and how much of the next one is
loaded, and for each attempt from which step to which its work was kept, when it began and when it
was last kept, so that no step can be lost or counted twice unseen.

    python metered_job.py --iteration 0.02 --curve 1:0.4,3:1,6:1.5
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from partita.fleet.lease import Lease

_PATIENCE_S = 1.0
"""How long loading waits for the scheduler before it goes on with the grant that it has."""


def speed_at(curve: list[tuple[float, float]], cpus: float) -> float:
    """Return the speed on a curve: straight between points, in proportion below the first."""
    if cpus <= curve[0][0]:
        return curve[0][1] * cpus / curve[0][0]
    for (low, slow), (high, fast) in pairwise(curve):
        if cpus <= high:
            return slow + (fast - slow) * (cpus - low) / (high - low)
    return curve[-1][1]


def read_curve(text: str) -> list[tuple[float, float]]:
    """Return the points of ``1:0.4,3:1``: CPUs per GPU and the speed there."""
    points = [part.split(":") for part in text.split(",")]
    return sorted((float(cpus), float(speed)) for cpus, speed in points)


class Checkpoint:
    """How far the job is, on disk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "checkpoint.json"
        folder.mkdir(parents=True, exist_ok=True)
        said = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.step: int = said.get("steps", 0)
        self.part: float = said.get("part", 0.0)
        self.segments: list[list[float]] = said.get("segments", [])
        self.segments.append([self.step, self.step, time.time(), time.time()])

    def save(self, step: int, part: float) -> None:
        """Keep how much is done; a kill meanwhile leaves the file as it was."""
        self.step = self.segments[-1][1] = step
        self.segments[-1][3] = time.time()
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text(json.dumps({"steps": step, "part": part, "segments": self.segments}))
        unfinished.replace(self.path)


class Meter:
    """Lets time pass as loading would.

    Args:
        iteration_s: Seconds of a step at speed 1.
        curve: Speed by CPUs per GPU.
        by_affinity: Whether CPUs are read back from the process; else from the lease.
        part: How much of the next step is loaded.
    """

    def __init__(
        self,
        iteration_s: float,
        curve: list[tuple[float, float]],
        *,
        by_affinity: bool,
        part: float,
    ) -> None:
        self.now_s = time.time()
        self.part = part
        self._iteration_s, self._curve, self._by_affinity = iteration_s, curve, by_affinity
        self._rate = self._end_s = self._unheard_s = math.nan

    def steps(self, lease: Lease, start_s: float) -> Iterator[int]:
        """Yield steps, each when its data would have been loaded, until the lease ends."""
        self.now_s = max(lease.term[0] + start_s, time.time())
        for number in range(lease.steps - lease.step):
            while not self._loads(lease):
                if not lease.wait_beyond(self._end_s, _PATIENCE_S):
                    self._unheard_s = self._end_s
                elif lease.is_over:
                    return
            yield number

    def _loads(self, lease: Lease) -> bool:
        """Load the next step; False = the round ends before that, and a part is loaded."""
        begin_s, end_s = lease.term
        if begin_s <= self.now_s:  # otherwise the real clock is ahead: it is the next round's
            self._rate, self._end_s = self._speed(lease.grant) / self._iteration_s, end_s
        elif self.now_s >= self._end_s:  # rounds went by without a word: the old grant held on
            self._end_s = begin_s
        ready_s = self.now_s + (1 - self.part) / self._rate
        done = ready_s <= self._end_s or self._end_s == self._unheard_s
        if done:
            self.now_s, self.part = ready_s, 0.0
        else:
            self.part += max(0.0, self._end_s - self.now_s) * self._rate
            self.now_s = max(self.now_s, self._end_s)
        time.sleep(max(0.0, self.now_s - time.time()))
        return done

    def _speed(self, grant: dict[str, Any]) -> float:
        cpus = len(os.sched_getaffinity(0)) if self._by_affinity else float(grant.get("cpus", 1))
        return speed_at(self._curve, cpus / max(1, int(grant.get("gpus", 1))))


def main() -> None:
    """Run the job until it is done or its lease ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iteration", type=float, default=0.02, help="seconds at speed 1")
    parser.add_argument("--curve", type=read_curve, default="1:0.4,3:1", help="CPUs per GPU:speed")
    parser.add_argument("--grant", choices=("lease", "affinity"), default="lease")
    parser.add_argument("--start", type=float, default=0.0, help="seconds from round to first step")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--steps", type=int, help="without a scheduler")
    options = parser.parse_args()
    checkpoint = Checkpoint(Path(os.environ.get("PARTITA_CHECKPOINT", "checkpoint")))
    meter = Meter(
        options.iteration,
        options.curve,
        by_affinity=options.grant == "affinity",
        part=checkpoint.part,
    )
    lease = Lease(
        lambda step: checkpoint.save(step, meter.part),
        step=checkpoint.step,
        steps=options.steps,
        checkpoint_every=options.checkpoint_every,
    )
    lease.clock = lambda: meter.now_s
    print(f"emulated: from step {lease.step} of {lease.steps} with {lease.grant}", flush=True)
    for _ in lease.over(meter.steps(lease, options.start)):
        pass
    print(f"{lease.state} at step {lease.step}", flush=True)


if __name__ == "__main__":
    main()
