import asyncio
import json
from typing import Any

import pytest

from partita.core.codec import encode
from partita.testing.builders import small_energy_profile


def test_zeus_clients_register_and_get_their_clocks(
    run: Any, serving: Any, registered: Any
) -> None:
    async def work() -> None:
        async with serving() as client:
            job = await registered(client, job_metadata="a/b c")
            assert job.endswith("+dp1+pp2+tp1+all-max+a-b-c")
            answer = await client.get(f"/schedule/{job}", params={"rank": 1})
            clocks = [["forward", 1400], ["backward", 1400]] * 2
            assert answer.json() == {
                "rank": 1,
                "frequencies": clocks,
                "version": 1,
                "state": "deployed",
                "time_s": None,
                "energy_j": None,
                "note": "",
            }

    run(work())


def test_names_of_jobs_differ(run: Any, serving: Any, bodies: Any) -> None:
    async def work() -> None:
        async with serving() as client:
            asked = [client.post("/register_job", json=bodies.job()) for _ in range(20)]
            names = [answer.json() for answer in await asyncio.gather(*asked)]
            assert len(set(names)) == 20

    run(work())


def test_a_rank_that_has_reported_waits_for_the_others(
    run: Any, serving: Any, registered: Any, bodies: Any
) -> None:
    async def work() -> None:
        async with serving() as client:
            job = await registered(client)
            await client.post(f"/result/{job}", json=bodies.result(0))
            poll = asyncio.create_task(client.get(f"/schedule/{job}", params={"rank": 0}))
            other = await client.get(f"/schedule/{job}", params={"rank": 1})
            assert other.json()["version"] == 1
            short = await client.get(f"/schedule/{job}", params={"rank": 0, "wait": 0.05})
            assert (short.status_code, short.json()["detail"]) == (
                504,
                "after 0.05 s rank 1 has not reported on version 1",
            )
            await client.post(f"/result/{job}", json=bodies.result(1))
            assert (await poll).json()["version"] == 2

    run(work())


def test_after_waits_for_a_later_version(
    run: Any, serving: Any, registered: Any, bodies: Any
) -> None:
    async def work() -> None:
        async with serving() as client:
            job = await registered(client)
            poll = asyncio.create_task(
                client.get(f"/schedule/{job}", params={"rank": 0, "after": 1})
            )
            for rank in (0, 1):
                await client.post(f"/result/{job}", json=bodies.result(rank, version=1))
            assert (await poll).json()["version"] == 2
            late = await client.post(f"/result/{job}", json=bodies.result(0, version=1))
            assert late.status_code == 200
            early = await client.post(f"/result/{job}", json=bodies.result(0, version=9))
            assert early.status_code == 409

    run(work())


def test_a_poll_that_is_over_names_the_missing_ranks(run: Any, serving: Any, bodies: Any) -> None:
    async def work() -> None:
        async with serving(poll_limit_s=0.05) as client:
            job = (await client.post("/register_job", json=bodies.job(4))).json()
            await client.post(f"/register_rank/{job}", json=bodies.rank(2))
            answer = await client.get(f"/schedule/{job}", params={"rank": 2})
            assert answer.status_code == 504
            assert answer.json()["detail"] == "after 0.05 s ranks 0, 1, 3 have not registered"

    run(work())


