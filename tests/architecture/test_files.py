"""What no file of the project may do, or be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT, modules, parsed, python_files

MOST_LINES = 400
UNPICKLING_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
OUTSIDE = re.compile(r"https?://(?!www\.w3\.org/)[\w.-]+")
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|work|opt|usr|mnt|Users|tmp|var)/\w+")


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _name(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def _says(call: ast.Call, **wanted: bool) -> bool:
    given = {k.arg: k.value for k in call.keywords}
    return all(isinstance(v := given.get(k), ast.Constant) and v.value is want for k, want in wanted.items())


def unpickles(tree: ast.AST) -> list[str]:
    """The places in a file that can run what a file or a message says, with the line of each."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"{node.lineno}: imports {n}" for n in names if n.split(".")[0] in UNPICKLING_MODULES]
        elif isinstance(node, ast.Call):
            called = _name(node.func)
            if called.endswith("torch.load") and not _says(node, weights_only=True):
                found.append(f"{node.lineno}: torch.load without weights_only=True")
            if called in ("np.load", "numpy.load") and not _says(node, allow_pickle=False):
                found.append(f"{node.lineno}: np.load without allow_pickle=False")
            if called in ("yaml.unsafe_load", "yaml.full_load"):
                found.append(f"{node.lineno}: {called}")
            if called.split(".")[-1] in OBJECT_COLLECTIVES:
                found.append(f"{node.lineno}: {called} unpickles what other ranks send")
    return found


@pytest.mark.parametrize("path", [p for p in python_files() if ROOT / "tests" not in p.parents], ids=_id)
def test_nothing_is_unpickled(path: Path) -> None:
    assert not unpickles(parsed(path))


def test_unpickling_is_found() -> None:
    source = """
import pickle
from joblib import load
torch.load(path)
torch.load(path, weights_only=False)
torch.load(path, weights_only=True)
np.load(path)
np.load(path, allow_pickle=False)
yaml.unsafe_load(text)
dist.broadcast_object_list(values)
"""
    assert [int(line.split(":")[0]) for line in unpickles(ast.parse(source))] == [2, 3, 4, 5, 7, 9, 10]


@pytest.mark.parametrize("path", python_files(), ids=_id)
def test_a_file_holds_one_idea(path: Path) -> None:
    count = len(path.read_text().splitlines())
    assert count <= MOST_LINES, f"{count} lines, at most {MOST_LINES}: look for the second idea in it"


def _package_texts() -> list[Path]:
    folders = [ROOT / PACKAGE, *(p for p in (ROOT / PACKAGE).iterdir() if p.is_dir())]
    other = {".html", ".jinja", ".j2", ".css", ".js", ".json", ".yaml", ".yml", ".txt", ".toml"}
    files = {p.resolve() for folder in folders for p in folder.glob("**/*") if p.suffix in other}
    return sorted({p.resolve() for p in modules().values()} | files)


@pytest.mark.parametrize("path", _package_texts(), ids=_id)
def test_the_package_names_no_machine_and_no_outside_address(path: Path) -> None:
    text = path.read_text()
    found = [m.group() for pattern in (OUTSIDE, MACHINE) for m in pattern.finditer(text)]
    assert not found, f"{found}: the package works offline, and on any machine"


def test_machines_and_addresses_are_found() -> None:
    text = 'open("/home/me/x"); get("https://example.org/a"); xmlns="http://www.w3.org/2000/svg"; a/home/b'
    assert [m.group() for p in (OUTSIDE, MACHINE) for m in p.finditer(text)] == ["https://example.org", "/home/me"]
