"""The program of a drop-in module: the forward and the backward pass, of which the second synchronizes gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.autograd import Variable

from autopar.errors import CaptureError
from autopar.ir.arrivals import Reached
from autopar.ir.batch import Batch, bind, flatten
from autopar.ir.given_containers import kept_containers, warn_of_set
from autopar.ir.model_output import output_tensors
from autopar.ir.sizes import shape_for
from autopar.ir.symbols import StaticOnlyError
from autopar.ir.training_graph import TrainingGraph
from autopar.ops.context import Context
from autopar.runtime.base_program import Write
from autopar.runtime.compiled import Compiled, Settings
from autopar.runtime.drop_in.drop_in_program import DropInProgram
from autopar.runtime.drop_in.kept_gradients import Kept
from autopar.runtime.drop_in.module_writer import BackwardWriter, ForwardWriter
from autopar.runtime.drop_in.other_gradients import OtherGradients
from autopar.runtime.drop_in.passes import (
    Backward,
    Gradients,
    Passes,
    is_added_to,
    only,
    unforeseen,
    without_hooks_on_saved_tensors,
)
from autopar.runtime.drop_in.same_pass import SamePass
from autopar.runtime.gathering import gathered_as_it_is, gathering, sizes_of
from autopar.runtime.job.process_group import Group
from autopar.runtime.losses.shares import one_weight
from autopar.runtime.model.copies import all_of, copies
from autopar.runtime.model.eager import gradients_of, without_hooks, without_trace
from autopar.runtime.model.outputs import fill, holds_numbers, output_template
from autopar.runtime.model.own_state import check_own_state
from autopar.runtime.proofs.differences import tolerance_of
from autopar.runtime.proofs.local_proof import SynchronizedOnce, prove_locally
from autopar.runtime.proofs.one_pass import How, Ran
from autopar.runtime.proofs.probes import Seen
from autopar.runtime.replay import as_captured
from autopar.runtime.sync_batch_norm import check_tangents
from autopar.runtime.uncaptured.stand_in_gradients import StandInGradients, run_backward
from autopar.spec.plan import Plan
from autopar.strategies.lowering import StepProgram

_BEHIND_WEIGHTS = 4
"""Where a message that begins a backward pass says which gradients a rank has: behind the weight and the number of its
micro-batches, a 1 by which it asks for what `OtherGradients` exchanges, and what `SamePass` compares."""
_BACKWARD: Mapping[str, Callable[[BackwardWriter], torch.fx.GraphModule]] = {
    "backward": lambda writer: writer.write(),
    "backward after accumulation": lambda writer: writer.write(accumulated=True),
    "local backward": lambda writer: writer.write_local(),
}


class GradientProgram(DropInProgram):
    """Runs a model so that `backward()` leaves synchronized gradients; `SyncedModule` is what users call.

    Each rank's loss counts by the samples in its batch, or as `settings.weight` says, for the loss is not seen.
    """

    writers: ClassVar[Mapping[str, Write]] = {
        "forward": lambda *of: ForwardWriter(*of).write(),
        **{name: lambda *of, write=write: write(BackwardWriter(*of)) for name, write in _BACKWARD.items()},
    }
    needed = ("forward", "backward")

    def __init__(self, model: nn.Module, plan: Plan, group: Group, settings: Settings, context: Context) -> None:
        super().__init__(model, plan, group, settings, context)
        self._gathers = False
        """Whether the model takes samples of all ranks."""
        self._sums = False
        """Whether it does, or adds something else up over them, as batch normalization over all ranks."""
        self._others = OtherGradients(self._parameters, group, settings.clip_grad_norm is not None, self._kept.note)
        self._same_pass = SamePass(group, self._shared, self._others)
        self._eagerly: StandInGradients | None = None
        """Backward passes through batches that could not be captured; `None` before there is one."""
        self._stands_in: Compiled | None = None
        """What the last of these batches runs."""
        self._proof: SynchronizedOnce | None = None
        self._compared = False
        """Whether synchronized gradients were compared with what the ranks' own add up to."""
        self._tells: bool | None = None
        """Whether ranks tell each other which parameters their backward passes come to, as some may not come to all;
        known once a graph is adopted."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output, given its inputs as the model takes them. While all that is trained is frozen, as a
        discriminator for its generator's update, the model is a function of its inputs alone, and runs as it is; ranks
        take each other's samples there as in training."""
        known = next(iter(self._compiled), None)  # a copy captures its first batch
        trained = self._parameters if known is None else [p.name for p in known.graph.parameters]
        if any(self._parameters[name].requires_grad for name in trained):
            return self.run(bind(self.model, args, kwargs))
        with self._random:
            if not (self._sums and self._group.world_size > 1):
                return self.model(*args, **kwargs)
            inputs = bind(self.model, args, kwargs)
            batch = flatten(inputs)
            with gathering(self._group, self._sizes(batch)):
                return gathered_as_it_is(self.model, batch, self._weight(batch, inputs), self._group)

    def of_copy(self, model: nn.Module) -> Self:
        made = super().of_copy(model)
        made._gathers, made._sums, made._tells = self._gathers, self._sums, self._tells
        return made

    def adopt(
        self, graph: TrainingGraph, batch: Any, outputs: bool | None = None, sizes: tuple[int, ...] = ()
    ) -> Compiled:
        compiled = super().adopt(graph, batch, outputs, sizes)
        if self._tells is None:
            mine = str(compiled.arrivals.may_miss)
            self._tells = str(True) in self._rendezvous.exchange("outputs that parameters depend on", mine)
        return compiled

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(self, inputs: dict[str, Any]) -> Any:
        """The model's output, given all of its inputs by keyword. Gradients flow to the parameters, and to the inputs
        that require one."""
        self._unchanged.check()
        self.statistics.share()
        batch = flatten(inputs)
        sizes = self._sizes(batch)
        with gathering(self._group, sizes):
            return self._run(batch, inputs, sizes)

    def _weight(self, batch: Batch, inputs: dict[str, Any]) -> float:
        """How much this rank's batch counts."""
        if self._group.world_size == 1:
            return 1.0
        samples = 1 if batch.size is None else batch.size
        return float(one_weight(self.settings.weight, inputs) if self.settings.weight else samples)

    def _sizes(self, batch: Batch) -> tuple[int, ...]:
        """Of all ranks' batches, where ranks take each other's samples; by all of them together."""
        return sizes_of(batch.size, self._group, self._device) if self._gathers else ()

    def _run(self, batch: Batch, inputs: dict[str, Any], sizes: tuple[int, ...]) -> Any:
        """`sizes`: of all ranks' batches, where ranks gather them."""
        compiled, weight = self.compile_for(batch, sizes=sizes), self._weight(batch, inputs)
        if compiled.eager is not None:
            return self._run_eagerly(compiled, weight, inputs)
        if self._eagerly is not None:
            self._eagerly.call_captured()
        if self.settings.check == "always" or (self.settings.check == "first" and not compiled.proved):
            with without_hooks_on_saved_tensors():
                self._prove(compiled, batch)

        synchronizes = self.synchronizes
        around = self._others.begin()

        def backward(saved: list[Any], tangents: list[torch.Tensor], reached: Reached) -> Gradients:
            sends = self._sends(synchronizes)
            if self._eagerly is not None:
                self._eagerly.pass_captured(not sends)
            run = self.run_backward if sends else self.run_backward_alone
            self._others.around = around
            found = run(compiled, saved, tangents, reached, weight)
            if self._eagerly is not None:
                self._eagerly.deliver_captured(
                    {p.name: g for p, g in zip(compiled.graph.parameters, found, strict=False)}
                )
            return found

        return fill(compiled.output, iter(self._outputs(compiled, batch, backward)))

    def _run_eagerly(self, c: Compiled, weight: float, inputs: dict[str, Any]) -> Any:
        """The output of a batch that could not be captured, from which gradients flow as autograd has it."""
        self._stands_in = c
        if self._eagerly is None:
            kept, forget = self._kept if self._keeps else None, self._others.forget
            self._eagerly = StandInGradients(c, kept, self._sends, self._synchronized, self._guard, forget)
        with self._random:
            return self._eagerly.forward(weight, self.synchronizes, lambda: self.model(**inputs))

    def _synchronized(self, own: Mapping[str, torch.Tensor], weight: float, kept: Kept) -> dict[str, torch.Tensor]:
        """The synchronized gradients, of this rank's own, as `run_backward` leaves them."""
        c = self._stands_in
        assert c is not None
        names = [p.name for p in c.graph.parameters]
        total, count = weight + kept.weight, 1 + kept.passes
        # Where ranks do not tell each other, each of the others has all gradients, and so has a batch without a share.
        has = [n in own or n in kept.sums or not (weight or self._tells) for n in names]
        earlier = kept.sums_of({n: self._parameters[n] for n in names})
        scalars, proof, expected = [], None, {}
        if self._group.world_size > 1:
            self._shared.run(c.shared_buffers, c.read_buffers)
            scalars = self._scalars(names, has, weight, total, count, asks=True)
            if self.settings.check == "always" or (self.settings.check == "first" and not self._compared):
                proof = self._new_proof(c)
                local = [own.get(n, torch.zeros_like(self._parameters[n])) for n in names]
                expected = proof.expected(local, kept.sums, weight, count, total)
        step = self.written(c, self._synchronizing(kept))
        gradients = run_backward(step, c.tangent(1.0, self._device), own, weight, scalars, earlier)
        if proof is not None:
            self._compared = proof.compare(expected, gradients[: len(names)])
        if self._group.world_size > 1:
            sums = gradients[-1]
            self._same_pass.compare(sums[_BEHIND_WEIGHTS - 1])
            if self._tells:
                has = [ranks > 0 for ranks in sums[_BEHIND_WEIGHTS:].tolist()]
            self._others.expect(dict.fromkeys(names), total / count, sums)
            self._others.arrived()
        elif self._keeps:
            Variable._execution_engine.queue_callback(self._kept.note)
        self._share_buffers(f"backward pass {self._steps}")
        self._steps += 1
        return {n: g for n, g, is_there in zip(names, gradients, has, strict=False) if is_there}

    def _scalars(
        self, names: Sequence[str], has: Sequence[bool], weight: float, total: float, count: int, asks: bool = False
    ) -> list[torch.Tensor]:
        """What a backward pass is given behind its tangents. Raises `CaptureError` where it comes to some parameters
        alone, and ranks do not tell each other to which."""
        if not self._tells and any(has) and not all(has):
            raise CaptureError(unforeseen(names[has.index(True)], names[has.index(False)]))
        numbers = [weight, [total, count, asks, self._same_pass.number(), *(has if self._tells else ())]]
        return [torch.tensor(x, dtype=torch.float64, device=self._device) for x in numbers]

    def _new_proof(self, c: Compiled) -> SynchronizedOnce:
        trained = {p.name: self._parameters[p.name] for p in c.graph.parameters}
        clips = self.settings.clip_grad_norm is not None
        return SynchronizedOnce(trained, c.graph, c.program.groups, self._group, clips)

    def _outputs(self, c: Compiled, batch: Batch, backward: Backward) -> tuple[torch.Tensor, ...]:
        """The output's tensors, from which gradients flow through `backward`."""
        trainable = [self._parameters[p.name] for p in c.graph.parameters]
        # Inputs that the outputs do not depend on have no gradient, rather than one of `None`.
        given = [t if i in c.joint.input_gradients else t.detach() for i, t in enumerate(batch.tensors)]
        return Passes.apply(self, c, backward, *given, *trainable)  # type: ignore[no-any-return, no-untyped-call]

    def run_forward(self, c: Compiled, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The output's tensors, followed by the values that the backward pass reads."""
        self._shared.run(c.shared_buffers, c.read_buffers)
        with as_captured(), self._random:
            return c.graphs["forward"](*self._arguments(c, tensors))  # type: ignore[no-any-return]

    def run_backward(
        self, c: Compiled, saved: list[Any], tangents: list[torch.Tensor], reached: Reached, weight: float
    ) -> Gradients:
        """Gradients of the trainable parameters, then those of the inputs that require one: this rank's own, of its own
        loss, for what comes before the module is each rank's own, too. `None` of a parameter that no rank's backward
        pass comes to."""
        names = [p.name for p in c.graph.parameters]
        if self._group.world_size == 1:
            return self._run_backward_on_one_rank(c, saved, tangents, reached)
        with self._guard():
            kept = self._kept.take(weight, names, lambda name: is_added_to(self._parameters[name]))
        total, count = weight + kept.weight, 1 + kept.passes
        has = [r or n in kept.sums for n, r in zip(names, reached.parameters, strict=True)]
        scalars = self._scalars(names, has, weight, total, count)
        proof, expected = self._proof if self.settings.check == "always" or not self._compared else None, {}

        def expected_of(proof: SynchronizedOnce, factor: float) -> dict[str, Seen]:
            begun = [t * factor for t in tangents]
            local = self._backward(c, "local backward", reached)(*saved, *begun)[: len(names)]
            return proof.expected(local, kept.sums, weight / factor, count, total)

        if proof is not None:
            expected = expected_of(proof, 1.0)
        with self._guard():
            earlier = kept.sums_of({n: self._parameters[n] for n in names})
            run = self._backward(c, self._synchronizing(kept), reached, weight > 0)
            *gradients, sums = run(*saved, *tangents, *scalars, *earlier)
        if proof is not None:
            self._compared = proof.compare(expected, gradients[: len(names)], partial(expected_of, proof))
        self._same_pass.compare(sums[_BEHIND_WEIGHTS - 1])
        self._share_buffers(f"backward pass {self._steps}")
        self._steps += 1
        found = tuple(gradients)
        if self._tells and not all(has):
            found = only(found, [ranks > 0 for ranks in sums[_BEHIND_WEIGHTS:].tolist()])
        self._others.expect(dict(zip(names, found, strict=False)), total / count, sums)
        return found

    def _run_backward_on_one_rank(
        self, c: Compiled, saved: list[Any], tangents: list[torch.Tensor], reached: Reached
    ) -> Gradients:
        """The same of one rank, whose gradients are clipped together with those that were kept back."""
        names, kept = [p.name for p in c.graph.parameters], Kept()
        if self._keeps:
            kept = self._kept.take(1.0, names, lambda name: is_added_to(self._parameters[name]))
            Variable._execution_engine.queue_callback(self._kept.note)
        earlier = kept.sums_of({n: self._parameters[n] for n in names})
        found = self._backward(c, self._synchronizing(kept), reached)(*saved, *tangents, *earlier)
        return only(found, [r or n in kept.sums for n, r in zip(names, reached.parameters, strict=True)])

    def run_backward_alone(
        self, c: Compiled, saved: list[Any], tangents: list[torch.Tensor], reached: Reached, weight: float
    ) -> Gradients:
        """As `run_backward`, of this rank's own gradients, which a later backward pass synchronizes. Those of a batch
        that counts as nothing, which may be no numbers, are left out."""
        joined = c.joint.sums_over_ranks and weight > 0
        if joined:  # other ranks' gradients come with it, each of which is to count as its own batch does
            tangents = [t * weight for t in tangents]
        gradients = self._backward(c, "local backward", reached)(*saved, *tangents)
        if joined:
            gradients = [g / weight for g in gradients]
        found = only(gradients, [weight > 0 and is_reached for is_reached in reached.parameters])
        self._others.leave_out()
        self._kept.expect({p.name: g for p, g in zip(c.graph.parameters, found, strict=False)}, weight)
        return found

    def _backward(self, c: Compiled, name: str, reached: Reached, counts: bool = True) -> Any:
        """One of a capture's backward passes. Of outputs that are not used, the passes compute with zeros: where these
        need not lead to zeros, the pass is one of its own, in which they do; so is that of a batch which does not count
        as anything."""
        if counts and not reached.silent:
            return self.written(c, name)
        own = f"{name} from outputs {sorted(reached.outputs)}{'' if counts else ' of nothing'}"
        if own not in c.graphs:
            writer = BackwardWriter(c.graph, c.program, self._target(), reached.silent, counts)
            c.graphs[own] = _BACKWARD[name](writer)
        return c.graphs[own]

    def _prove(self, c: Compiled, batch: Batch) -> None:
        """Compares both passes with the model run eagerly, on this rank alone, and has the first synchronized gradients
        compared later on."""
        joint = c.joint
        if joint.sums_over_ranks:  # no rank can run it by itself
            c.proved = True
            return
        parameters = {p.name: self._parameters[p.name] for p in c.graph.parameters}
        tolerance = tolerance_of(c.graph)
        self._proof = self._new_proof(c)
        draw = torch.Generator(self._device).manual_seed(0)
        tangents = [
            torch.randn(shape_for(joint, n, batch.shapes), generator=draw, device=self._device).to(n.meta["val"].dtype)
            for n in joint.outputs
        ]
        own = batch.leaves()
        given = {f"the gradient of input {i}": t for i, t in enumerate(own.tensors) if t.requires_grad}
        names, into = [*(f"the gradient of '{n}'" for n in parameters), *given], [*parameters.values(), *given.values()]

        def ran(outputs: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor | None]]:
            begun = [i for i, o in enumerate(outputs) if o.requires_grad]
            of, by = [outputs[i] for i in begun], [tangents[i] for i in begun]
            found = gradients_of(of, into, by) if begun else [None] * len(into)
            dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
            return _numbered(outputs), dict(zip(names, dense, strict=True))

        def eagerly(how: How) -> Ran:
            inputs = own.rebuild(own.copied())
            kept = [one for name, value in inputs.items() for one in kept_containers(value, name)]
            with self._random, without_trace({"": self.model}) as buffers, torch.enable_grad():
                found = ran(list(output_tensors(how(self.model.__call__)(**inputs))))
            warn_of_set(kept)
            return Ran(*found, _called({n: b for n, b in buffers.items() if n in self._buffers}))  # filled by now

        def by_graph() -> Ran:
            local = self.written(c, "local backward")
            with torch.enable_grad(), without_hooks(self._parameters.values()):
                found = ran(self._outputs(c, own, lambda saved, by, _: local(*saved, *by)))
            return Ran(*found, _called(self._buffers))

        def snapshot() -> Callable[[], object]:
            return all_of([copies([*parameters.values(), *self._buffers.values()]), self._random.kept()])

        def outputs(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return list(output_tensors(self.model(**own.rebuild(tuple(tensors)))))

        check_own_state(joint.guards, {"": self.model}, outputs, own.tensors, tolerance, self._random.staying)
        held = (*self._parameters.values(), *self._buffers.values())
        # All is put back, so that what an earlier call of this step has saved for its backward pass is still valid.
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(held):
            prove_locally(eagerly, by_graph, parameters, snapshot, tolerance, "It lies in this rank's graphs")
        c.proved = True

    def _lowered(self, graph: TrainingGraph, program: StepProgram, batch: Batch) -> Compiled:
        assert graph.joint is not None
        check_tangents(graph.joint)
        self._gathers |= graph.joint.gathers
        self._sums |= graph.joint.sums_over_ranks
        output = output_template(self.model, batch)
        if graph.joint.sizes is not None and holds_numbers(output):
            raise StaticOnlyError("the model returns a number besides tensors, which may follow from the batch's sizes")
        return replace(super()._lowered(graph, program, batch), output=output)


def _numbered(outputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"output {i}": value.detach() for i, value in enumerate(outputs)}


def _called(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"buffer '{n}'": value for n, value in buffers.items()}