def test_conflicts_are_409_and_the_same_again_is_not(
    run: Any, serving: Any, registered: Any, bodies: Any
) -> None:
    async def work() -> None:
        async with serving() as client:
            fresh = (await client.post("/register_job", json=bodies.job())).json()
            none = await client.post(f"/result/{fresh}", json=bodies.result(0))
            assert none.status_code == 409
            job = await registered(client)
            again = await client.post(f"/register_rank/{job}", json=bodies.rank(0))
            assert again.status_code == 200
            other = bodies.rank(0, available_frequencies=[1])
            answer = await client.post(f"/register_rank/{job}", json=other)
            assert answer.status_code == 409
            await client.post(f"/register_rank/{fresh}", json=bodies.rank(0))
            twice = await client.post(f"/register_rank/{fresh}", json=bodies.rank(1, pp_rank=0))
            assert twice.json()["detail"] == "rank 0 is at the place of rank 1"
            frontier = await client.get(f"/frontier/{job}")
            assert frontier.status_code == 409

    run(work())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"pp_degree": 0}, "pp_degree"),
        ({"pp_degree": "2"}, "pp_degree"),
        ({"dp_degree": True}, "dp_degree"),
        ({"tp_degree": 1.5}, "tp_degree"),
        ({"wish": {"slowdown": "0.1"}}, "wish"),
        ({"world_size": 3}, "world_size"),
        ({"job_id": "mine"}, "job_id"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"schedule": "2f2b"}, "schedule"),
        ({"wish": {"slow": 1}}, "wish"),
        ({"wish": {"slowdown": -1}}, "wish"),
        ({"profile": {"format": "partita.plan", "version": 1}}, "profile"),
        ({"profile": encode(small_energy_profile())}, "profile"),
        ({"solution": {"format": "\ud800"}}, "solution"),
        ({"solution": json.loads('{"a":' * 400 + "1" + "}" * 400)}, "solution"),
        ({"job_metadata": '{"num_microbatches": -1}'}, "num_microbatches"),
    ],
)
def test_what_is_wrong_with_a_job_is_422_with_the_field(
    run: Any, serving: Any, bodies: Any, change: Any, field: str
) -> None:
    async def work() -> None:
        async with serving() as client:
            body = json.dumps(bodies.job(2, **change))
            headers = {"content-type": "application/json"}
            answer = await client.post("/register_job", content=body, headers=headers)
            assert answer.status_code == 422, answer.text
            assert field in [part for one in answer.json()["detail"] for part in one["loc"]]

    run(work())


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", "/register_rank/{job}", {"rank": 5}, "dp_rank"),
        ("POST", "/result/{job}", {"rank": 7, "iter_time": []}, "rank"),
        ("POST", "/result/{job}", {"rank": 0, "iter_time": ["NaN"]}, "iter_time"),
        ("POST", "/straggler/{job}", {"rank": 9, "slowdown": 2}, "rank"),
        ("POST", "/straggler/{job}", {"dp_rank": 1, "slowdown": 2}, "dp_rank"),
        ("POST", "/straggler/{job}", {"slowdown": 0.5}, "slowdown"),
        ("POST", "/straggler/{job}", {}, "slowdown"),
        ("POST", "/straggler/{job}", {"rank": 0, "iteration_s": 2.0}, "slowdown"),
        ("GET", "/schedule/{job}?rank=2", None, "rank"),
        ("GET", "/schedule/{job}?rank=0&wait=nan", None, "wait"),
        ("DELETE", "/straggler/{job}?rank=2", None, "rank"),
    ],
)
def test_what_is_wrong_with_a_rank_is_422_with_the_field(
    run: Any, serving: Any, registered: Any, method: str, path: str, body: Any, field: str
) -> None:
    async def work() -> None:
        async with serving() as client:
            job = await registered(client)
            answer = await client.request(method, path.format(job=job), json=body)
            assert answer.status_code == 422, answer.text
            assert field in answer.json()["detail"][0]["loc"]

    run(work())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/schedule/none?rank=0"),
        ("GET", "/jobs/none"),
        ("GET", "/frontier/none"),
        ("GET", "/profile/none"),
        ("DELETE", "/jobs/none"),
        ("DELETE", "/straggler/none"),
    ],
)
def test_unknown_jobs_are_404(run: Any, serving: Any, method: str, path: str) -> None:
    async def work() -> None:
        async with serving() as client:
            assert (await client.request(method, path)).status_code == 404

    run(work())


