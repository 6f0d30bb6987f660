"""Puts faults back that autopar once had, one at a time, and looks whether the fuzzer finds each.

Each is a patch in `tests/faults/`, applied to a copy of the project. What no random model or plan shows soon (ranks
that differ, checkpoints, hooks) has a test of its own instead, which `TESTS` names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "faults"
_FINDINGS = ("FAILED", "ERROR", "wrong", "disproved", "drifted", "crashed")
TESTS = {
    "buffers_of_each_rank": "tests/gloo/test_other_numbers.py",
    "hooks_ignored": "tests/unit/test_guards.py",
    "one_stream_for_all_ranks": "tests/gloo/test_checkpoints.py",
    "ranks_may_differ": "tests/gloo/test_other_numbers.py",
    "python_state_frozen": "tests/unit/test_guards.py",
    "requires_grad_ignored": "tests/unit/test_guards.py",
    "fused_optimizers_on_strided_memory": "tests/unit/test_guards.py",
    "elements_of_results_named_twice": "tests/unit/test_recompute.py",
    "shared_memory_ignored": "tests/unit/test_guards.py",
}


def found(patch: Path, seconds: int) -> str | None:
    """How the fault is found, in words; `None` where it is not."""
    with tempfile.TemporaryDirectory(prefix="autopar-fault-") as folder:
        copy = Path(folder) / "project"
        left_out = shutil.ignore_patterns(".*", "out", "build", "results", "data", "*.pyc")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        test = TESTS.get(patch.stem)
        fuzz = ["benchmarks.fuzz", "--seconds", str(seconds), "--seed", "1", "--shrink", "0"]
        command = [sys.executable, "-m", *(["pytest", "-q", "-x", test] if test else fuzz)]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    lines = [x for x in done.stdout.splitlines() if x.startswith(_FINDINGS)]
    return (lines[0] if lines else f"exit code {done.returncode}")[:200] if done.returncode else None


@click.command(context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="NAME", help="This fault alone; may be repeated.")
@click.option("--seconds", default=120, help="How long the fuzzer looks for each.")
def main(only: tuple[str, ...], seconds: int) -> None:
    """Whether each fault of `tests/faults/` is found once it is put back."""
    missed = []
    for patch in sorted(FAULTS.glob("*.patch")):
        if only and patch.stem not in only:
            continue
        how = found(patch, seconds)
        click.echo(f"{patch.stem}: {how or 'NOT FOUND'}")
        missed += [] if how else [patch.stem]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
