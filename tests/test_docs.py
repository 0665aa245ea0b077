"""The documentation is true: its code runs, its links resolve, the API page misses no public name."""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import seloptim

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
NOTEBOOKS = sorted(DOCS.glob("*.ipynb"))
TRAINERS = {"transformers", "accelerate", "lightning", "mup", "peft"}
OPTIONAL = {"tensorboard", "torchopt", "matplotlib", "sklearn", "tqdm", *TRAINERS}  # extras that a block may need


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


class Block(NamedTuple):
    """A fenced block: what stands behind its opening fence, the line below it, its text."""

    info: str
    line: int
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^(`{3,})([^\n`]*)\n(.*?)^\1`*\s*$", text, re.M | re.S):
        yield Block(found[2].strip(), text[: found.start(3)].count("\n"), found[3])


def without_blocks(page: Path) -> str:
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1`*\s*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


# ------------------------------------------------------------------------------------------------------- code


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models of these pages are so small that a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def command_line(line: str) -> str:
    """What a line of a shell block that calls this package prints."""
    from seloptim.__main__ import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(shlex.split(line)[3:])
    assert code == 0, f"{line}: exit code {code}"
    return out.getvalue()


# What the trainers' packages say of each other and of a run as small as a page's; what we warn of at a load stays an error.
THEIRS = ("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:::lightning", "error:the loaded raw weights")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.filterwarnings(*THEIRS)) if page.stem == "integrations" else page
        for page in PAGES
        if any(b.info == "python" for b in blocks(page))
    ],
    ids=page_id,
)
def test_every_python_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks share a namespace and an empty directory, its calls of the command line too.

    A block `output` is what the block above it prints.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    skipped: list[str] = []
    for block in blocks(page):
        if block.info == "output" and not skipped:
            same = doctest.OutputChecker().check_output(
                block.text, printed, doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
            )
            assert same, f"{page.name}:{block.line}: the page says\n{block.text}\nbut the block above prints\n{printed}"
        if block.info == "sh":
            ours = [line for line in block.text.splitlines() if line.startswith("python -m seloptim ")]
            printed = "".join(map(command_line, ours))
            continue
        if block.info != "python":
            continue
        code = compile("\n" * block.line + block.text, str(page), "exec")  # so that a traceback has the page's lines
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] not in OPTIONAL:
                raise
            skipped.append(f"line {block.line} needs {missing.name}")
        except NameError as unknown:
            if not skipped:
                raise
            skipped.append(f"line {block.line} needs {unknown.name}")
        printed = out.getvalue()
    if skipped:
        pytest.skip("; ".join(skipped))


