"""The page, served: what ``partita.serve_page`` and ``partita ui`` do."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from partita.errors import InvalidInputError
from partita.fleet.live.token import fleet_token
from partita.flows.fleet.live import FleetFields
from partita.flows.runs.requests import RUNS
from partita.http import check_address, is_loopback
from partita.requests import declare, make
from partita.service.listen import ListenFields, port_field, server_needed, url_of
from partita.service.settings import PageSettings, Settings
from partita.units import parse_bytes, parse_seconds

DEFAULT_PORT = 7789


@dataclass(frozen=True, kw_only=True)
class PageRequest(ListenFields, FleetFields):
    """Where the page is served, what it shows, and the limits of its work."""

    port: int = port_field(DEFAULT_PORT)
    runs: str = declare(RUNS, path="folder", help="Folder whose runs are shown.")
    energy_server: str | None = declare(
        None,
        usual="none",
        help="Energy server whose jobs are shown, such as http://any:TOKEN@127.0.0.1:7787.",
    )
    jobs: int = declare(
        2, minimum=1, maximum=64, help="Number of processes that plan and simulate at a time."
    )
    time_limit: str = declare("600", usual="600 s", help="Longest time of a piece of work.")
    memory: str = declare("8GB", help="Memory that a piece of work may take.")
    upload: str = declare("32MB", help="Largest document that may be uploaded.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageServer:
    """A page that is served.

    Attributes:
        url: Address of the server.
        link: Address to open: good once.
        notes: What whoever started it should know, a line each.
    """

    url: str
    link: str
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """Return the link to open."""
        return self.link

    def to_json(self) -> dict[str, Any]:
        """Return where it is as JSON values."""
        return {"url": self.url, "link": self.link, "notes": list(self.notes)}


def serve_page(
    *,
    on_listening: Callable[[PageServer], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 (fields of PageRequest)
) -> None:
    """Serve the page for the whole flow in this process until SIGTERM or Ctrl-C.

    Args:
        on_listening: Called once the page can be opened, with the link to it.
        **options: The fields of :class:`PageRequest`: the options of ``partita ui``.

    Raises:
        InvalidInputError: There is no such option, or the address cannot be had.
        UnsupportedError: The extra ``serve`` is not installed.
    """
    serve_page_request(make(PageRequest, **options), on_listening)


def serve_page_request(request: PageRequest, on_listening: Callable[[PageServer], None]) -> None:
    """Serve as a request asks for; see :func:`serve_page`."""
    with server_needed():
        from partita.service.app import make_app  # noqa: PLC0415 (an extra)
        from partita.service.logs import log_to_stderr  # noqa: PLC0415 (likewise)
        from partita.service.serve import bound_socket, serve  # noqa: PLC0415 (likewise)
    tls = request.tls()
    settings = page_settings(request)
    log_to_stderr(request.log)
    app = make_app(settings)
    bound = bound_socket(request.host, request.port)
    url = url_of(request.host, bound, is_tls=tls is not None)
    token = app.state.page.keys.link()
    on_listening(PageServer(url=url, link=f"{url}/?token={token}", notes=request.notes()))
    serve(app, bound, tls=tls)


def page_settings(request: PageRequest) -> Settings:
    """Return the settings of the app.

    Raises:
        InvalidInputError: A limit is wrong, or a cookie would travel in clear text.
    """
    if not is_loopback(request.host) and request.tls_cert is None:
        raise InvalidInputError(
            f"{request.host!r} can be reached from other machines, and the page's key would travel "
            "in clear text: give --tls-cert, or keep 127.0.0.1 and use ssh -L "
            f"{request.port}:127.0.0.1:{request.port}"
        )
    if request.energy_server is not None:
        check_address(request.energy_server, noun="energy server")
    upload = int(parse_bytes(request.upload, "--upload"))
    page = PageSettings(
        runs=Path(request.runs),
        fleet=request.server,
        fleet_token=fleet_token(request.token_file, request.server),
        energy_server=request.energy_server or "",
        jobs=request.jobs,
        time_limit_s=parse_seconds(request.time_limit, "--time-limit"),
        memory_bytes=int(parse_bytes(request.memory, "--memory")),
        upload_bytes=upload,
        tls=request.tls_cert is not None,
    )
    return Settings(
        host=request.host,
        allow_hosts=request.allow_host,
        # A character of a document may take six in JSON.
        max_body_bytes=max(2**20, 6 * upload),
        version=import_module("partita").__version__,
        page=page,
    )
