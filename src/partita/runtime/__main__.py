"""A rank of a job: ``torchrun --nproc-per-node 2 -m partita.runtime JOB_DIRECTORY``."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from partita.errors import PartitaError
from partita.processes import append_output, die_with_parent


def main(arguments: list[str]) -> int:
    """Be the rank that the environment says; returns the exit code.

    Args:
        arguments: The job directory; from our launcher also its process and which attempt this is.
    """
    append_output()
    if len(arguments) not in (1, 3):
        sys.stderr.write("usage: torchrun --nproc-per-node N -m partita.runtime JOB_DIRECTORY\n")
        return 2
    # First of all: importing torch takes seconds, in which the launcher may die.
    die_with_parent(int(arguments[1]) if len(arguments) == 3 else None)
    from partita.ranks.environment import RankEnvironment  # noqa: PLC0415 (see above)
    from partita.runtime.job_rank import be_rank  # noqa: PLC0415 (see above)

    try:
        environment = RankEnvironment.of(os.environ)
        if len(arguments) == 3:
            environment = replace(environment, attempt=int(arguments[2]))
        return be_rank(Path(arguments[0]), environment)
    except PartitaError as exc:
        sys.stderr.write(f"partita: {exc}\n")
        return exc.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch may still wait for other ranks
