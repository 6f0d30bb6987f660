"""`python -m benchmarks.suite`: what the workloads are made of, in one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

import click

from benchmarks.harness import Report, Target, options, publish
from benchmarks.suite import WORKLOADS, workload_named
from benchmarks.suite.facts import TIMED_STEPS, Facts, examine

REQUIRED = 10
"""Workloads that must be captured."""
TIMEOUT_S = 300.0
"""For one workload."""


def examined(name: str, timed: bool) -> Facts | str:
    """The facts of a workload, found in a process of its own; the reason where there are none."""
    argv = [sys.executable, "-m", "benchmarks.suite", "--worker", "--only", name, *(["--time"] if timed else [])]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {TIMEOUT_S:.0f} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    found = json.loads(done.stdout.splitlines()[-1])
    return Facts(**found | {"largest_shape": tuple(found["largest_shape"])})


def report(found: Sequence[Facts], failures: Sequence[tuple[str, str]], required: int) -> Report:
    """The table in the order of the suite; `failures` are (workload, reason)."""
    timed = any(f.step_s is not None for f in found)
    result = Report(
        name="suite",
        title="The suite's workloads",
        columns=(
            "workload",
            "parameters",
            "MB",
            "largest parameter",
            "gradients found (share of bytes)",
            "nodes",
            *(("step ms",) if timed else ()),
            "peak MiB",
        ),
    )
    for f in found:
        step = () if not timed else (f"{f.step_s * 1e3:.0f}" if f.step_s is not None else "",)
        shape = " x ".join(map(str, f.largest_shape))
        result.rows.append(
            (
                f.name,
                f"{f.parameters / 1e6:.1f} M",
                f"{f.parameter_bytes / 1e6:.0f}",
                f"{f.largest}: {shape}, {f.largest_share:.0%}",
                f"NOT CAPTURED: {f.failure}" if f.failure else _structures(f),
                str(f.nodes),
                *step,
                f"{f.peak_memory_bytes / 2**20:.0f}",
            )
        )
    width = len(result.columns)
    result.rows += [(name, f"FAILED: {reason}", *[""] * (width - 2)) for name, reason in failures]
    good = [f for f in found if not f.failure]
    result.targets = [Target("workloads that are captured whole", len(good), required, "at least")]
    result.notes = [
        "float32, one thread, each workload in a process of its own. Peak MiB: by how much that process grew for "
        "the model, its gradients, its optimizer and the activations of eager steps.",
        *([f"Step ms: an eager step on one rank, median of {TIMED_STEPS}; informational."] if timed else []),
        *(f"{f.name}: {f.about}" for f in found),
    ]
    result.data = {"workloads": [asdict(f) for f in found], "failures": dict(failures)}
    return result


def _structures(facts: Facts) -> str:
    parts = (
        f"{count} {kind} ({facts.structure_bytes[kind] / facts.parameter_bytes:.0%})"
        for kind, count in sorted(facts.structures.items())
    )
    return ", ".join(parts)


@click.command(context_settings={"show_default": True})
@click.option("--only", multiple=True, metavar="NAME", help="Examine this workload alone; may be repeated.")
@click.option("--time", "timed", is_flag=True, help="Time an eager step on one rank.")
@click.option("--worker", is_flag=True, hidden=True)
@options
def main(only: tuple[str, ...], timed: bool, worker: bool, check: bool, json_file: str | None, save: bool) -> None:
    """Builds, trains for a few steps and captures every workload of the suite, and says what it is made of."""
    try:
        names = [workload_named(name).name for name in only] or list(WORKLOADS)
    except KeyError as e:
        raise click.UsageError(e.args[0]) from e
    if worker:
        click.echo(json.dumps(asdict(examine(WORKLOADS[names[0]], timed))))
        return
    found: list[Facts] = []
    failures: list[tuple[str, str]] = []
    for name in names:
        facts = examined(name, timed)
        click.echo(f"{name}: {facts if isinstance(facts, str) else 'examined'}", err=True)
        if isinstance(facts, str):
            failures.append((name, facts))
        else:
            found.append(facts)
    result = report(found, failures, len(names) if only else REQUIRED)
    sys.exit(publish(result, command="python -m benchmarks.suite", check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
