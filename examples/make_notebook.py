"""Makes quickstart.ipynb from quickstart.py and runs it, so that the notebook shows what each cell prints.

    python examples/make_notebook.py

The script is in the percent format: `# %%` begins a code cell, `# %% [markdown]` a text cell of comment lines. Only
what cells print to stdout is kept.
"""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("quickstart.py")


def cells_of(script: str) -> list[dict[str, Any]]:
    """The cells of a script in the percent format, as nbformat 4.5 stores them, without outputs."""
    cells: list[dict[str, Any]] = []
    for part in script.split("# %%")[1:]:
        header, _, body = part.partition("\n")
        lines = body.strip("\n").split("\n")
        cell: dict[str, Any] = {"id": f"cell-{len(cells)}", "metadata": {}}
        if header.strip() == "[markdown]":
            cell |= {"cell_type": "markdown"}
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
        else:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
        cells.append(cell | {"source": _stored("\n".join(lines).strip("\n"))})
    return cells


def execute(cells: list[dict[str, Any]]) -> None:
    """Runs the code cells in order in one namespace and puts what each prints into its outputs."""
    namespace: dict[str, Any] = {}
    code_cells = [cell for cell in cells if cell["cell_type"] == "code"]
    for count, cell in enumerate(code_cells, start=1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), f"cell {count}", "exec"), namespace)
        cell["execution_count"] = count
        text = printed.getvalue()
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": _stored(text)}] if text else []


def _stored(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    cells = cells_of(SCRIPT.read_text(encoding="utf-8"))
    execute(cells)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path = SCRIPT.with_suffix(".ipynb")
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path}: {len(cells)} cells")


if __name__ == "__main__":
    main()
