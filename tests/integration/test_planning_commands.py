"""Planning from the command line: rules, limits of the search, estimates, refusals, robustness."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from partita.catalogue.examples import example
from partita.core.graph import Graph
from partita.core.plan import Plan
from partita.core.problem import Problem
from partita.core.solution import Solution
from partita.documents import load, save
from partita.planners.table import PLANNERS, get_planner, takes
from partita.planners.uniform import plan_uniform

Run = Callable[..., tuple[int, str, str]]
SMALL = ("gpt3-small", "--scale", "0.05", "--sequence-length", "8")


def devices_of(plan: Plan, graph: Graph, prefix: str) -> set[str]:
    """Return the devices that run the ops whose names begin with a prefix."""
    return {
        plan.devices[device]
        for op, name in enumerate(graph.ops.names)
        if name.startswith(prefix)
        for group in plan.stages[int(plan.stage_of[op])].devices
        for device in group
    }


def test_pins_hold_in_the_plan_and_stay_in_its_file(run: Run, tmp_path: Path) -> None:
    pin = "layer1.*=host0/gpu0"
    code, out, err = run("plan", "gpt-small", "-p", "single", "--pin", pin, "-o", "p.json", "-q")
    assert code == 0, err
    assert f"rules: pin {pin}" in out
    found = load(tmp_path / "p.json")
    assert isinstance(found, Solution)
    assert [str(rule) for rule in found.problem.rules] == [f"pin {pin}"]
    assert devices_of(found.plan, found.problem.graph, "layer1.") == {"host0/gpu0"}
    code, out, _ = run("explain", "p.json")
    assert f"rules: pin {pin}" in out
    assert json.loads(run("explain", "p.json", "--json")[1])["rules"] == [f"pin {pin}"]
    again = json.loads(run("plan", "p.json", "-p", "single", "--json")[1])
    assert again["rules"] == [f"pin {pin}"]


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_keeps_rules_or_refuses_in_one_line(run: Run, name: str) -> None:
    if name in ("custom", "manual", "grid"):
        pytest.skip("plans what it is told")
    rules = ("--pin", "layer0.*=host0/gpu0", "--forbid", "head*=host0/gpu0")
    more = ["--iterations", "5"] if takes(name, "iterations") else []
    if PLANNERS[name].minimises:
        more += ["--objective", PLANNERS[name].minimises[0].value]
    code, out, err = run("plan", "gpt-small", "-p", name, *rules, *more, "--json", "-c", "2xa100")
    if code == 0:
        document = json.loads(out)["solution"]
        solution = load_text(document)
        graph = solution.problem.graph
        assert devices_of(solution.plan, graph, "layer0.") == {"host0/gpu0"}
        assert "host0/gpu0" not in devices_of(solution.plan, graph, "head")
        return
    assert code in (2, 3)
    assert len(err.strip().splitlines()) == 1


def load_text(document: dict[str, object]) -> Solution:
    path = Path("solution.json")
    path.write_text(json.dumps(document))
    found = load(path)
    assert isinstance(found, Solution)
    return found


def test_a_plan_that_cannot_keep_a_rule_says_so_and_what_to_leave_out(run: Run) -> None:
    arguments = ("plan", "gpt-small", "-p", "uniform", "--forbid", "*=host0/gpu1")
    code, out, err = run(*arguments, "-q")
    assert code == 3
    assert not out
    assert len(err.strip().splitlines()) == 1
    assert "'host0/gpu1'" in err
    assert "to leave out --forbid '*=host0/gpu1'" in err
    code, out, _ = run(*arguments, "--json")
    assert code == 3
    assert json.loads(out)["changes"][0]["without"] == ["forbid *=host0/gpu1"]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (("--pin", "layer1"), "OPS=DEVICES"),
        (("--pin", "no.such=host0/gpu0"), "names no op"),
        (("--forbid", "head*=host9/*"), "names no device"),
        (("--pin", "layer1=host0/gpu0", "--forbid", "layer1=host0/*"), "runs on no device"),
    ],
)
def test_rules_that_mean_nothing_are_bad_input(run: Run, rule: tuple[str, ...], said: str) -> None:
    for command in ("plan", "compare", "estimate"):
        code, _, err = run(command, "gpt-small", *rule, "-q")
        assert code == 2
        assert said in err
        assert len(err.strip().splitlines()) == 1


def test_compare_and_estimate_keep_rules(run: Run) -> None:
    rules = ("--pin", "*=host0/gpu1")
    code, out, err = run("compare", "gpt-small", "-p", "single", "-p", "uniform", *rules, "--json")
    rows = {row["name"]: row for row in json.loads(out)["plans"]}
    assert code == 0, err
    assert rows["single"]["refusal"] is None
    assert "rule" in rows["uniform"]["refusal"]
    save(example("gpt-small").graph, "graph.json")
    rules = ("--forbid", "head*=host0/gpu0")
    code, out, err = run("estimate", "graph.json", "-c", "2xa100", *rules, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert "where a rule forbids it" in found["refusals"][0]
    assert found["best"]["stages"] == 2
    assert run("estimate", "graph.json", "-c", "1xa100", "--pin", "*=host0/gpu0")[0] == 0


def test_limits_of_a_search_go_to_planners_that_search(run: Run) -> None:
    for option in (("--time-limit", "1"), ("--iterations", "3"), ("--as-released",)):
        code, _, err = run("plan", "gpt-small", "-p", "uniform", *option)
        assert code == 2
        assert f"planner 'uniform' takes no {option[0]}" in err
    code, _, err = run("compare", "gpt-small", "-p", "uniform", "-p", "single", "--iterations", "3")
    assert code == 2
    assert "none of uniform, single takes --iterations" in err
    assert run("plan", "gpt-small", "--time-limit", "0")[0] == 2


def test_a_model_of_the_zoo_is_estimated_for_the_cluster(run: Run, tmp_path: Path) -> None:
    code, out, err = run("plan", *SMALL, "-c", "2xa100+1xv100", "-p", "uniform", "-q")
    assert code == 0, err
    assert "estimated profile for a100, v100" in out
    found = load(tmp_path / "gpt3-small.plan.json")
    assert isinstance(found, Solution)
    graph = found.problem.graph
    assert [costs.device_type for costs in graph.costs] == ["a100", "v100"]
    assert graph.annotations["model"]["source"] == "gpt3-small"
    code, out, err = run("plan", *SMALL, "-c", "2xa100", "-p", "single", "--microbatch-size", "2")
    found = load(tmp_path / "gpt3-small-2.plan.json")
    assert isinstance(found, Solution)
    assert found.problem.graph.batch_size == found.problem.microbatch_size == 2


def test_a_module_path_pins_the_ops_of_the_module_and_of_those_inside(run: Run) -> None:
    rules = ("--pin", "blocks.0=host0/gpu1", "--pin", "head.decoder=host0/gpu1")
    code, out, err = run("plan", *SMALL, "-c", "2xa100", "-p", "single", *rules, "--json")
    assert code == 0, err
    solution = load_text(json.loads(out)["solution"])
    row_of, matrix = solution.problem.allowed
    graph = solution.problem.graph
    pinned = [name for op, name in enumerate(graph.ops.names) if matrix[row_of[op]].sum() == 1]
    assert {name.split("/")[0].split(".")[0] for name in pinned} == {"blocks", "head"}
    assert any(name.startswith("blocks.0/") for name in pinned)
    for prefix in ("blocks.0.", "blocks.0/", "head.decoder/"):
        assert devices_of(solution.plan, graph, prefix) == {"host0/gpu1"}


def test_an_estimated_model_is_compared_and_recomputed(run: Run) -> None:
    base = ("compare", *SMALL, "-c", "2xa100", "-p", "single", "--json")
    plain, leaner = (
        json.loads(run(*base, *more)[1])["plans"][0] for more in ((), ("--recompute",))
    )
    assert leaner["devices"][0]["peak_bytes"] < plain["devices"][0]["peak_bytes"]
    assert leaner["step_s"] > plain["step_s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpt-smal",), "there is no model 'gpt-smal'"),
        (("gpt-small", "--dtype", "bfloat16"), "graph with its own figures"),
        (("no.json",), "no such file"),
        ((*SMALL, "--devices", "2", "-O", "x=1"), "has no option 'x'"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(
    run: Run, arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = run("plan", *arguments, "-q", "-p", "uniform")
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_the_answer_has_memory_bound_effort_and_alternatives(run: Run) -> None:
    solution = plan_uniform(example("gpt-small"))
    others = tuple(plan_uniform(solution.problem, stages=count).plan for count in (3, 2))

    def planner(problem: Problem, trace: object = None) -> Solution:
        """Return a plan with others and figures of a search."""
        del trace  # what a search may be watched by
        found = plan_uniform(problem)
        return replace(found, alternatives=others, stats={"seconds": 0.25, "rounds": 1200})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("partita.flows.planner_choice.get_planner", lambda *_, **__: planner)
        code, out, err = run("plan", "gpt-small", "-o", "found.json", "-q")
        assert code == 0, err
        found = json.loads(run("plan", "gpt-small", "--json")[1])
    text = " ".join(out.split())
    assert "searched: seconds 0.25, 1,200 rounds" in text
    assert "other plans" in text
    assert "3 stages, 1f1b" in text
    assert "no plan can beat" in text
    for device in solution.problem.cluster.device_names:
        assert device in text
    assert found["effort"] == {"seconds": 0.25, "rounds": 1200}
    values = [row["value"] for row in found["alternatives"]]
    assert values == sorted(values)
    assert [row["ratio"] for row in found["alternatives"]] == [v / found["value"] for v in values]
    documented = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    assert all(key in documented for key in found)


def test_devices_that_are_not_used_are_named_and_very_many_are_summed_up(run: Run) -> None:
    code, out, _ = run("plan", "gpt-small", "-p", "uniform", "-c", "4x8xa100", "-q")
    assert code == 0
    assert "not used: " in out
    code, out, _ = run("plan", "resnet50", "-p", "uniform", "-c", "5x8xa100", "-q")
    assert code == 0
    assert "3 more" in out


REFUSED = [
    ("gpt-small", "-p", "uniform", "--memory-factor", "0.01"),
    ("gpt-small", "-p", "uniform", "-c", "2xa100", "--what-if", "memory=0.1x"),
    ("gpt-small", "-p", "single", "--what-if", "memory=0.1x", "--objective", "max-load"),
    ("baechi-fig1", "-p", "uniform"),
]


@pytest.mark.parametrize("arguments", REFUSED, ids=[" ".join(row) for row in REFUSED])
def test_what_is_printed_makes_it_fit(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run("plan", *arguments, "--json")
    assert code == 3, err
    found = json.loads(out)
    assert found["refusal"]
    assert found["changes"]
    for change in found["changes"]:
        again, _, why = run("plan", *arguments, *change["arguments"], "--json")
        assert again == 0, why
    code, out, err = run("plan", *arguments, "-q")
    assert not out
    assert len(err.strip().splitlines()) == 1
    assert shlex.join(found["changes"][0]["arguments"]) in err


def test_a_refusal_names_device_stage_op_and_limit(run: Run) -> None:
    _, _, err = run("plan", "gpt-small", "-p", "uniform", "--memory-factor", "0.01", "-q")
    for word in ("device 'host0/gpu1'", "stage 1", "largest op", "limit of 859 MB"):
        assert word in err


def test_robustness_of_a_saved_plan_and_of_others(run: Run) -> None:
    for name, stages in (("four", "4"), ("two", "2")):
        base = ("plan", "gpt-small", "-p", "uniform", "-O", f"stages={stages}", "-o")
        assert run(*base, f"{name}.json", "-q")[0] == 0
    base = ("robustness", "four.json", "two.json", "--samples", "4", "--replans", "1")
    code, out, err = run(*base, "-q")
    assert code == 0, err
    text = " ".join(out.split())
    assert "4 draws of all costs within 20 %, seed 1" in text
    assert "two.json" in text
    assert "against planning again" in text
    found, again = (json.loads(run(*base, "--json")[1]) for _ in range(2))
    assert found == again
    assert [row["name"] for row in found["plans"]] == ["plan", "two.json"]
    assert sum(row["wins"] for row in found["plans"]) == pytest.approx(1.0)
    assert found["replanned"] == 1
    other = json.loads(run(*base, "--seed", "2", "--json")[1])
    assert other["plans"] != found["plans"]


def test_robustness_plans_a_model_first(run: Run) -> None:
    base = ("robustness", "resnet50", "-p", "uniform", "--samples", "2", "--json")
    code, out, err = run(*base, "--perturb", "0")
    assert code == 0, err
    assert json.loads(out)["plans"][0]["relative"]["max"] == 1.0


def test_a_plan_from_elsewhere_is_not_planned_again(run: Run) -> None:
    graph = example("gpt-small").graph
    Path("map.yaml").write_text(json.dumps(dict.fromkeys(graph.ops.names, "host0/gpu0")))
    assert run("plan", "gpt-small", "-p", "manual:map.yaml", "-o", "map.json", "-q")[0] == 0
    code, out, _ = run("robustness", "map.json", "--samples", "2", "-q")
    assert code == 0
    assert "cannot be planned again" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("plan.json", "--perturb", "1.5"), 2, "perturb is 1.5"),
        (("plan.json", "-p", "single"), 2, "is a plan already"),
        (("plan.json", "graph.json"), 2, "not a plan"),
        (("plan.json", "other.json"), 2, "other.json"),
        (("plan.json", "--dtype", "float16"), 2, "graph with its own figures"),
        (("gpt-small", "-p", "uniform", "--memory-factor", "0.001"), 3, "limit"),
        (("no-such-file.json",), 2, "no such file"),
    ],
)
def test_robustness_refuses_in_one_line(
    run: Run, arguments: tuple[str, ...], code: int, said: str
) -> None:
    problem = example("gpt-small")
    save(problem.graph, "graph.json")
    save(get_planner("uniform")(problem), "plan.json")
    save(get_planner("uniform")(example("resnet50")), "other.json")
    found, _, err = run("robustness", *arguments, "--samples", "2", "-q")
    assert found == code, err
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_recompute_none_recomputes_nothing(run: Run) -> None:
    base = ("compare", *SMALL, "-c", "2xa100", "-p", "uniform", "-q", "--json")
    plain, none, full = (
        json.loads(run(*base, *more)[1])["plans"][0]["step_s"]
        for more in ((), ("--recompute", "none"), ("--recompute", "full"))
    )
    assert plain == none < full


@pytest.mark.parametrize(
    "command",
    [
        ("plan", *SMALL, "-p", "uniform", "-c", "2xa100"),
        ("estimate", *SMALL, "-c", "2xa100"),
        ("compare", *SMALL, "-p", "uniform", "-c", "2xa100"),
        ("robustness", *SMALL, "-p", "uniform", "-c", "2xa100"),
        ("profile", *SMALL, "--estimate", "a100"),
        ("fleet", "curve", *SMALL, "-p", "uniform", "--devices", "a100:1,2"),
        ("train", *SMALL, "-c", "2xa100", "--emulate"),
    ],
    ids=lambda command: command[0],
)
def test_named_sets_of_activations_are_for_large_models(run: Run, command: tuple[str, ...]) -> None:
    code, _, err = run(*command, "--recompute", "attention")
    assert code == 2
    assert "--recompute attention is for large transformers" in err


@pytest.mark.parametrize("command", ["compare", "robustness", "profile", "train"])
def test_a_large_model_is_not_asked_for_again_where_it_is_not_built(run: Run, command: str) -> None:
    code, _, err = run(command, "llama3-8b", "-q")
    assert code == 2
    assert "'llama3-8b' is planned by its shape" in err
    assert "did you mean" not in err


def test_a_measured_profile_refuses_options_of_estimates(run: Run) -> None:
    code, _, err = run("profile", *SMALL, "--recompute")
    assert code == 2
    assert "--recompute is for --estimate" in err
