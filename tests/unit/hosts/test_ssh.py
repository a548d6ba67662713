"""Files of hosts, and which of them a plan's hosts are."""

from pathlib import Path

import pytest

from partita.errors import FormatError, InvalidInputError
from partita.hosts.places import PlanHost, RealHost, match_hosts
from partita.hosts.ssh import SshPlace, load_hostfile, read_hostfile
from partita.hosts.table import PlaceFields, check_place

PLAN = [PlanHost(name="gpu10", ranks=(0, 1, 2)), PlanHost(name="gpu2", ranks=(3,))]


def test_all_spellings_of_a_hostfile_are_read() -> None:
    text = "# ours\ngpu10 slots=3\nme@gpu2:1 address=10.0.0.2\n\nn3\n"
    assert read_hostfile(text) == [
        RealHost(name="gpu10", slots=3, address="gpu10", login="gpu10"),
        RealHost(name="gpu2", slots=1, address="10.0.0.2", login="me@gpu2"),
        RealHost(name="n3", slots=0, address="n3", login="n3"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no host is named"),
        ("a\na\n", "line 2: host 'a' stands twice"),
        ("a slots=x", "line 1: 'a slots=x' is not of the form HOST slots=N"),
        ("a cores=3", "line 1: 'cores=3'; expected slots=N or address=NAME"),
        ("-oProxyCommand=evil", "not of the form"),
        ("a:2 slots=3", "expected slots=N"),
    ],
)
def test_a_wrong_hostfile_is_refused_with_its_line(text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words.replace("(", r"\(")):
        read_hostfile(text)


def test_a_hostfile_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none:.*file"):
        load_hostfile(tmp_path / "none")


def test_hosts_are_those_of_the_plan_by_name_whatever_their_order() -> None:
    there = [RealHost(name="gpu2"), RealHost(name="other"), RealHost(name="gpu10")]
    assert [host.name for host in match_hosts(PLAN, there, "hosts")] == ["gpu10", "gpu2"]


def test_hosts_of_other_names_are_taken_in_their_order() -> None:
    there = [RealHost(name="n10"), RealHost(name="n2"), RealHost(name="n1")]
    assert [host.name for host in match_hosts(PLAN, there, "hosts")] == ["n10", "n2"]


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ([RealHost(name="gpu10"), RealHost(name="n1")], "does not name host gpu2 of the plan"),
        ([RealHost(name="n1")], "the plan uses 2 hosts, hosts has 1"),
        (
            [RealHost(name="gpu10", slots=2), RealHost(name="gpu2")],
            "host gpu10 of the plan has 3 ranks, hosts gives gpu10 2 slots",
        ),
    ],
)
def test_hosts_that_do_not_fit_the_plan_are_refused(there: list[RealHost], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        match_hosts(PLAN, there, "hosts")


def test_ssh_is_called_with_the_login_and_one_word_for_the_shell(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@gpu10\ngpu2\n")
    place = SshPlace(tmp_path / "hosts", PLAN, command="echo -n", python="/opt/my python")
    channel = place.start(0)
    (line,) = channel.lines()
    assert line.startswith(b"me@gpu10 exec ")
    assert line.endswith(b"'/opt/my python' -m partita.hosts.agent")
    assert channel.ended() == "echo ended with exit code 0"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on": "shh:hosts"}, "there is no 'shh'; did you mean 'ssh'"),
        ({"on": "ssh"}, "add what follows, ssh:HOSTFILE"),
        ({"detach": True}, "--detach is for runs on other hosts: add --on"),
        ({"ssh_command": "x"}, "--ssh-command is for runs on other hosts"),
    ],
)
def test_places_that_are_none_and_options_without_one_are_refused(
    options: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        check_place(PlaceFields(**options))  # type: ignore[arg-type]
