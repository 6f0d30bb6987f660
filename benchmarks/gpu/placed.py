"""Models and batches on the device at hand, and the cluster that it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from autopar.runtime.job.ports import held_port
from autopar.spec.cluster import ClusterSpec
from autopar.spec.detect import detect
from autopar.testing.tasks import Task


def moved(value: Any, device: str) -> Any:
    """A batch, with its tensors on `device`."""
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, value)


def task_on(task: Task, device: str) -> Task:
    """A task whose model and batches are on `device`."""
    return replace(
        task,
        name=f"{task.name} on {device}",
        model=lambda: task.model().to(device),
        batch=lambda samples, seed: moved(task.batch(samples, seed), device),
    )


def cluster_of(ranks: int, device: str) -> ClusterSpec:
    """`ranks` devices like the first one of this machine, in one host."""
    if device == "cpu":
        return ClusterSpec.local(ranks)
    host = detect({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    devices = tuple(d.model_copy(update={"count": ranks}) for d in host.devices)
    return ClusterSpec(hosts=(host.model_copy(update={"devices": devices}),))


def synchronize(device: str) -> None:
    """Waits until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def one_rank(backend: str, device: str) -> Iterator[None]:
    """While it is open, there is a default process group of this process alone."""
    if device == "cuda":
        torch.cuda.set_device(0)
    with held_port() as port:
        dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
