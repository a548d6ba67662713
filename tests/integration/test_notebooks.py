"""The example notebooks run, and what they show has no scripts and is small."""

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="the extra dev has nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
BOOKS = ("plan-a-70b.ipynb", "why-is-my-pipeline-slow.ipynb", "which-policy-for-my-lab.ipynb")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the kernel's own machinery
def test_the_notebooks_run_in_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel for all: starting one takes longer than a notebook."""
    assert sorted(BOOKS) == sorted(path.name for path in FOLDER.glob("*.ipynb"))
    monkeypatch.chdir(tmp_path)
    whole = nbformat.v4.new_notebook()
    for name in BOOKS:
        whole.cells += nbformat.read(FOLDER / name, as_version=4).cells
    for index, cell in enumerate(whole.cells):
        cell["id"] = f"c{index}"
    nbclient.NotebookClient(whole, timeout=60, kernel_name="python3").execute()
    shown = [
        output["data"]["text/html"]
        for cell in whole.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert len(shown) >= 8
    for text in shown:
        assert "<script" not in text
        assert len(text) < 200_000
        assert text.startswith('<div class="partita-shown">')


def test_notebooks_are_stored_without_outputs() -> None:
    for name in BOOKS:
        for cell in nbformat.read(FOLDER / name, as_version=4).cells:
            assert not cell.get("outputs")
            assert cell.get("execution_count") is None
