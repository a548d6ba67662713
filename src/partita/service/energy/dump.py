"""The artifact's files, in a folder a job.

``perseus.json`` (how the server was started), ``ranks.json``, ``%d.sched.json``, ``%d.prof.json``.
"""

import asyncio
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from partita.documents import write_text
from partita.energy.policies.base import Deployment
from partita.errors import InvalidInputError
from partita.service.energy.models import RankBody, ResultBody

logger = logging.getLogger(__name__)


class EnergyDump:
    """Writes what jobs were sent and what they measured.

    A file that cannot be written is logged; the job goes on.

    Args:
        folder: Where the folders of the jobs are made.
        info: How the server was started, as JSON.
    """

    def __init__(self, folder: Path, info: str) -> None:
        self.folder = folder
        self.info = info

    async def ranks(self, job: str, ranks: Iterable[RankBody]) -> None:
        """Write who takes part, and in what."""
        await self._write(job, "perseus.json", self.info)
        bodies = [rank.model_dump(mode="json") for rank in sorted(ranks, key=lambda one: one.rank)]
        await self._write(job, "ranks.json", json.dumps(bodies))

    async def version(
        self, job: str, version: int, deployment: Deployment, results: Iterable[ResultBody]
    ) -> None:
        """Write the clocks of a version and what was measured under it; versions count from 0."""
        clocks: list[dict[str, Any]] = [
            {"rank": rank, "frequencies": entries}
            for rank, entries in enumerate(deployment.entries)
        ]
        measured = [
            one.model_dump(mode="json") for one in sorted(results, key=lambda one: one.rank)
        ]
        await self._write(job, f"{version - 1}.sched.json", json.dumps(clocks))
        await self._write(job, f"{version - 1}.prof.json", json.dumps(measured))

    async def text(self, job: str, name: str, text: str) -> None:
        """Write another file of a job."""
        await self._write(job, name, text)

    async def _write(self, job: str, name: str, text: str) -> None:
        def write() -> None:
            folder = self.folder / job
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / name, text)

        try:
            await asyncio.to_thread(write)
        except (InvalidInputError, OSError) as exc:
            logger.warning("%s of job %s is not written: %s", name, job, exc)
