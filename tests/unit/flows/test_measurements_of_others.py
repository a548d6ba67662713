"""Traces of torch's profiler, dumps of the Flight Recorder, outputs of nccl-tests."""

import json
import shutil
from pathlib import Path

import pytest

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.plan import Plan, equal_microbatches, pipeline_stages
from partita.core.problem import Objective, Problem, Schedule
from partita.core.program import Kind
from partita.core.solution import Solution
from partita.core.timeline import TimelineOrigin
from partita.errors import FormatError, InvalidInputError
from partita.flows.calibrate import calibrate
from partita.flows.explain import explain
from partita.flows.flight import compare_dumps, read_flight
from partita.flows.replan import replan
from partita.flows.traces import read_trace_file, read_traces, trace_timeline
from partita.formats.flight_recorder import read_flight_dump
from partita.profiler.calibrate.nccl_tests import read_nccl_tests
from partita.testing.builders import chain

FILES = Path(__file__).parents[2] / "golden" / "readers"
PASSES = ("forward", "backward")
TRACES, DUMPS = FILES / "torch-trace", FILES / "flight-recorder"


def solved(schedule: Schedule, stages: int, microbatches: int = 4) -> Solution:
    """Return a pipeline of a chain over two devices."""
    problem = Problem(
        graph=chain(stages),
        cluster=read_shorthand("2xa100", load_catalogue()),
        objective=Objective(microbatches=microbatches),
    )
    plan = Plan(
        fingerprint=problem.graph.fingerprint,
        devices=problem.cluster.device_names,
        stage_of=range(stages),
        stages=pipeline_stages([[index % 2] for index in range(stages)]),
        schedule=schedule,
        microbatch_sizes=equal_microbatches(microbatches, problem.graph.batch_size),
    )
    metric = problem.objective.metric
    return Solution(problem=problem, plan=plan, metric=metric, value=1.0, unit="s")


def both(kind: str) -> list[str]:
    return [str(TRACES / f"{kind}-rank{rank}.json") for rank in (1, 0)]


@pytest.mark.parametrize(
    ("kind", "schedule", "stages"),
    [("gpipe", Schedule.GPIPE, 2), ("interleaved", Schedule("interleaved-1f1b"), 4)],
)
def test_passes_of_torchs_pipelines_are_instructions_of_the_plan(
    kind: str, schedule: Schedule, stages: int
) -> None:
    solution = solved(schedule, stages)
    timeline = trace_timeline(solution.problem, solution.plan, read_traces(both(kind)))
    assert timeline.origin is TimelineOrigin.MEASURED
    assert len(timeline) == 2 * 4 * stages  # forward and backward of four microbatches
    assert timeline.start_s.min() == 0
    assert 1e-4 < timeline.makespan_s < 0.1
    for stage in range(stages):  # a stage is handed on to only when it is done
        at = {
            (int(k), int(m)): (s, e)
            for k, m, st, s, e in zip(
                timeline.kind,
                timeline.microbatch,
                timeline.stage,
                timeline.start_s,
                timeline.end_s,
                strict=True,
            )
            if st == stage
        }
        assert all(at[Kind.FORWARD, m][1] <= at[Kind.BACKWARD, m][0] for m in range(4))


def test_explain_holds_a_plan_against_traces() -> None:
    solution = solved(Schedule.GPIPE, 2)
    found = explain(solution, measured=tuple(both("gpipe")), what_if=("speed=2x",))
    assert [row["stage"] for row in found.measured] == [0, 1]
    assert all(row["forward_measured_s"] > 0 for row in found.measured)
    assert found.to_json()["measured"]["passes_s"] == found.measured_s
    assert found.predicted_s == pytest.approx(found.summary.evaluation.timeline.makespan_s, rel=0.5)
    assert explain(solution, what_if=("speed=2x",)).measured == ()


