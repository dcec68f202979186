"""The course: each notebook is its source, runs from top to bottom, and shows its figures."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import jupytext
import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("build", ROOT / "lessons" / "build.py")
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)
LESSONS = pytest.mark.parametrize("source", build.sources(), ids=lambda path: path.stem)


def cells(notebook):
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


@LESSONS
def test_notebook_is_its_source(source):
    """A source that was edited without building again is found here."""
    stored = json.loads(build.notebook_path(source).read_text())
    assert cells(stored) == cells(jupytext.read(source))
    text = json.dumps(stored)
    assert len(text) <= 400_000
    assert not re.search(r"/(home|tmp|root|work|Users)/", text), "a path of some machine"


@LESSONS
def test_figures_are_inside(source):
    """Every cell that ends in a figure holds one picture; no error, no warning."""
    stored = json.loads(build.notebook_path(source).read_text())
    pictures = 0
    for cell in stored["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not any(o.get("name") == "stderr" for o in cell["outputs"])
        assert not any(o["output_type"] == "error" for o in cell["outputs"])
        shown = sum("image/png" in o.get("data", {}) for o in cell["outputs"])
        code = "".join(cell["source"]).replace("%matplotlib", "#")
        last = ast.unparse(ast.parse(code).body[-1])
        assert shown == last.startswith("figures.")
        pictures += shown
    assert 1 <= pictures <= 6


@LESSONS
def test_lesson_runs(source, monkeypatch):
    """As it lies in the repository, a minute a cell at most, without a display."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("DISPLAY", raising=False)
    fresh = build.execute(source)
    stored = json.loads(build.notebook_path(source).read_text())
    for now, then in zip(fresh.cells, stored["cells"], strict=True):
        kinds = [[o["output_type"] for o in cell.get("outputs", [])] for cell in (now, then)]
        assert kinds[0] == kinds[1]
        assert not any(o.get("name") == "stderr" for o in now.get("outputs", []))


@LESSONS
def test_length(source):
    """At most 120 lines of code, and the parts that every lesson has."""
    parts = jupytext.read(source).cells
    code = "\n".join(cell.source for cell in parts if cell.cell_type == "code")
    assert sum(bool(re.match(r"\s*[^#\s]", line)) for line in code.splitlines()) <= 120
    prose = "\n".join(cell.source for cell in parts if cell.cell_type == "markdown")
    for part in ("**Goal.**", "## Summary", "**In the paper.**", "<details>"):
        assert part in prose
