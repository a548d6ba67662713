"""What the first of several hosts decides for all of them."""

import json
import random
import socket
import string
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from partita.errors import InfeasibleError, PartitaError, WorkerError
from partita.runtime import rendezvous
from partita.runtime.rendezvous import Host, decided_by_first, open_store

Decide = Callable[[Sequence[Mapping[str, Any]]], str]


@pytest.fixture
def hosts() -> list[Host]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return [Host(index=index, num_hosts=2, port=port, names=("n1", "n2")) for index in range(2)]


def decided(hosts: Sequence[Host], decide: Decide) -> list[str | PartitaError]:
    """Return what each host has of a decision, all at once."""
    found: dict[int, str | PartitaError] = {}

    def call(host: Host) -> None:
        try:
            found[host.index] = decided_by_first(
                host, {"count": host.index + 1}, decide, start_limit_s=20.0
            )
        except PartitaError as exc:
            found[host.index] = exc

    threads = [threading.Thread(target=call, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[host.index] for host in hosts]


def test_all_hosts_have_what_the_first_decides_and_the_port_is_free_again(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_PART", 100)
    long = "".join(random.Random(0).choices(string.printable, k=2000))

    def decide(told: Sequence[Mapping[str, Any]]) -> str:
        return json.dumps([long, [each["count"] for each in told]])

    first, second = decided(hosts, decide)
    assert first == second == json.dumps([long, [1, 2]])
    with socket.create_server(("", hosts[0].port)):
        pass


def test_why_the_first_host_cannot_decide_is_said_on_all(hosts: list[Host]) -> None:
    def refuse(_: Sequence[Mapping[str, Any]]) -> str:
        raise InfeasibleError("it does not fit")

    for error in decided(hosts, refuse):
        assert isinstance(error, InfeasibleError)
        assert str(error) == "it does not fit"


def test_hosts_that_do_not_come_or_decide_are_named(hosts: list[Host]) -> None:
    with pytest.raises(WorkerError, match=r"host 1 \(n2\).* 0\.1 s"):
        decided_by_first(hosts[0], {}, lambda _: "", start_limit_s=0.1)
    store = open_store(hosts[0], 0.0, 5.0)
    with pytest.raises(WorkerError, match=r"host 0 .* 0\.1 s"):
        decided_by_first(hosts[1], {}, lambda _: "", start_limit_s=5.0, decision_limit_s=0.1)
    del store


def test_a_first_host_that_goes_away_is_named(hosts: list[Host]) -> None:
    stores = [open_store(hosts[0], 0.0, 5.0)]
    timer = threading.Timer(0.2, stores.clear)
    timer.start()
    with pytest.raises(WorkerError, match=r"host 0 .*went away"):
        decided_by_first(hosts[1], {}, lambda _: "", start_limit_s=5.0)
    timer.join()


def test_hosts_that_a_plan_leaves_out_do_not_count() -> None:
    addresses = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    hosts = [
        Host(index=k, num_hosts=3, address="10.0.0.1", port=7, names=("a", "b", "c"))
        for k in range(3)
    ]
    first, second, third = (host.among([1, 2], addresses) for host in hosts)
    assert first is None
    assert second == Host(num_hosts=2, address="10.0.0.2", port=7, names=("b", "c"))
    assert third is not None
    assert (third.index, str(third)) == (1, "host 1 (c)")
    assert hosts[2].among([2], addresses) == Host()
    here = Host(index=1, num_hosts=2, address="127.0.0.1", port=7)
    assert here.own_address() == "127.0.0.1"
