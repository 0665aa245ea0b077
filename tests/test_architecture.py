"""Imports point one way: what each module may know, read from the source, imports inside functions included."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import seloptim

PACKAGE = Path(seloptim.__file__).parent
TESTS = Path(__file__).parent
MAY_KNOW: dict[str, set[str]] = {
    "functional": set(),
    "init": {"_shards", "functional"},
    "schedule": set(),
    "_rule": {"functional"},
    "_shards": set(),
    "_execute": {"_shards", "_rule", "kernels"},
    "kernels": {"_rule", "kernels"},
    "_stats": {"functional", "_rule"},
    "_options": {"init", "schedule", "_rule"},
    "_shadow": {"_shards", "functional", "init", "_rule", "_execute", "_stats", "_options"},
    "_base": {"_shards", "init", "_rule", "_execute", "_options", "_shadow", "convert"},
    "optimizer": {"_shards", "_rule", "_execute", "_options", "_base", "_stats", "convert"},
    "groups": set(),
    "transform": {"functional", "init", "schedule", "_rule", "_options"},
    "curved": {"_shards", "_rule", "_execute", "_options", "_base"},
    "convert": {"_shards", "functional", "_rule"},
    "losses": set(),
    "tensorboard": {"optimizer"},
}
# Outside the standard library and torch; extras only, and only where they are asked for.
MAY_NEED = {"transform": {"torchopt"}, "kernels": {"triton"}}


def modules() -> list[str]:
    """Dotted names of the package's modules, without the package's."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(".".join(path.with_suffix("").parts) for path in paths)


def imported(path: Path, package: tuple[str, ...]) -> Iterator[str]:
    """Absolute dotted names of what a file of `package` imports while it runs: not what only a type checker reads."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from .x import y` may name a module or something in it; the longer name has the module in front.
            yield from (".".join((*base, alias.name)) for alias in node.names)


def imports_of(module: str) -> list[str]:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    return list(imported(path, ("seloptim", *module.split(".")[:-1])))


def test_relative_imports_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .optimizer import SELAdam\n"
        "def f():\n    from . import _rule\n    from ..init import shrink\n    import seloptim.losses\n"
    )
    assert list(imported(path, ("seloptim", "kernels"))) == [
        "typing.TYPE_CHECKING",
        "seloptim.kernels._rule",
        "seloptim.init.shrink",
        "seloptim.losses",
    ]


@pytest.mark.parametrize("module", modules())
def test_a_module_knows_only_what_it_may(module: str) -> None:
    room = module.split(".")[0]
    names = {name.split(".")[1] for name in imports_of(module) if name.startswith("seloptim.")}
    ours = names & {other.split(".")[0] for other in modules()}
    if room == "__init__":
        return
    if room == "__main__":
        assert not {name for name in ours if name.startswith("_")}
        return
    assert room in MAY_KNOW, f"say in MAY_KNOW what {room} may know"
    assert ours <= MAY_KNOW[room]
    assert ours == names, "the package's own face is for users"


@pytest.mark.parametrize("module", modules())
def test_a_module_needs_only_torch(module: str) -> None:
    needed = {name.split(".")[0] for name in imports_of(module)} - sys.stdlib_module_names - {"torch", "seloptim"}
    if module != "__main__":
        assert needed <= MAY_NEED.get(module.split(".")[0], set())


def test_the_arrows_have_no_cycle() -> None:
    def behind(room: str, seen: tuple[str, ...]) -> None:
        assert room not in seen, " -> ".join((*seen, room))
        for other in MAY_KNOW[room] - {room}:
            behind(other, (*seen, room))

    for room in MAY_KNOW:
        behind(room, ())


def test_the_package_exports_and_does_nothing_else() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert isinstance(tree.body[0], ast.Expr)
    for node in tree.body[1:]:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in node.names), "from .x import Y as Y"


@pytest.mark.parametrize("name", ["oracle.py", "cases.py"])
def test_the_truth_is_independent(name: str) -> None:
    assert not [found for found in imported(TESTS / name, ("tests",)) if found.split(".")[0] == "seloptim"]
