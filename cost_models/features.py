"""Physical features of a plan on a cluster: what a learned correction of its predicted time may depend on."""

from __future__ import annotations

import math

from autopar.cost_models.analytic import StepPricer
from autopar.cost_models.base import Estimate
from autopar.strategies.lowering import StepProgram

SMALL_BYTES = 1 << 20
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter")
"""Collectives whose times are features of their own; others count as all-reduces."""


def features(program: StepProgram, estimate: Estimate, pricer: StepPricer, dilation: float = 1.0) -> dict[str, float]:
    """The features of a plan on a cluster, by name: parts of the step, sizes in logarithms, balance. No names of
    models, hosts or ranks. `dilation`: how many times slower than `pricer` says a lab ran everything."""
    step, n = estimate.step_time_s, pricer.network.world_size
    kinds = dict.fromkeys(COLLECTIVES, 0.0)
    messages, small_s, channel_s, device_s, late_s, second_lane_s = 0, 0.0, 0.0, 0.0, 0.0, 0.0
    sizes = [0.0]
    for call, price in zip(program.calls, pricer.step_prices(program), strict=True):
        if price.transfer is None:
            device_s += max(price.device_s)
            continue
        kind = call.op.name if call.op.name in kinds else "all_reduce"
        seconds = price.transfer.seconds
        messages += 1
        kinds[kind] += seconds
        channel_s += seconds
        sizes.append(float(call.bytes))
        small_s += seconds * (call.bytes < SMALL_BYTES)
        late_s += seconds * call.deferred
        second_lane_s += seconds * (price.transfer.communicator > 0)
    backend = pricer.network.backend
    most, mean = max(estimate.sent_bytes), sum(estimate.sent_bytes) / n
    most_in = max(estimate.received_bytes)
    bandwidth = pricer.network.bandwidth[: pricer.network.links_of_ranks]
    slowest = float(bandwidth.min()) / dilation if len(bandwidth) else 1.0
    fastest = float(bandwidth.max()) / dilation if len(bandwidth) else 1.0
    found = {
        "log step": math.log(dilation * step),
        "compute": estimate.compute_s / step,
        "exposed": estimate.exposed_communication_s / step,
        "channels busy": estimate.communication_s / step,
        "transfers": channel_s / step,
        "device work": device_s / step,
        "fixed costs": messages * backend.call_s / step,
        "issuing": messages * backend.issue_s / step,
        "log messages": math.log(1 + messages),
        "log mean message": math.log(1 + sum(sizes) / max(1, messages)),
        "log largest message": math.log(1 + max(sizes)),
        "small messages": small_s / step,
        "late": late_s / step,
        "second lane": second_lane_s / step,
        "imbalance sent": most / mean if mean else 1.0,
        "imbalance received": most_in / mean if mean else 1.0,
        "log bytes": math.log(1 + most),
        "ranks": float(n),
        "log slowest link": math.log(slowest),
        "links differ": math.log(fastest / slowest),
        "clips": float(program.context.clips),
    }
    return {**found, **{f"{kind} time": seconds / step for kind, seconds in kinds.items()}}
