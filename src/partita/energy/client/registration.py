"""What a job and its ranks tell an energy server about themselves."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partita.energy.devices.protocol import PowerDevice
from partita.http import ServerError, ServerLink, pause_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A training job.

    Attributes:
        pp: Stages of the pipeline.
        dp: Pipelines side by side.
        tp: Devices of a stage that share every instruction.
        metadata: A remark that becomes part of its name.
        microbatches: Microbatches of a step in each pipeline; None = the ranks or a solution say.
        schedule: Order of the microbatches; None = 1F1B, or as the solution says.
        solution: A ``partita.solution`` document: the plan that runs.
        wish: What the deployed clocks have to keep: the fields of ``PointLimits``.
        profile: A ``partita.energy-profile`` document, where it is known beforehand.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    metadata: str = ""
    microbatches: int | None = None
    schedule: str | None = None
    solution: Mapping[str, Any] | None = None
    wish: Mapping[str, Any] | None = None
    profile: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """Return what is sent; what is not known is left out."""
        optional = {
            "job_metadata": self.metadata or None,
            "num_microbatches": self.microbatches,
            "schedule": self.schedule,
            "solution": self.solution,
            "wish": self.wish,
            "profile": self.profile,
        }
        return {
            "job_id": "",
            "pp_degree": self.pp,
            "dp_degree": self.dp,
            "tp_degree": self.tp,
            "world_size": self.pp * self.dp * self.tp,
            **{key: value for key, value in optional.items() if value is not None},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One process of a job.

    Attributes:
        rank: Its number in the job.
        dp_rank: Its pipeline.
        pp_rank: Its stage.
        tp_rank: Its place among those that share the stage.
        device: The name of its device in the solution; ``""`` = there is none.
        instructions: Names of the instructions of one step in order; empty = as the schedule has
            them.
    """

    rank: int = 0
    dp_rank: int = 0
    pp_rank: int = 0
    tp_rank: int = 0
    device: str = ""
    instructions: Sequence[str] = field(default=())

    def body(self, device: PowerDevice) -> dict[str, Any]:
        """Return what is sent of a rank with a power device."""
        optional = {
            "device": self.device or None,
            "device_type": device.type or None,
            "pipe_schedule": list(self.instructions) or None,
            "blocking_w": device.blocking_w,
        }
        return {
            "rank": self.rank,
            "dp_rank": self.dp_rank,
            "pp_rank": self.pp_rank,
            "tp_rank": self.tp_rank,
            "available_frequencies": list(device.clocks_mhz),
            "origin": device.origin.value,
            **{key: value for key, value in optional.items() if value is not None},
        }


def register_job(
    url: str,
    job: JobInfo,
    *,
    token: str | None = None,
    limit_s: float = 10.0,
    transport: Any = None,  # noqa: ANN401 (of httpx)
) -> str:
    """Register a job, once for all of its ranks, and return its name.

    Args:
        url: The server.
        job: The job.
        token: The server's bearer token.
        limit_s: How long to go on asking a server that does not answer.
        transport: An ``httpx`` transport to use instead of the network.

    Raises:
        ServerError: The server did not answer in time, or refuses; says why.
    """
    link = ServerLink(
        url, noun="energy server", token=token, timeout_s=limit_s, transport=transport
    )
    deadline, failures = time.monotonic() + limit_s, 0
    waiting = threading.Event()
    try:
        while True:
            try:
                return str(link.post("/register_job", job.body()))
            except ServerError as exc:
                failures += 1
                pause = pause_s(failures)
                if not exc.is_passing or time.monotonic() + pause > deadline:
                    raise
                waiting.wait(pause)
    finally:
        link.close()
