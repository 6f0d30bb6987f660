"""A rank that says, on its own host, what plans will take: calibrated, with a model's compute measured there."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

import autopar
from autopar.spec.calibration import Calibration
from benchmarks.interleaved import serve_requests
from benchmarks.zoo.named import any_workload


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """A calibration, `{"do": "calibrate", "cluster", "budget_s"}`; or plans, `{"do": "plan", "workload", "cluster",
    "calibration", "plans"}`, of each its JSON. All ranks measure at once, as they will train."""
    cluster = autopar.ClusterSpec.model_validate(request["cluster"])
    if request["do"] == "calibrate":
        return autopar.calibrate(cluster, time_budget_s=request["budget_s"]).model_dump(mode="json")
    calibration = Calibration.model_validate(request["calibration"])
    return {"plans": [_plan(request["workload"], cluster, calibration, *each) for each in request["plans"]]}


def _plan(name: str, cluster: autopar.ClusterSpec, calibration: Calibration, strategy: str, fidelity: Any) -> str:
    """`strategy`: a builder's name, or `""` for what the search finds."""
    workload = any_workload(name)
    model = workload.model()
    dist.barrier()
    found = autopar.plan(
        model,
        cluster,
        example_inputs=workload.batch(0, 0),
        loss_fn=workload.loss_fn,
        optimizer=workload.optimizer(model),
        strategy=strategy or None,
        fidelity=fidelity,
        calibration=calibration,
        measure_compute=True,
    )
    return found.model_dump_json(exclude={"alternatives"})


if __name__ == "__main__":
    serve_requests(lambda: answer)
