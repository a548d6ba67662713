import dataclasses
import math

import pytest

from partita.core.problem import Metric, Problem
from partita.core.solution import Proof, Solution
from partita.errors import InvalidInputError
from partita.testing.builders import chain, flat_cluster, pipeline


def solution(**changes: object) -> Solution:
    graph, cluster = chain(4), flat_cluster(2)
    parts: dict[str, object] = {
        "problem": Problem(graph=graph, cluster=cluster),
        "plan": pipeline(graph, cluster, [0, 1]),
        "metric": Metric.THROUGHPUT,
        "value": 8.0,
        "unit": "s",
        "lower_bound": 6.0,
    }
    return Solution(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value": -1.0}, "value is -1.0; expected a finite number >= 0"),
        ({"value": math.nan}, "value is nan; expected a finite number >= 0"),
        ({"value": math.inf}, "value is inf; expected a finite number >= 0"),
        ({"lower_bound": 9.0}, "lower_bound 9.0 is not within 0 and the value 8.0"),
        ({"lower_bound": -1.0}, "lower_bound -1.0 is not within 0 and the value 8.0"),
        ({"lower_bound": math.nan}, "lower_bound nan is not within 0 and the value 8.0"),
        ({"stats": {"a": math.inf}}, "stats: inf is not a JSON number"),
        ({"options": {"a": object()}}, "options: object is not a JSON value"),
        (
            {"plan": pipeline(chain(5), flat_cluster(2), [0, 1])},
            "the plan places 5 ops, graph 'built' has 4",
        ),
        (
            {"alternatives": [pipeline(chain(5), flat_cluster(2), [0, 1])]},
            "the plan places 5 ops, graph 'built' has 4",
        ),
    ],
)
def test_solutions_that_cannot_be_are_refused(changes, words):
    with pytest.raises(InvalidInputError) as caught:
        solution(**changes)
    assert str(caught.value).startswith(words)


def test_the_gap_is_relative_to_the_bound():
    assert solution().gap == pytest.approx(8 / 6 - 1)
    assert solution(lower_bound=0.0).gap == math.inf
    assert solution(lower_bound=8.0 + 1e-12, proof=Proof.OPTIMAL).gap == pytest.approx(0)


def test_a_solution_is_frozen_with_its_options_and_statistics():
    options = {"stages": [1, 2]}
    made = solution(options=options, stats={"tried": 3}, alternatives=[solution().plan])
    options["stages"].append(3)
    assert made.options == {"stages": (1, 2)}
    assert made.alternatives == (solution().plan,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.value = 1.0
    with pytest.raises(TypeError, match=r"support.*assignment"):
        made.stats["tried"] = 4
    assert solution() == solution() != made
