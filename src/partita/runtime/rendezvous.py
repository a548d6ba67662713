"""Hosts that meet before or for a run: what each is told of the others, and the first one's store.

What one host has to decide for all of them, such as the plan of a training, goes through a store
that is there for this alone: it opens on MASTER_PORT, and is gone before the run opens its own.
"""

import base64
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its stubs

from partita.errors import InvalidInputError, PartitaError, UnsupportedError, WorkerError, reason_of
from partita.ranks.failures import first_line, read_error, write_error

DEFAULT_PORT = 29500
LOOK_S = 0.1
GRACE_S = 3.0
START_LIMIT_S = 300.0
"""How long hosts wait for one another to come."""
_DECISION_LIMIT_S = 3600.0
"""How long hosts wait for the first one, which may have a large model to measure and to plan."""
_PART = 4_000_000
"""Characters of a value of a store; torch's limit is 8 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This host among those of a run.

    Attributes:
        index: Its number, NODE_RANK: the k-th host that the plan uses.
        num_hosts: How many there are, NNODES.
        address: Where the first host is reached, MASTER_ADDR.
        port: The port of its store, MASTER_PORT; 0 = any that is free, for a single host.
        names: Names of all hosts, where they are known.
    """

    index: int = 0
    num_hosts: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.num_hosts < 1:
            raise InvalidInputError(f"NNODES is {self.num_hosts}; expected 1 or more")
        if not 0 <= self.index < self.num_hosts:
            raise InvalidInputError(
                f"NODE_RANK is {self.index}; expected 0 to {self.num_hosts - 1}, below NNODES"
            )
        if not 0 <= self.port < 65_536:
            raise InvalidInputError(f"MASTER_PORT is {self.port}; expected 0 to 65535")
        if self.num_hosts > 1 and not self.port:
            raise InvalidInputError("several hosts need the same MASTER_PORT, which is not set")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Host":
        """Return what NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT say.

        Raises:
            InvalidInputError: One is wrong, or several hosts do not say where the first one is.
        """
        try:
            num_hosts = int(environment.get("NNODES", "1"))
            index = int(environment.get("NODE_RANK", "0"))
            port = int(environment.get("MASTER_PORT", DEFAULT_PORT if num_hosts > 1 else 0))
        except ValueError as exc:
            raise InvalidInputError(
                f"NNODES, NODE_RANK and MASTER_PORT are numbers: {exc}"
            ) from exc
        if num_hosts == 1:
            return cls(index=index, port=port)
        if "MASTER_ADDR" not in environment:
            raise InvalidInputError(
                f"NNODES is {num_hosts}, but MASTER_ADDR does not say where the first host is"
            )
        address = environment["MASTER_ADDR"]
        return cls(index=index, num_hosts=num_hosts, address=address, port=port)

    def own_address(self) -> str:
        """Return where the other hosts reach this one: by the way that leads to the first one.

        Raises:
            WorkerError: No way does.
        """
        if self.index == 0:
            return self.address
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                self.address, self.port, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as asked:
                asked.connect(address)  # sends nothing
                return str(asked.getsockname()[0])
        except OSError as exc:
            raise WorkerError(
                f"{self}: host 0 is not found at {self.address}: {reason_of(exc)}"
            ) from exc

    def among(self, used: Sequence[int], addresses: Sequence[str]) -> "Host | None":
        """Return this host among some of the hosts, which meet at the first of them.

        Args:
            used: Their numbers, in order.
            addresses: Where each of all hosts is reached.

        Returns:
            This host; None = it is none of them.
        """
        if self.index not in used:
            return None
        if len(used) == 1:
            return Host()
        return replace(
            self,
            index=used.index(self.index),
            num_hosts=len(used),
            address=addresses[used[0]],
            names=tuple(self.names[k] for k in used) if self.names else (),
        )

    def called(self, index: int) -> str:
        """Return how a host of the run is called in messages."""
        return f"host {index} ({self.names[index]})" if self.names else f"host {index}"

    def __str__(self) -> str:
        return self.called(self.index)


def open_store(host: Host, deadline: float, limit_s: float) -> TCPStore:
    """Open the store of the first host: there it is made, on others it is waited for.

    Raises:
        UnsupportedError: The port is taken.
        WorkerError: There is no such store by the deadline, or something else listens there.
    """
    if host.index:
        _await_port(host, deadline, limit_s)
        return _open_store_of_first(host, deadline, limit_s)
    # One host keeps to itself; several may know the first one by any of its addresses.
    bound = ("127.0.0.1" if host.num_hosts == 1 else "", host.port)
    try:
        listener = socket.create_server(bound)
    except OSError as exc:
        reason = reason_of(exc)
        raise UnsupportedError(
            f"port {host.port} of this host cannot be opened: {reason}; "
            "end what holds it, or set another MASTER_PORT on all hosts"
        ) from exc
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit_s),
        master_listen_fd=listener.detach(),
    )


def _open_store_of_first(host: Host, deadline: float, limit_s: float) -> TCPStore:
    """Open the store of the first host, in a thread, as torch waits for ever for what is silent."""
    found: list[TCPStore | RuntimeError] = []

    def open_store() -> None:
        limit = timedelta(seconds=limit_s)
        try:
            store = TCPStore(
                host.address, host.port, is_master=False, wait_for_workers=False, timeout=limit
            )
            found.append(store)
        except RuntimeError as exc:
            found.append(exc)

    thread = threading.Thread(target=open_store, daemon=True, name="store")
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()) + GRACE_S)
    store = found[0] if found else RuntimeError(f"no answer within {limit_s:g} s")
    if isinstance(store, RuntimeError):
        raise WorkerError(
            f"{host}: what listens at {host.address}:{host.port} is not the store of host 0: "
            f"{first_line(store)}; set another MASTER_PORT on all hosts"
        ) from store
    return store


