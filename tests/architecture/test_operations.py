"""Nobody but `autopar.ops`, and the strategies that emit them, knows one operation from another."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from tests.architecture.source import modules, parsed

KNOW = ("autopar.ops", "autopar.strategies")


def asks_of_kinds(tree: ast.AST) -> list[str]:
    """The places in a file that ask what kind an operation is, with the line of each."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
            if ast.unparse(node.args[0]).endswith((".op", "(op)")) or ast.unparse(node.args[0]) == "op":
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopar.ops."):
            made = importlib.import_module(str(node.module))
            operation = importlib.import_module("autopar.ops.base").Operation
            for alias in node.names:
                named = getattr(made, alias.name)
                if isinstance(named, type) and issubclass(named, operation) and named is not operation:
                    found.append(f"{node.lineno}: imports {alias.name}")
    return found


@pytest.mark.parametrize("module", sorted(m for m in modules() if not m.startswith(KNOW)))
def test_no_kinds_are_told_apart(module: str) -> None:
    assert not asks_of_kinds(parsed(modules()[module]))


def test_who_asks_is_found(tmp_path: Path) -> None:
    source = "from autopar.ops.updates import Update\nfrom autopar.ops.base import Call\nisinstance(call.op, Call)\n"
    assert [line[0] for line in asks_of_kinds(ast.parse(source))] == ["1", "3"]