def test_ended_jobs_are_404_and_stay_on_disk(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        async with serving() as client:
            job = await registered(client)
            poll = asyncio.create_task(
                client.get(f"/schedule/{job}", params={"rank": 0, "after": 1})
            )
            await asyncio.sleep(0)
            await client.delete(f"/jobs/{job}")
            assert (await poll).status_code == 404
            assert (await client.get("/jobs")).json() == []
        async with serving() as client:
            answer = await client.get(f"/jobs/{job}")
            assert (answer.status_code, "deleted" in answer.text) == (404, True)

    run(work())


def test_idle_jobs_are_closed(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        async with serving(max_idle_s=0.05) as client:
            job = await registered(client)
            while (await client.get("/jobs")).json():
                await asyncio.sleep(0.02)
            answer = await client.get(f"/jobs/{job}")
            assert (answer.status_code, "idle" in answer.text) == (404, True)

    run(work())


def test_the_artifact_has_its_own_forms(run: Any, serving: Any, bodies: Any) -> None:
    async def work() -> None:
        async with serving(scheduler="instruction-profiler") as client:
            body = bodies.job(1, framework="merak", model_name="gpt3 xl", partition_method="u")
            body |= {"microbatch_size": 4, "num_microbatches": 1}
            job = (await client.post("/register_job", json=body)).json()
            assert "+merak+gpt3-xl+u+dp1+pp1+tp1+mbs4+nmb1+" in job
            rank = {"job_id": job, "rank": 0, "dp_rank": 0, "pp_rank": 0, "tp_rank": 0}
            rank |= {"pipe_schedule": ["load", "forward", "backward", "step"]}
            await client.post("/register_rank", json={**rank, "power_state_range": [900]})
            answer = (await client.get(f"/schedule/{job}", params={"rank": 0})).json()
            assert answer["power_states"] == [900] * 4
            assert answer["state"] == "profiling"
            times = {"forward": [[1.0], [1.0]], "backward": [[2.0], [2.0]]}
            energies = {"forward": [[5.0], [5.0]], "backward": [[9.0], [9.0]]}
            result = bodies.result(0, time_breakdown=times, energy_breakdown=energies)
            await client.post(f"/result/{job}", json=result)
            done = await client.get(f"/schedule/{job}", params={"rank": 0})
            assert (done.status_code, "[profiling-done]" in done.text) == (409, True)
            profile = (await client.get(f"/profile/{job}")).json()
            assert profile["joules"] == [5.0, 9.0]
            info = (await client.get("/info")).json()
            assert info["scheduler"] == "instruction-profiler"

    run(work())


def test_microbatches_come_from_the_metadata_too(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        async with serving(microbatches=None) as client:
            job = await registered(client, 1, job_metadata='{"num_microbatches": 3}')
            answer = (await client.get(f"/schedule/{job}", params={"rank": 0})).json()
            assert len(answer["frequencies"]) == 6
            job = await registered(client, 1)
            answer = await client.get(f"/schedule/{job}", params={"rank": 0})
            assert (answer.status_code, "num_microbatches" in answer.text) == (409, True)

    run(work())


def test_a_server_that_stops_lets_polls_go(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        async with serving() as client:
            job = await registered(client)
            poll = asyncio.create_task(
                client.get(f"/schedule/{job}", params={"rank": 0, "after": 1})
            )
            await asyncio.sleep(0.05)
            client.app.state.stop_waiting()
            assert (await poll).status_code == 503

    run(work())


def test_files_are_dumped(
    run: Any, serving: Any, registered: Any, bodies: Any, tmp_path: Any
) -> None:
    async def work() -> None:
        async with serving(dump=tmp_path / "dump") as client:
            job = await registered(client)
            for _ in range(2):
                for rank in (0, 1):
                    await client.post(f"/result/{job}", json=bodies.result(rank))
                await client.get(f"/schedule/{job}", params={"rank": 0})
            folder = tmp_path / "dump" / job
            names = sorted(file.name for file in folder.iterdir())
            assert names == ["0.prof.json", "0.sched.json", "perseus.json", "ranks.json"]
            info = json.loads((folder / "perseus.json").read_text())
            assert info == (await client.get("/info")).json()
            ranks = json.loads((folder / "ranks.json").read_text())
            assert [one["available_frequencies"] for one in ranks] == [[1200, 1400]] * 2
            clocks = json.loads((folder / "0.sched.json").read_text())
            assert clocks[1]["frequencies"][0] == ["forward", 1400]
            measured = json.loads((folder / "0.prof.json").read_text())
            assert measured[0]["iter_time"] == [1.0]

    run(work())


def test_metrics_count(run: Any, serving: Any, registered: Any) -> None:
    async def work() -> None:
        async with serving() as client:
            await registered(client)
            await client.get("/jobs/none")
            text = (await client.get("/metrics")).text
            assert 'route="/jobs/{job_id}",status="404"} 1' in text
            assert 'partita_energy_jobs{state="deployed"} 1' in text
            assert "partita_energy_ranks 2" in text

    run(work())


def test_every_route_documents_its_errors(run: Any, serving: Any) -> None:
    async def work() -> None:
        async with serving() as client:
            paths = (await client.get("/openapi.json")).json()["paths"]
            for path, methods in paths.items():
                for method, route in methods.items():
                    assert "413" in route["responses"], (method, path)
                    if "{job_id}" in path:
                        assert {"401", "404", "422", "503"} <= set(route["responses"])

    run(work())