def load_notebook_module() -> Any:
    spec = importlib.util.spec_from_file_location("docs_notebook", DOCS / "notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=page_id)
def test_notebook_runs_and_prints_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))

    def outputs() -> list[list[str]]:
        # Digits differ between machines in the last places; the words must not.
        printed = ["".join(o["text"]) for c in notebook["cells"] for o in c.get("outputs", [])]
        return [re.sub(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", "#", text).split() for text in printed]

    shown = outputs()
    monkeypatch.chdir(tmp_path)
    load_notebook_module().run(notebook, path.name)
    assert outputs() == shown, "run docs/notebook.py on it to refresh what it shows"


def png_size(path: Path) -> bytes:
    """Width and height, from a PNG's header."""
    return path.read_bytes()[16:24]


def test_figures_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["figures.py", str(tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(DOCS / "figures.py"), run_name="__main__")
    drawn = {path.name for path in tmp_path.glob("*.png")}
    shown = {Path(target).name for page in PAGES for target in links(page) if target.endswith(".png")}
    assert drawn <= shown
    for name in drawn:
        assert png_size(tmp_path / name) == png_size(DOCS / name), f"run docs/figures.py: {name} is another picture"


REPORTS = [
    (page, suite) for page in PAGES for suite in re.findall(r"^<!-- efficiency: ([\w-]+) -->$", page.read_text(), re.M)
]


@pytest.mark.parametrize(("page", "suite"), REPORTS, ids=[f"{page.stem}-{suite}" for page, suite in REPORTS])
def test_tables_are_those_of_the_results(page: Path, suite: str) -> None:
    """What a page says was measured is what the committed results say."""
    command = [sys.executable, str(ROOT / "examples" / "benchmarks" / "efficiency.py"), "--suite", suite, "--report"]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    text = page.read_text().split(f"<!-- efficiency: {suite} -->")[1].split("<!-- end -->")[0]
    shown = [line for line in text.splitlines() if line.startswith("|")]
    assert shown == [line for line in report.splitlines() if line.startswith("|")], f"{command[1:]} says\n{report}"


# ------------------------------------------------------------------------------------------------------ links


def anchors(page: Path) -> set[str]:
    """GitHub's names for the headings of a page."""
    headings = re.findall(r"^#+\s+(.+?)\s*$", without_blocks(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_blocks(page))
    return [target.split()[0] for target in re.findall(r"\]\(([^)]+)\)", text)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_resolve(page: Path) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = page if not name else (page.parent / name).resolve()
        assert there.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{page.name} links to {target}; the headings there are {anchors(there)}"


def test_every_page_is_in_the_table_of_contents() -> None:
    toctrees = [b.text for b in blocks(DOCS / "index.md") if b.info == "{toctree}"]
    listed = {line.strip() for text in toctrees for line in text.splitlines() if line and not line.startswith(":")}
    assert listed == {path.stem for path in (*DOCS.glob("*.md"), *NOTEBOOKS)} - {"index"}


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="needs the extra 'docs'",
)
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "--keep-going", "-d", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert 'id="seloptim.SELAdam.scales"' in page
    loaded = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css)[^"]*)"', page)
    assert not loaded, f"the site must be readable without a network, it loads {loaded}"


# -------------------------------------------------------------------------------------------------------- api


def public_modules() -> list[Any]:
    names = [m.name for m in pkgutil.iter_modules(seloptim.__path__) if not m.name.startswith("_") and not m.ispkg]
    return [importlib.import_module(f"seloptim.{name}") for name in names]


def public_names() -> dict[str, Any]:
    """Qualified name -> object: what stands in seloptim itself, then what its public modules offer beside it.

    A module offers what its __all__ lists, or else what has no underscore and a docstring with an example; functions
    without one pass between modules.
    """
    at_top = {name: value for name, value in vars(seloptim).items() if not name.startswith("_")}
    found = {f"seloptim.{name}": value for name, value in at_top.items() if not inspect.ismodule(value)}
    for module in public_modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__ or name.startswith("_") or name in at_top:
                continue
            if name in getattr(module, "__all__", ()) or "Example" in (inspect.getdoc(value) or ""):
                found[f"{module.__name__}.{name}"] = value
    return found


def documented() -> dict[str, set[str]]:
    """Qualified name -> its members, for every directive of the API page."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for directive in re.finditer(r"^\.\. (?:auto\w+|py:data):: (\S+)\n((?:[ \t]+.*\n)*)", text, re.M):
        members = re.search(r":members: (.*)", directive[2])
        found[directive[1]] = set(members[1].replace(",", " ").split()) if members else set()
    return found


def test_api_page_has_every_public_name_and_no_other() -> None:
    names = public_names()
    pages = documented()
    missing = names.keys() - pages.keys()
    assert not missing, f"docs/api.md lacks {sorted(missing)}"
    gone = {name for name in pages if name not in names}
    assert not gone, f"docs/api.md documents what is not there: {sorted(gone)}"
    for name, value in names.items():
        if not inspect.isclass(value) or hasattr(value, "_fields"):
            continue
        methods = {
            method
            for owner in value.__mro__
            if owner.__module__.startswith("seloptim")
            for method, member in vars(owner).items()
            if not method.startswith("_") and member.__doc__
        }
        above = set().union(*(pages.get(f"seloptim.{base.__name__}", set()) for base in value.__mro__[1:]))
        assert not (lacking := methods - pages[name] - above), f"docs/api.md lacks {sorted(lacking)} of {name}"
        assert pages[name] <= set(dir(value)), f"docs/api.md lists {sorted(pages[name] - set(dir(value)))} of {name}"


@pytest.mark.parametrize("name", sorted(public_names()))
def test_docstring_names_every_argument(name: str) -> None:
    """The API page shows docstrings, so an argument that none mentions is undocumented."""
    value = public_names()[name]
    if not callable(value) or hasattr(value, "_fields"):
        return
    text = inspect.getdoc(value) or ""
    assert text, f"{name} has no docstring"
    absent = [
        argument.name
        for argument in inspect.signature(value).parameters.values()
        if argument.kind is not inspect.Parameter.VAR_KEYWORD and not re.search(rf"\b{argument.name}\b", text)
    ]
    assert not absent, f"the docstring of {name} does not mention {absent}"
