"""The environment variable by which `autopar run --plan` hands its plan to the script."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.spec.plan import Plan

PLAN_VARIABLE = "AUTOPAR_PLAN"
"""Holds the path of a plan's file."""


def plan_from_environment() -> Plan | None:
    """The plan that `autopar run` was given, if any."""
    from autopar.spec.plan import Plan

    path = os.environ.get(PLAN_VARIABLE)
    return Plan.load(path) if path else None
