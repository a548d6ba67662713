"""Clients that are slow or greedy, and those who listen, on real connections."""

import importlib
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from whole_app import TOKENS, builders, whole_app

from partita.errors import InvalidInputError, UnsupportedError
from partita.fleet.live.client import FleetClient
from partita.http import ServerError, ServerLink
from partita.service.serve import Clients, bound_socket, make_server
from partita.service.users import Role

LIMIT_S = 30.0


@contextmanager
def listening(app: Any, clients: Clients, tls: tuple[str, str] | None = None) -> Iterator[int]:
    """Run the real server in a thread; yields its port."""
    bound = bound_socket("127.0.0.1", 0)
    server = make_server(app, clients=clients, tls=tls)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while not server.started:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(LIMIT_S)
        bound.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)


def rest_of(talk: socket.socket) -> bytes:
    """Return what a server sends until it hangs up."""
    parts = []
    while part := talk.recv(65536):
        parts.append(part)
    talk.close()
    return b"".join(parts)


def is_served(port: int) -> bool:
    answer = httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=LIMIT_S, trust_env=False)
    return answer.status_code == 200


@pytest.mark.slow
def test_a_client_that_does_not_finish_its_head_is_hung_up_on(tmp_path: Path) -> None:
    app, _ = whole_app(tmp_path)
    with listening(app, Clients(most=100, head_limit_s=0.3)) as port:
        said = []
        for begun in (b"", b"GET /fle", b"GET /fleet HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "):
            talk = connected(port)
            talk.sendall(begun)
            said.append(rest_of(talk))
        # One that drips does not win time; nor one that was polite before.
        talk = connected(port)
        talk.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        while b"ok" not in talk.recv(65536):
            pass
        stop = threading.Event()

        def drip() -> None:
            while not stop.wait(0.05):
                try:
                    talk.sendall(b"G")
                except OSError:
                    return

        dripping = threading.Thread(target=drip, daemon=True)
        dripping.start()
        try:
            said.append(rest_of(talk))
        except ConnectionResetError:  # it had sent more before it heard
            talk.close()
            said.append(b"HTTP/1.1 408 ")
        stop.set()
        dripping.join(LIMIT_S)
        assert [each[:13] for each in said] == [b"HTTP/1.1 408 "] * 4
        assert is_served(port)


@pytest.mark.slow
def test_a_client_that_does_not_finish_its_body_is_hung_up_on(tmp_path: Path) -> None:
    app, _ = whole_app(tmp_path, body_limit_s=0.3)
    head = (
        "POST /fleet/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        "Authorization: Bearer token-of-the-server\r\n"
    )
    with listening(app, Clients(most=100)) as port:
        for how in ("Content-Length: 1000", "Transfer-Encoding: chunked"):
            talk = connected(port)
            talk.sendall(f"{head}{how}\r\n\r\n".encode())
            said = rest_of(talk)
            assert said.startswith(b"HTTP/1.1 408 ")
            assert b"the body is not whole after 0.3 s" in said
        assert is_served(port)


@pytest.mark.slow
def test_a_client_has_a_share_of_all_connections(tmp_path: Path) -> None:
    app, _ = whole_app(tmp_path)
    clients = Clients(most=5)
    with listening(app, clients) as port:
        talks = [connected(port) for _ in range(5)]
        assert rest_of(connected(port)).startswith(b"HTTP/1.1 429 ")
        assert clients.open == {"127.0.0.1": 5}
        # Another address is served meanwhile.
        other = socket.create_connection(
            ("127.0.0.1", port), timeout=LIMIT_S, source_address=("127.0.0.2", 0)
        )
        other.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in rest_of(other)
        for talk in talks:
            talk.close()
        deadline_s = time.monotonic() + LIMIT_S
        while clients.open:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        assert is_served(port)


@pytest.mark.slow
def test_a_submission_that_is_refused_is_not_sent_again(tmp_path: Path) -> None:
    app, fleet = whole_app(tmp_path)
    with listening(app, Clients(most=100)) as port:
        spec = builders.spec(tmp_path)
        for token, why in ((TOKENS[Role.READ], "needs submit"), ("wrong", "a token is needed")):
            client = FleetClient(f"http://any:{token}@127.0.0.1:{port}", patience_s=LIMIT_S)
            with pytest.raises(UnsupportedError, match=why) as refused:
                client.submit(spec)
            assert token not in str(refused.value)
        token = TOKENS[Role.SUBMIT]
        assert FleetClient(f"http://any:{token}@127.0.0.1:{port}").submit(spec) == 1
        assert fleet.jobs()[0]["owner"] == "user-submit"
        metrics = httpx.get(
            f"http://any:{token}@127.0.0.1:{port}/metrics", timeout=LIMIT_S, trust_env=False
        )
        refusals = re.findall(r'status="40[13]"} (\d+)', metrics.text)
        assert refusals == ["1", "1"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_a_certificate_hides_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *(
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
                "-keyout",
                key,
                "-out",
                certificate,
            ),
            *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    app, _ = whole_app(tmp_path)
    with listening(app, Clients(most=100), (certificate, key)) as port:
        url = f"https://localhost:{port}"
        link = ServerLink(url, noun="fleet server", token=TOKENS[Role.READ], timeout_s=LIMIT_S)
        with pytest.raises(ServerError, match=r"(?i)certificate verify failed"):
            link.get("/fleet")
        link.close()
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        client = FleetClient(url, token=TOKENS[Role.READ], timeout_s=LIMIT_S)
        assert client.info()["policy"] == "fifo:tune"
        # Who speaks plain HTTP to it is told nothing.
        talk = connected(port)
        talk.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" not in rest_of(talk)


def test_files_of_tls_are_checked_before_anything_starts(tmp_path: Path) -> None:
    serve = importlib.import_module("partita.service.fleet.serve")
    wrong = tmp_path / "cert.pem"
    wrong.write_text("no certificate")
    with pytest.raises(InvalidInputError, match="cannot be used"):
        serve.ServeFleetRequest(tls_cert=str(wrong)).tls()
    with pytest.raises(InvalidInputError, match="needs --tls-cert"):
        serve.ServeFleetRequest(tls_key=str(wrong)).tls()
    assert serve.ServeFleetRequest().tls() is None
