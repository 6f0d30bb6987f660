"""The proof of one rank's graphs: outputs, gradients and buffers, beside the model run eagerly, without communication.

For what is captured later than the first step, when ranks need not capture together; and for the drop-in module, whose
first synchronized gradients are then compared with what its own local ones add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from autopar.errors import TracingError, VerificationError
from autopar.ir.garbage import without_collector
from autopar.ir.training_graph import TrainingGraph
from autopar.ops import group as ops
from autopar.runtime.job.process_group import Group
from autopar.runtime.proofs.blame import blame, blame_tracing, blame_wire
from autopar.runtime.proofs.differences import GradientRule, tolerance_of
from autopar.runtime.proofs.one_pass import How, Ran, as_it_is, differences
from autopar.runtime.proofs.perturbation import PERTURBATION, perturb, round_otherwise
from autopar.runtime.proofs.probes import Probe, Seen
from autopar.runtime.proofs.proof import ROUNDING
from autopar.runtime.proofs.subject import largest, summed
from autopar.runtime.proofs.tracing import tracing_fault
from autopar.runtime.proofs.wire_range import beyond_float16
from autopar.spec.plan import ParameterSlice


@without_collector()
def prove_locally(
    eagerly: Callable[[How], Ran],
    by_graph: Callable[[], Ran],
    parameters: Mapping[str, nn.Parameter],
    snapshot: Callable[[], Callable[[], object]],
    tolerance: float,
    where: str,
) -> None:
    """Compares both, on slightly perturbed parameters; what was there before is put back, as `snapshot` has kept it.
    Raises `VerificationError`, by one rank alone, for the others may have nothing to compare. `eagerly`: is given what
    is to call the user's function."""
    put_back = snapshot()

    def begin() -> None:
        put_back()  # buffers, too, which the graph and the model write to
        perturb(parameters, PERTURBATION)

    try:
        begin()
        expected = eagerly(as_it_is)
        wrong = differences(by_graph(), expected, tolerance)
        if not wrong:
            return
        begin()
        round_otherwise(parameters)
        noise = differences(eagerly(as_it_is), expected, tolerance, over=0.0)
        wrong = {n: t for n, t in wrong.items() if t > ROUNDING * noise.get(n, 0.0)}
        if not wrong:
            return
        begin()
        line = tracing_fault(eagerly, by_graph, tolerance)
    finally:
        put_back()
    how = "with slightly perturbed parameters"
    if line is not None:
        raise TracingError(blame_tracing(wrong, how, line))
    raise VerificationError(blame(wrong, how, where))


class SynchronizedOnce:
    """Holds the first synchronized gradients of a drop-in module to what the ranks' own add up to."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        of: TrainingGraph,
        groups: Sequence[ops.Group],
        group: Group,
        clips: bool,
    ) -> None:
        """`groups`: of the plan, as they are lowered for the graph."""
        self._probes = {n: Probe(ParameterSlice(name=n), p.shape) for n, p in parameters.items()}
        self._group = group
        self._groups = groups
        self._tolerance = tolerance_of(of, groups)
        self._clips = clips
        self._share = 1.0

    def expected(
        self,
        local: Sequence[torch.Tensor],
        earlier: Mapping[str, torch.Tensor],
        weight: float,
        count: int,
        total: float,
    ) -> dict[str, Seen]:
        """What gradients are to be: of this backward pass, and weighted already of those before; `total`, `count`: the
        weight of all that this rank has, and how many backward passes that is. By all ranks together."""
        flats = []
        for (n, probe), gradient in zip(self._probes.items(), local, strict=True):
            flat = probe.see(gradient if weight else torch.zeros_like(gradient)).flat * weight
            flats.append(flat + probe.see(earlier[n]).flat if n in earlier else flat)
        whole = summed(torch.cat([torch.tensor([total, count], dtype=torch.float64), *flats]), self._group)
        mean_count = whole[1] / self._group.world_size
        self._share = float(weight * mean_count / whole[0])
        pieces = torch.split(mean_count * whole[2:] / whole[0], [p.width for p in self._probes.values()])
        return {n: Seen(piece) for n, piece in zip(self._probes, pieces, strict=True)}

    def compare(
        self,
        expected: Mapping[str, Seen],
        found: Iterable[torch.Tensor],
        again: Callable[[float], Mapping[str, Seen]] | None = None,
    ) -> bool:
        """Returns whether gradients were there to compare: a loss that is scaled may make them infinite. `again`: what
        gradients are to be, by a backward pass that begins with a factor; `None` where those that were sent are the
        local ones themselves. Raises `VerificationError` on all ranks where they differ on one, by more than this
        rank's share of the batch as that factor moves them: where a gradient's terms add up to nothing, equal batches
        have equal rounding errors. By all ranks together."""
        if not all(bool(s.norm.isfinite()) for s in expected.values()):
            return False
        seen = {n: probe.see(g) for (n, probe), g in zip(self._probes.items(), found, strict=True)}
        factor = 1.0
        if self._clips:
            mine, theirs = (torch.cat([s.elements for s in each.values()]) for each in (seen, expected))
            factor = float((mine * theirs).sum() / (theirs * theirs).sum().clamp(min=1e-300))
        rule = GradientRule(self._probes, expected, self._tolerance)
        wrong = {n: t for n, t in self._on_any_rank(rule, seen, factor).items() if t > 1}
        if wrong and again is not None:
            noise = self._on_any_rank(rule, again(self._share or 1.0))
            wrong = {n: t for n, t in wrong.items() if t > ROUNDING * noise[n]}
        if wrong:
            wrong = {f"the gradient of '{n}'": t for n, t in wrong.items()}
            if beyond := beyond_float16(self._groups, expected):
                raise VerificationError(blame_wire(wrong, beyond))
            raise VerificationError(
                blame(wrong, "summed over ranks", "Each rank's own gradients are right, so it lies between the ranks")
            )
        return True

    def _on_any_rank(self, rule: GradientRule, seen: Mapping[str, Seen], factor: float = 1.0) -> dict[str, float]:
        """How many times what is allowed gradients are off, on the rank where they are most."""
        off = []
        for n, s in seen.items():
            elements, projections = s.elements.tolist(), s.projections.tolist()
            off.append(min(max(rule.elements(n, elements, factor), rule.projections(n, projections, factor)), 1e30))
        return dict(zip(seen, largest(torch.tensor(off, dtype=torch.float64), self._group).tolist(), strict=True))
