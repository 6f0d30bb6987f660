"""Calibrates the lab as trials found it: each cluster at each speed that it was run at."""

from __future__ import annotations

import sys
from collections.abc import Callable

from autopar.lab import Job, Lab
from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from benchmarks.harness import additions_us
from benchmarks.trials.making.journal import Journal
from benchmarks.trials.records import Dataset, LabCalibration

TIMEOUT_S = 300.0


def calibrate_lab(data: Dataset, journal: Journal, budget_s: float, progress: Callable[[str], None]) -> int:
    """Appends a calibration for each cluster and dilation of the trials with virtual compute that has none yet;
    returns how many."""
    wanted = {(t.cluster, t.dilation) for t in data.trials if t.ok and t.compute == "virtual"}
    wanted -= journal.known.calibrations.keys()
    worker = [sys.executable, "-m", "benchmarks.trials.making.calibration_rank"]
    same: dict[object, tuple[float, Calibration]] = {}
    taken = 0
    for cluster in sorted({c for c, _ in wanted}):
        record = data.clusters[cluster]
        spec = ClusterSpec.model_validate(record.spec)
        with Lab.of(spec) as lab, Job(lab.ranks, worker) as job:
            for dilation in sorted(d for c, d in wanted if c == cluster):
                lab.set_rates(spec, scale=1 / dilation)
                # Clusters of other devices may be the same lab.
                key = wiring(lab)
                if key not in same:
                    speed = additions_us()
                    answer = job.ask({"cluster": record.spec, "budget_s": budget_s}, TIMEOUT_S)[0]
                    same[key] = speed, Calibration.model_validate(answer)
                    taken += 1
                speed, found = same[key]
                journal.write(LabCalibration(cluster=cluster, dilation=dilation, additions_us=speed, calibration=found))
                progress(f"{record.cluster} at 1/{dilation:g} of its speed: {found.took_s:.0f} s")
    return taken


def wiring(lab: Lab) -> object:
    """What a lab is but for its devices: which ranks share a host, and the rates of hosts, to a percent."""
    wires = lab.wiring
    rates = [(wires.sends_bps(host), wires.receives_bps(host)) for host in wires.hosts]
    return lab.placement, tuple(tuple(None if r is None else float(f"{r:.2g}") for r in pair) for pair in rates)
