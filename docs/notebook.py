"""Run a notebook's cells without Jupyter, and read a notebook as Markdown.

python docs/notebook.py docs/first_steps.ipynb      # runs it and writes the output of each cell into it
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)


def run(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """Run the code cells in order, in one namespace, and keep what each prints as its output; returns the namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(_text(cell["source"]), f"{name}[cell {number}]", "exec"), namespace)
        text = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}] if text else []
    return namespace


def as_markdown(source: str) -> str:
    """The notebook in the JSON text `source` as one Markdown page."""
    parts = []
    for cell in json.loads(source)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(_text(cell["source"]))
        elif cell["cell_type"] == "code":
            parts.append(f"```python\n{_text(cell['source'])}\n```")
            parts += [
                f"```text\n{_text(output['text']).rstrip()}\n```" for output in cell["outputs"] if "text" in output
            ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        run(notebook, path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
