"""How far predictions are from measurements, for what was not measured before.

python -m benchmarks.fidelity [--only PART] [--check] [--json FILE] [--save]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import click

from benchmarks.fidelity import autodist, memory, nccl, speed, trials, vtrain
from benchmarks.harness import Report, options, publish

PARTS: dict[str, Callable[[Report], None]] = {
    "nccl": nccl.fill,
    "autodist": autodist.fill,
    "vtrain": vtrain.fill,
    "trials": trials.fill,
    "memory": memory.fill,
    "speed": speed.fill,
}
COLUMNS = ("data", "learned from", "MAPE", "P95", "tau", "top-1 regret", "worst", "top-3", "pairs in order", "bias")


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="This part alone; may be repeated.")
@options
def main(only: tuple[str, ...], check: bool, json_file: str | None, save: bool) -> None:
    """Compares predictions with measured times."""
    report = Report(name="-".join(["fidelity", *only]), title="Predictions beside measurements", columns=COLUMNS)
    for name, fill in PARTS.items():
        if not only or name in only:
            fill(report)
    report.rows = [(*row, *[""] * (len(COLUMNS) - len(row))) for row in report.rows]
    command = " ".join(["python -m benchmarks.fidelity", *(f"--only {name}" for name in only)])
    sys.exit(publish(report, command=command, check=check, json_file=json_file, save=save))


if __name__ == "__main__":
    main()
