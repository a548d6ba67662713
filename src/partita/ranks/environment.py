"""A rank among others, as torchrun or a launcher like it starts it: who and where it is."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # not in its stubs

from partita.errors import InvalidInputError, WorkerError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """What torchrun, or a launcher like it, tells a rank.

    Attributes:
        rank: Number among all ranks.
        num_ranks: How many there are.
        local_rank: Number among those of its host.
        num_local_ranks: How many its host has.
        host: Number of its host.
        num_hosts: How many there are.
        address: Where the store is.
        port: Its port.
        attempt: How often the job was restarted: marks of an earlier attempt must not be read.
        opens_store: Whether rank 0 opens the store, because no launcher has.
    """

    rank: int
    num_ranks: int
    local_rank: int = 0
    num_local_ranks: int = 1
    host: int = 0
    num_hosts: int = 1
    address: str
    port: int
    attempt: int = 0
    opens_store: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "RankEnvironment":
        """Return what the environment of a rank says.

        Raises:
            InvalidInputError: A variable is missing or not a number.
        """
        try:
            return cls(
                rank=int(environment["RANK"]),
                num_ranks=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", "0")),
                num_local_ranks=int(environment.get("LOCAL_WORLD_SIZE", "1")),
                host=int(environment.get("GROUP_RANK", "0")),
                num_hosts=int(environment.get("GROUP_WORLD_SIZE", "1")),
                address=environment["MASTER_ADDR"],
                port=int(environment["MASTER_PORT"]),
                attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
                opens_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            )
        except KeyError as exc:
            raise InvalidInputError(
                f"environment variable {exc} is missing; start ranks with torchrun, or unset RANK"
            ) from exc
        except ValueError as exc:
            raise InvalidInputError(f"environment of a rank: {exc}") from exc

    def open_store(self, limit_s: float) -> Store:
        """Return the store of the job.

        Raises:
            WorkerError: Nobody opened it in time.
        """
        try:
            return TCPStore(
                self.address,
                self.port,
                is_master=self.opens_store and self.rank == 0,
                wait_for_workers=False,
                timeout=timedelta(seconds=limit_s),
            )
        except RuntimeError as exc:
            raise WorkerError(
                f"rank {self.rank}: no store at {self.address}:{self.port} within {limit_s:g} s; "
                "rank 0's host did not start, or cannot be reached"
            ) from exc
