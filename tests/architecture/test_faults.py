"""The faults of `benchmarks.faults` can be put back: their patches fit the code as it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.source import ROOT


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("patch", sorted((ROOT / "tests" / "faults").glob("*.patch")), ids=lambda p: p.stem)
def test_a_fault_can_be_put_back(patch: Path) -> None:
    done = subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
