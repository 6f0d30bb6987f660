"""Puts faults back that autopar once had, one at a time, and looks whether the fuzzer finds each.

Each is a patch in `tests/faults/`, applied to a copy of the project. The fuzzer trains random models there, with the
proof of the first step inside of each training, until it finds what the fault leads to: a wrong number, ranks that
drift apart or were not refused, or the proof's message. It then runs the case again, with the fault and without it,
so that a finding of another origin does not count.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "faults"
_NUMBERS = "^(wrong|drifted|disproved): "
LEADS_TO = {
    "buffers_of_each_rank": _NUMBERS + r".*\[average\]",
    "cross_sample_losses_unsaid": _NUMBERS + r".*\[(across samples|several counts)\]",
    "fused_optimizers_on_strided_memory": _NUMBERS + "(?!.*same random numbers)",
    "hooks_ignored": _NUMBERS + r".*\[hook\]",
    "moments_dropped_by_dcp_load": _NUMBERS + r".*\[loaded\]",
    "one_stream_for_all_ranks": r"^drifted: ranks have drawn the same random numbers",
    "python_state_frozen": _NUMBERS + r"(?!.*\[(hook|average|implementation)\])",
    "ranks_may_differ": r"^wrong: ranks that differ were trained",
    "strided_slices_to_gloo": r"^(wrong: |drifted: |disproved: |crashed: .*contig)",
}
"""By what the line of a finding must match; others lead to wrong numbers, or to the proof's message."""


def found(patch: Path, seconds: int, seed: int, jobs: int) -> tuple[bool, str]:
    """Whether the fault is found, and how, in words, with the seconds that it took."""
    with tempfile.TemporaryDirectory(prefix="autopar-fault-") as folder:
        copy = Path(folder) / "project"
        left_out = shutil.ignore_patterns(".*", "out", "build", "results", "data", "*.pyc")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
        subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)
        pattern, start = LEADS_TO.get(patch.stem, _NUMBERS), time.monotonic()
        settings = ["--seconds", str(seconds), "--seed", str(seed), "--until", pattern, "--jobs", str(jobs)]
        lines = _fuzz(copy, *settings)
        took = time.monotonic() - start
        name = next((lines[i + 1].split()[-1] for i, line in enumerate(lines[:-1]) if re.search(pattern, line)), None)
        if name is None:
            return False, f"NOT FOUND in {took:.0f} s"
        line = lines[next(i for i, other in enumerate(lines) if other.endswith(f" {name}")) - 1]
        again = any(re.search(pattern, x) for x in _fuzz(copy, "--only", name))
    without = any(x.endswith(f"--only {name}") for x in _fuzz(ROOT, "--only", name))
    doubt = "" if again else " (not again)"
    doubt += " (without the fault, too)" if without else ""
    return not doubt, f"{took:.0f} s, {name}{doubt}: {line}"[:200]


def _fuzz(project: Path, *settings: str) -> list[str]:
    """The lines that the fuzzer prints, run on a copy of the project."""
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.fuzz", "--shrink", "0", *settings]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True).stdout.splitlines()


@click.command(context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="NAME", help="This fault alone; may be repeated.")
@click.option("--seconds", default=600, help="How long the fuzzer looks for each.")
@click.option("--seed", default=1, help="The fuzzer's.")
@click.option("--jobs", default=2, help="Models that the fuzzer tries at the same time.")
def main(only: tuple[str, ...], seconds: int, seed: int, jobs: int) -> None:
    """Whether each fault of `tests/faults/` is found once it is put back."""
    missed = []
    for patch in sorted(FAULTS.glob("*.patch")):
        if only and patch.stem not in only:
            continue
        is_found, how = found(patch, seconds, seed, jobs)
        click.echo(f"{patch.stem}: {how}")
        missed += [] if is_found else [patch.stem]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
