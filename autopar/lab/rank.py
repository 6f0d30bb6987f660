"""A living rank: loads trials, runs their steps, and stays up for the next. Started by `autopar.lab.pool`.

A request is handled in one of two ways. `load` communicates with nobody: what goes wrong is answered, and the rank
lives on. In `start` and `run` ranks depend on each other, so one that fails ends, and the pool ends the others.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.cost_models.analytic import NodeTimes, StepPricer
from autopar.cost_models.optimizers import OptimizerCost
from autopar.errors import AutoparError, PlanError
from autopar.ir.tables import GraphTables
from autopar.ir.training_graph import TrainingGraph
from autopar.lab import memory
from autopar.lab.host import Host
from autopar.lab.job import serve
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group, join
from autopar.runtime.program import Program
from autopar.runtime.virtual import DeviceTimes, VirtualProgram
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from autopar.spec.topology import Topology
from autopar.strategies import Context
from autopar.strategies.lowering import lower_plan
from autopar.strategies.timing import is_timed
from autopar.training import Training

KEPT = 4
"""Captured models, and pricers of virtual ones, that a rank keeps."""

Request = dict[str, Any]


@dataclass(frozen=True)
class _Started:
    """A trial that can be run."""

    step: Callable[[int], Callable[[], torch.Tensor]]
    """Makes, from a step's number, that step."""
    synchronize: Callable[[], None]
    """Receives what the last step has left on its way."""


@dataclass
class _Loaded:
    """A trial that this rank is ready for."""

    start: Callable[[], _Started]
    """Prepares it together with the other ranks."""
    order_hash: str
    started: _Started | None = None


class _Model:
    """A workload's model, before any training, and its captured graphs."""

    def __init__(self, said: dict[str, Any], rank: int, clip_grad_norm: float | None) -> None:
        module, _, name = said["workload"].partition(":")
        found = getattr(importlib.import_module(module), name)
        self.workload = found(*said["arguments"]) if callable(found) else found
        self.model: nn.Module = self.workload.model()
        optimizer = self.workload.optimizer(self.model)
        settings = Settings(self.workload.loss_fn, clip_grad_norm)
        self.training = Training(self.model, self.workload.batch(0, rank), settings, optimizer, "step")
        self.training.settle()


