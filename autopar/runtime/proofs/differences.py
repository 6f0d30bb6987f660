"""What differs between a step of a program and the model run eagerly, by how many times what is allowed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.ir.training_graph import TrainingGraph
from autopar.ops.group import Group
from autopar.runtime.optimizers.optimizer import without_wrong_kernels
from autopar.runtime.optimizers.own_settings import bare_copy, kept_settings
from autopar.runtime.proofs.probes import Probe, Seen
from autopar.runtime.proofs.rows import Held, Row, sum_rows
from autopar.runtime.proofs.subject import Subject

TOLERANCE = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 3e-4,
    torch.complex64: 3e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1.2e-1,
}
"""Of a difference, relative to the largest value of a gradient, by the narrowest dtype that the step computes in.
[Empirical: hundreds to thousands of roundings; what differs by more is judged by what rounding does]"""
WIRE_ROUNDING = {"bfloat16": 2.0**-4, "float16": 2.0**-7}
"""What 16 bits on the wire may move a gradient by: values are rounded once, and each partial sum of them once."""
FLOOR = 1e-3
"""Gradients smaller than so much of the largest one of the model are compared as if they were so large: rounding of
larger summands may be all that they are, as that of a key's bias in attention."""

UPDATES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}
"""Of an updated value, relative to the largest update: implementations of one optimizer round differently."""


@dataclass
class Expected:
    """What the model does eagerly, over all ranks."""

    loss: float
    seen: dict[str, Seen]
    buffers: dict[str, torch.Tensor]
    strangers: list[str] = field(default_factory=list)
    """Parameters with a gradient that the captured graph has none for."""

    @property
    def is_finite(self) -> bool:
        """Whether no gradient holds infinities or NaN."""
        return all(bool(seen.norm.isfinite()) for seen in self.seen.values())


@dataclass(frozen=True)
class Difference:
    """Something that is not as it is eagerly."""

    what: str
    times: float
    """How many times what is allowed."""


class GradientRule:
    """How far the probes of a gradient may lie from what is expected of them: `tolerance` times the gradient's size."""

    def __init__(self, probes: Mapping[str, Probe], expected: Mapping[str, Seen], tolerance: float) -> None:
        self._elements = {n: seen.elements.tolist() for n, seen in expected.items()}
        self._projections = {n: seen.projections.tolist() for n, seen in expected.items()}
        self._tolerance = tolerance
        self._root_numel = {n: math.sqrt(max(1, probes[n].numel)) for n in expected}
        rms = {n: float(seen.norm) / self._root_numel[n] for n, seen in expected.items()}
        floor = FLOOR * max(rms.values(), default=0.0)
        self._size = {n: max(rms[n], largest_of(of), floor) for n, of in self._elements.items()}

    def expected(self, name: str, which: Sequence[int]) -> list[float]:
        """Of the sampled elements, some."""
        of = self._elements[name]
        return [of[i] for i in which]

    def elements(
        self, name: str, found: Sequence[float], factor: float = 1.0, which: Sequence[int] | None = None
    ) -> float:
        """How many times what is allowed sampled elements differ. `factor`: what clipping has multiplied gradients
        with. `which`: the sampled elements that `found` has; all of them by default."""
        expected = self._elements[name] if which is None else self.expected(name, which)
        off = largest_of(a - factor * b for a, b in zip(found, expected, strict=True))
        return times(off, self._size[name] * self._tolerance)

    def projections(self, name: str, found: Sequence[float], factor: float = 1.0) -> float:
        """How many times what is allowed projections differ. A projection's standard deviation is the gradient's norm,
        at most the gradient's size times the root of its number of elements; three of them are taken."""
        off = largest_of(a - factor * b for a, b in zip(found, self._projections[name], strict=True))
        return times(off, 3 * self._root_numel[name] * self._size[name] * self._tolerance)


