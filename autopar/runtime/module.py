"""A drop-in module: the model, with gradients synchronized during `backward()`, in the place of DDP."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.ir.batch import Batch, bind, flatten
from autopar.ir.build import named_parameters, training_graph
from autopar.ir.training_graph import TrainingGraph
from autopar.ir.weights import BatchWeight
from autopar.runtime.fragments import Fragment
from autopar.runtime.module_writer import BackwardWriter, ForwardWriter
from autopar.runtime.optimizer import OptimizerPart
from autopar.runtime.process_group import Group, Rendezvous, average_buffers
from autopar.runtime.program import CollectiveOrder, Settings, signature_key
from autopar.runtime.random import RandomStream
from autopar.runtime.writer import Target
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Plan
from autopar.strategies.base import Context
from autopar.strategies.lowering import StepProgram, lower_plan


@dataclass
class _Compiled:
    """One batch signature's graphs; the rarer two are written when first needed."""

    graph: TrainingGraph
    program: StepProgram
    target: Target
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    template: Any
    """The model's output, with fake tensors: what the real ones are put into."""
    extra: dict[str, torch.fx.GraphModule] = field(default_factory=dict)

    def backward_after_accumulation(self) -> torch.fx.GraphModule:
        if "after" not in self.extra:
            self.extra["after"] = BackwardWriter(self.graph, self.program, self.target).write(accumulated=True)
        return self.extra["after"]

    def local_backward(self) -> torch.fx.GraphModule:
        if "local" not in self.extra:
            self.extra["local"] = BackwardWriter(self.graph, self.program, self.target).write_local()
        return self.extra["local"]


