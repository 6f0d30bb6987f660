"""autopar: a planner and compiler for distributed PyTorch training.

    program = autopar.optimize(model, cluster, example_inputs=batch, optimizer=optimizer)
    for batch in loader:
        loss = program.step(batch)

Nothing heavy is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import optimize as optimize
    from autopar.api import plan as plan
    from autopar.calibration import calibrate as calibrate
    from autopar.errors import AutoparError as AutoparError
    from autopar.errors import AutoparWarning as AutoparWarning
    from autopar.ir.passes import Pass as Pass
    from autopar.ir.passes import Passes as Passes
    from autopar.quality.budget import QualityBudget as QualityBudget
    from autopar.runtime.checkpoints.load import load_checkpoint as load_checkpoint
    from autopar.runtime.drop_in.module import SyncedModule as SyncedModule
    from autopar.runtime.gathering import gather as gather
    from autopar.runtime.program import Program as Program
    from autopar.runtime.step_result import StepResult as StepResult
    from autopar.spec.calibration import Calibration as Calibration
    from autopar.spec.cluster import ClusterSpec as ClusterSpec
    from autopar.spec.plan import Plan as Plan
    from autopar.verification import Verification as Verification
    from autopar.verification import verify as verify

_HOMES = {
    "AutoparError": "autopar.errors",
    "AutoparWarning": "autopar.errors",
    "Calibration": "autopar.spec.calibration",
    "ClusterSpec": "autopar.spec.cluster",
    "Pass": "autopar.ir.passes",
    "Passes": "autopar.ir.passes",
    "Plan": "autopar.spec.plan",
    "Program": "autopar.runtime.program",
    "QualityBudget": "autopar.quality.budget",
    "StepResult": "autopar.runtime.step_result",
    "SyncedModule": "autopar.runtime.drop_in.module",
    "Verification": "autopar.verification",
    "calibrate": "autopar.calibration",
    "gather": "autopar.runtime.gathering",
    "load_checkpoint": "autopar.runtime.checkpoints.load",
    "optimize": "autopar.api",
    "plan": "autopar.api",
    "verify": "autopar.verification",
}

__version__ = "0.1.0"
__all__ = [
    "AutoparError",
    "AutoparWarning",
    "Calibration",
    "ClusterSpec",
    "Pass",
    "Passes",
    "Plan",
    "Program",
    "QualityBudget",
    "StepResult",
    "SyncedModule",
    "Verification",
    "calibrate",
    "gather",
    "load_checkpoint",
    "optimize",
    "plan",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
