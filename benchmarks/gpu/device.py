"""What CUDA device there is, and with what it is used: asked in a process of its own, as a driver may fail or hang.

python -m benchmarks.gpu.device FILE
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.processes import python, run

TIMEOUT_S = 90.0
"""The first CUDA call of a machine may take long."""


def look() -> dict[str, Any]:
    """The device as the benchmark's report describes it; `none` says why there is none, in words."""
    with tempfile.TemporaryDirectory(prefix="autopar-gpu-") as folder:
        found, log = Path(folder, "device.json"), Path(folder, "log")
        failed = run(python("benchmarks.gpu.device", str(found)), log, TIMEOUT_S)
        if failed is not None:
            return {"none": f"torch fails to use its device: {failed}"}
        known: dict[str, Any] = json.loads(found.read_text())
        return known


def _described() -> dict[str, Any]:
    import torch

    built = torch.version.cuda
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cuda": built}
    if not torch.cuda.is_available():
        why = "built without CUDA" if built is None else f"built with CUDA {built}, finds no device or no driver"
        return {"none": f"torch {torch.__version__} is {why}", **versions}
    properties = torch.cuda.get_device_properties(0)
    product = torch.ones(64, 64, device="cuda")
    assert float((product @ product)[0, 0]) == 64.0, "a product of ones on the device"
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,  # type: ignore[no-untyped-call]
        **versions,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_described()))
