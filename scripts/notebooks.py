"""Run the notebooks and store what they put out.

    python -m scripts.notebooks

Each runs in a fresh kernel and an empty folder.
"""

import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from pmvit.files import write_text

FOLDER = Path(__file__).parents[1] / "notebooks"
SECONDS = 600  # for one cell


def run(path: Path) -> NotebookNode:
    """Run a notebook from its first cell to its last; the file stays as it is.

    Raises:
        CellExecutionError: If a cell does.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"timeout": SECONDS, "coalesce_streams": True}
        options.update(record_timing=False, store_widget_state=False)
        client = NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options)
        ran: NotebookNode = client.execute()
    ran.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for cell in ran.cells:
        if cell.cell_type == "code":
            cell.metadata = {}
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]  # warnings of others
    return ran


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        write_text(path, nbformat.writes(run(path)) + "\n")
        print(f"ran {path.name}")
