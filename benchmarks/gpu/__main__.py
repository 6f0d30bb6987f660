"""autopar on this machine's GPU, in at most nine minutes: numbers, step time, memory, a calibration.

    python -m benchmarks.gpu [--check] [--only PART]

Each part runs in a process of its own, with a time limit. The figures are written as JSON into `benchmarks/results/`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click

from benchmarks.gpu import device
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.processes import python, run
from benchmarks.harness import RESULTS, Report, Target, options, publish

BUDGET_S = 525.0
"""Of the whole command; what is left is for imports and the report."""
PARTS: dict[str, float] = {
    "nccl": 90.0,
    "ranks": 150.0,
    "memory": 75.0,
    "calibration": 75.0,
    "step resnet-50": 80.0,
    "step gpt2-small": 80.0,
    "step bert-base": 80.0,
}
"""Seconds that each may take: together more than there are, since most take less."""
DRY_RUN = 4.0
"""By how much longer a dry run may take: processors are slow, and may be busy."""
LEAST_S = 10.0
"""What is worth beginning a part for."""


def measure(name: str, folder: Path, where: str, seconds: float) -> tuple[Findings, str | None]:
    """Runs one part; returns what it has found, and why it failed, if it did."""
    out = folder / f"{name.replace(' ', '-')}.json"
    argv = python("benchmarks.gpu.part", name, "--out", str(out), "--device", where, "--seconds", str(seconds))
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    failed = run(argv, out.with_suffix(".log"), seconds, quiet)
    return Findings.load(out), failed


def fill(report: Report, names: tuple[str, ...], where: str) -> None:
    """Runs the parts, one after the other, and adds what they find."""
    patience = DRY_RUN if where == "cpu" else 1.0
    end = time.monotonic() + patience * BUDGET_S
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder:
        for name in names:
            seconds = min(patience * PARTS[name], end - time.monotonic())
            if seconds < LEAST_S:
                report.rows.append((name, "", "not begun: the time is over"))
                report.targets.append(Target(f"{name}: has run", None, 1, direction="at least"))
                continue
            click.echo(f"{name}, at most {seconds:.0f} s", err=True)
            start = time.monotonic()
            found, failed = measure(name, Path(folder), where, seconds)
            took_s = time.monotonic() - start
            report.rows += [(name, *row) for row in found.rows]
            report.targets += found.targets
            report.notes += found.notes
            report.data[name] = {"took_s": round(took_s, 1), "failed": failed, **found.data}
            if failed is not None:
                report.rows.append((name, "the part failed", failed))
                report.targets.append(Target(f"{name}: has run", None, 1, direction="at least"))


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="This part alone; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Runs the parts on the processor, small: shows that they work, no more.")
@options
def main(only: tuple[str, ...], dry_run: bool, check: bool, json_file: str | None, save: bool) -> None:
    """Looks at autopar on this machine's GPU."""
    names = only or tuple(PARTS)
    found = {"name": "no device: a dry run on the processor"} if dry_run else device.look()
    if "none" in found:
        click.echo(f"There is no CUDA device here: {found['none']}. Nothing was measured.")
        if check:
            click.echo("--check fails, as it has nothing to check.")
        sys.exit(1 if check else 0)
    report = Report(name="gpu", title=f"autopar on one {found['name']}", columns=("part", "what", "found"))
    report.data["device"] = found
    report.notes.append("Device: " + ", ".join(f"{key} {value}" for key, value in found.items() if value is not None))
    fill(report, names, "cpu" if dry_run else "cuda")
    if json_file is None and not dry_run:
        kind = "".join(c if c.isalnum() else "-" for c in str(found["name"]).lower()).strip("-")
        json_file = str(RESULTS / f"{report.machine.date[:10]}-gpu-{kind}.json")
    command = " ".join(["python -m benchmarks.gpu", *(f"--only '{name}'" for name in only)])
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
