"""Files that describe a cluster, as options name them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.spec.calibration import Calibration
    from autopar.spec.cluster import ClusterSpec


def is_local(argument: str) -> bool:
    """Whether `--cluster` names ranks of this machine, `local:4`, rather than a file."""
    return argument == "local" or argument.startswith("local:")


def load_cluster(argument: str) -> ClusterSpec:
    """Reads `--cluster`: a file, or `local:4`. Raises `ClusterSpecError`."""
    from autopar.errors import ClusterSpecError
    from autopar.spec.cluster import ClusterSpec

    if is_local(argument):
        digits = argument.removeprefix("local").removeprefix(":")
        if not re.fullmatch(r"[1-9][0-9]{0,4}", digits):
            raise ClusterSpecError(f"--cluster is '{argument}', expected local:N with N ranks from 1 on, as local:4")
        return ClusterSpec.local(int(digits))
    if not Path(argument).exists():
        raise ClusterSpecError(
            f"--cluster: there is no file '{argument}'; give a cluster description, or local:4 for four local ranks"
        )
    return ClusterSpec.load(argument)


def load_calibration(path: str | None) -> Calibration | None:
    """Reads `--calibration`. Raises `SpecError`."""
    from autopar.spec.calibration import Calibration

    return None if path is None else Calibration.load(path)
