"""Work of the page in processes of its own, and what comes of it in this one."""

import asyncio
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from page_app import page_client

import partita
from partita.core.codec import read_json, write_json
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.service.settings import PageSettings
from partita.service.ui.held import DocumentStore
from partita.service.ui.jobs import JobState, PageJobs
from partita.service.ui.work import HELD, JOBS, STOP, Work

PLAN = {"model": "gpt-small", "cluster": "4xa100", "planner": "uniform", "microbatches": "4"}


class Pipe:
    """A pipe that keeps what is said, and asks to stop when it is told to."""

    def __init__(self, *, stops: bool = False) -> None:
        self.frames: list[tuple[dict[str, Any], str]] = []
        self._stops = stops

    def send_bytes(self, frame: bytes) -> None:
        head, _, body = frame.partition(b"\n")
        self.frames.append((json.loads(head), body.decode()))

    def poll(self, _: float) -> bool:
        return self._stops

    def recv_bytes(self) -> bytes:
        return STOP

    def said(self, what: str) -> list[dict[str, Any]]:
        return [head for head, _ in self.frames if head["what"] == what]

    def body(self, what: str) -> str:
        return next(body for head, body in self.frames if head["what"] == what)


def worked(kind: str, values: dict[str, Any], *, stops: bool = False, **held: str) -> Pipe:
    pipe = Pipe(stops=stops)
    documents = {f"{HELD}{name}": (f"{name}.json", text) for name, text in held.items()}
    JOBS[kind](Work(values=values, documents=documents, pipe=pipe))
    return pipe


@pytest.fixture(scope="module")
def solution() -> Solution:
    found = partita.plan("gpt-small", cluster="4xa100", planner="uniform", microbatches=4)
    return found.solution


def test_a_plan_is_that_of_the_command_it_shows(solution: Solution) -> None:
    pipe = worked("plan", PLAN)
    page = json.loads(pipe.body("page"))
    words = ["partita", "plan", "gpt-small", "--cluster", "4xa100", "--planner", "uniform"]
    assert sorted(shlex.split(page["command"])) == sorted([*words, "--microbatches", "4"])
    found = read_json(pipe.body("document"))
    assert found.value == solution.value
    assert found.plan.stage_of.tolist() == solution.plan.stage_of.tolist()


def test_an_error_is_the_line_of_the_public_function() -> None:
    values = {**PLAN, "cluster": "4xnothing"}
    with pytest.raises(partita.errors.InvalidInputError) as ours:  # type: ignore[attr-defined]
        worked("plan", values)
    with pytest.raises(partita.errors.InvalidInputError) as theirs:  # type: ignore[attr-defined]
        partita.plan("gpt-small", cluster="4xnothing")
    assert str(theirs.value).startswith(str(ours.value))


def test_a_search_that_is_stopped_keeps_the_best_it_has() -> None:
    values = {"model": "gpt-small", "cluster": "4xa100", "time_limit": "60"}
    pipe = worked("plan", values, stops=True)
    assert pipe.said("point")
    found = read_json(pipe.body("document"))
    assert found.value == pytest.approx(pipe.said("point")[-1]["value"])
    assert pipe.said("search")[0]["bound"] <= found.value


def test_uploaded_graphs_and_typed_clusters_are_planned(solution: Solution) -> None:
    text = write_json(solution.problem.graph)
    read = worked("read", {}, **{"": text})
    assert read.said("document")[0]["kind"] == "graph"
    values = {**PLAN, "model": "doc:graph", "cluster": "2xa100"}
    page = json.loads(worked("plan", values, graph=text).body("page"))
    assert "graph.json" in shlex.split(page["command"])


def test_a_configuration_is_planned_as_the_command_does_and_names_no_code(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "intermediate_size": 14336, "vocab_size": 128256}
    text = json.dumps(config)
    read = {"name": "my llama.json"}
    assert worked("read", read, **{"": text}).said("document")[0]["kind"] == "config"
    pipe = worked("plan", {"model": "doc:m", "cluster": "2x8xa100", "batch_size": "64"}, m=text)
    (tmp_path / "config.json").write_text(text)
    same = partita.plan(str(tmp_path / "config.json"), cluster="2x8xa100", batch_size=64).solution
    assert read_json(pipe.body("document")).value == pytest.approx(same.value)
    assert '"partita plan config.json ' in pipe.body("page")
    for key in ("auto_map", "_attn_implementation", "quantization_config"):
        with pytest.raises(InvalidInputError, match="names code"):
            worked("read", read, **{"": json.dumps({**config, key: "package.module"})})


def test_plans_are_compared_and_traded_for_energy(solution: Solution) -> None:
    text = write_json(solution)
    page = json.loads(worked("compare", {"plans": ["doc:a", "doc:b"]}, a=text, b=text).body("page"))
    assert page["command"] == "partita report a.json b.json"
    pipe = worked("frontier", {"plan": "doc:a", "points": "5"}, a=text)
    frontier = pipe.body("document")
    page = json.loads(pipe.body("page"))
    assert page["command"] == "partita energy frontier --points 5 a.json"
    kinds = [figure["kind"] for section in page["sections"] for figure in section["figures"]]
    assert kinds[:2] == ["chart", "clocks"]
    for asked in ({"point": "2"}, {"slowdown": "0.05"}, {"least_energy": True}):
        pipe = worked("clocks", {"frontier": "doc:f", **asked}, f=frontier)
        assert pipe.said("document")[0]["title"].startswith("freqs_pipeline_")
        facts = {head["name"]: head["value"] for head in pipe.said("fact")}
        assert facts["command"].startswith("partita energy choose f.json")
        assert facts["lines"][0].startswith("point ")