def _await_port(host: Host, deadline: float, limit_s: float) -> None:
    """Wait until the first host listens."""
    while True:
        try:
            with socket.create_connection((host.address, host.port), timeout=2.0):
                return
        except OSError as exc:
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{host}: host 0 was not found at {host.address}:{host.port} within "
                    f"{limit_s:g} s: {exc}"
                ) from exc
            time.sleep(LOOK_S)


def decided_by_first(
    host: Host,
    mine: Mapping[str, Any],
    decide: Callable[[Sequence[Mapping[str, Any]]], str],
    *,
    start_limit_s: float = START_LIMIT_S,
    decision_limit_s: float = _DECISION_LIMIT_S,
) -> str:
    """Return what the first of several hosts decides; every host calls it.

    Args:
        host: This host.
        mine: What the first host has to know of this one, as JSON values.
        decide: Returns the decision, given what all hosts have said, in their order; called on the
            first host alone.
        start_limit_s: How long hosts wait for one another.
        decision_limit_s: How long the others wait for the decision.

    Raises:
        PartitaError: The first host could not decide: its error, on every host.
        UnsupportedError: The port is taken.
        WorkerError: A host did not come in time, or went away; names it.
        InvalidInputError: Two hosts say that they are the same one.
    """
    deadline = time.monotonic() + start_limit_s
    store = open_store(host, deadline, start_limit_s)
    with _connected(host):
        if store.add(f"count/{host.index}", 1) > 1:
            raise InvalidInputError(f"two hosts have NODE_RANK {host.index}; each needs its own")
        store.set(f"told/{host.index}", json.dumps(dict(mine)))
        if host.index:
            return _await_decision(host, store, decision_limit_s)
        keys = [f"told/{other}" for other in range(host.num_hosts)]
        for other in range(host.num_hosts):
            await_host(host, store, keys, other, deadline, start_limit_s)
        told = [json.loads(store.get(key)) for key in keys]
    try:
        decision = decide(told)
    except PartitaError as exc:
        with suppress(WorkerError), _connected(host):  # the error is what counts
            _tell(host, store, write_error(exc), is_error=True, limit_s=GRACE_S)
        del store  # the error may be kept, and with it all that is here
        raise
    with _connected(host):
        _tell(host, store, decision, is_error=False, limit_s=start_limit_s)
    return decision


@contextmanager
def _connected(host: Host) -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:
        raise WorkerError(
            f"{host}: host 0 at {host.address}:{host.port} went away before all had its plan"
        ) from exc


def await_host(
    host: Host,
    store: TCPStore,
    keys: Sequence[str],
    other: int,
    deadline: float,
    limit_s: float,
) -> None:
    """Wait until a host has set its key, the k-th host the k-th key.

    Raises:
        WorkerError: It has not by the deadline; names all that have not, and how they are started.
    """
    while not store.check([keys[other]]):
        if time.monotonic() > deadline:
            missing = [k for k, key in enumerate(keys) if not store.check([key])]
            names = ", ".join(map(host.called, missing))
            raise WorkerError(
                f"{host}: {names} did not come within {limit_s:g} s; "
                f"start it with NNODES={host.num_hosts} NODE_RANK={missing[0]} "
                f"MASTER_ADDR={host.address} MASTER_PORT={host.port}"
            )
        time.sleep(LOOK_S / 2)


def _tell(host: Host, store: TCPStore, text: str, *, is_error: bool, limit_s: float) -> None:
    """Tell the other hosts what was decided, and wait until all have it."""
    data = base64.b85encode(zlib.compress(text.encode(), 1)).decode()
    parts = [data[at : at + _PART] for at in range(0, len(data), _PART)]
    for number, part in enumerate(parts):
        store.set(f"part/{number}", part)
    store.set("decided", json.dumps([len(parts), is_error]))
    keys = [f"taken/{other}" for other in range(1, host.num_hosts)]
    deadline = time.monotonic() + limit_s
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys, 1) if not store.check([key])]
            names = ", ".join(map(host.called, missing))
            raise WorkerError(f"{host}: {names} did not take the plan within {limit_s:g} s")
        time.sleep(LOOK_S / 2)


def _await_decision(host: Host, store: TCPStore, limit_s: float) -> str:
    """Return what the first host has decided, once its store is gone: the run opens another."""
    deadline = time.monotonic() + limit_s
    while not store.check(["decided"]):
        if time.monotonic() > deadline:
            raise WorkerError(f"{host}: host 0 had no plan within {limit_s:g} s")
        time.sleep(LOOK_S)
    count, is_error = json.loads(store.get("decided"))
    data = b"".join(store.get(f"part/{number}") for number in range(count))
    text = zlib.decompress(base64.b85decode(data)).decode()
    if is_error:
        store.set(f"taken/{host.index}", "1")
        raise read_error(text)
    # torch would warn of a store that closes while it is used; this connection just ends with it.
    with socket.create_connection((host.address, host.port), timeout=limit_s) as link:
        store.set(f"taken/{host.index}", "1")
        try:
            link.recv(1)
        except TimeoutError as exc:
            raise WorkerError(f"{host}: host 0 did not go on within {limit_s:g} s") from exc
        except ConnectionError:
            pass
    return text
