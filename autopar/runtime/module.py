"""A drop-in module: the model, with gradients synchronized during `backward()`, in the place of DDP."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from autopar.errors import CaptureError
from autopar.ir.batch import Batch, bind, flatten
from autopar.ir.build import named_parameters, training_graph
from autopar.ir.capture import output_tensors
from autopar.ir.training_graph import TrainingGraph
from autopar.runtime.buffers import shared_buffers
from autopar.runtime.captures import Captures, signature_key
from autopar.runtime.checkpoint_checks import check_module
from autopar.runtime.compiled import Settings
from autopar.runtime.differences import tolerance_of
from autopar.runtime.eager import without_trace
from autopar.runtime.fragments import Fragment
from autopar.runtime.local_proof import Ran, SynchronizedOnce, copies, prove_locally
from autopar.runtime.module_writer import BackwardWriter, ForwardWriter
from autopar.runtime.optimizer import OptimizerPart
from autopar.runtime.order import CollectiveOrder
from autopar.runtime.process_group import Group, Rendezvous, average_buffers, take_from_rank_0
from autopar.runtime.random import RandomStream
from autopar.runtime.unchanged import Unchanged
from autopar.runtime.writer import Target
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
    shared_buffers: tuple[str, ...]
    """Of the buffers, those that the forward pass both reads and writes."""
    template: Any
    """The model's output, with fake tensors: what the real ones are put into."""
    extra: dict[str, torch.fx.GraphModule] = field(default_factory=dict)
    proved: bool = False
    """Whether both passes were compared with the model run eagerly."""

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
    optimizer. The module does not see the loss, so each rank's counts by the samples in its batch (dimension 0 of its
    first tensor), or as `weight` says: that is one process's gradient where the loss is a mean over samples. A batch of
    no samples counts as nothing. Outside training mode, or without autograd, it is the model itself. Its state dict is
    the model's.
    """

    def __init__(self, model: nn.Module, plan: Plan, group: Group, settings: Settings, context: Context) -> None:
        super().__init__()
        self.module = model
        self.plan = plan
        self.settings = settings
        self._group = group
        self._context = context.on(plan.cluster.cluster)
        self._order = CollectiveOrder(Rendezvous(group), plan)
        self._random = RandomStream(group.rank, group.world_size)
        self._named = named_parameters(model)
        self._buffers_by_name = dict(model.named_buffers(remove_duplicate=False))
        self._compiled: Captures[_Compiled] = Captures(says=group.rank == 0)
        self._unchanged = Unchanged({"": model}, self._buffers_by_name)
        self._synchronizes = True
        self._earlier: dict[str, torch.Tensor] = {}
        self._earlier_weight, self._earlier_count = 0.0, 0
        self._steps = 0
        self._proof: SynchronizedOnce | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and self.module.training):
            return self.module(*args, **kwargs)
        if DistributedDataParallel._active_ddp_module is not None:
            raise CaptureError(
                "the module runs within DistributedDataParallel, which would send every gradient a second time: use "
                "the result of optimize() in DDP's place"
            )
        self._unchanged.check()
        inputs = bind(self.module, args, kwargs)
        batch = flatten(inputs)
        compiled = self.compile_for(batch)
        samples = 1 if batch.size is None else batch.size
        weight = self.settings.weight(inputs) if self.settings.weight else samples
        if self.settings.check == "always" or (self.settings.check == "first" and not compiled.proved):
            self._prove(compiled, batch, inputs)
        trainable = [self._named[p.name] for p in compiled.graph.parameters]
        joint = compiled.graph.joint
        assert joint is not None
        # Inputs that the outputs do not depend on have no gradient, rather than one of `None`.
        given = [t if i in joint.input_gradients else t.detach() for i, t in enumerate(batch.tensors)]
        outputs = _Run.apply(self, compiled, float(weight), *given, *trainable)  # type: ignore[no-untyped-call]
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
        key = (signature_key(self.module, batch), tuple(t.requires_grad for t in batch.tensors))
        known = self._compiled.find(key)
        if known is None:
            graph = training_graph(self.module, leaves(batch), None, "module", self.settings.unused_parameters)
            return self.adopt(key, graph, batch)
        return known

    def adopt(self, key: Hashable, graph: TrainingGraph, batch: Batch) -> _Compiled:
        """Lowers and writes a captured graph."""
        self.plan.check_model(graph.model)
        assert graph.joint is not None
        program = lower_plan(self.plan.groups, graph, self._context)
        self._order.check(program, graph)
        target = Target(
            self._group.rank,
            self._group.world_size,
            self._group,
            self._named,
            {},
            _no_optimizer,
            self.settings.clip_grad_norm,
            compiled=self.settings.compiled,
        )
        compiled = _Compiled(
            graph,
            program,
            target,
            ForwardWriter(graph, program, target).write(),
            BackwardWriter(graph, program, target).write(),
            shared_buffers(graph.joint, self._group),
            output_template(self.module, batch),
        )
        self._compiled.add(key, graph.joint.guards, compiled)
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
        """Gradients of the trainable parameters, then those of the inputs that require one: this rank's own, of its own
        loss, for what comes before the module is each rank's own, too."""
        names = [p.name for p in c.graph.parameters]
        if not self._synchronizes and self._group.world_size > 1:
            gradients = c.local_backward()(*saved, *tangents)
            for name, gradient in zip(names, gradients, strict=False):
                weighted = gradient * weight
                self._earlier[name] = weighted if name not in self._earlier else self._earlier[name].add_(weighted)
            self._earlier_weight += weight
            self._earlier_count += 1
            return (*(None for _ in names), *gradients[len(names) :])
        if self._group.world_size == 1:
            return c.backward(*saved, *tangents)  # type: ignore[no-any-return]
        numbers = [weight, weight + self._earlier_weight, 1 + self._earlier_count]
        scalars = [torch.tensor(float(x), dtype=torch.float64, device=saved[0].device) for x in numbers]
        proof, expected = self._proof if self.settings.check == "always" or not self._steps else None, {}
        if proof is not None:
            local = c.local_backward()(*saved, *tangents)[: len(names)]
            expected = proof.expected(
                local, self._earlier, weight, 1 + self._earlier_count, weight + self._earlier_weight
            )
        with self._group.guard(f"backward pass {self._steps}"):
            if self._earlier:
                earlier = [self._earlier[n] for n in names]
                self._earlier, self._earlier_weight, self._earlier_count = {}, 0.0, 0
                gradients = c.backward_after_accumulation()(*saved, *tangents, *scalars, *earlier)
            else:
                gradients = c.backward(*saved, *tangents, *scalars)
        if proof is not None:
            proof.compare(expected, gradients[: len(names)])
        shared = [self._buffers_by_name[n] for n in c.shared_buffers]
        take_from_rank_0(shared, self._group, f"buffers of backward pass {self._steps}")
        self._steps += 1
        return gradients  # type: ignore[no-any-return]

    def _prove(self, c: _Compiled, batch: Batch, inputs: dict[str, Any]) -> None:
        """Compares both passes with the model run eagerly, on this rank alone, and has the first synchronized gradients
        compared later on."""
        joint = c.graph.joint
        assert joint is not None
        parameters = {p.name: self._named[p.name] for p in c.graph.parameters}
        tolerance = tolerance_of(c.graph)
        self._proof = SynchronizedOnce(parameters, self._group, tolerance, self.settings.clip_grad_norm is not None)
        wanted = [int(key) for kind, key in joint.inputs if kind == "tangent"]
        likes = [joint.outputs[i].meta["val"] for i in wanted]
        device = next(iter(parameters.values())).device
        draw = torch.Generator(device).manual_seed(0)
        tangents = [torch.randn(v.shape, generator=draw, device=device).to(v.dtype) for v in likes]
        own = leaves(batch)
        given = {f"the gradient of input {i}": own.tensors[i] for i in joint.input_gradients}

        def eagerly() -> Ran:
            with self._random, without_trace({"": self.module}) as buffers, torch.enable_grad():
                outputs = list(output_tensors(self.module(**own.rebuild(own.tensors))))
                into = [*parameters.values(), *given.values()]
                found = torch.autograd.grad([outputs[i] for i in wanted], into, tangents, allow_unused=True)
            names = [*(f"the gradient of '{n}'" for n in parameters), *given]
            return Ran(_numbered(outputs), dict(zip(names, found, strict=True)), _called(buffers))

        def by_graph() -> Ran:
            values = self.run_forward(c, batch.tensors)
            count = len(joint.outputs)
            with torch.no_grad():
                found = c.local_backward()(*values[count:], *tangents)
            names = [*(f"the gradient of '{n}'" for n in parameters), *given]
            return Ran(_numbered(values[:count]), dict(zip(names, found, strict=True)), _called(self._buffers_by_name))

        def snapshot() -> Callable[[], None]:
            tensors, stream = copies([*parameters.values(), *self._buffers_by_name.values()]), self._random.kept()

            def put_back() -> None:
                tensors()
                stream()

            return put_back

        prove_locally(eagerly, by_graph, parameters, snapshot, tolerance, "It lies in this rank's graphs")
        c.proved = True

    def synchronize_buffers(self) -> None:
        """Averages floating-point buffers over the ranks, as `Program.synchronize_buffers` does."""
        average_buffers(self._buffers_by_name.values(), self._group)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's own, as one process would have it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads the model's own. Raises `SpecError` where it does not fit, before anything is changed; `assign` is
        refused, as the program holds the tensors themselves."""
        if assign:
            raise ValueError("load_state_dict(assign=True) would replace the tensors that the program was made for")
        check_module("model", self.module, state_dict, strict, converts=True)
        return self.module.load_state_dict(state_dict, strict)


class _Run(torch.autograd.Function):
    """The model's forward and backward pass as one differentiable function of its inputs and its parameters."""

    @staticmethod
    def forward(ctx: Any, owner: SyncedModule, c: _Compiled, weight: float, *values: Any) -> Any:
        joint = c.graph.joint
        assert joint is not None
        tensors = values[: len(values) - len(c.graph.parameters)]
        found = owner.run_forward(c, tensors)
        count = len(joint.outputs)
        outputs = tuple(v.detach() if v.requires_grad else v for v in found[:count])
        ctx.save_for_backward(*found[count:])
        ctx.context = (owner, c, weight, len(tensors))
        wanted = {int(key) for kind, key in joint.inputs if kind == "tangent"}
        ctx.mark_non_differentiable(*(o for i, o in enumerate(outputs) if i not in wanted))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise CaptureError(
                "backward(create_graph=True) through a captured module: its backward pass is a graph of its own, which "
                "cannot be differentiated again. Compute the penalty with the model itself, module.module, and add its "
                "gradients"
            )
        owner, c, weight, inputs = ctx.context
        tangents = [grads[int(key)] for kind, key in c.graph.joint.inputs if kind == "tangent"]
        found = owner.run_backward(c, list(ctx.saved_tensors), [t.contiguous() for t in tangents], weight)
        own = len(c.graph.parameters)
        of_inputs = dict(zip(c.graph.joint.input_gradients, found[own:], strict=True))
        return None, None, None, *(of_inputs.get(i) for i in range(inputs)), *found[:own]


def leaves(batch: Batch) -> Batch:
    """The batch with tensors that have no history: what is captured begins with them."""
    return replace(batch, tensors=tuple(t.detach().requires_grad_(t.requires_grad) for t in batch.tensors))


def _numbered(outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"output {i}": value.detach() for i, value in enumerate(outputs)}


def _called(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"buffer '{n}'": value for n, value in buffers.items()}


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
