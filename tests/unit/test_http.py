"""Requests to our servers: time limits, proxies, tokens in addresses."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("httpx", reason="requests need httpx")

from partita.errors import InvalidInputError
from partita.http import ServerError, ServerLink, check_address, is_loopback, split_address

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4\r\n\r\nnull"


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server that treats each connection as a test says, and its requests.

    Connections are closed at the end, whatever they wait for.
    """
    asked: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))
    talks: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                talk, _ = listening.accept()
            except OSError:
                return
            talks.append(talk)
            try:
                asked.append(talk.recv(65536))
                answer(talk)
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        for each in (listening, *talks):
            each.close()
        thread.join(10)


def drip(data: bytes, sent: list[int]) -> Callable[[socket.socket], None]:
    """Return an answer of which a byte comes now and then, for half a minute; counts them."""

    def answer(talk: socket.socket) -> None:
        for byte in data[:600]:
            talk.sendall(bytes([byte]))
            sent.append(byte)
            time.sleep(0.05)

    return answer


@pytest.mark.parametrize(
    "data",
    [b"H" * 600, b"HTTP/1.1 200 OK\r\nX: " + b"x" * 600],
    ids=["of the first line", "of a header"],
)
def test_an_answer_that_drips_is_given_up_in_time(data: bytes) -> None:
    sent: list[int] = []
    with answering(drip(data, sent)) as (url, _):
        link = ServerLink(url, noun="fleet server", timeout_s=0.3)
        with pytest.raises(ServerError, match="does not answer") as found:
            link.get("/fleet")
        link.close()
    assert found.value.is_passing
    assert len(sent) < 600


def test_a_body_that_drips_is_given_up_in_time() -> None:
    sent: list[int] = []

    def answer(talk: socket.socket) -> None:
        talk.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n")
        drip(b" " * 600, sent)(talk)

    with answering(answer) as (url, _):
        link = ServerLink(url, noun="fleet server", timeout_s=0.3)
        with pytest.raises(ServerError, match="does not answer"):
            link.get("/fleet")
        link.close()
    assert len(sent) < 600


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
def test_a_proxy_is_not_asked_for_what_is_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with (
        answering(lambda talk: talk.sendall(ANSWER)) as (url, asked),
        answering(lambda talk: talk.sendall(ANSWER)) as (proxy, taken),
    ):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, proxy)
        for address in (url, url.replace("127.0.0.1", "localhost")):
            link = ServerLink(address, noun="fleet server", token="secret", timeout_s=5)
            assert link.get("/fleet") is None
            link.close()
        assert len(asked) == 2
        assert not taken
        # Other machines are reached by the proxy, as everywhere.
        link = ServerLink("http://far.example:7788", noun="fleet server", token="t", timeout_s=5)
        assert link.get("/fleet") is None
        link.close()
        assert taken[0].startswith(b"GET http://far.example:7788/fleet HTTP/1.1")


def test_a_token_in_the_address_is_shown_to_the_server_and_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARTITA_TOKEN", "another")
    refusal = ANSWER.replace(b"200 OK", b"404 Not Found")
    with answering(lambda talk: talk.sendall(refusal)) as (url, asked):
        link = ServerLink(url.replace("//", "//any:s3%2Fcret@"), noun="fleet server", timeout_s=5)
        with pytest.raises(ServerError) as refused:
            link.get("/fleet")
    assert b"authorization: bearer s3/cret\r\n" in asked[0].lower()
    assert url in str(refused.value)
    assert "cret" not in f"{refused.value} {refused.value.detail} {link.url}"
    with pytest.raises(ServerError) as silent:
        link.get("/fleet")
    link.close()
    assert "cret" not in f"{silent.value} {silent.value.detail}"


@pytest.mark.parametrize(
    "url", ["http://any:TOKEN@", "http://any:TOKEN@host:99999", "any:TOKEN@host", "ftp://a:TOKEN@h"]
)
def test_a_wrong_address_is_named_without_its_token(url: str) -> None:
    with pytest.raises(InvalidInputError) as wrong:
        check_address(url, noun="fleet server")
    assert "TOKEN" not in str(wrong.value)


def test_addresses_are_split() -> None:
    assert split_address("http://u:a@b:p@host:1/x@y") == ("http://host:1/x@y", "a@b:p")
    assert split_address("http://host:1/x?y=u:p@z") == ("http://host:1/x?y=u:p@z", "")
    assert split_address("https://token@host") == ("https://host", "")
    assert [is_loopback(host) for host in ("LocalHost.", "127.9.9.9", "::1", "0.0.0.0", "a")] == [
        *(True, True, True, False, False)
    ]
