"""Documents in a notebook: one line as text; a table, figures in a sandbox and a picture."""

import base64
import html
import json
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


@pytest.mark.parametrize("value", DOCUMENTS, ids=lambda value: type(value).__name__)
def test_front_ends_choose_between_html_a_picture_and_text(value) -> None:
    found = value._repr_mimebundle_()
    assert found["text/plain"] == repr(value)
    assert found["text/html"] == value._repr_html_()
    assert found["image/svg+xml"] == pictured(found["text/html"])
    frame = re.search(r"<iframe [^>]*srcdoc='([^']*)'></iframe>", found["text/html"])
    if type(value).__name__ == "Plan":  # without a graph there is nothing to draw but its picture
        assert frame is None
        return
    assert frame is not None
    assert 'sandbox="allow-scripts allow-downloads"' in frame[0]  # never allow-same-origin
    inside = html.unescape(frame[1])
    assert "default-src 'none'; script-src 'sha256-" in inside
    data = re.search(r'id="data">(.*?)</script>', inside, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["sections"][0]["figures"]


def test_a_timeline_that_is_too_large_for_a_frame_is_a_picture() -> None:
    planned = partita.plan("gpt-small", cluster="16xa100", planner="uniform", microbatches=400)
    text = partita.simulate(planned, perturb=0.3)._repr_html_()
    assert len(text.encode()) < MAX_BYTES
    assert "<iframe" not in text
    assert pictured(text).startswith("<svg")


def test_what_is_too_long_is_cut_and_said() -> None:
    text = shown(["x"], [{"a": "y" * 5000}] * 500)
    assert len(text) < 10_000
    assert "476 more rows" in text
    assert html_table([]) == ""


def test_progress_outside_of_a_notebook_is_a_line(capsys) -> None:
    Progress()("half")
    assert "half" in capsys.readouterr().err