class SyncedModule(nn.Module):
    """The model, whose `backward()` leaves every rank the gradient of the mean over the global batch.

    Used like the model, and like `DistributedDataParallel`: `output = module(...)`, `loss.backward()`, and any
    optimizer. Each rank's loss counts by the samples in its batch (dimension 0 of its first tensor), or as `weight`
    says. Outside training mode, or without autograd, it is the model itself. Its state dict is the model's.
    """

    def __init__(self, model: nn.Module, plan: Plan, group: Group, settings: Settings, context: Context) -> None:
        super().__init__()
        self.module = model
        self.plan = plan
        self.settings = settings
        self._group = group
        self._context = context.on(ClusterSpec.model_validate(plan.cluster.spec))
        self._order = CollectiveOrder(Rendezvous(group), plan)
        self._random = RandomStream(group.rank, group.world_size)
        self._named = named_parameters(model)
        self._buffers_by_name = dict(model.named_buffers(remove_duplicate=False))
        self._compiled: dict[Hashable, _Compiled] = {}
        self._synchronizes = True
        self._earlier: dict[str, torch.Tensor] = {}
        self._earlier_weight, self._earlier_count = 0.0, 0
        self._steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.module.training):
            return self.module(*args, **kwargs)
        inputs = bind(self.module, args, kwargs)
        batch = flatten(inputs)
        compiled = self.compile_for(batch)
        weight = (
            self.settings.weight(inputs)
            if self.settings.weight
            else BatchWeight("samples", constant=float(batch.size or 1)).of(batch.tensors)
        )
        trainable = [self._named[p.name] for p in compiled.graph.parameters]
        outputs = _Run.apply(self, compiled, batch.tensors, float(weight), *trainable)  # type: ignore[no-untyped-call]
        return fill(compiled.template, iter(outputs))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, `backward()` keeps gradients on this rank, to be synchronized with those of the next `backward()`
        outside. The parameters' `grad` does not change until then."""
        before, self._synchronizes = self._synchronizes, False
        try:
            yield
        finally:
            self._synchronizes = before

    def compile_for(self, batch: Batch) -> _Compiled:
        """Captures, lowers and writes both passes for a batch's signature, unless that was done before."""
        key = signature_key(self.module, batch)
        if key not in self._compiled:
            graph = training_graph(self.module, batch, None, "module", self.settings.unused_parameters)
            return self.adopt(key, graph, batch)
        return self._compiled[key]

    def adopt(self, key: Hashable, graph: TrainingGraph, batch: Batch) -> _Compiled:
        """Lowers and writes a captured graph."""
        self.plan.check_model(graph.model)
        program = lower_plan(self.plan.groups, graph, self._context)
        self._order.check(program)
        target = Target(
            self._group.rank,
            self._group.world_size,
            self._group,
            self._named,
            {},
            _no_optimizer,
            self.settings.clip_grad_norm,
        )
        compiled = _Compiled(
            graph,
            program,
            target,
            ForwardWriter(graph, program, target).write(),
            BackwardWriter(graph, program, target).write(),
            output_template(self.module, batch),
        )
        self._compiled[key] = compiled
        return compiled

    def run_forward(self, c: _Compiled, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        joint = c.graph.joint
        assert joint is not None
        tables: dict[str, Any] = {"parameter": self._named, "buffer": self._buffers_by_name, "batch": tensors}
        arguments = [tables[kind][key] for kind, key in joint.inputs if kind != "tangent"]
        with torch.no_grad(), self._random:
            return c.forward(*arguments)  # type: ignore[no-any-return]

    def run_backward(
        self, c: _Compiled, saved: list[torch.Tensor], tangents: list[torch.Tensor], weight: float
    ) -> tuple[torch.Tensor | None, ...]:
        names = [p.name for p in c.graph.parameters]
        if not self._synchronizes and self._group.world_size > 1:
            gradients = c.local_backward()(*saved, *tangents)
            for name, gradient in zip(names, gradients, strict=True):
                weighted = gradient * weight
                self._earlier[name] = weighted if name not in self._earlier else self._earlier[name].add_(weighted)
            self._earlier_weight += weight
            self._earlier_count += 1
            return (None,) * len(names)
        if self._group.world_size == 1:
            return c.backward(*saved, *tangents)  # type: ignore[no-any-return]
        numbers = [weight, weight + self._earlier_weight, 1 + self._earlier_count]
        scalars = [torch.tensor(float(x), dtype=torch.float64, device=saved[0].device) for x in numbers]
        with self._group.guard(f"backward pass {self._steps}"):
            if self._earlier:
                earlier = [self._earlier[n] for n in names]
                self._earlier, self._earlier_weight, self._earlier_count = {}, 0.0, 0
                gradients = c.backward_after_accumulation()(*saved, *tangents, *scalars, *earlier)
            else:
                gradients = c.backward(*saved, *tangents, *scalars)
        self._steps += 1
        return gradients  # type: ignore[no-any-return]

    def synchronize_buffers(self) -> None:
        """Averages floating-point buffers over the ranks, as `Program.synchronize_buffers` does."""
        average_buffers(self._buffers_by_name.values(), self._group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own, as one process would have it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the model's own; `assign` is refused, as the program holds the tensors themselves."""
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the tensors that the program was made for")
        return self.module.load_state_dict(state_dict, strict)


class _Run(torch.autograd.Function):
    """The model's forward and backward pass as one differentiable function of its parameters."""

    @staticmethod
    def forward(ctx: Any, owner: SyncedModule, c: _Compiled, tensors: Any, weight: float, *parameters: Any) -> Any:
        joint = c.graph.joint
        assert joint is not None
        values = owner.run_forward(c, tensors)
        count = len(joint.outputs)
        outputs = tuple(v.detach() if v.requires_grad else v for v in values[:count])
        ctx.save_for_backward(*values[count:])
        ctx.context = (owner, c, weight)
        wanted = {int(key) for kind, key in joint.inputs if kind == "tangent"}
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in wanted))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        owner, c, weight = ctx.context
        tangents = [grads[int(key)] for kind, key in c.graph.joint.inputs if kind == "tangent"]
        gradients = owner.run_backward(c, list(ctx.saved_tensors), [t.contiguous() for t in tangents], weight)
        return None, None, None, None, *gradients


def module_batch(model: nn.Module, batch: Any) -> Batch:
    """A batch as `SyncedModule.forward` would see it: all inputs by keyword."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return flatten(bind(model, (), dict(batch)))
    return flatten(bind(model, tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}))


def output_template(model: nn.Module, batch: Batch) -> Any:
    """The model's output for a batch, with fake tensors; nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        state: dict[str, torch.Tensor] = {
            n: mode.from_tensor(t) for n, t in [*model.named_parameters(), *model.named_buffers()]
        }
        tensors = tuple(mode.from_tensor(t) for t in batch.tensors)
        return torch.func.functional_call(model, state, (), batch.rebuild(tensors))


def fill(template: Any, values: Iterator[torch.Tensor]) -> Any:
    """The template with real tensors; caches and other objects that hold tensors of their own become `None`."""
    if isinstance(template, torch.Tensor):
        return next(values)
    if isinstance(template, dict):
        return type(template)(**{k: fill(v, values) for k, v in template.items()})
    if isinstance(template, (tuple, list)):
        items = [fill(v, values) for v in template]
        return type(template)(*items) if hasattr(template, "_fields") else type(template)(items)
    if dataclasses.is_dataclass(template):
        filled = copy.copy(template)
        for one in dataclasses.fields(template):
            object.__setattr__(filled, one.name, fill(getattr(template, one.name), values))
        return filled
    return template if isinstance(template, (bool, int, float, str, type(None))) else None


def _no_optimizer(index: int, parts: tuple[Fragment, ...]) -> OptimizerPart:
    raise AssertionError("a program without an optimizer updates nothing")
