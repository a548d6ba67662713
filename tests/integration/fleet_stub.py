"""Stands for Synergy's ImageNet script: takes its flags, and reports what a law says.

An iteration takes 1.92 s over the CPUs that it may run on, at least 0.22 s; nothing is trained.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from utils.utilities import Register  # type: ignore[import-not-found]

parser = argparse.ArgumentParser()
parser.add_argument("--dali", action="store_true")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--dali_cpu", action="store_true")
parser.add_argument("--max-iterations", type=int, default=-1)
parser.add_argument("--workers", "-j", type=int, default=3)
parser.add_argument("-b", "--batch-size", type=int, default=256)
parser.add_argument("--data", required=True)
parser.add_argument("--job-name", default="job-0")
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--nnodes", type=int, default=1)
parser.add_argument("--node_rank", type=int, default=0)
args = parser.parse_args()

seen = {
    "arguments": sys.argv[1:],
    "cpus": sorted(os.sched_getaffinity(0)),
    "place": {
        name: os.environ.get(name)
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NNODES")
    },
}
rank = os.environ["RANK"]
Path(os.environ["OUT_DIR"], f"seen-{args.job_name}-{rank}.json").write_text(json.dumps(seen))
if rank == "0":
    seconds = max(1.92 / len(seen["cpus"]), 0.22)
    Register(name=args.job_name).log_update(seconds, args.max_iterations, 0)
