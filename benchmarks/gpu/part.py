"""One part of `benchmarks.gpu`, in a process of its own: writes what it finds to a file.

python -m benchmarks.gpu.part NAME --out FILE [--device cpu]
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.gpu import calibration, memory, nccl, steps, world
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.setting import Setting


def _parts() -> dict[str, Callable[[Findings, Setting], None]]:
    return {
        "nccl": nccl.fill,
        "ranks": world.fill,
        "memory": memory.fill,
        "calibration": calibration.fill,
        **{f"step {name}": steps.filler(name) for name in steps.MODELS},
    }


@click.command()
@click.argument("name")
@click.option("--out", required=True)
@click.option("--device", default="cuda")
@click.option("--seconds", default=60.0)
def main(name: str, out: str, device: str, seconds: float) -> None:
    """Runs one part."""
    warnings.simplefilter("ignore")
    findings = Findings(Path(out))
    _parts()[name](findings, Setting(device, seconds))
    findings.save()


if __name__ == "__main__":
    main()
