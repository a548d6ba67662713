"""Starts the ranks of a job on this machine, within the limits that it is given.

Run as ``python launch.py OPTIONS -- script.py ARGUMENTS``. It limits itself first, so that every
process it starts is limited as well: it joins control groups, keeps to some CPUs, and bounds the
data of a process. Ranks find their place in the variables that torchrun sets too. The first rank
that fails ends the others, and its exit code is ours.
"""

import argparse
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

_PDEATHSIG = 1
_POLL_S = 0.05
_GRACE_S = 5.0


def main() -> int:
    """Run all ranks of this machine and return an exit code."""
    options = _options()
    _end_with_parent()
    _limit(options)
    started: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: _end(started, 128 + signal.SIGTERM))
    started.extend(_start(options, local) for local in range(options.ranks))
    while True:
        codes = [rank.poll() for rank in started]
        failed = [code for code in codes if code]
        if failed:
            _end(started, failed[0] if failed[0] > 0 else 128 - failed[0])
        if all(code == 0 for code in codes):
            _write_peak(options.peak_file)
            return 0
        time.sleep(_POLL_S)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="launch.py")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=29500)
    parser.add_argument("--rank-option", default="", help="is given to each rank with its number")
    parser.add_argument("--affinity", default="", help="CPUs, such as 0,1,2")
    parser.add_argument("--data-bytes", type=int, default=0, help="of each process")
    parser.add_argument("--peak-file", default="", help="gets the most bytes that one rank held")
    parser.add_argument("--join", action="append", default=[], help="file of a control group")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _end_with_parent() -> None:
    """Ask the system for a SIGTERM when the profiler dies, so that no job is left behind."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


def _limit(options: argparse.Namespace) -> None:
    for path in options.join:
        with open(path, "w") as file:  # noqa: PTH123 (as in Python 3.6)
            file.write(str(os.getpid()))
    if options.affinity:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.affinity.split(",")})
    if options.data_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (options.data_bytes, options.data_bytes))


def _start(options: argparse.Namespace, local: int) -> "subprocess.Popen[bytes]":
    place = {
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "NNODES": options.nodes,
        "NODE_RANK": options.node_rank,
        "GROUP_RANK": options.node_rank,
        "WORLD_SIZE": options.nodes * options.ranks,
        "LOCAL_WORLD_SIZE": options.ranks,
        "RANK": options.node_rank * options.ranks + local,
        "LOCAL_RANK": local,
    }
    environment = dict(os.environ)
    environment.update({name: str(value) for name, value in place.items()})
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    own = ["{}={}".format(options.rank_option, local)] if options.rank_option else []  # noqa: UP032
    return subprocess.Popen([sys.executable, "-u", *command, *own], env=environment)


def _write_peak(path: str) -> None:
    """Write the most memory that one rank has held, as the system has counted it."""
    if path:
        kibibytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        with open(path, "w") as file:  # noqa: PTH123 (as in Python 3.6)
            file.write(str(1024 * kibibytes))


def _end(ranks: "list[subprocess.Popen[bytes]]", code: int) -> None:
    """End the ranks that still run, and this process."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    last = time.monotonic() + _GRACE_S
    while time.monotonic() < last and any(rank.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
