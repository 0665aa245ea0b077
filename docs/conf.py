"""The site: python -m sphinx -W -n --keep-going docs site"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from myst_parser.parsers.sphinx_ import MystParser

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # the package and notebook.py, installed or not

from notebook import as_markdown  # noqa: E402

project = "seloptim"
author = "The seloptim authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
html_theme = "furo"
html_title = "seloptim"
html_math_renderer = "mathml"
smartquotes = False  # an option's "value" can be copied
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False

default_role = "literal"  # a name in `single quotes` of a docstring is code
autodoc_typehints = "none"  # the signature would be longer than what it says; types stand in the text
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 90
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]


class NotebookParser(MystParser):
    """Notebooks as pages: their text, code and printed output."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(as_markdown(inputstring), document)


def formula(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """A formula as MathML, which browsers draw by themselves: no script, nothing from a network."""
    block = isinstance(node, nodes.math_block)
    mathml = tex2mathml(node.astext(), as_block=block)
    translator.body.append(f'<div class="math">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


SECTION = re.compile(r"(Args|Arguments|Returns|Raises|Example|Source):\s*(.*)")
ENTRY = re.compile(r"((?:\*\*)?[A-Za-z_][\w, *]*):\s+(.*)")


def _prose(line: str) -> str:
    """Keep reStructuredText from reading mathematics (|raw|, a*b) as markup; `code` stays."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if k % 2 else re.sub(r"([*|`_])", r"\\\1", part) for k, part in enumerate(parts))


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Runs of lines between blank ones."""
    run: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            run.append(line)
        elif run:
            yield run
            run = []


def _body(lines: list[str], entries: bool) -> Iterator[str]:
    """The lines below a section's name, at any indentation."""
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    for run in _paragraphs([line[indent:] for line in lines]):
        if run[0].startswith(">>>"):
            yield from run
        else:
            listed = False
            for line in run:
                found = ENTRY.fullmatch(line) if entries else None
                if found:
                    listed = True
                    yield ""
                    names = ", ".join(f"``{name.strip()}``" for name in found[1].split(","))
                    yield f"* {names}: {_prose(found[2])}"
                else:
                    yield ("  " if listed else "") + _prose(line.strip())
        yield ""


def render_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """This project's docstrings (docs/api.md shows them) as reStructuredText."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        section = SECTION.fullmatch(line)
        at += 1
        if section:
            start = at
            while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
                at += 1
            title = "Arguments" if section[1] == "Args" else section[1]
            if section[2]:
                text = " ".join([section[2], *(text.strip() for text in lines[start:at])])
                out += [f"**{title}.** {_prose(text)}", ""]
                continue
            entries = title in ("Arguments", "Raises")
            out += [f"**{title}.**", "", *_body(lines[start:at], entries), ""]
        elif line.strip() == "::" or line.startswith(".. "):
            out.append(line)
            while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
                out.append(lines[at])
                at += 1
        else:
            out.append(_prose(line))
    lines[:] = out


def setup(app: Any) -> None:
    app.add_source_parser(NotebookParser)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("autodoc-process-docstring", render_docstring)