class Comparison:
    """Compares what a rank has seen of one step with what is expected of it."""

    def __init__(self, subject: Subject, expected: Expected, tolerance: float) -> None:
        self.of = subject
        self.expected = expected
        self.tolerance = tolerance
        self.rule = GradientRule(subject.probes, expected.seen, tolerance)

    def gradients(self, held: Held, own: Held) -> tuple[dict[str, torch.Tensor], list[Difference]]:
        """The sampled elements of the gradients that were updated with, and what differs in them, or in the mean over
        ranks of what they have of their `own`. By all ranks together."""
        of, rule = self.of, self.rule
        rows = {n: Row(len(p.indices)) for n, p in of.probes.items()}
        for fragment, which, seen in (*held, *own):
            rows[str(fragment.piece)].add(fragment, which, seen)
        looks = [(str(f.piece), which.tolist(), seen.elements.tolist()) for f, which, seen in held]
        clipped = looks if of.max_norm is not None else ()
        pairs = [pair for n, places, mine in clipped for pair in zip(mine, rule.expected(n, places), strict=True)]
        fit = [sum(a * b for a, b in pairs), sum(b * b for _, b in pairs)]
        fit = sum_rows(rows.values(), of.lasting.group, fit)
        apart = {str(fragment.piece) for fragment, _, _ in own}
        factor = fit[0] / fit[1] if fit[1] else 1.0
        found = [Difference(f"no gradient of '{n}'", math.inf) for n in self.expected.strangers]
        elements, square = {}, 0.0
        for name, row in rows.items():
            probe = of.probes[name]
            copies = row.held / max(1, probe.numel)
            if name in apart:
                found.append(Difference(f"the gradient of '{name}'", rule.elements(name, row.elements)))
            else:
                elements[name] = torch.tensor(row.elements, dtype=torch.float64)
            if probe.numel and (copies < 1 or copies != round(copies)):
                found.append(Difference(f"the gradient of '{name}', which {copies:g} ranks hold", math.inf))
            elif probe.numel:
                square += row.square / copies
                mean = [p / copies for p in row.projections]
                off = rule.projections(name, mean, 1.0 if name in apart else factor)
                found.append(Difference(f"the gradient of '{name}'", off))
        for name, places, mine in looks:
            found.append(Difference(f"the gradient of '{name}'", rule.elements(name, mine, factor, places)))
        if of.max_norm is not None and not apart:
            found += self._clipping(of.max_norm, factor, math.sqrt(square))
        return elements, found

    def _clipping(self, max_norm: float, factor: float, norm: float) -> list[Difference]:
        """`norm`: of the gradients that were updated with. PyTorch divides by their norm before, plus 1e-6."""
        before = norm / factor if factor else 0.0
        expected = min(before, max_norm * before / (before + 1e-6)) if before else 0.0
        off = abs(norm - expected)
        return [
            Difference("the norm to which gradients are clipped", times(off, 4 * max_norm * self.tolerance)),
            Difference("the factor that clips gradients", times(max(factor - 1, 0.0), self.tolerance)),
        ]

    def loss(self, loss: torch.Tensor) -> Difference:
        """Whether the step has returned the global mean."""
        off = abs(float(loss) - self.expected.loss)
        return Difference("the loss", times(off, max(1.0, abs(self.expected.loss)) * self.tolerance))

    def buffers(self) -> list[Difference]:
        """What differs in this rank's buffers."""
        of, found = self.of, []
        for name, value in self.expected.buffers.items():
            mine = of.lasting.buffers.get(name)
            if mine is None or (name in of.shared_buffers and of.lasting.group.rank != 0):
                continue
            found.append(Difference(f"buffer '{name}'", difference(mine, value, self.tolerance)))
        return found

    def updates(
        self,
        before: Mapping[str, torch.Tensor],
        after: Mapping[str, torch.Tensor],
        states: Mapping[str, dict[str, Any]],
        gradients: Mapping[str, torch.Tensor],
        settings: Callable[[], None],
    ) -> list[Difference]:
        """What differs in the sampled elements' values from what the optimizer makes of the gradients that were updated
        with, which were compared for themselves. `settings` sets the optimizer's to those before the step."""
        now = kept_settings(self.of.lasting.optimizer)
        try:
            settings()
            stepped = stepped_elements(self.of, before, gradients, states)
        finally:
            now()
        off = _off(stepped, before, after)
        return [Difference(f"the updated '{n}'", t) for n, t in off.items()]


