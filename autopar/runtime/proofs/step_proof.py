"""Which steps of a program are compared with the model run eagerly: with all ranks together, or on one alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from autopar.ir.batch import Batch
from autopar.ir.stand_in import StandIn
from autopar.ops.group import Group
from autopar.runtime.compiled import Check, Compiled
from autopar.runtime.lasting import Lasting
from autopar.runtime.model.eager import kept_attributes, loss_of
from autopar.runtime.model.own_state import check_own_state
from autopar.runtime.proofs.differences import tolerance_of
from autopar.runtime.proofs.drift import StepTimes
from autopar.runtime.proofs.local_proof import prove_locally
from autopar.runtime.proofs.one_pass import How, Ran, step_by_graph, step_eagerly
from autopar.runtime.proofs.probes import probes
from autopar.runtime.proofs.proof import Proof, fits
from autopar.runtime.proofs.subject import Subject

_SYNCHRONIZING = ("synchronize", "delayed")


class StepProofs:
    """Compares the first step of a program with all ranks together, or every step; and each later capture alone."""

    def __init__(
        self,
        check: Check,
        subject: Callable[..., Subject],
        lasting: Lasting,
    ) -> None:
        """`subject`: makes one from what is different from step to step."""
        self._check = check
        self._subject = subject
        self._lasting = lasting
        self._looked: set[int] = set()
        """Groups of which a step was compared in which they synchronize."""
        self._told: set[int] = set()

    def run(
        self,
        captures: Sequence[Compiled],
        compiled: Sequence[Compiled],
        batches: Sequence[Batch],
        shares: Callable[[], Sequence[float]],
        run: Callable[[], torch.Tensor],
        times: StepTimes,
        is_first: bool,
        timed: Sequence[Group],
    ) -> torch.Tensor:
        """Runs a step, and compares it, or what was captured for it, where that is due. `captures`: of the batches;
        `compiled`: what is run of them in this step. `shares`: of each micro-batch in the global batch. `timed`: what
        groups do in it, where steps differ."""
        if self.is_due(not is_first, timed):
            loss = self.step(compiled, batches, shares(), run, is_first)
            for c in captures:
                c.proved = True
            return loss
        for c, b in zip(captures, batches, strict=True):
            self.capture(c, b)
        with times.one():
            return run()

    def is_due(self, has_stepped: bool, timed: Sequence[Group]) -> bool:
        """Whether all ranks compare the next step. `timed`: what groups do in it, where steps differ; the first step in
        which a group synchronizes is compared, too."""
        if self._check != "first" or not has_stepped:
            return self._check != "never"
        return any(g.index not in self._looked for g in timed if g.moment.doing in _SYNCHRONIZING)

    def step(
        self,
        compiled: Sequence[Compiled],
        batches: Sequence[Batch],
        shares: Sequence[float],
        run: Callable[[], torch.Tensor],
        is_first: bool,
    ) -> torch.Tensor:
        """A step, compared where memory allows it on all ranks. `shares`: of each micro-batch in the global batch."""
        last = compiled[-1]
        stands_in = isinstance(last.joint, StandIn)  # others may run a graph, and expect what the model computes
        device = self._lasting.device
        subject = self._subject(
            graph=last.graph,
            parameters={p.name: self._lasting.parameters[p.name] for p in last.graph.parameters},
            groups=last.program.groups,
            calls=last.program.calls,
            told=self._told,
            probes=probes(last.program.groups),
            arguments=lambda buffers: [
                *last.arguments(batches[-1].tensors, self._lasting.parameters, buffers, device),
                last.tangent(1.0, device),
            ],
            run=run,
            eager=None if stands_in else last.eager,
        )
        self._looked |= {g.index for g in last.program.groups if g.moment.doing in _SYNCHRONIZING}
        for c in compiled:
            c.proved = True
        if not fits(subject):
            return run()
        if subject.eager is not None:
            return Proof(subject, batches, shares, is_first).step()
        on_device = [b.to(device) for b in batches]
        with subject.lasting.gathered():
            for c, b in zip(compiled, on_device, strict=True):
                self._check_own_state(c, b)
        proof = Proof(subject, on_device, shares, is_first)
        if is_first:
            put_back = kept_attributes(self._lasting.owners.values()) if stands_in else _nothing_kept
            proof.trial()
            put_back()
        return proof.step()

    def capture(self, c: Compiled, batch: Batch) -> None:
        """Compares what was captured later than the first step, on this rank alone, unless that was done before."""
        if (
            c.proved
            or c.graph.eager
            or self._check == "never"
            or self._lasting.rows.is_spread()
            or c.joint.sums_over_ranks
        ):
            return
        c.proved = True
        trained = {n: self._lasting.parameters[n] for n in c.joint.gradients}
        device = self._lasting.device
        lasting, owners = self._lasting, self._lasting.owners
        on_device, written = batch.to(device), [n for n, _ in c.joint.mutations]
        self._check_own_state(c, on_device)

        def eagerly(how: How) -> Ran:
            with lasting.random:
                return step_eagerly(owners, lasting.loss_fn, on_device, trained, written, how)

        def by_graph() -> Ran:
            with lasting.random:
                arguments = c.arguments(on_device.tensors, lasting.parameters, lasting.buffers, device)
                return step_by_graph(c.joint, [*arguments, c.tangent(1.0, device)])

        prove_locally(eagerly, by_graph, trained, lasting.snapshot, tolerance_of(c.graph), "It lies in a later capture")

    def _check_own_state(self, c: Compiled, batch: Batch) -> None:
        def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [loss_of(self._lasting.model, self._lasting.loss_fn, batch.rebuild(tuple(tensors)))]

        draws = self._lasting.random.staying
        check_own_state(c.joint.guards, self._lasting.owners, run, batch.tensors, tolerance_of(c.graph), draws)


def _nothing_kept() -> None:
    """Puts back what a graph has changed of what Python holds."""
