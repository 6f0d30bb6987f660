"""Each layer imports only itself and what stands to its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, modules, parsed

ORDER = [
    "errors",
    "formatting",
    "spec",
    "ir",
    "backends",
    "ops",
    "strategies",
    "cost_models",
    "search",
    "runtime",
    "training",
    "planning",
    "quality",
    "api",
    "integrations",
    "calibration",
    "verification",
    "lab",
    "trials",
    "testing",
    "report",
    "cli",
]
"""From left to right. `autopar` itself re-exports what stands up to `verification`; `__main__` is the command line."""

WITHOUT_TORCH = {"errors", "formatting", "spec"}


def layer(module: str) -> str:
    """The layer of a dotted name: `autopar.ir.capture` is in `ir`."""
    parts = module.split(".")
    if len(parts) == 1:
        return "verification"
    return "cli" if parts[1] == "__main__" else parts[1]


def imports(tree: ast.AST, module: str, is_package: bool) -> set[str]:
    """Dotted names that a module imports, anywhere in it, those under TYPE_CHECKING included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*anchor, *filter(None, [base])])
            # `from autopar import spec` imports the layer, not what the face exports.
            names = {f"{base}.{alias.name}" for alias in node.names} if base == PACKAGE else set()
            found |= {n if layer(n) in ORDER else base for n in names} or {base}
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_only_what_stands_to_the_left(module: str) -> None:
    path = modules()[module]
    mine = layer(module)
    assert mine in ORDER, f"{path}: '{mine}' is no layer; the layers are {', '.join(ORDER)}"
    names = imports(parsed(path), module, path.name == "__init__.py")
    wrong = {n for n in names if n.split(".")[0] == PACKAGE and ORDER.index(layer(n)) > ORDER.index(mine)}
    assert not wrong, f"{path} ({mine}) imports {sorted(wrong)}, which stand to its right: {' < '.join(ORDER)}"


@pytest.mark.parametrize("module", sorted(m for m in modules() if layer(m) in WITHOUT_TORCH))
def test_descriptions_do_without_torch(module: str) -> None:
    path = modules()[module]
    names = imports(parsed(path), module, path.name == "__init__.py")
    assert not {n for n in names if n.split(".")[0] == "torch"}, f"{path} imports torch"


@pytest.mark.parametrize("module", sorted(modules()))
def test_nothing_but_the_tests_imports_tests_or_benchmarks(module: str) -> None:
    path = modules()[module]
    names = imports(parsed(path), module, path.name == "__init__.py")
    assert not {n for n in names if n.split(".")[0] in ("tests", "benchmarks")}


def test_the_imports_of_a_module_are_found(tmp_path: Path) -> None:
    source = (
        "import autopar.search.base\nfrom autopar import ir, Plan\nfrom autopar.spec.plan import Plan\n"
        "def f():\n    from ..runtime import program\n    from . import local\n"
    )
    names = imports(ast.parse(source), "autopar.ir.capture", is_package=False)
    assert {"autopar.search.base", "autopar.ir", "autopar", "autopar.spec.plan", "autopar.runtime"} <= names
    assert layer("autopar.search.base") == "search"
    assert layer("autopar") == "verification"


def test_contributing_names_the_layers() -> None:
    assert f"\n    {' < '.join(ORDER)}\n" in (ROOT / "CONTRIBUTING.md").read_text()


KINDS = ("deferred", "sharded_rows", "random")
"""Modules that keep what outlives a step, besides those of the optimizer's state and the states of strategies."""


def test_what_outlives_a_step_is_reached_through_lasting() -> None:
    """Checkpoints, proofs and looks at the loss know no kind of it by name (ADR 0015)."""
    rooms = tuple(f"autopar.runtime.{room}." for room in ("checkpoints", "proofs", "losses"))
    named = {f"autopar.runtime.{kind}" for kind in KINDS}
    for module, path in modules().items():
        if module.startswith(rooms):
            imported = {n.module for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom)}
            assert not imported & named, f"{module} imports {imported & named}: ask `runtime.lasting.Lasting`"
