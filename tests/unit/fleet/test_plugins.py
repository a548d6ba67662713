"""Orderings, allocators, engines and simulators that other packages add by entry points."""

from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from fleet_cluster import servers

from partita import plugins
from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.engines.table import ENGINES, engine_names, make_engine
from partita.fleet.policies.allocators.simple import fair
from partita.fleet.policies.table import OrderingEntry, allocator_names, ordering_names, policy_of
from partita.fleet.simulate.table import SIMULATORS, simulate_trace, simulator_of
from partita.testing.fleet_builders import small_trace


def by_size(snapshot):
    return snapshot.gpus.astype(float)


BY_SIZE = OrderingEntry(keys=by_size, ranked=False, title="smallest first")


def failing(snapshot):
    raise ZeroDivisionError("no jobs")


def evenly(snapshot, order, *, effort=0.0):
    return fair(snapshot, order, effort=effort)


def nothing(snapshot, order, *, effort=0.0):
    return None


def make_far_engine(there, *, groups):
    return SimpleNamespace(name="far", servers=there, groups=groups)


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def add(group: str, **targets: str) -> None:
        found = {
            name.replace("_", "-"): EntryPoint(name, target, f"partita.fleet.{group}")
            for name, target in targets.items()
        }
        before = plugins.installed
        monkeypatch.setattr(
            plugins,
            "installed",
            lambda asked: found if asked == f"partita.fleet.{group}" else before(asked),
        )

    return add


def test_an_ordering_and_an_allocator_are_a_function_each(plugged) -> None:
    plugged("orderings", size=f"{__name__}:by_size", row=f"{__name__}:BY_SIZE")
    plugged("allocators", evenly=f"{__name__}:evenly")
    assert {"size", "row", "fifo"} <= set(ordering_names())
    assert {"evenly", "tune"} <= set(allocator_names())
    for policy in ("size:evenly", "row:fair"):
        history = simulate_trace(small_trace(), servers(1), policy)
        assert not history.unfinished
    assert not policy_of("row:fair").ordering.ranked


def test_a_broken_plug_in_is_one_line_and_breaks_nothing_else(plugged) -> None:
    plugged("orderings", gone="no.such.module:keys", bad=f"{__name__}:failing")
    plugged("allocators", none=f"{__name__}:nothing")
    assert policy_of("fifo:tune").name == "fifo:tune"
    with pytest.raises(UnsupportedError, match="ordering 'gone' is a plug-in, and "):
        policy_of("gone:tune")
    with pytest.raises(UnsupportedError, match=r"'bad'.*plug-in.*ZeroDiv"):
        simulate_trace(small_trace(), servers(1), "bad:tune")
    with pytest.raises(UnsupportedError, match=r"'none'.*plug-in.*Allocation"):
        simulate_trace(small_trace(), servers(1), "fifo:none")


def test_what_is_built_in_cannot_be_replaced(plugged) -> None:
    plugged("orderings", fifo=f"{__name__}:failing")
    assert not simulate_trace(small_trace(), servers(1), "fifo:fair").unfinished


def test_an_engine_is_a_function_that_makes_one(plugged) -> None:
    plugged("engines", remote=f"{__name__}:make_far_engine")
    assert engine_names() == [*ENGINES, "remote"]
    assert make_engine("remote", servers(1), groups=False).name == "far"
    assert make_engine("local", servers(1), groups=False).name == "local"
    with pytest.raises(InvalidInputError, match=r"'remtoe';.*'remote'"):
        make_engine("remtoe", servers(1))


def test_rules_of_released_code_are_a_row_that_is_loaded_when_it_is_asked_for(plugged) -> None:
    plugged("simulators", odd=f"{__name__}:failing")
    assert set(SIMULATORS) == {"ours", "released"}
    assert simulator_of("released").suffix == " as released"
    with pytest.raises(UnsupportedError, match=r"'odd'.*plug-in,.*Simulator"):
        simulator_of("odd")
    with pytest.raises(InvalidInputError, match="'theirs'"):
        simulator_of("theirs")