class _Cache(OrderedDict[str, Any]):
    """The `KEPT` entries that were used last."""

    def get_or_make(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self:
            while len(self) >= KEPT:
                self.popitem(last=False)
            self[key] = make()
        self.move_to_end(key)
        return self[key]


class Rank:
    """Answers the pool's requests."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._base_bytes = 0
        self._loaded: dict[str, _Loaded] = {}
        self._models, self._graphs, self._pricers = _Cache(), _Cache(), _Cache()
        self._counters = Host("", None, "", os.environ.get("GLOO_SOCKET_IFNAME", ""))

    def answer(self, request: Request) -> dict[str, Any]:
        """Handles `{"do": ...}`; see the methods of these names."""
        if request["do"] == "load":
            return self.load(request)
        try:
            handled: dict[str, Any] = getattr(self, request["do"])(request)
            return handled
        except BaseException:
            # The others wait for this rank. Ending says so at once, where an answer would reach nobody.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def hello(self, request: Request) -> dict[str, Any]:
        return {
            "autopar": autopar.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()}",
        }

    def load(self, request: Request) -> dict[str, Any]:
        """Makes a trial ready, by itself: `slot`, `plan`, `clip_grad_norm`, and `real` or `virtual`."""
        self._loaded.pop(request["slot"], None)
        try:
            plan = Plan.loads(request["plan"], "the trial's plan")
            plan.check_world_size(self.group.world_size)
            make = self._real if "real" in request else self._virtual
            loaded = self._loaded[request["slot"]] = make(plan, request)
            return {"order_hash": loaded.order_hash}
        except AutoparError as e:
            return {"refused": f"{type(e).__name__}: {e}"}
        except Exception:
            return {"failed": traceback.format_exc(limit=-4)}

    def start(self, request: Request) -> dict[str, Any]:
        """Makes a loaded trial ready together with the other ranks: `slot`."""
        loaded = self._loaded[request["slot"]]
        loaded.started = loaded.start()
        memory.reset_peak()
        return {}

    def run(self, request: Request) -> dict[str, Any]:
        """Takes steps `first` to `first + count` of the trial in `slot`, one behind the other. `cpu_s` counts what the
        rank does besides, or others would seem to have done it."""
        began_cpu_s = time.process_time()
        trial = self._loaded[request["slot"]].started
        assert trial is not None, "a trial is started before it is run"
        steps = [trial.step(i) for i in range(request["first"], request["first"] + request["count"])]
        losses, ends_s = [], []
        gc.collect()
        gc.disable()
        trial.synchronize()
        dist.barrier()
        counted = self._counted()
        start_s = time.perf_counter()
        for step in steps:
            losses.append(step())
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # a step returns before the device has computed it
            ends_s.append(time.perf_counter())
        trial.synchronize()  # what is late was sent for these steps
        dist.barrier()
        sent, received = (b - a for a, b in zip(counted, self._counted(), strict=True))
        gc.enable()
        return {
            "start_s": start_s,
            "ends_s": ends_s,
            "losses": [float(loss) for loss in losses],
            "sent_bytes": sent,
            "received_bytes": received,
            "cpu_s": time.process_time() - began_cpu_s,
            "peak_bytes": max(0, memory.peak_bytes() - self._base_bytes),
        }

    def drop(self, request: Request) -> dict[str, Any]:
        """Forgets the trial in `slot`."""
        self._loaded.pop(request["slot"], None)
        return {}

    def _counted(self) -> tuple[int, int]:
        try:
            return self._counters.bytes_sent(), self._counters.bytes_received()
        except OSError:
            return 0, 0

    def _virtual(self, plan: Plan, request: Request) -> _Loaded:
        said = request["virtual"]
        path, clip = said["tables"], request["clip_grad_norm"]
        graph, measured_s = self._graphs.get_or_make(path, lambda: _tables(path))
        plan.check_model(graph.model)
        if any(map(is_timed, plan.groups)):
            raise PlanError("virtual compute runs plans whose steps are all alike; run this one with real compute")
        cluster = ClusterSpec.model_validate(plan.cluster.spec)
        context = Context(
            self.group.world_size,
            clips=clip is not None,
            late_parameters=True,
            sparse_update=said["sparse_update"],
        )
        program = lower_plan(plan.groups, graph, context.on(cluster))
        key = json.dumps([path, plan.cluster.digest, said["optimizer"]])

        def pricer() -> StepPricer:
            return StepPricer(graph, Topology(cluster), OptimizerCost(*said["optimizer"]), measured_s)

        times = DeviceTimes.of(
            self._pricers.get_or_make(key, pricer), program, self.group.rank, dilation=said["dilation"]
        )

        def start() -> _Started:
            virtual = VirtualProgram(graph, program, times, self.group, clip)
            return _Started(lambda number: virtual.step, virtual.synchronize)

        return _Loaded(start, program.order_hash)

    def _real(self, plan: Plan, request: Request) -> _Loaded:
        said, clip = request["real"], request["clip_grad_norm"]
        held: _Model = self._models.get_or_make(json.dumps([said, clip]), lambda: _Model(said, self.group.rank, clip))
        workload, training = held.workload, held.training
        graph = training.graph(plan.recompute)
        plan.check_model(graph.model)
        context = training.context(self.group.world_size, late_parameters=True)
        cluster = ClusterSpec.model_validate(plan.cluster.spec)
        order_hash = lower_plan(plan.groups, graph, context.on(cluster)).order_hash

        def start() -> _Started:
            model = copy.deepcopy(held.model)
            optimizer = workload.optimizer(model)
            memory.release()
            self._base_bytes = memory.resident_bytes() - _bytes(model)
            program = Program(model, plan, self.group, optimizer, training.settings, context)
            program.adopt(graph, training.batch)

            def step(number: int) -> Callable[[], torch.Tensor]:
                batch = workload.batch(number, self.group.rank)
                return lambda: program.step(batch)

            return _Started(step, program.synchronize)

        return _Loaded(start, order_hash)


def _bytes(model: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def _tables(path: str) -> tuple[TrainingGraph, NodeTimes | None]:
    found = json.loads(Path(path).read_text())
    return GraphTables.model_validate(found["tables"]).graph(), found["measured_s"]


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # In a lab, ranks share the machine's cores: one each.
    timeout_s = float(sys.argv[1])
    rank = Rank(join(timeout_s))
    gc.freeze()  # What was imported stays: later collections, before every run, need not look at it.
    serve(rank.answer)
    os._exit(0)  # The parent is gone: there is nobody to say goodbye to.


if __name__ == "__main__":
    main()
