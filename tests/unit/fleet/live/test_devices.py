"""Numbers of devices: nobody shares a GPU, and who stays keeps what it has."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from live_builders import servers

from partita.fleet.engines.devices import (
    Piece,
    Share,
    choose_devices,
    keep_sizes,
    same_gpus,
    whole_cpus,
)
from partita.fleet.engines.protocol import Place


def piece(server: int, gpus: int, cpus: float = 1.0) -> Piece:
    return Piece(server=server, gpus=gpus, cpus=cpus, memory_bytes=1e9)


def place(server: int, gpus: tuple[int, ...], cpus: float) -> Place:
    return Place(server=f"host{server}", gpus=gpus, cpu_ids=(), cpus=cpus, memory_bytes=1e9)


grants = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 3), st.sampled_from([0.5, 1.0, 2.0])), max_size=8
)


def fitting(wanted: list[tuple[int, int, float]]) -> dict[int, list[Piece]]:
    """Return the grants that fit on two servers with four GPUs and twelve CPUs each."""
    free, found = {0: 4, 1: 4}, {}
    for job, (server, gpus, cpus) in enumerate(wanted):
        if gpus <= free[server]:
            free[server] -= gpus
            found[job] = [piece(server, gpus, cpus * gpus)]
    return found


@given(grants, grants)
def test_gpus_are_disjoint_and_kept(
    first: list[tuple[int, int, float]], second: list[tuple[int, int, float]]
) -> None:
    there = servers(2)
    before = choose_devices(fitting(first), {}, there)
    after = choose_devices(fitting(second), before, there)
    for places in (before, after):
        held = [(p.server, gpu) for all_of in places.values() for p in all_of for gpu in p.gpus]
        assert len(held) == len(set(held))
    for job, pieces in fitting(second).items():
        assert [len(place.gpus) for place in after[job]] == [each.gpus for each in pieces]
        if job in before and same_gpus(pieces, before[job], there.names):
            assert [p.gpus for p in after[job]] == [p.gpus for p in before[job]]


def test_whole_cpus_are_not_shared_and_parts_are() -> None:
    there = servers(1, gpus=4, cpus=4.0)
    whole = choose_devices({1: [piece(0, 1, 2.0)], 2: [piece(0, 1, 2.0)]}, {}, there)
    assert not set(whole[1][0].cpu_ids) & set(whole[2][0].cpu_ids)
    parts = choose_devices({job: [piece(0, 1, 1.5)] for job in (1, 2)}, {}, servers(1, cpus=3.0))
    assert [len(parts[job][0].cpu_ids) for job in (1, 2)] == [2, 2]
    assert set(parts[1][0].cpu_ids) | set(parts[2][0].cpu_ids) == {0, 1, 2}


def test_who_stays_keeps_its_cpus_where_it_can() -> None:
    held = {2: [Place(server="host0", gpus=(3,), cpu_ids=(7, 8), cpus=2.0, memory_bytes=1e9)]}
    found = choose_devices({1: [piece(0, 1, 4.0)], 2: [piece(0, 1, 2.0)]}, held, servers())
    assert found[2][0].cpu_ids == (7, 8)
    assert not set(found[1][0].cpu_ids) & {7, 8}


def test_a_job_may_hold_places_on_two_servers() -> None:
    pieces = {1: [piece(0, 3), piece(1, 2)]}
    found = choose_devices(pieces, {}, servers(2))
    assert [(p.server, p.gpus) for p in found[1]] == [("host0", (0, 1, 2)), ("host1", (0, 1))]


def test_who_stays_keeps_its_cpus_where_they_cannot_be_changed() -> None:
    there = servers(gpus=4, cpus=12.0)
    held = {1: (place(0, gpus=(0,), cpus=6.0),)}
    shares = {1: Share(places=(place(0, gpus=(0,), cpus=4.0),), gain=0.9)}
    assert keep_sizes(shares, held, there) == held
    shares[2] = Share(places=(place(0, gpus=(1,), cpus=6.0),))
    assert keep_sizes(shares, held, there)[1] == held[1]
    shares[2] = Share(places=(place(0, gpus=(1,), cpus=8.0),))
    assert keep_sizes(shares, held, there)[1] == shares[1].places


def test_rounding_of_memory_restarts_nobody() -> None:
    there = servers(gpus=3, memory_bytes=100e9)
    share = 100e9 / 3
    held = {
        job: (replace(place(0, gpus=(job,), cpus=1.0), memory_bytes=share * (1 + 1e-15)),)
        for job in range(3)
    }
    shares = {
        job: Share(places=(replace(each, memory_bytes=share),)) for job, (each,) in held.items()
    }
    assert keep_sizes(shares, held, there) == held
    more = {**held, 2: (replace(held[2][0], memory_bytes=share + 1e6),)}
    assert keep_sizes(shares, more, there) == {**held, 2: shares[2].places}


def test_who_would_gain_much_is_restarted() -> None:
    held = {1: (place(0, gpus=(0,), cpus=2.0),)}
    shares = {1: Share(places=(place(0, gpus=(0,), cpus=4.0),), gain=1.5)}
    assert keep_sizes(shares, held, servers())[1] == shares[1].places


def test_whole_cpus_use_what_there_is_and_no_more() -> None:
    there = servers(gpus=4, cpus=12.0)
    wanted = {
        1: (place(0, gpus=(0,), cpus=3.3),),
        2: (place(0, gpus=(1,), cpus=8.4),),
        3: (place(0, gpus=(2,), cpus=0.2),),
    }
    found = whole_cpus(wanted, there)
    assert [found[job][0].cpus for job in (1, 2, 3)] == [3.0, 8.0, 1.0]
    del wanted[3]
    found = whole_cpus(wanted, there)
    assert [found[job][0].cpus for job in (1, 2)] == [3.0, 9.0]
