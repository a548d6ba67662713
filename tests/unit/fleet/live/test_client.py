"""What a client of a fleet does while the server is away: it asks again, and says so."""

import live_builders as builders
import pytest

from partita.errors import PartitaError, UnsupportedError, WorkerError
from partita.fleet.live import client as module
from partita.flows.fleet.live import SubmitRequest, submit_request
from partita.http import ServerError


class Link:
    """A server that answers by a list: a status that it refuses with, 0 for none, or an answer."""

    def __init__(self, *answers):
        self.answers, self.keys, self.url = list(answers), [], "http://127.0.0.1:1"

    def get(self, path, query=None):
        del path, query
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, int):
            raise ServerError("refused", found)
        return found

    def post(self, path, body):
        self.keys.append(body.get("key"))
        return self.get(path)


@pytest.fixture
def serve(monkeypatch):
    """Return a function that makes a client of a server with such answers; its clock is ours."""
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        module.time, "sleep", lambda pause_s: clock.__setitem__(0, clock[0] + pause_s)
    )

    def made(*answers, patience_s=10.0):
        link, told = Link(*answers), []
        monkeypatch.setattr(module, "ServerLink", lambda *_, **__: link)
        client = module.FleetClient(patience_s=patience_s, on_progress=told.append)
        return client, link, told

    made.clock = clock
    return made


def test_a_submission_waits_for_a_server_that_is_away_and_stays_the_same_job(serve, tmp_path):
    client, link, told = serve(0, 503, 0, {"id": 7})
    assert client.submit(builders.spec(tmp_path)) == 7
    assert len(link.keys) == 4
    assert len(set(link.keys)) == 1
    assert told == [
        "the fleet at http://127.0.0.1:1 does not answer (refused); it is asked again for 10 s"
    ]


def test_patience_ends(serve, tmp_path):
    client, link, _ = serve(0)
    with pytest.raises(UnsupportedError, match=r"127\.0\.0\.1:1"):
        client.submit(builders.spec(tmp_path))
    assert serve.clock[0] == pytest.approx(10.0)
    assert len(link.keys) > 10


def test_who_only_looks_waits_for_servers_alone_that_have_answered_before(serve):
    client, _, told = serve(0, [])
    with pytest.raises(UnsupportedError):
        client.jobs()
    assert (serve.clock[0], told) == (0.0, [])
    client, _, told = serve([], 0, 0, [1], 0, [2])
    assert [client.jobs(), client.jobs(), client.jobs()] == [[], [1], [2]]
    assert len(told) == 2  # once for each time that it was away


@pytest.mark.parametrize(("status", "kind"), [(401, UnsupportedError), (500, WorkerError)])
def test_a_refusal_is_an_answer(serve, tmp_path, status, kind):
    client, link, _ = serve(status)
    with pytest.raises(kind):
        client.submit(builders.spec(tmp_path))
    assert len(link.keys) == 1


def test_files_that_were_not_submitted_are_named_with_the_jobs_that_were(
    serve, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.yaml").write_text("command: x\nsteps: 1\n")
    serve({"id": 3}, 0)
    request = SubmitRequest(files=("a.yaml", "b.yaml", "c.yaml"), wait=2.0)
    with pytest.raises(PartitaError, match=r"b\.yaml .*job 3"):
        submit_request(request)
    assert serve.clock[0] == pytest.approx(2.0)


def test_replies_of_a_server_of_before_are_read_in_bytes(serve):
    server = {"name": "host0", "memory_gb": 62.5, "memory_gb_granted": 0.5}
    client, *_ = serve({"servers": [server]})
    found = {"name": "host0", "memory_bytes": 62.5e9, "memory_bytes_granted": 0.5e9}
    assert client.info() == {"servers": [found]}
    client, *_ = serve([{"id": 1, "places": [{"server": "host0", "memory_gb": 2.0}]}])
    assert client.jobs()[0]["places"] == [{"server": "host0", "memory_bytes": 2e9}]
    client, *_ = serve({"places": [{"memory_bytes": 1e9, "memory_gb": 1.0}], "attempt_list": []})
    assert client.status(1)["places"] == [{"memory_bytes": 1e9}]
