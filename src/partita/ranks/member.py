"""A rank among others that have met: its store, its device, its process groups."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # not in its stubs

from partita.ranks.failures import PeerError, first_line


@dataclass(frozen=True, kw_only=True, eq=False)
class Member:
    """This process among the ranks of a pool or a job.

    Attributes:
        rank: Its rank; rank r is the r-th device of the plan that has something to do.
        world: Number of ranks.
        store: Where ranks leave records for one another.
        device: Where it computes.
        backend: ``gloo`` or ``nccl``.
        limit_s: How long anything may take that waits for others.
        notify: Sends a message to whoever started it, such as that a step is done.
        groups: Groups of some of the ranks that were made so far, by purpose and ranks. They are
            kept: a group that is made again under the same name would find the addresses of the old
            one in the store.
    """

    rank: int
    world: int
    store: Store
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "gloo"
    limit_s: float = 300.0
    notify: Callable[[Any], None] = lambda _: None
    groups: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)

    def join(self) -> None:
        """Make the process group of all ranks.

        Raises:
            WorkerError: The others did not come in time; names them.
        """
        try:
            self.store.set(f"here/{self.rank}", "1")
            dist.init_process_group(
                self.backend,
                store=self.store,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=self.limit_s),
            )
        except RuntimeError as exc:
            missing = self._missing()
            who = f"rank {', '.join(map(str, missing))} did not come" if missing else "all came"
            raise PeerError(
                f"rank {self.rank}: the {self.world} ranks did not meet within {self.limit_s:g} s, "
                f"{who}: {first_line(exc)}"
            ) from exc

    def _missing(self) -> list[int]:
        """Return the ranks that have not come."""
        try:
            return [r for r in range(self.world) if not self.store.check([f"here/{r}"])]
        except RuntimeError:  # the store is gone too
            return []

    def group_of(
        self, ranks: Sequence[int], purpose: str = "", *, backend: str | None = None
    ) -> Any:  # noqa: ANN401  # torch's
        """Return a group of some ranks, of which this is one; all of them call it.

        torch calls a group by how many its maker has made, which differs from rank to rank: members
        with other groups would look for one another in vain. So the name follows from the ranks and
        the purpose.

        Args:
            ranks: The ranks, in any order.
            purpose: What it is for; the same ranks have another group for every purpose.
            backend: Its backend; that of all ranks if not given.
        """
        key = (purpose, tuple(sorted(ranks)))
        if key not in self.groups:
            digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
            dist.distributed_c10d._world.group_count = int(digest[:12], 16)  # noqa: SLF001 (see above)
            limit = timedelta(seconds=self.limit_s)
            self.groups[key] = dist.new_group(list(key[1]), timeout=limit, backend=backend)
        return self.groups[key]
