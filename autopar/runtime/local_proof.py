"""The proof of one rank's graphs: outputs, gradients and buffers, beside the model run eagerly, without communication.

For what is captured later than the first step, when ranks need not capture together; and for the drop-in module, whose
first synchronized gradients are then compared with what its own local ones add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import VerificationError
from autopar.ir.batch import Batch
from autopar.ir.capture import JointGraph
from autopar.runtime.blame import blame
from autopar.runtime.differences import FLOOR, GradientRule, difference, times
from autopar.runtime.eager import backward, loss_of, without_trace
from autopar.runtime.generators import generators, set_generators
from autopar.runtime.probes import Probe, Seen
from autopar.runtime.process_group import Group
from autopar.runtime.proof import PERTURBATION, ROUNDING, perturb
from autopar.runtime.shared_memory import once
from autopar.runtime.subject import largest, summed
from autopar.spec.plan import ParameterSlice

Tensors = Mapping[str, torch.Tensor | None]
"""By what they are called in messages; `None` for no gradient, which is one of zeros."""


@dataclass(frozen=True)
class Ran:
    """What one forward and backward pass has given."""

    outputs: Tensors
    gradients: Tensors
    buffers: Tensors


def prove_locally(
    eagerly: Callable[[], Ran],
    by_graph: Callable[[], Ran],
    parameters: Mapping[str, nn.Parameter],
    snapshot: Callable[[], Callable[[], object]],
    tolerance: float,
    where: str,
) -> None:
    """Compares both, on slightly perturbed parameters; what was there before is put back, as `snapshot` has kept it.
    Raises `VerificationError`, by one rank alone, for the others may have nothing to compare."""
    put_back = snapshot()
    try:
        perturb(parameters, PERTURBATION)
        begin = copies(parameters.values())
        expected = eagerly()
        wrong = _differences(by_graph(), expected, tolerance)
        if not wrong:
            return
        begin()
        perturb(parameters, rounding=True)
        noise = _differences(eagerly(), expected, tolerance, over=0.0)
    finally:
        put_back()
    wrong = {n: t for n, t in wrong.items() if t > ROUNDING * noise.get(n, 0.0)}
    if wrong:
        raise VerificationError(blame(wrong, "with slightly perturbed parameters", where))


def _differences(found: Ran, expected: Ran, tolerance: float, over: float = 1.0) -> dict[str, float]:
    """By name, how many times what is allowed differs by more than `over`."""
    sizes = [float(g.abs().max()) for g in expected.gradients.values() if g is not None and g.numel()]
    floor = FLOOR * max(sizes, default=0.0)
    pairs = [
        (found.outputs, expected.outputs, 0.0),
        (found.gradients, expected.gradients, floor),
        (found.buffers, expected.buffers, 0.0),
    ]
    wrong = {}
    for mine, theirs, least in pairs:
        for name, reference in theirs.items():
            value = mine.get(name)
            if reference is None or value is None:
                some = reference if value is None else value
                off = 0.0 if some is None or not some.numel() else times(float(some.abs().max()), floor * tolerance)
            else:
                off = difference(value, reference, tolerance, least)
            if off > over:
                wrong[name] = off
    return wrong


def step_by_graph(joint: JointGraph, arguments: Sequence[torch.Tensor]) -> Ran:
    """One rank's part of a step, as the joint graph computes it, on the values of its placeholders in order."""
    with torch.no_grad():
        values = joint.module(*arguments)
    results = joint.module.graph.output_node().args[0]
    by_node = {n: v for n, v in zip(results, values, strict=True) if n is not None}  # type: ignore[arg-type]
    gradients = {f"the gradient of '{n}'": by_node[node] for n, node in joint.gradients.items()}
    buffers = {f"buffer '{n}'": by_node[node] for n, node in joint.mutations}
    return Ran({"the loss": by_node[joint.outputs[0]].reshape(())}, gradients, buffers)


def step_eagerly(
    owners: Mapping[str, nn.Module],
    loss_fn: Any,
    batch: Batch,
    parameters: Mapping[str, nn.Parameter],
    written: Iterable[str],
) -> Ran:
    """The same as the user's model computes it. `parameters`: by the names that the joint graph's gradients have.
    `written`: the buffers that are looked at."""
    gradients: dict[str, torch.Tensor | None] = {f"the gradient of '{n}'": None for n in parameters}

    def take(name: str, gradient: torch.Tensor) -> None:
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        gradients[f"the gradient of '{name}'"] = dense.detach().clone()

    with without_trace(owners) as buffers, torch.enable_grad():
        loss = loss_of(owners[""], loss_fn, batch.rebuild(batch.tensors))
        backward(loss, parameters, take)
    held = {f"buffer '{n}'": buffers[n] for n in written if n in buffers}
    return Ran({"the loss": loss.detach().reshape(())}, gradients, held)


class SynchronizedOnce:
    """Holds the first synchronized gradients of a drop-in module to what the ranks' own add up to."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: Group, tolerance: float, clips: bool) -> None:
        self._probes = {n: Probe(ParameterSlice(name=n), p.shape) for n, p in parameters.items()}
        self._group = group
        self._tolerance = tolerance
        self._clips = clips

    def expected(
        self,
        local: Sequence[torch.Tensor],
        earlier: Mapping[str, torch.Tensor],
        weight: float,
        count: int,
        total: float,
    ) -> dict[str, Seen]:
        """What gradients are to be: of this backward pass, and weighted already of those before; `total`: the weight of
        all that this rank has. By all ranks together."""
        flats = []
        for (n, probe), gradient in zip(self._probes.items(), local, strict=True):
            flat = weight * probe.see(gradient).flat()
            flats.append(count * (flat + probe.see(earlier[n]).flat() if n in earlier else flat))
        whole = summed(torch.cat([torch.tensor([total], dtype=torch.float64), *flats]), self._group)
        pieces = torch.split(whole[1:] / whole[0], [p.width for p in self._probes.values()])
        return {n: probe.read(piece) for (n, probe), piece in zip(self._probes.items(), pieces, strict=True)}

    def compare(self, expected: Mapping[str, Seen], found: Iterable[torch.Tensor]) -> None:
        """Raises `VerificationError` on all ranks where they differ on one. By all ranks together."""
        seen = {n: probe.see(g) for (n, probe), g in zip(self._probes.items(), found, strict=True)}
        factor = 1.0
        if self._clips:
            mine, theirs = (torch.cat([s.elements for s in each.values()]) for each in (seen, expected))
            factor = float((mine * theirs).sum() / (theirs * theirs).sum().clamp(min=1e-300))
        rule = GradientRule(self._probes, expected, self._tolerance)
        off = [
            min(max(rule.elements(n, s.elements, factor), rule.projections(n, s.projections, factor)), 1e30)
            for n, s in seen.items()
        ]
        everywhere = largest(torch.tensor(off, dtype=torch.float64), self._group).tolist()
        wrong = {f"the gradient of '{n}'": t for n, t in zip(expected, everywhere, strict=True) if t > 1}
        if wrong:
            raise VerificationError(
                blame(wrong, "summed over ranks", "Each rank's own gradients are right, so it lies between the ranks")
            )


def copies(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Copies tensors, and where the generators of random numbers are; what is returned puts that back."""
    before = [(once(t), once(t).clone()) for t in tensors]
    random = generators()

    def put_back() -> None:
        set_generators(random)
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)

    return put_back
