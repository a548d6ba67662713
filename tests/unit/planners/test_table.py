import re
from importlib.metadata import EntryPoint

import pytest

from partita import plugins
from partita.cli.inputs import takes
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError
from partita.planners.single import plan_single
from partita.planners.table import (
    DEFAULT_PLANNER,
    PLANNERS,
    get_planner,
    planners,
    solve,
)


def plan_plugged(problem: Problem, *, depth: int = 1, width: int) -> Solution:
    """A planner from elsewhere, with an option that it needs."""
    assert (depth, width) == (2, 3)
    return plan_single(problem)


class Entry:
    """An entry point of an installed plug-in."""

    def __init__(self, name: str, found: object) -> None:
        self.name, self.value, self.found = name, f"plugin:{name}", found

    def load(self) -> object:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def plug_in(monkeypatch):
    """Return a function that installs entry points."""

    def install(**found: object) -> None:
        def installed(group: str) -> dict[str, Entry]:
            assert group == "partita.planners"
            names = {name.replace("_", "-"): part for name, part in found.items()}
            return {name: Entry(name, part) for name, part in names.items()}

        monkeypatch.setattr(plugins, "installed", installed)

    return install


def test_the_table_is_what_it_says():
    assert DEFAULT_PLANNER in PLANNERS
    assert planners() == PLANNERS
    for name, planner in PLANNERS.items():
        assert planner.__doc__
        assert planner.__name__.startswith("plan_")
        assert name.islower()


def test_a_planner_is_called_by_name_with_its_options(problem_of):
    problem = problem_of(8)
    assert solve(problem).planner == "auto"
    assert len(solve(problem, "uniform").plan.stages) == 4
    assert len(solve(problem, "uniform", stages=2).plan.stages) == 2
    assert get_planner("single", device="d2")(problem).plan.devices == ("d2",)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unifrom", "there is no planner 'unifrom'; did you mean 'uniform'?"),
        ("Single", "there is no planner 'Single'; did you mean 'single'?"),
        ("xyz", "there is no planner 'xyz'; there are auto, single, uniform, uniform_floor,"),
        ("", "there is no planner ''; there are auto, single, uniform, uniform_floor,"),
    ],
)
def test_a_misspelt_name_is_corrected(name, words):
    with pytest.raises(InvalidInputError) as caught:
        get_planner(name)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "uniform",
            {"stage": 2},
            "planner 'uniform' has no option 'stage'; did you mean 'stages'?",
        ),
        (
            "uniform",
            {"zzz": 2},
            "planner 'uniform' has no option 'zzz'; there are stages, replicas, chunks",
        ),
        ("single", {"problem": 2}, "planner 'single' has no option 'problem'; there are device"),
        ("custom", {}, "planner 'custom' needs the option 'boundaries'"),
        ("manual", {}, "planner 'manual' needs the option 'assignment'"),
        (
            "custom",
            {"boundary": [0, 1]},
            "planner 'custom' has no option 'boundary'; did you mean 'boundaries'?",
        ),
    ],
)
def test_options_are_checked_against_the_signature(name, options, words):
    with pytest.raises(InvalidInputError) as caught:
        get_planner(name, **options)
    assert str(caught.value) == words


def plan_plain(problem: Problem) -> Solution:
    """A planner from elsewhere without options."""
    return plan_single(problem)


def test_a_planner_without_options_says_so(plug_in):
    plug_in(plain=plan_plain)
    with pytest.raises(
        InvalidInputError, match=r"^planner 'plain' has no option 'x'; there are none$"
    ):
        get_planner("plain", x=1)


def test_a_plug_in_is_found_by_its_entry_point(plug_in, problem_of):
    plug_in(deep_search=plan_plugged)
    assert planners() == {"deep-search": plan_plugged, **PLANNERS}
    problem = problem_of(3)
    assert solve(problem, "deep-search", depth=2, width=3) == plan_single(problem)
    with pytest.raises(InvalidInputError, match=r"^planner 'deep-search' needs the option 'width'"):
        get_planner("deep-search", depth=2)
    with pytest.raises(InvalidInputError, match=r"no option 'dept'; did you mean 'depth'\?$"):
        get_planner("deep-search", dept=2)
    with pytest.raises(
        InvalidInputError, match=r"no planner 'deep-serch'; did you mean 'deep-search'\?$"
    ):
        get_planner("deep-serch")


def test_a_plug_in_does_not_replace_a_planner_of_the_table(plug_in):
    plug_in(single=plan_plugged)
    assert planners()["single"] is plan_single
    assert get_planner("single").func is plan_single


@pytest.mark.parametrize("reason", [ImportError("no module x"), AttributeError("no plan_x")])
def test_a_broken_plug_in_is_named_and_breaks_no_other_planner(plug_in, problem_of, reason, caplog):
    plug_in(broken=reason, other=plan_single)
    problem = problem_of(3)
    assert solve(problem, "single") == solve(problem, "other")
    words = rf"^planner 'broken' is a plug-in, and plugin:broken cannot be loaded: {reason}$"
    with pytest.raises(UnsupportedError, match=words):
        get_planner("broken")
    assert planners() == {"other": plan_single, **PLANNERS}
    (record,) = caplog.records
    assert re.match(words, record.getMessage())


def test_only_the_named_plug_in_is_loaded_to_know_its_options(plug_in, caplog):
    plug_in(broken=RuntimeError("at import"), deep_search=plan_plugged)
    assert takes("auto", "time_limit")
    assert takes("deep-search", "depth")
    assert not takes("deep-search", "time_limit")
    assert takes("not-there", "anything")
    assert not caplog.records
    with pytest.raises(UnsupportedError, match="cannot be loaded: at import"):
        takes("broken", "time_limit")


def test_real_entry_points_load(monkeypatch, problem_of):
    entry = EntryPoint("mine", "partita.planners.single:plan_single", "partita.planners")
    monkeypatch.setattr(plugins, "installed", lambda group: {"mine": entry})
    problem = problem_of(3)
    assert solve(problem, "mine") == plan_single(problem)


@pytest.mark.parametrize("value", ["x", 1.5, True, None])
def test_an_option_of_the_wrong_type_is_refused(value):
    with pytest.raises(InvalidInputError, match="option 'stages' of planner 'uniform' is"):
        get_planner("uniform", stages=value)