def test_a_plan_is_made_again_from_traces(tmp_path: Path) -> None:
    for rank in (0, 1):
        shutil.copy(TRACES / f"gpipe-rank{rank}.json", tmp_path)
    solution = solved(Schedule.GPIPE, 2)
    found = replan(solution, measured=str(tmp_path), planner="uniform")
    timeline = trace_timeline(solution.problem, solution.plan, read_traces([str(tmp_path)]))
    assert found.measured_s == timeline.makespan_s
    assert found.calibration.levels == {}  # passes say nothing of links
    predicted = explain(solution, measured=(str(tmp_path),)).measured
    for row, device in zip(predicted, solution.plan.devices, strict=True):
        factors = [row[f"{part}_measured_s"] / row[f"{part}_predicted_s"] for part in PASSES]
        assert min(factors) <= found.calibration.seen[device] <= max(factors)
    with pytest.raises(InvalidInputError, match="another plan"):
        replan(solved(Schedule.GPIPE, 2, 8), measured=str(tmp_path), planner="uniform")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([str(TRACES / "1f1b-rank0.json")], "traces of 1 ranks, the plan has 2 devices"),
        (both("interleaved"), "they are of another plan"),
        ([*both("gpipe"), str(TRACES / "old-no-info-rank1.json")], "of rank 1, as another"),
        ([str(TRACES / "1f1b-rank0.json"), both("gpipe")[0]], "plain 1F1B makes none"),
        ([str(TRACES / "broken-time-rank0.json")], "rank0.json: event 'PP:1F0' has time 'soon'"),
        ([str(FILES / "kubernetes" / "mig.json")], "no trace of torch's profiler"),
    ],
)
def test_traces_that_do_not_fit_are_refused_in_one_line(names: list[str], words: str) -> None:
    solution = solved(Schedule.GPIPE, 2)
    with pytest.raises(InvalidInputError, match=words) as caught:
        trace_timeline(solution.problem, solution.plan, read_traces(names))
    assert "\n" not in str(caught.value)


def test_gpu_marks_go_before_those_of_the_host_and_ranks_may_be_in_names() -> None:
    trace = read_trace_file(str(TRACES / "nccl-rank0.json"))
    assert trace.steps[0][0].end_s - trace.steps[0][0].start_s == pytest.approx(10e-6)
    assert read_trace_file(str(TRACES / "old-no-info-rank1.json")).rank == 1


def test_collectives_of_a_trace_calibrate_a_cluster() -> None:
    path = str(TRACES / "nccl-rank0.json")
    found = calibrate(trace=(path,), cluster="4xa100")
    assert found is not None
    rows = found.cluster.levels[0].collectives[0].measured
    assert {(row.kind, row.ranks) for row in rows} == {("all_reduce", 4), ("all_gather", 2)}
    fit = next(row.fit for row in found.calibration.reductions if row.kind == "all_reduce")
    assert fit.bandwidth_bytes_per_s == pytest.approx(200e9, rel=0.01)
    with pytest.raises(InvalidInputError, match="give its --cluster"):
        calibrate(trace=(path,))
    with pytest.raises(InvalidInputError, match=r"rank 3,.*2 devices"):
        calibrate(trace=(path,), cluster="2xa100")
    with pytest.raises(InvalidInputError, match="collective of two"):
        calibrate(trace=(both("gpipe")[0],), cluster="2xa100")


def messages(path: Path, rank: int, *calls: tuple[str, int, float, dict]) -> str:
    """Write a trace with NCCL's messages: name, elements of two bytes, microseconds, more."""
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_SendRecv",
            "ts": 1000 * index,
            "dur": spent,
            "args": {
                "Collective name": name,
                "In msg nelems": count,
                "dtype": "BFloat16",
                "Group size": 4,
                **more,
            },
        }
        for index, (name, count, spent, more) in enumerate(calls)
    ]
    value = {"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": events}
    file = path / f"rank{rank}.json"
    file.write_text(json.dumps(value))
    return str(file)


