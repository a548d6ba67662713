import pytest

from partita.errors import InvalidInputError
from partita.planners.custom import plan_custom


def test_stage_k_is_the_layers_from_index_k_to_the_next(layered, problem_of):
    problem = problem_of(layered([0, 0, 1, 2, 2, 3]))
    solution = plan_custom(problem, boundaries=[0, 1, 3, 4])
    assert solution.plan.stage_of.tolist() == [0, 0, 1, 1, 1, 2]
    assert solution.plan.devices == ("d0", "d1", "d2")
    assert solution.options == {"boundaries": (0, 1, 3, 4), "replicas": 1}
    assert solution.planner == "custom"


def test_without_layers_every_op_is_one(problem_of):
    plan = plan_custom(problem_of(5), boundaries=(0, 2, 5)).plan
    assert plan.stage_of.tolist() == [0, 0, 1, 1, 1]


def test_stages_may_be_replicated(problem_of):
    plan = plan_custom(problem_of(4), boundaries=[0, 2, 4], replicas=2).plan
    assert [stage.devices for stage in plan.stages] == [((0,), (1,)), ((2,), (3,))]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"boundaries": [0, 2, 5]},
            "the last boundary is 5; graph 'built' has 6 ops, so it must be 6",
        ),
        (
            {"boundaries": [0, 2, 7]},
            "the last boundary is 7; graph 'built' has 6 ops, so it must be 6",
        ),
        ({"boundaries": [1, 6]}, "boundaries [1, 6] must start with 0 and end with 6"),
        ({"boundaries": [0]}, "boundaries [0] must start with 0 and end with 6"),
        ({"boundaries": []}, "boundaries [] must start with 0 and end with 6"),
        ({"boundaries": [0, 4, 2, 6]}, "boundaries [0, 4, 2, 6] must ascend"),
        ({"boundaries": [0, 2, 2, 6]}, "boundaries [0, 2, 2, 6] must ascend"),
        ({"boundaries": [0, -1, 6]}, "boundaries [0, -1, 6] must ascend"),
        ({"boundaries": [0, 6], "replicas": 0}, "replicas is 0; expected 1 or more"),
        (
            {"boundaries": [0, 1, 2, 3, 4, 6]},
            "5 stages of 1 replicas need 5 devices; there are 4",
        ),
        (
            {"boundaries": [0, 1, 2, 6], "replicas": 2},
            "3 stages of 2 replicas need 6 devices; there are 4",
        ),
    ],
)
def test_boundaries_that_cannot_be_are_refused(problem_of, options, words):
    with pytest.raises(InvalidInputError) as caught:
        plan_custom(problem_of(6), **options)
    assert str(caught.value) == words


def test_a_wrong_last_index_says_how_many_layers_there_are(layered, problem_of):
    problem = problem_of(layered([0, 0, 1, 1, 2, 2]))
    with pytest.raises(InvalidInputError) as caught:
        plan_custom(problem, boundaries=[0, 2, 6])
    assert str(caught.value) == (
        "the last boundary is 6; graph 'built' has 3 layers, so it must be 3"
    )


def test_a_cut_through_ops_that_must_stay_together_names_one(layered, problem_of):
    problem = problem_of(layered([0, 1, 2, 3], colocation=[-1, 5, 5, -1]))
    with pytest.raises(InvalidInputError) as caught:
        plan_custom(problem, boundaries=[0, 2, 4])
    assert str(caught.value) == (
        "op 'op2' must share a device with an op of stage 0, but is cut into stage 1"
    )
    assert len(plan_custom(problem, boundaries=[0, 1, 4]).plan) == 2


def test_replicas_must_divide_the_microbatches(problem_of):
    with pytest.raises(InvalidInputError, match=r"8; use.*3"):
        plan_custom(problem_of(6), boundaries=[0, 6], replicas=3)


def test_a_stage_of_empty_layers_is_refused(layered, problem_of):
    problem = problem_of(layered([0, 0, 3, 3]))
    with pytest.raises(InvalidInputError, match="1 holds"):
        plan_custom(problem, boundaries=[0, 1, 3, 4])