def tolerance_of(graph: TrainingGraph, groups: Sequence[Group] = ()) -> float:
    """What a difference may be: by the narrowest dtype that the graph computes in, or that is on the wire. A strategy
    may send activations, so that what one group rounds is seen in the gradients of others."""
    assert graph.joint is not None
    values = (n.meta.get("val") for n in graph.joint.module.graph.nodes)
    dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype in TOLERANCE}
    computed = max((TOLERANCE[d] for d in dtypes), default=TOLERANCE[torch.float32])
    return max([computed, *(WIRE_ROUNDING.get(str(g.spec.options.get("wire")), 0.0) for g in groups)])


def _off(
    stepped: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """How many times what is allowed the updated elements of each member, `after`, are off from `stepped`. Where
    PyTorch itself divides by zero, as Adam does whose variance underflows in float16, a rounding decides which elements
    are no numbers: of a member with such elements, those are compared that are numbers in both."""
    found = {}
    for n, value in stepped.items():
        rounding = torch.finfo(value.dtype).eps
        each = list(zip(value.tolist(), after[n].tolist(), before[n].tolist(), strict=True))
        if not all(math.isfinite(new) for new, _, _ in each):
            each = [(new, mine, old) for new, mine, old in each if math.isfinite(new) and math.isfinite(mine)]
        step = UPDATES[value.dtype] * largest_of(new - old for new, _, old in each) + 1e-30
        found[n] = _finite(largest_of((mine - new) / (step + rounding * abs(new)) for new, mine, _ in each))
    return found


def stepped_elements(
    of: Subject,
    values: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    states: Mapping[str, dict[str, Any]],
) -> dict[str, torch.Tensor]:
    """The sampled elements as a copy of the optimizer, in the user's own settings, updates them, where the optimizer's
    state is known; the states are left as they are."""
    optimizer, states = bare_copy(of.lasting.optimizer), copy.deepcopy({n: states[n] for n in states})
    place = {p: i for i, g in enumerate(of.lasting.optimizer.param_groups) for p in g["params"]}
    # Of complex gradients no elements are kept.
    leaves = {n: nn.Parameter(v.clone()) for n, v in values.items() if n in states and not v.is_complex()}
    for n, leaf in leaves.items():
        leaf.grad = gradients[n].to(leaf)
        optimizer.param_groups[place[of.parameters[of.probes[n].piece.name]]]["params"].append(leaf)
        if states[n]:
            optimizer.state[leaf] = states[n]
    without_wrong_kernels(optimizer)
    with torch.no_grad():
        optimizer.step()
    return {n: leaf.detach() for n, leaf in leaves.items()}


def difference(mine: torch.Tensor, reference: torch.Tensor, tolerance: float, least: float = 0.0) -> float:
    """How many times what is allowed two tensors differ by, relative to the largest value, which is taken to be `least`
    or more; integers must be equal."""
    if mine.shape != reference.shape or mine.dtype != reference.dtype:
        return math.inf
    if not mine.numel():
        return 0.0
    a, b = _wide(mine), _wide(reference)
    off, most = float((a - b).abs().max()), float(b.abs().max())
    if not math.isfinite(off):  # else all of both are numbers
        if not bool((torch.isfinite(a) == torch.isfinite(b)).all()):
            return math.inf
        off, most = float((a - b).nan_to_num(0.0, 0.0, 0.0).abs().max()), float(b.nan_to_num(0.0, 0.0, 0.0).abs().max())
    narrow = tolerance if mine.is_floating_point() or mine.is_complex() else 0.0
    return times(off, max(most, least) * narrow)


def times(off: float, allowed: float) -> float:
    """How many times what is allowed a difference is."""
    if off == 0:
        return 0.0
    return _finite(off / allowed if allowed else math.inf)


def largest_of(numbers: Iterable[float]) -> float:
    """The largest magnitude, 0 of no numbers; not a number if one is none."""
    sizes = list(map(abs, numbers))
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def _finite(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _wide(t: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).detach().double().cpu()