def test_messages_of_a_pipeline_set_the_bandwidth_of_their_level(tmp_path: Path) -> None:
    known = read_shorthand("2x2xa100", load_catalogue())
    within, between = known.levels
    count = 5_000_000
    inner_us, outer_us = 1e6 * float(within.latency_s[0]), 1e6 * float(between.latency_s[0])
    to_1, to_2 = {"Src Rank": 0, "Dst Rank": 1}, {"Src Rank": 1, "Dst Rank": 2}
    pair = {"Group size": 2, "Process Group Ranks": "[1, 2]"}
    names = (
        # the sender waits for rank 1 the first time, rank 1 for the sender the second
        messages(tmp_path, 0, ("send", count, 900, to_1), ("send", count, inner_us + 100, to_1)),
        messages(
            tmp_path,
            1,
            ("recv", count, inner_us + 100, to_1),
            ("recv", count, 800, to_1),
            ("send", count, outer_us + 1000, to_2),
            ("send", count, 4000, pair),
            ("send", count, 1, {}),  # to whom, it does not say
        ),
    )
    found = calibrate(trace=names, cluster="2x2xa100")
    assert found is not None
    rates = [float(level.bandwidth_bytes_per_s[0]) for level in found.cluster.levels]
    assert rates == pytest.approx([1e7 / 100e-6, 1e7 / 1000e-6], rel=0.02)
    assert {row.kind for row in found.calibration.reductions} == {"send_recv"}


def dumps(*names: str):
    found = [read_flight_dump((DUMPS / name).read_bytes(), name=name) for name in names]
    return {dump.rank: dump for dump in found}


def test_the_last_call_that_all_agree_on_is_named_and_who_went_another_way() -> None:
    report = compare_dumps(dumps(*(f"nccl_trace_rank_{rank}" for rank in range(3))))
    group, pair = report.agreements
    assert group.agreed == "#2 all_reduce [1000]"
    assert dict(group.waiting) == {
        0: "#3 all_gather [1000] started",
        1: "#3 all_reduce [1000] started",
        2: "never came to #3, its last is #2 all_reduce [1000]",
    }
    assert (pair.who, pair.agreed) == ("0->1", "message 1 [1000]")
    assert dict(pair.waiting) == {0: "send 0->1 [1000] scheduled", 1: "no more"}
    assert "last agreed on #2 all_reduce" in "\n".join(report.lines())
    lost = compare_dumps(dumps("nccl_trace_rank_0", "nccl_trace_rank_1"))
    assert lost.missing == (2,)


def test_dumps_as_json_and_of_gloo_are_read() -> None:
    (text,) = dumps("json_rank_3").values()
    (gloo,) = dumps("gloo_4").values()
    assert (text.rank, len(text.calls)) == (3, 2)
    assert gloo.calls[0].state == "completed"  # retired, though its state stays scheduled


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("evil_5", "asks for '.*print'; only values are read"),
        ("torn_6", "the pickle is broken"),
        ("old-list_7", "holds no table"),
    ],
)
def test_dumps_with_more_than_values_or_less_are_refused(name: str, words: str, tmp_path) -> None:
    with pytest.raises(FormatError, match=words):
        dumps(name)
    (tmp_path / name).write_bytes((DUMPS / name).read_bytes())
    with pytest.raises(FormatError, match=name):
        read_flight(tmp_path)


def test_a_directory_needs_a_dump_of_each_rank(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has no dumps"):
        read_flight(tmp_path)
    for name in ("rank_0", "again_0"):
        (tmp_path / name).write_bytes((DUMPS / "nccl_trace_rank_0").read_bytes())
    with pytest.raises(InvalidInputError, match="rank 0 again"):
        read_flight(tmp_path)


@pytest.mark.parametrize(
    ("name", "ranks"), [("new.txt", 8), ("old.txt", 2), ("in-place-na.txt", 2)]
)
def test_outputs_of_nccl_tests_of_several_versions_are_read(name: str, ranks: int) -> None:
    found = read_nccl_tests((FILES / "nccl-tests" / name).read_text(), kind="all_reduce")
    assert found.record.num_ranks == ranks


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("failed.txt", "0 lines that name a rank"),
        ("one-size.txt", "1 sizes"),
        ("words.txt", "fast"),
    ],
)
def test_broken_outputs_of_nccl_tests_are_refused(name: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read_nccl_tests((FILES / "nccl-tests" / name).read_text(), kind="all_reduce")