def test_policies_are_simulated_as_the_command_does() -> None:
    values = {"trace": "generated:jobs=5,short", "cluster": "1x8xv100", "policy": ["fifo:tune"]}
    pipe = worked("fleet", values)
    page = json.loads(pipe.body("page"))
    assert shlex.split(page["command"])[:4] == ["partita", "fleet", "simulate", values["trace"]]
    assert read_json(pipe.body("document")).policy == "fifo:tune"


def test_work_is_told_limited_and_cancelled(run: Any) -> None:
    """A process of its own is slow to start; all of it is tried with one or two."""

    async def work() -> None:
        store = DocumentStore(10**8)
        jobs = PageJobs(PageSettings(jobs=1, time_limit_s=300.0), store)
        wrong = await jobs.result("plan", {"model": "nothing", "cluster": "4xa100"})
        assert (wrong.state, wrong.error.count("\n")) == (JobState.FAILED, 0)
        assert wrong.error.startswith("there is no model 'nothing'")
        near = await jobs.result("plan", {"model": "gpt-smal", "cluster": "4xa100"})
        assert "did you mean 'gpt-small'" in near.error
        done = await jobs.result("plan", PLAN)
        assert done.state is JobState.DONE
        assert store.get(done.documents["plan"].key).kind == "solution"
        assert jobs.ask("plan", PLAN) is done
        # On devices of two types a search goes on until its limit.
        long = {"model": "gpt-small", "cluster": "2xa100+2xv100", "time_limit": "99"}
        endless = jobs.ask("plan", long)
        while not endless.points:
            await asyncio.wait_for(endless.changed.wait(), 300)
        # A file is read meanwhile, though one search at a time is all there may be.
        sent = {HELD: ("c.yaml", "hosts: 2xa100\n")}
        await asyncio.wait_for(jobs.result("read", {"name": "c.yaml"}, documents=sent), 300)
        assert endless.state is JobState.RUNNING
        jobs.cancel(endless)
        assert endless.state is JobState.CANCELLED
        limited = PageJobs(PageSettings(jobs=1, time_limit_s=0.0), store)
        late = await limited.result("plan", PLAN)
        assert "--time-limit" in late.error
        for each in (jobs, limited):
            each.close()

    run(work())


def test_edits_answer_with_figures_and_are_saved(
    tmp_path: Path, run: Any, solution: Solution
) -> None:
    async def work() -> None:
        async with page_client(tmp_path) as client:
            store = client.app.state.page.store  # type: ignore[attr-defined]
            held = store.add("a.plan.json", "solution", "", write_json(solution))
            body = {"plan": held.key, "edits": ["cut:1=30", "microbatches=8"]}
            answer = (await client.post("/ui/api/edit", json=body)).json()
            assert [figure["kind"] for figure in answer["figures"]] == ["timeline", "memory"]
            assert [stage["end"] for stage in answer["stages"]][1] == 30
            assert answer["microbatches"] == 8
            # A step of other samples is compared by the sample, and no bound of the plan is its.
            work = 8 / solution.plan.num_microbatches
            assert answer["change"] == pytest.approx(answer["step_s"] / work / solution.value - 1)
            assert (answer["per"], answer["gap"]) == ("per sample, ", None)
            same = (await client.post("/ui/api/edit", json={**body, "edits": []})).json()
            assert (same["per"], same["change"]) == ("", pytest.approx(0.0, abs=1e-9))
            assert same["gap"] == pytest.approx(solution.gap)
            saved = (await client.post("/ui/api/edit/save", json=body)).json()
            assert saved["command"] == "partita simulate gpt-small.edited.plan.json"
            file = await client.get(f"/ui/api/documents/{saved['id']}")
            assert "attachment" in file.headers["content-disposition"]
            found = read_json(file.text)
            assert found.value == pytest.approx(answer["step_s"])
            assert found.plan.num_microbatches == found.problem.microbatches == 8
            wrong = await client.post("/ui/api/edit", json={"plan": held.key, "edits": ["cut:9=1"]})
            assert (wrong.status_code, wrong.json()["problem"].count("\n")) == (200, 0)
            odd = await client.post(
                "/ui/api/edit", json={"plan": held.key, "edits": ["microbatches=\u00b2"]}
            )
            assert "is not" in odd.json()["problem"]  # a digit that is no number
            gone = await client.post("/ui/api/edit", json={"plan": "gone", "edits": []})
            assert "not held here any more" in gone.json()["problem"]
            typed = await client.post("/ui/api/cluster", json={"text": "2x"})
            assert typed.json()["problem"].count("\n") == 0

    run(work())
