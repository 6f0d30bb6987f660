"""The public face: what `import autopar` exposes, and what it costs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import autopar
from tests.architecture.source import ROOT, modules


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_exported_names_are_sorted_and_exist() -> None:
    assert list(autopar.__all__) == sorted(set(autopar.__all__))
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None


def test_nothing_else_is_exposed() -> None:
    """Submodules aside: they become attributes of the package as they are imported."""
    exposed = {n for n in dir(autopar) if not n.startswith("_")}
    exposed -= {n for n in exposed if isinstance(getattr(autopar, n), ModuleType)}
    assert exposed - {"annotations", "TYPE_CHECKING", "Any"} == {n for n in autopar.__all__ if not n.startswith("_")}


def test_import_autopar_leaves_torch_out() -> None:
    assert _python("import sys, autopar; print('torch' in sys.modules)") == "False"


def test_the_help_leaves_torch_out() -> None:
    code = (
        "import sys\nfrom autopar.cli import main\nsys.argv = ['autopar', '--help']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        "print('torch' in sys.modules)"
    )
    assert _python(code).splitlines()[-1] == "False"


@pytest.mark.parametrize("module", sorted(m for m in modules() if m.startswith("autopar.spec")))
def test_descriptions_load_without_torch(module: str) -> None:
    assert _python(f"import sys, {module}; print('torch' in sys.modules)") == "False"
