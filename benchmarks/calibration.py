"""Calibration over an emulated link of 100 MB/s and 5 ms between two network namespaces.

Two ranks on each side; the bandwidth between the sides must come back within 10 %, the latency
within 1 ms, and the hierarchy with two levels. Needs root and iproute2, else exits 4.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _harness import run_benchmark

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.cluster_yaml.reader import read_cluster_yaml
from partita.core.cluster import Cluster
from partita.runtime.emulation.link import Namespace, emulated_link, why_unavailable

RATE_BYTES_PER_S, DELAY_S = 100e6, 0.005
RANKS, PORT, LIMIT_S = 4, 29_517, 240


def start(rank: int, ends: tuple[Namespace, Namespace], target: Path) -> subprocess.Popen:
    """Start a rank in its namespace; waiting for a core must not look like delay of the link."""
    end = ends[rank // 2]
    places = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2}
    places |= {"MASTER_ADDR": ends[0].address, "MASTER_PORT": PORT}
    environment = {**os.environ, **{key: str(value) for key, value in places.items()}}
    options = ("--interface", end.interface, "--limit", "60", "--budget", "15", "-q")
    command = (sys.executable, "-m", "partita", "calibrate", *options, "-o", str(target))
    return subprocess.Popen(
        end.command("nice", "-n", "-10", *command), env=environment, stdout=subprocess.DEVNULL
    )


def calibrated() -> Cluster:
    """Return the cluster that four ranks over the emulated link measure."""
    with tempfile.TemporaryDirectory() as folder:
        target, ranks = Path(folder) / "cluster.yaml", []
        with emulated_link(rate_bytes_per_s=RATE_BYTES_PER_S, delay_s=DELAY_S) as ends:
            try:
                ranks = [start(rank, ends, target) for rank in range(RANKS)]
                for process in ranks:
                    process.wait(timeout=LIMIT_S)
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
        return read_cluster_yaml(target.read_text(), load_catalogue())


def measure() -> tuple[dict, list[str]]:
    """Calibrate once and compare."""
    reason = why_unavailable()
    if reason is not None:
        print(reason, file=sys.stderr)
        raise SystemExit(4)
    levels = calibrated().levels
    bandwidth = float(levels[-1].bandwidth_bytes_per_s[0])
    latency = float(levels[-1].latency_s[0])
    found = f"{bandwidth / 1e6:.1f} MB/s, {1e3 * latency:.2f} ms"
    print(f"{len(levels)} levels; between the sides {found}")
    missed = []
    if [level.group_of.tolist() for level in levels] != [[0, 0, 1, 1], [0, 0, 0, 0]]:
        missed.append("the hierarchy is not two hosts of two ranks")
    if abs(bandwidth / RATE_BYTES_PER_S - 1) > 0.1:
        missed.append(f"bandwidth {bandwidth / 1e6:.1f} MB/s, wanted 100 within 10 %")
    if abs(latency - DELAY_S) > 0.001:
        missed.append(f"latency {1e3 * latency:.2f} ms, wanted 5 within 1")
    figures = {"bandwidth_mb_per_s": bandwidth / 1e6, "latency_ms": 1e3 * latency}
    return {**figures, "levels": len(levels)}, missed


if __name__ == "__main__":
    run_benchmark(__doc__ or "", measure)
