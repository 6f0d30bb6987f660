"""No files import each other in a circle, not even for annotations: each can be read after those that it imports."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import networkx as nx

from tests.architecture.source import modules, parsed


def circles(trees: Mapping[str, ast.AST]) -> set[frozenset[str]]:
    """Modules, by dotted name, that import each other, anywhere in the file; `__init__` files are left out, as they
    gather what their packages offer."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                graph.add_edges_from((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                graph.add_edges_from((module, name) for name in (names & trees.keys()) | {node.module or ""})
    graph.remove_nodes_from([node for node in graph if node not in trees])
    return {frozenset(c) for c in nx.strongly_connected_components(graph) if len(c) > 1}


def test_no_files_import_each_other_in_a_circle() -> None:
    found = circles({name: parsed(path) for name, path in modules().items() if path.name != "__init__.py"})
    assert not found


def test_a_circle_is_found() -> None:
    sources = {
        "p.a": "from p import b",
        "p.b": "def f():\n    from p.c import x",
        "p.c": "if TYPE_CHECKING:\n    import p.a",
        "p.d": "import p.a",
    }
    assert circles({name: ast.parse(text) for name, text in sources.items()}) == {frozenset({"p.a", "p.b", "p.c"})}
