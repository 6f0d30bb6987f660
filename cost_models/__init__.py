"""The family of cost models: each predicts what one step of a lowered plan costs on a cluster."""

from __future__ import annotations

if __name__ != "autopar.cost_models":
    raise ImportError("import autopar.cost_models, not cost_models: this folder ships as a subpackage of autopar")

from autopar.cost_models.analytic import AnalyticCostModel
from autopar.cost_models.base import CostModel, Estimate, Observation, Span
from autopar.cost_models.corrected import CorrectedCostModel, cost_model_for
from autopar.cost_models.optimizers import ADAMW, OptimizerCost, optimizer_cost

__all__ = [
    "ADAMW",
    "AnalyticCostModel",
    "CorrectedCostModel",
    "CostModel",
    "Estimate",
    "Observation",
    "OptimizerCost",
    "Span",
    "cost_model_for",
    "optimizer_cost",
]
