"""A rank that says, on its own host, what plans will take: calibrated, with a model's compute measured there."""

from __future__ import annotations

from typing import Any

import autopar
from autopar.planning import Planner
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import join
from autopar.spec.calibration import Calibration
from autopar.training import Training
from benchmarks.interleaved import serve_requests
from benchmarks.zoo.named import any_workload

TIMEOUT_S = 300.0


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """A calibration, `{"do": "calibrate", "cluster", "budget_s"}`; or plans, `{"do": "plan", "workload", "cluster",
    "calibration", "plans"}`, of each its JSON, as `autopar.optimize` makes them. In "plans" are builders' names, `""`
    for what the search finds, with their fidelity."""
    cluster = autopar.ClusterSpec.model_validate(request["cluster"])
    if request["do"] == "calibrate":
        return autopar.calibrate(cluster, time_budget_s=request["budget_s"]).model_dump(mode="json")
    calibration = Calibration.model_validate(request["calibration"])
    workload = any_workload(request["workload"])
    model = workload.model()
    optimizer = workload.optimizer(model)
    training = Training(model, workload.batch(0, 0), Settings(workload.loss_fn), optimizer, "step")
    training.settle(join(TIMEOUT_S))
    texts = []
    for strategy, fidelity in request["plans"]:
        planner = Planner(strategy or None, fidelity, calibration=calibration, measure_compute=True)
        plan = planner.plan_on_rank_0(training, lambda: cluster)
        texts.append(plan.model_dump_json(exclude={"alternatives"}))
    return {"plans": texts}


if __name__ == "__main__":
    serve_requests(lambda: answer)
