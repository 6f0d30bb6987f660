"""The source files that the architecture tests read."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "autopar"


@functools.cache
def modules() -> dict[str, Path]:
    """The package's modules by dotted name, each file once. Folders behind symlinks are part of the package."""
    found = {}
    for folder in [ROOT / PACKAGE, *(p for p in (ROOT / PACKAGE).iterdir() if p.is_dir())]:
        # `rglob` does not follow the symlinks to strategies, cost_models and search by itself.
        pattern = "*.py" if folder == ROOT / PACKAGE else "**/*.py"
        for path in folder.glob(pattern):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def python_files() -> tuple[Path, ...]:
    """Every Python file of the project."""
    others = [p for name in ("benchmarks", "tests", "docs") for p in (ROOT / name).rglob("*.py")]
    return (*modules().values(), *others)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))
