"""Execute the lessons and write their notebooks: `python lessons/build.py`, or `… 01 04`.

`src/NN_title.py` is what people edit and review; `NN_title.ipynb` is made from it, with outputs and
figures inside, and without whatever would differ from one machine or run to the next.
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def sources(wanted=()):  # -> paths, in order
    """The lessons whose numbers were asked for, or all."""
    paths = sorted((HERE / "src").glob("[0-9][0-9]_*.py"))
    return [path for path in paths if not wanted or path.name[:2] in wanted]


def notebook_path(source):
    """Where the notebook of a source lies."""
    return HERE / f"{source.stem}.ipynb"


def unexecuted(source):  # path of a .py -> notebook
    """Its cells, with identifiers that stay."""
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"c{i:02}", nbformat.from_dict({})
    return notebook


def execute(source):  # path of a .py -> notebook
    """All cells from top to bottom, in `lessons/`, a minute each at most."""
    notebook = unexecuted(source)
    client = NotebookClient(
        notebook,
        timeout=60,
        kernel_name="python3",
        resources={"metadata": {"path": str(HERE)}},
        coalesce_streams=True,  # a slow cell's printing arrives in pieces: how many is chance
    )
    client.execute()
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    return notebook


def main():
    """Build what was asked for."""
    chosen = sources(sys.argv[1:])
    if not chosen:
        sys.exit(f"build.py: error: there is no lesson {' '.join(sys.argv[1:])}")
    for source in chosen:
        nbformat.write(execute(source), notebook_path(source))
        size = notebook_path(source).stat().st_size / 1000
        print(f"{notebook_path(source).name}: {size:.0f} kB")


if __name__ == "__main__":
    main()
