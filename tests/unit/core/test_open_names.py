"""Metrics and schedules of other packages: one function and one row, found by entry points."""

import pickle
from dataclasses import dataclass, replace

import click
import pytest

from partita.bounds import lower_bound
from partita.bounds.figures import Bound
from partita.cli.plan import command as plan_command
from partita.core.codec import decode, encode
from partita.core.metrics import MemoryRule, MetricRow
from partita.core.problem import Metric, Objective, Problem, Schedule
from partita.core.schedules import ScheduleRow
from partita.cost.judge import Limit, evaluate, judge, measure
from partita.cost.predict import simulate
from partita.cost.proof import check
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.objectives.value import Value
from partita.program.schedules import order_gpipe
from partita.testing.builders import Figures, chain, flat_cluster, pipeline


def stages_used(problem, plan):
    del problem
    return Value(metric=Metric("stage-count"), value=float(len(plan.stages)), unit="stages")


def one_stage_at_least(problem, effort):
    del problem, effort
    yield Bound(1.0, "a plan has a stage")


def breaks(problem, plan):
    raise KeyError("oops")


ROWS = {
    "partita.objectives": {
        "stage-count": MetricRow(value=stages_used, unit="stages", bound=one_stage_at_least),
        "stages-in-memory": MetricRow(value=stages_used, memory=MemoryRule.PROGRAM),
        "breaking": MetricRow(value=breaks),
        "no-row": stages_used,
    },
    "partita.schedules": {"all-then-all": ScheduleRow(order=order_gpipe), "no-order": order_gpipe},
}


@dataclass
class Entry:
    """As much of an entry point as is looked at."""

    name: str
    target: object
    value: str = "other.package:row"

    def load(self):
        return self.target


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    def entries(group):
        return {name: Entry(name, row) for name, row in ROWS.get(group, {}).items()}

    monkeypatch.setattr("partita.plugins.installed", entries)


def problem_of(**objective):
    graph = chain(4, Figures(parameter_bytes=100.0))
    return Problem(graph=graph, cluster=flat_cluster(2), objective=Objective(**objective))


def plan_of(problem, **options):
    return pipeline(problem.graph, problem.cluster, [0, 1], **options)


def test_a_metric_of_a_plug_in_measures_and_is_bounded():
    problem = problem_of(metric="stage-count")
    assert problem.objective.metric is Metric("stage-count")
    assert measure(problem, plan_of(problem)).value == 2
    assert lower_bound(problem) == 1
    assert judge(problem, plan_of(problem)).feasible


def test_its_row_says_by_which_rule_plans_keep_within_memory():
    for metric, limit in (("stage-count", None), ("stages-in-memory", Limit.MEMORY)):
        problem = problem_of(metric=metric)
        small = replace(problem, cluster=flat_cluster(2, memory_bytes=1))
        assert judge(small, plan_of(small)).limit is limit


def test_it_survives_documents_and_pickles():
    problem = problem_of(metric="stage-count", schedule="all-then-all")
    assert decode(encode(problem)).objective == problem.objective
    assert pickle.loads(pickle.dumps(Metric("stage-count"))) is Metric("stage-count")


def test_names_that_nobody_has_are_refused_and_near_ones_named():
    with pytest.raises(InvalidInputError, match=r"'stage-cuont';.*'stage-c"):
        Objective(metric="stage-cuont")
    with pytest.raises(InvalidInputError, match="'1f1c'"):
        Objective(schedule="1f1c")
    body = encode(problem_of())
    body["objective"]["metric"] = "nothing"
    with pytest.raises(FormatError, match="throughput, latency"):
        decode(body)


def test_it_is_not_among_the_members_that_iteration_gives():
    assert Metric("stage-count") not in list(Metric)


def test_the_command_line_takes_its_names():
    types = {parameter.name: parameter.type for parameter in plan_command.params}
    assert types["objective"].convert("stage-count", None, None) == "stage-count"
    assert types["objective"].convert("piper", None, None) == "piper"
    assert types["schedule"].convert("all-then-all", None, None) == "all-then-all"
    with pytest.raises(click.BadParameter):
        types["objective"].convert("nothing", None, None)


def test_one_that_fails_or_is_no_row_is_one_line():
    problem = problem_of(metric="breaking")
    with pytest.raises(UnsupportedError, match=r"'breaking'.*plug-in"):
        measure(problem, plan_of(problem))
    with pytest.raises(UnsupportedError, match=r"'no-row'.*plug-in"):
        _ = Metric("no-row").row
    with pytest.raises(UnsupportedError, match=r"'no-order'.*plug-in"):
        _ = Schedule("no-order").row


def test_a_schedule_of_a_plug_in_runs_and_is_proved():
    problem = problem_of(schedule="all-then-all", microbatches=4)
    ours = plan_of(problem, schedule=Schedule.GPIPE, microbatches=4)
    plan = replace(ours, schedule=Schedule("all-then-all"))
    assert check(problem, plan).num_instructions == check(problem, ours).num_instructions
    assert simulate(problem, plan).makespan_s == simulate(problem, ours).makespan_s
    assert evaluate(problem, plan).step_s == evaluate(problem, ours).step_s
