import logging

import pytest

from partita import plugins
from partita.errors import InvalidInputError, UnsupportedError
from partita.plugins import PluginGroup, guarded, installed, load_target


class Entry:
    """An entry point of an installed plug-in."""

    def __init__(self, name: str, found: object) -> None:
        self.name, self.value, self.found = name, f"package:{name}", found
        self.loaded = 0

    def load(self) -> object:
        self.loaded += 1
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


ORDERINGS = PluginGroup(group="partita.fleet.orderings", noun="ordering")


@pytest.fixture
def entries(monkeypatch):
    """Install two plug-ins, one of them broken."""
    found = {"good": Entry("good", len), "bad": Entry("bad", ImportError("no module x"))}
    monkeypatch.setattr(plugins, "installed", lambda group: found)
    return found


def test_nothing_is_loaded_to_know_the_names(entries):
    assert ORDERINGS.names() == ["good", "bad"]
    words = str(ORDERINGS.unknown("goood", ["fifo"]))
    assert words == "there is no ordering 'goood'; did you mean 'good'?"
    assert not entries["good"].loaded + entries["bad"].loaded


def test_the_named_plug_in_is_loaded_and_no_other(entries):
    assert ORDERINGS.find("good") is len
    assert ORDERINGS.find("other") is None
    assert not entries["bad"].loaded


def test_a_broken_plug_in_is_an_error_where_it_was_asked_for(entries):
    words = "^ordering 'bad' is a plug-in, and package:bad cannot be loaded: no module x$"
    with pytest.raises(UnsupportedError, match=words):
        ORDERINGS.find("bad")


def test_a_broken_plug_in_is_one_warning_where_it_was_not(entries, caplog):
    assert ORDERINGS.load_all() == {"good": len}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in record.getMessage()


def test_failures_of_a_plug_in_name_it():
    with pytest.raises(UnsupportedError, match=r"'odd'.*plug-in.*TypeErr"):
        guarded("ordering", "odd", len)(3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"'odd'.*plug-in.*returned"):
        guarded("ordering", "odd", len, returns=str)([])

    def refuse() -> None:
        raise InvalidInputError("its own words")

    with pytest.raises(InvalidInputError, match=r"^its own words$"):
        guarded("ordering", "odd", refuse)()


def test_what_is_installed_is_looked_up_once():
    assert installed("partita.nothing") == {}
    assert installed("partita.nothing") is installed("partita.nothing")


def test_a_row_names_what_is_loaded_when_it_is_asked_for():
    assert load_target("partita.plugins:load_target") is load_target
