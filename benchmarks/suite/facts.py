"""What a workload is made of, and what a step of it takes: measured on this machine, on one thread."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.lab.memory import peak_bytes, release, reset_peak, resident_bytes
from benchmarks.zoo.workload import Workload

TIMED_STEPS = 7
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Facts:
    """Of one workload."""

    name: str
    about: str
    parameters: int
    """Trainable ones, in elements; a tied one counts once."""
    parameter_bytes: int
    largest: str
    """Name of the largest parameter."""
    largest_shape: tuple[int, ...]
    largest_share: float
    """Of all parameters."""
    structures: dict[str, int]
    """Parameters of each gradient structure, as found in the graph; empty where the capture failed."""
    structure_bytes: dict[str, int]
    nodes: int
    """Of the joint graph."""
    capture_s: float
    peak_memory_bytes: int
    """By which the process grew at most, over the model and eager steps: weights, gradients, optimizer, activations."""
    step_s: float | None
    """Median of the eager step's forward and backward pass and update; None where it was not asked for."""
    failure: str = ""
    """Why the capture failed."""


def examine(workload: Workload, timed: bool) -> Facts:
    """Builds the workload, takes steps, and captures it. Memory is the process's: examine one in each."""
    torch.set_num_threads(1)
    workload.batch(0, 0)  # reads the data
    with torch.device("meta"):
        workload.model()  # imports what it needs
    release()
    reset_peak()
    before = resident_bytes()
    model = workload.model()
    step_s = _steps(workload, model, TIMED_STEPS if timed else 0)
    peak = peak_bytes() - before
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    largest = max(parameters, key=lambda n: parameters[n].numel())
    elements = sum(p.numel() for p in parameters.values())
    return Facts(
        name=workload.name,
        about=workload.about,
        parameters=elements,
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters.values()),
        largest=largest,
        largest_shape=tuple(parameters[largest].shape),
        largest_share=parameters[largest].numel() / elements,
        peak_memory_bytes=peak,
        step_s=step_s,
        **_captured(workload, model),
    )


def _steps(workload: Workload, model: nn.Module, timed: int) -> float | None:
    """Takes steps; the median time of the timed ones in seconds."""
    optimizer = workload.optimizer(model)
    times_s = []
    for number in range(WARM_UP_STEPS + timed):
        batch = workload.batch(number, 0)
        start = time.perf_counter()
        optimizer.zero_grad()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[WARM_UP_STEPS:]) if timed else None


def _captured(workload: Workload, model: nn.Module) -> dict[str, Any]:
    """The facts that the graph tells."""
    from autopar.errors import AutoparError
    from autopar.ir.batch import flatten
    from autopar.ir.build import training_graph
    from autopar.ir.dtypes import DTYPE_BYTES

    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    nodes, failure, start = 0, "", time.perf_counter()
    try:
        graph = training_graph(model, flatten(workload.batch(0, 0)), workload.loss_fn)
    except AutoparError as e:
        failure = str(e).splitlines()[0]
    else:
        nodes = len(graph.compute)
        for p in graph.parameters:
            counts[p.structure] += 1
            sizes[p.structure] += p.numel * DTYPE_BYTES[p.spec.dtype]
    return {
        "structures": dict(counts),
        "structure_bytes": dict(sizes),
        "nodes": nodes,
        "capture_s": time.perf_counter() - start,
        "failure": failure,
    }
