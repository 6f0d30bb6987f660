"""Several gloo ranks that share the device: every strategy, on every small model that it applies to, trains as one
process does.

Ranks write what they find line by line. Where a case fails, all ranks are started anew, and go on behind it.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from autopar.runtime.job.ports import held_port
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.processes import python, run_all
from benchmarks.gpu.rank import EQUAL, SHOWN
from benchmarks.gpu.setting import Setting

WORLDS = (2, 3)
MOST_FAILURES = 6
"""Cases that may fail before the rest of a world is given up."""
SPARE_S = 10.0


def fill(findings: Findings, setting: Setting) -> None:
    """A row for each number of ranks."""
    end = time.monotonic() + setting.seconds - SPARE_S
    for i, ranks in enumerate(WORLDS[:1] if setting.small else WORLDS):
        share_s = (end - time.monotonic()) / (len(WORLDS) - i)
        _world(findings, setting, ranks, time.monotonic() + share_s)


def _world(findings: Findings, setting: Setting, ranks: int, end: float) -> None:
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder:
        for start in range(MOST_FAILURES):
            left_s = end - time.monotonic()
            if left_s < 1:
                break
            failed = _started(Path(folder, str(start)), setting, ranks, len(cases), left_s, cases)
            if failed is None:
                break
    differ = {k: c for k, c in cases.items() if c.get("off") is None or not c["off"] <= EQUAL}
    shown = "; ".join(f"{name}: {c.get('why') or c['off']}" for name, c in list(differ.items())[:SHOWN])
    findings.data[f"{ranks} ranks"] = cases
    findings.row(
        f"{ranks} gloo ranks, tensors on {setting.device}, float64",
        f"{len(cases) - len(differ)} of {len(cases)} cases as one process" + (f"; {shown}" if shown else ""),
    )
    findings.target(f"{ranks} ranks: cases that are not as one process", float(len(differ)), 0)
    findings.target(f"{ranks} ranks: cases", float(len(cases)), 1 if setting.small else 30, direction="at least")


def _started(
    folder: Path, setting: Setting, ranks: int, behind: int, seconds: float, cases: dict[str, dict[str, Any]]
) -> str | None:
    """Runs the cases from number `behind` on; returns why the ranks failed, or None where all is done."""
    folder.mkdir()
    common = ["--device", setting.device, "--behind", str(behind), "--seconds", str(seconds - SPARE_S / 2)]
    commands = [python("benchmarks.gpu.rank", str(folder / f"found{r}"), *common) for r in range(ranks)]
    with held_port() as port:
        environments = [
            {
                "RANK": str(r),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            for r in range(ranks)
        ]
        failed = run_all(commands, [folder / f"log{r}" for r in range(ranks)], seconds, environments)
    for rank in range(ranks):
        path = folder / f"found{rank}"
        for line in path.read_text().splitlines() if path.exists() else []:
            found = json.loads(line)
            case = cases.setdefault(found["case"], {})
            case.update({k: v for k, v in found.items() if k == "why"})
            if "off" in found and not found["off"] <= case.get("off", 0.0):
                case["off"] = found["off"]
            elif "off" in found:
                case.setdefault("off", found["off"])
    if failed is not None:
        for case in cases.values():
            if "off" not in case:
                case.setdefault("why", failed)
    return failed
