import inspect
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from partita import plugins
from partita.core.columns import thawed
from partita.core.problem import Metric, Objective, Problem
from partita.core.solution import Solution
from partita.errors import InvalidInputError, UnsupportedError
from partita.planners.effort import SearchTrace
from partita.planners.single import plan_single
from partita.planners.table import (
    DEFAULT_PLANNER,
    PLANNERS,
    find_planner,
    get_planner,
    planners_for,
    plugged_planners,
    solve,
    takes,
)
from partita.plugins import load_target


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
            if group != "partita.planners":
                return {}
            names = {name.replace("_", "-"): part for name, part in found.items()}
            return {name: Entry(name, part) for name, part in names.items()}

        monkeypatch.setattr(plugins, "installed", installed)

    return install


def test_the_table_is_what_it_says():
    assert DEFAULT_PLANNER in PLANNERS
    for name, row in PLANNERS.items():
        planner = find_planner(name)
        assert planner.__doc__
        assert planner.__name__.startswith("plan_")
        assert row.target.endswith(f":{planner.__name__}")
        assert row.summary.endswith(".")
        assert name.islower()


RELEASED = [name for name, row in PLANNERS.items() if row.released is not None]


def test_four_planners_have_a_released_form_with_the_same_options():
    assert RELEASED == ["m-topo", "m-etf", "m-sct", "pipedream"]
    for name in RELEASED:
        planner, released = find_planner(name), load_target(PLANNERS[name].released)
        assert released.__name__ == f"{planner.__name__}_released"
        known = inspect.signature(released).parameters
        if not any(part.kind is inspect.Parameter.VAR_KEYWORD for part in known.values()):
            assert set(known) == set(inspect.signature(planner).parameters)


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_form_is_called_where_it_is_asked_for(name, problem_of):
    metric = (PLANNERS[name].minimises or (Metric.THROUGHPUT,))[0]
    problem = replace(problem_of(8), objective=Objective(metric=metric))
    assert takes(name, "as_released")
    released = solve(problem, name, as_released=True)
    assert released.planner == name
    assert released.options["as_released"] is True
    assert solve(problem, name, **thawed(released.options)) == released
    plain = solve(problem, name, as_released=False)
    assert plain == solve(problem, name)
    assert "as_released" not in plain.options


def test_limits_of_our_search_change_nothing_as_released(problem_of):
    problem = replace(problem_of(8), objective=Objective(metric=Metric.PIPEDREAM))
    limited = {"as_released": True, "time_limit": 1.0, "iterations": 1, "orders": 2}
    assert get_planner("pipedream", **limited)(problem, trace=SearchTrace()) == solve(
        problem, "pipedream", as_released=True
    )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("uniform", {"as_released": True}, "planner 'uniform' has no option 'as_released'; "),
        ("m-etf", {"as_relesed": True}, "no option 'as_relesed'; did you mean 'as_released'?"),
        ("m-etf", {"as_released": "x"}, "option 'as_released' of planner 'm-etf' is 'x'; expected"),
        ("pipedream", {"as_released": True, "x": 1}, "planner 'pipedream' has no option 'x'; "),
        ("pipedream", {"as_released": 1}, "option 'as_released' of planner 'pipedream' is 1; "),
    ],
)
def test_a_released_form_is_refused_like_any_option(name, options, words):
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        get_planner(name, **options)
    assert not takes("uniform", "as_released")


def plan_with_own_form(problem: Problem, *, as_released: bool = False) -> Solution:
    """A planner from elsewhere with an option of that name."""
    assert as_released
    return plan_single(problem)


def test_a_plug_in_may_have_an_option_of_that_name(plug_in, problem_of):
    plug_in(own=plan_with_own_form)
    assert takes("own", "as_released")
    assert solve(problem_of(3), "own", as_released=True) == plan_single(problem_of(3))


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
            "planner 'uniform' has no option 'zzz'; there are stages, replicas, chunks, tp, "
            "sequence_parallel",
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
    with pytest.raises(InvalidInputError, match=r"'plain'.*'x'"):
        get_planner("plain", x=1)


def test_a_plug_in_is_found_by_its_entry_point(plug_in, problem_of):
    plug_in(deep_search=plan_plugged)
    problem = problem_of(3)
    assert solve(problem, "deep-search", depth=2, width=3) == plan_single(problem)
    with pytest.raises(InvalidInputError, match=r"'deep-search'.*'width'"):
        get_planner("deep-search", depth=2)
    with pytest.raises(InvalidInputError, match=r"'dept';.*'depth'\?"):
        get_planner("deep-search", dept=2)
    with pytest.raises(InvalidInputError, match=r"'deep-serch';.*'deep-search'\?"):
        get_planner("deep-serch")


def test_a_plug_in_does_not_replace_a_planner_of_the_table(plug_in):
    plug_in(single=plan_plugged)
    assert find_planner("single") is plan_single


