"""Compute as it is measured here: every node, no side effects, and what a plan predicts from it."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import autopar
from autopar import ClusterSpec
from autopar.ir.batch import flatten
from autopar.ir.build import training_graph
from autopar.runtime.profile import node_seconds

CLUSTER = ClusterSpec.loads("hosts: [{name: host, count: 2, devices: 1 x cpu}]\nnetwork: {bandwidth: 1 Gbit/s}")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 256))


BATCH = (torch.ones(64, 256), torch.zeros(64, 256))


def test_every_node_is_timed_and_nothing_is_changed() -> None:
    made = model()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    graph = training_graph(made, flatten(BATCH), nn.functional.mse_loss)
    start = time.perf_counter()
    seconds = node_seconds(graph, made, flatten(BATCH), nn.functional.mse_loss)
    elapsed_s = time.perf_counter() - start
    assert set(seconds) == {n.name for n in graph.compute}
    assert 0 < sum(seconds.values()) < elapsed_s
    products = [n.name for n in graph.compute if n.op.startswith(("mm", "addmm"))]
    assert sum(seconds[n] for n in products) > 0.2 * sum(seconds.values()), "the work is in the matrix products"
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    assert all(p.grad is None for p in made.parameters())


def test_a_plan_may_rest_on_it() -> None:
    """The devices are said to be hundreds of times slower than any is, which the measured plan does not believe."""
    text = (
        "{hosts: [{name: h, count: 2, devices: {kind: cpu, peak_flops: 100 MFLOP/s}}], network: {bandwidth: 1 Gbit/s}}"
    )
    slow = ClusterSpec.loads(text)
    told, found = (
        autopar.plan(
            model(),
            slow,
            example_inputs=BATCH,
            loss_fn=nn.functional.mse_loss,
            strategy="ddp",
            measure_compute=measure,
        ).prediction
        for measure in (False, True)
    )
    assert told is not None and found is not None
    assert told.compute_s > 20 * found.compute_s
    assert found.wire_bytes == told.wire_bytes
    with pytest.raises(autopar.AutoparError, match="another cluster"):
        autopar.plan(
            model(),
            CLUSTER,
            example_inputs=BATCH,
            loss_fn=nn.functional.mse_loss,
            calibration=_of(slow),
            strategy="ddp",
        )


def _of(cluster: ClusterSpec) -> autopar.Calibration:
    return autopar.Calibration(
        date="2026-11-21", hardware="none", versions={}, cluster=cluster.fingerprint, backend="gloo"
    )
