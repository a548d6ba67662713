"""Plans changed by hand: what becomes of them, and what is refused."""

import pytest

import partita
from partita.core.solution import Solution
from partita.cost.judge import evaluate
from partita.cost.proof import check
from partita.errors import InvalidInputError
from partita.flows.edits import cuts_of, edit_plan, stage_rows
from partita.flows.solutions import evaluated


@pytest.fixture(scope="module")
def four() -> Solution:
    """Four stages on four of eight devices."""
    inner = partita.plan("gpt-small", cluster="4xa100", planner="uniform").solution
    return evaluated(partita.problem("gpt-small", cluster="2x4xa100"), inner.plan, inner)


def test_a_boundary_moves_ops_and_the_step_is_that_of_the_cost_model(four: Solution) -> None:
    cuts = cuts_of(four.plan)
    found = edit_plan(four, [f"cut:1={cuts[1] + 3}"])
    assert cuts_of(found.plan) == [cuts[0], cuts[1] + 3, cuts[2]]
    assert found.step_s == evaluate(found.problem, found.plan).step_s
    check(found.problem, found.plan)
    back = edit_plan(four, [f"cut:1={cuts[1] + 3}", f"cut:1={cuts[1]}"])
    assert back.plan.stage_of.tolist() == four.plan.stage_of.tolist()
    assert [row["end"] for row in stage_rows(found)] == [
        *cuts_of(found.plan),
        len(found.plan.stage_of),
    ]


def test_any_boundary_gives_a_plan_whose_data_flow_forward(four: Solution) -> None:
    cuts = cuts_of(four.plan)
    for count in range(cuts[0] + 1, cuts[2], 7):
        found = edit_plan(four, [f"cut:1={count}"])
        found.plan.check_fits(found.problem)


def test_a_stage_goes_to_an_idle_device_or_changes_places(four: Solution) -> None:
    idle = edit_plan(four, ["device:2=host1/gpu3"])
    assert idle.plan.devices == ("host0/gpu0", "host0/gpu1", "host0/gpu3", "host1/gpu3")
    rows = stage_rows(idle)
    assert rows[2]["devices"] == [["host1/gpu3"]]
    swapped = stage_rows(edit_plan(four, ["device:2=host0/gpu0"]))
    assert [row["devices"][0][0] for row in swapped] == [
        "host0/gpu2", "host0/gpu1", "host0/gpu0", "host0/gpu3",
    ]  # fmt: skip


def test_replicas_take_idle_devices_of_the_same_type_and_go_again(four: Solution) -> None:
    more = edit_plan(four, ["replicas:0=2"])
    assert more.plan.stages[0].num_replicas == 2
    assert len(more.plan.devices) == 5
    check(more.problem, more.plan)
    fewer = edit_plan(four, ["replicas:0=2", "replicas:0=1"])
    assert fewer.plan.devices == four.plan.devices


def test_schedule_and_microbatches_change_the_problem_too(four: Solution) -> None:
    found = edit_plan(four, ["schedule=zero-bubble", "microbatches=16"])
    assert found.plan.schedule.value == "zero-bubble"
    assert found.problem.microbatches == found.plan.num_microbatches == 16
    saved = found.solution(four)
    assert saved.value == pytest.approx(found.step_s)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ("nonsense", "not understood"),
        ("cut=3", "not understood"),
        ("cut:x=3", "'x' is not within 0 and 3"),
        ("cut:3=3", "the last"),
        ("cut:0=9999999999999", "is not within"),
        ("cut:0=0", "may lie after 1"),
        ("device:0=nowhere", "no device 'nowhere'"),
        ("replicas:0=6", "4"),
        ("schedule=nothing", "no schedule 'nothing'"),
        ("microbatches=0", "is not within"),
    ],
)
def test_an_edit_that_is_not_possible_says_why_in_a_line(
    four: Solution, edit: str, words: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        edit_plan(four, [edit])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plan_that_breaks_a_limit_is_shown_with_the_reason() -> None:
    tight = partita.plan("gpt-small", cluster="2xt4", planner="uniform", memory_factor=0.7)
    assert edit_plan(tight.solution, []).refusal == ""
    squeezed = edit_plan(tight.solution, ["cut:0=120"])
    assert squeezed.refusal.startswith("device 'host0/gpu0' needs")
