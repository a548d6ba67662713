"""Requests of both servers, and the settings that they ask for."""

from pathlib import Path

import pytest

from partita.cli.energy.serve import _ancestors_options
from partita.errors import InvalidInputError
from partita.requests import fields_of
from partita.service.energy.serve import ServeEnergyRequest, settings_of
from partita.service.fleet.serve import ServeFleetRequest


def test_both_servers_listen_by_the_same_options_on_their_own_ports() -> None:
    shared = [
        {field.name: field.option for field in fields_of(request)}
        for request in (ServeEnergyRequest, ServeFleetRequest)
    ]
    assert all(shared[0][name] == shared[1][name] for name in ("host", "allow_host", "port"))
    assert (ServeEnergyRequest().port, ServeFleetRequest().port) == (7787, 7788)


def test_schedulers_have_the_names_of_the_ancestors_too(tmp_path: Path) -> None:
    request = ServeEnergyRequest(
        scheduler="AllMaxFrequency", state=str(tmp_path / "s"), allow_host=("proxy",)
    )
    settings = settings_of(request)
    assert settings.energy is not None
    assert settings.energy.scheduler == "all-max"
    assert settings.allow_hosts == ("proxy",)


def test_options_of_the_scheduler_are_json_or_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSEUS_SCHEDULER_ARGS", '{"unit_time": 0.001, "name": "a=b"}')
    assert _ancestors_options() == ["unit_time=0.001", 'name="a=b"']
    monkeypatch.setenv("ZEUS_PFO_SCHEDULER_ARGS", "[1")
    with pytest.raises(InvalidInputError, match=r"ZEUS_PFO_SCHEDULER_ARGS is .* JSON object"):
        _ancestors_options()
    with pytest.raises(InvalidInputError, match=r"'fast'.*k=v"):
        settings_of(ServeEnergyRequest(scheduler_option=("fast",)))
