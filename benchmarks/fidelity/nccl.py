"""14,336 measured NCCL all-reduces (vTrain's table: 2 to 8 A100 or V100 of one node, every MB up to 1 GB): of each
group of devices, six sizes predict the others: a straight line in logarithms lies between two neighbours."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.fidelity.figures import Quality
from benchmarks.harness import Report, Target

SOURCE = Path(__file__).with_name("published") / "vtrain_nccl_allreduce_lut.csv.gz"
MEGABYTES = (1, 4, 16, 64, 256, 1024)
MIB = 1 << 20
LIMIT = 0.025


def measured() -> Mapping[tuple[str, int], dict[int, float]]:
    """Seconds by bytes, for each kind of device and number of them."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    with gzip.open(SOURCE, "rt", newline="") as file:
        for row in csv.DictReader(file):
            times = found.setdefault((row["gpu"], int(row["n_gpus"])), {})
            times[int(row["size_bytes"])] = float(row["time_ns_oop"]) / 1e9
    return found


def fill(report: Report) -> None:
    """A row for each group of devices, and the target over all of them."""
    errors: list[float] = []
    for (gpu, count), times in sorted(measured().items()):
        known = [size * MIB for size in MEGABYTES]
        rest = [size for size in times if size not in known]
        predicted = np.exp(np.interp(np.log(rest), np.log(known), np.log([times[size] for size in known])))
        quality = Quality.of(predicted, np.array([times[size] for size in rest]), rest)
        errors.append(quality.mape)
        report.rows.append((f"NCCL, {count} x {gpu}", "6 points", f"{quality.mape:.1%}", f"{quality.p95:.1%}"))
    report.targets.append(Target("NCCL table: MAPE of sizes that were not measured", max(errors), LIMIT))
