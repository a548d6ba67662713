"""``Register``: how scripts written for Synergy's profiler report their speed.

``PERF_<name>.txt`` has three lines: mean seconds of an iteration, the last iteration, the epoch. It
goes to the folder that ``OUT_DIR`` names, or to the working directory. Unlike Synergy's it is
written with each update, so that a job that is killed has reported.
"""

import os


class Register:
    """Writes the speed of a job to its file.

    Attributes:
        name: Name of the job.
    """

    def __init__(self, name: str = "job-0") -> None:
        self.name = name

    def log_update(self, avg_batch_time: float, iteration: int, epoch: int) -> None:
        """Report the mean seconds of an iteration so far."""
        path = os.path.join(os.environ.get("OUT_DIR", "."), "PERF_" + self.name + ".txt")  # noqa: PTH118 (as in Python 3.6)
        unfinished = path + ".part"
        with open(unfinished, "w") as file:  # noqa: PTH123 (likewise)
            file.write("{}\n{}\n{}\n".format(avg_batch_time, iteration, epoch))  # noqa: UP032
        os.replace(unfinished, path)  # noqa: PTH105 (likewise)
