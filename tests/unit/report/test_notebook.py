"""Documents in a notebook: one line as text; a table and a picture as HTML, without scripts."""

import base64
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import partita
from partita.documents import load
from partita.flows.plan import PlanResult
from partita.report.notebook import MAX_BYTES, Progress, html_table, shown
from partita.testing.builders import chain

SAMPLES = Path(__file__).parents[2] / "golden" / "documents_v1" / "documents"
HOSTILE = "<script>alert(1)</script>"


def documents():
    planned = partita.plan("gpt-small", cluster="2x2xa100", planner="uniform", microbatches=4)
    yield planned.problem
    yield planned.plan
    yield planned.solution
    yield planned.problem.cluster
    yield partita.simulate(planned).timeline
    yield load(SAMPLES / "frontier-of-plan.json")
    yield load(SAMPLES / "history-simulated.json")
    yield planned


def pictured(text: str) -> str:
    """Return the picture in an output."""
    (packed,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    return base64.b64decode(packed).decode()


DOCUMENTS = list(documents())


@pytest.mark.parametrize("value", DOCUMENTS, ids=lambda value: type(value).__name__)
def test_a_document_is_shown_by_a_table_and_a_picture(value) -> None:
    text = value._repr_html_()
    assert len(text.encode()) < MAX_BYTES
    assert "<script" not in text
    assert "prefers-color-scheme" in text
    root = ElementTree.fromstring(pictured(text))
    assert root.tag.endswith("svg")
    if not isinstance(value, PlanResult):
        assert "<table>" in text
        assert "\n" not in repr(value)
        assert repr(value).startswith(type(value).__name__)


def test_names_of_others_stay_text() -> None:
    plain = chain(3)
    ops = replace(plain.ops, names=[HOSTILE, *plain.ops.names[1:]])
    planned = partita.plan(
        replace(plain, name=HOSTILE, ops=ops), cluster="2xa100", planner="uniform"
    )
    for value in (
        planned.problem,
        planned.plan,
        planned.solution,
        planned,
        partita.explain(planned),
    ):
        text = value._repr_html_()
        assert "<script" not in text + pictured(text)
    assert "&lt;script&gt;" in planned.problem._repr_html_()
    hostile = replace(
        planned.problem.cluster,
        name=HOSTILE,
        devices=[
            replace(device, name=f"{HOSTILE}{index}", type=HOSTILE)
            for index, device in enumerate(planned.problem.cluster.devices)
        ],
    )
    text = hostile._repr_html_()
    assert "<script" not in text + pictured(text)


def test_what_is_too_long_is_cut_and_said() -> None:
    text = shown(["x"], [{"a": "y" * 5000}] * 500, "<svg>" + " " * 500_000 + "</svg>")
    assert len(text) < 10_000
    assert "476 more rows" in text
    assert html_table([]) == ""


def test_progress_outside_of_a_notebook_is_a_line(capsys) -> None:
    Progress()("half")
    assert "half" in capsys.readouterr().err