@pytest.mark.parametrize("reason", [ImportError("no module x"), AttributeError("no plan_x")])
def test_a_broken_plug_in_is_named_and_breaks_no_other_planner(plug_in, problem_of, reason, caplog):
    plug_in(broken=reason, other=plan_single)
    problem = problem_of(3)
    assert solve(problem, "single") == solve(problem, "other")
    words = rf"^planner 'broken' is a plug-in, and plugin:broken cannot be loaded: {reason}$"
    with pytest.raises(UnsupportedError, match=words):
        get_planner("broken")
    assert list(plugged_planners(Metric.THROUGHPUT)) == []
    (record,) = caplog.records
    assert re.match(words, record.getMessage())


def test_only_the_named_plug_in_is_loaded_to_know_its_options(plug_in, caplog):
    plug_in(broken=RuntimeError("at import"), deep_search=plan_plugged)
    assert takes("auto", "time_limit")
    assert takes("deep-search", "depth")
    assert not takes("deep-search", "time_limit")
    assert takes("not-there", "anything")
    assert not caplog.records
    with pytest.raises(UnsupportedError, match=r"loaded:.*import"):
        takes("broken", "time_limit")


def test_real_entry_points_load(monkeypatch, problem_of):
    entry = EntryPoint("mine", "partita.planners.single:plan_single", "partita.planners")
    monkeypatch.setattr(plugins, "installed", lambda group: {"mine": entry})
    problem = problem_of(3)
    assert solve(problem, "mine") == plan_single(problem)


@pytest.mark.parametrize("value", ["x", 1.5, True, None])
def test_an_option_of_the_wrong_type_is_refused(value):
    with pytest.raises(InvalidInputError, match=r"'stages'.*'uniform'"):
        get_planner("uniform", stages=value)


def minimising(*metrics: str):
    """Return a planner from elsewhere that declares what it minimises."""

    def plan(problem: Problem, *, depth: int = 1) -> Solution:
        return plan_single(problem)

    plan.minimises = metrics
    return plan


@pytest.mark.parametrize(
    ("name", "metric", "words"),
    [
        (
            "piper",
            "makespan-parallel",
            "planner 'piper' minimises piper, not makespan-parallel; m-etf, m-sct, auto do",
        ),
        (
            "pipedream",
            "throughput",
            "planner 'pipedream' minimises pipedream, pipedream-repaired, not throughput; "
            "autopipe, auto do",
        ),
        ("m-etf", "energy", "planner 'm-etf' minimises makespan-parallel, makespan-sequential, "),
        ("local-search", "latency", "planner 'local-search' minimises sharding-cost, not latency;"),
    ],
)
def test_a_metric_that_a_planner_does_not_minimise_is_refused_with_who_does(
    problem_of, name, metric, words
):
    problem = problem_of(3, metric=Metric(metric))
    with pytest.raises(InvalidInputError) as caught:
        solve(problem, name)
    assert str(caught.value).startswith(words)


def test_every_published_metric_has_a_planner_and_auto_answers_all():
    assert PLANNERS[DEFAULT_PLANNER].minimises is None
    rest = {Metric.LATENCY, Metric.ENERGY, Metric.COST}
    assert [metric for metric in Metric if not planners_for(metric)] == [
        metric for metric in Metric if metric in rest
    ]


def test_a_plug_in_declares_what_it_minimises(plug_in, problem_of):
    plug_in(quick=minimising("latency"))
    with pytest.raises(InvalidInputError, match=r"'quick'.*throughput"):
        solve(problem_of(3), "quick")
    problem = problem_of(3, metric=Metric.LATENCY)
    assert solve(problem, "quick", depth=2) == plan_single(problem)
    assert [name for name, _ in plugged_planners(Metric.LATENCY)] == ["quick"]


def test_a_plug_in_that_declares_no_metric_that_there_is_is_broken(plug_in, problem_of, caplog):
    plug_in(odd=minimising("speed"))
    with pytest.raises(UnsupportedError, match=r"\('speed',\)"):
        get_planner("odd")
    assert list(plugged_planners(Metric.LATENCY)) == []
    assert len(caplog.records) == 1


def test_auto_asks_the_plug_ins_that_declare_the_metric(plug_in, problem_of, caplog):
    def fails(problem: Problem) -> Solution:
        raise RuntimeError("at work")

    fails.minimises = ("throughput",)
    plug_in(good=minimising("throughput"), other=minimising("latency"), fails=fails)
    tried = solve(problem_of(3), "auto", iterations=3).stats["tried"]
    assert tried["good"] == plan_single(problem_of(3)).value
    assert "other" not in tried
    assert tried["fails"] == "planner 'fails' is a plug-in and failed: RuntimeError: at work"
    (record,) = caplog.records
    assert record.getMessage() == tried["fails"]


def test_only_the_planner_that_is_asked_for_is_imported():
    code = (
        "import sys; from partita.planners.table import get_planner; get_planner('single');"
        "print(*[name for name in sys.modules if name.startswith('partita.planners.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(found.stdout.split()) == {
        f"partita.planners.{name}" for name in ("table", "single", "pipeline")
    }


def test_a_released_form_is_imported_only_when_it_is_asked_for():
    code = (
        "import sys; from partita.planners.table import get_planner;"
        "get_planner('m-etf'); print('partita.released' in sys.modules);"
        "get_planner('m-etf', as_released=True); print('partita.released' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
