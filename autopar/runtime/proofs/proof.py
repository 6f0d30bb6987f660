"""The proof on the first step: all ranks also run the user's model eagerly, and what the program does is compared.

Compared are the loss, every synchronized gradient (by probes, summed over ranks with the weights that the definition of
the gradient asks for), the updated values (against a copy of the optimizer on the sampled elements), and the buffers.
Of groups that are compressed or delayed, or that each rank updates alone, the sum of the ranks' own gradients is
compared instead, and what the first two update with and keep must add up to it (`autopar.runtime.proofs.feedback`).
First on a trial with slightly perturbed parameters, since zeros hide errors, after which everything is put back; then
on the step itself. What looks wrong is judged by how far rounding moves the eager result itself, before it is refused.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparWarning, TracingError, VerificationError
from autopar.ir.batch import Batch
from autopar.ir.batch_memory import check_unwritten
from autopar.ir.dtypes import EXACT_BYTES
from autopar.ir.garbage import without_collector
from autopar.ops.fragments import Fragment
from autopar.ops.updates import Observer
from autopar.runtime.looks import Observers
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.model.eager import backward, loss_of, without_trace
from autopar.runtime.optimizers.elsewhere import Elsewhere
from autopar.runtime.optimizers.own_settings import kept_settings
from autopar.runtime.proofs.blame import blame, blame_feedback, blame_tracing, blame_wire, first_difference
from autopar.runtime.proofs.differences import Comparison, Difference, Expected, difference, times, tolerance_of
from autopar.runtime.proofs.feedback import KIND, Feedback
from autopar.runtime.proofs.one_pass import How, Ran, step_by_graph, step_eagerly
from autopar.runtime.proofs.perturbation import PERTURBATION, perturb, round_otherwise
from autopar.runtime.proofs.probes import Probe, Seen
from autopar.runtime.proofs.subject import Subject, largest, summed
from autopar.runtime.proofs.tracing import tracing_fault
from autopar.runtime.proofs.wire_range import beyond_float16
from autopar.runtime.uncaptured.model import EagerModel
from autopar.runtime.unused import updated_with_more
from autopar.strategies.lowering import rounded_forward

_LOWERED, _MOST_LOWERED = 1 / 16, 8
"""By what the scale of the loss is lowered in a trial, and how often at most."""
_OTHERWISE = 0.75
"""A number near 1 that rounds what it multiplies."""
ROUNDING = 16.0
"""How many times as much as rounding moves the eager result a difference may be."""
FORWARD_ROUNDING, FORWARD_DRAWS = 3.0, 3
"""Where the wire rounds values to 16 bits that the forward pass reads: how many times as much as such a rounding of the
parameters moves the eager gradients a difference may be, and how many roundings are tried. The largest counts, as a few
samples that change sides of a ReLU decide how far gradients move."""


class Proof:
    """Compares one step of a program with the model run eagerly."""

    def __init__(self, subject: Subject, batches: Sequence[Batch], shares: Sequence[float], is_first: bool) -> None:
        """`batches`: the step's micro-batches. `shares`: how much of the global batch each is. `is_first`: whether no
        step came before, so that all of the optimizer's state is in the user's optimizer."""
        self.of = subject
        self.is_first = is_first
        self.batches = batches
        self.shares = shares
        self.tolerance = tolerance_of(subject.graph, subject.groups)

    @without_collector()
    def trial(self) -> None:
        """Compares on perturbed parameters, and puts everything back."""
        put_back, scale = self.of.lasting.snapshot(), self.of.scale
        state = None if scale is None else scale.state()

        def begin() -> None:
            put_back()
            with self.of.lasting.gathered():
                perturb(self.of.parameters, PERTURBATION)

        try:
            begin()
            with self.of.lasting.gathered():
                self._lower_scale()
            self.step("with slightly perturbed parameters", begin)
        finally:
            put_back()
            if scale is not None and state is not None:
                scale.load(state)

    def _lower_scale(self) -> None:
        """Lowers the scale of the loss until the eager gradients are finite, so that there is something to compare."""
        for _ in range(_MOST_LOWERED if self.of.scale is not None else 0):
            if self._eagerly().is_finite:
                return
            assert self.of.scale is not None
            self.of.scale.lower(_LOWERED)

    @without_collector()
    def step(self, how: str = "", begin: Callable[[], None] | None = None) -> torch.Tensor:
        """Runs the step, compares it, and returns its loss. Raises `VerificationError`, on all ranks alike. `begin`
        puts back all that the step changes; where it is not given, this method takes a snapshot for that."""
        of = self.of
        with of.lasting.gathered():
            expected = None if of.eager else self._eagerly()
            before, states = self._values(), self._states()
        begin, settings = begin or of.lasting.snapshot(), kept_settings(of.lasting.optimizer)
        held: list[tuple[Fragment, torch.Tensor, Seen]] = []
        own: list[tuple[Fragment, torch.Tensor, Seen]] = []
        feedback = Feedback(of)
        with of.observed(Observers(None, self._into(held), self._into(own), feedback.see), bool(how)):
            if of.eager is None:
                loss = of.run()
            else:
                loss, expected = self._as_it_ran(of.eager)
        with of.lasting.gathered():
            after = self._values()
        assert expected is not None
        comparison = Comparison(of, expected, self.tolerance)
        if of.scale is not None and self._overflows(expected, of.scale):
            found = [comparison.loss(loss), *comparison.buffers()]
            if of.scale.skipped:
                found += [Difference(f"the updated '{n}'", math.inf) for n in before if not _same(before[n], after[n])]
            self._judge(found, comparison, how, begin)
            return loss
        gradients, found = comparison.gradients(held, own)
        found += [comparison.loss(loss), *comparison.buffers(), *feedback.differences(own)]
        if states is not None:
            # Later, the user's optimizer has the state of the parameters that this rank updates as a whole.
            whole = {f.name for f, _, _ in held if f.whole}
            compared = gradients.keys() & states.keys()
            if of.eager is not None:  # what no rank has a gradient of is left as it was, unless some of it was kept
                still = [
                    n for n in compared - updated_with_more(of.groups) if of.probes[n].piece.name in of.eager.unused()
                ]
                compared -= {*still, *(n for n in compared if of.probes[n].piece.name in of.eager.written)}
                found += [Difference(f"the updated '{n}'", math.inf) for n in still if not before[n].equal(after[n])]
            known = {n: states[n] for n in compared if self.is_first or of.probes[n].piece.name in whole}
            found += comparison.updates(before, after, known, gradients, settings)
        self._judge(found, comparison, how, begin)
        return loss

    def _overflows(self, expected: Expected, scale: LossScale) -> bool:
        """Whether gradients that are scaled have left what their dtype can hold, in the step or on any rank's model."""
        mine = torch.tensor(float(scale.skipped or not expected.is_finite))
        return bool(largest(mine, self.of.lasting.group))

    def _into(self, held: list[tuple[Fragment, torch.Tensor, Seen]]) -> Observer:
        def see(fragment: Fragment, gradient: torch.Tensor) -> None:
            held.append((fragment, *self.of.probes[str(fragment.piece)].of_fragment(fragment, gradient)))

        return see

    def _as_it_ran(self, model: EagerModel) -> tuple[torch.Tensor, Expected]:
        """Runs the step, of a model that runs eagerly in it; the ranks' own gradients, and parts of the loss, are
        summed."""
        flats, own = self._probed()
        # What begins from a loss in 16 bits is scaled only as it is sent.
        assert self.of.graph.joint is not None
        narrow = self.of.graph.joint.outputs[0].meta["val"].dtype.itemsize < EXACT_BYTES
        factor = self.shares[0] if narrow and self.of.lasting.group.world_size > 1 else 1.0
        if self.of.scale is not None:
            factor /= self.of.scale.factor

        def see(name: str, gradient: torch.Tensor) -> None:
            for n, probe in own[name]:
                flats[n] += factor * probe.see(gradient).flat

        parts: list[torch.Tensor] = []
        with model.seen(see, parts):
            loss = self.of.run()
        shares = [float(part) * share for part, share in zip(parts, self.shares, strict=True) if share]
        return loss, self._summed(torch.tensor([sum(shares)], dtype=torch.float64), flats, {}, ())

    def _probed(self) -> tuple[dict[str, torch.Tensor], dict[str, list[tuple[str, Probe]]]]:
        """What is seen of each probe, nothing yet; and each parameter's probes."""
        own: dict[str, list[tuple[str, Probe]]] = {n: [] for n in self.of.parameters}
        for n, probe in self.of.probes.items():
            own[probe.piece.name].append((n, probe))
        return {n: torch.zeros(p.width, dtype=torch.float64) for n, p in self.of.probes.items()}, own

    def _summed(
        self,
        loss: torch.Tensor,
        flats: Mapping[str, torch.Tensor],
        buffers: dict[str, torch.Tensor],
        strangers: Sequence[str],
    ) -> Expected:
        sizes = [len(f) for f in flats.values()]
        whole = summed(torch.cat([loss, *flats.values()]), self.of.lasting.group)
        pieces = dict(zip(flats, torch.split(whole[1:], sizes), strict=True))
        seen = {n: Seen(piece) for n, piece in pieces.items()}
        return Expected(float(whole[0]), seen, buffers, sorted(strangers))

    def _eagerly(self, begun_at: float = 1.0) -> Expected:
        """The model on this rank's batches; losses and gradients are summed over ranks. `begun_at`: what the backward
        pass begins with, by which gradients are divided again."""
        of = self.of
        flats, own = self._probed()
        trained = set(map(id, of.parameters.values()))
        everything = {
            s + n: p for s, o in of.lasting.owners.items() for n, p in o.named_parameters() if p.requires_grad
        }
        updated = {
            id(p) for g in of.lasting.optimizer.param_groups for p in g["params"]
        }  # others are as if they were frozen
        others = {n: p for n, p in everything.items() if id(p) in updated and id(p) not in trained}
        watched = {**of.parameters, **others}
        strangers: set[str] = set()
        loss = torch.zeros(1, dtype=torch.float64)
        factor = begun_at * (1.0 if of.scale is None else float(of.scale.scaler.get_scale()))
        joined = of.graph.joint is not None and of.graph.joint.sums_over_ranks
        with of.lasting.random, without_trace(of.lasting.owners) as buffers, torch.enable_grad():
            for batch, share in zip(self.batches, self.shares, strict=True):

                def take(name: str, gradient: torch.Tensor, share: float = share) -> None:
                    gradient = gradient if factor == 1 else gradient / factor
                    for n, probe in own.get(name, ()):
                        flats[n] += (1.0 if joined else share) * probe.see(gradient).flat
                    if name not in own and bool(gradient.count_nonzero()):
                        strangers.add(name)

                given = batch.copied()
                one = loss_of(of.lasting.model, of.lasting.loss_fn, batch.rebuild(given))
                check_unwritten(given, frozenset() if of.graph.joint is None else of.graph.joint.copied_inputs)
                if share or joined:  # else the loss may be no number
                    loss += share * one.detach().double().cpu()
                    seed = factor * share if joined else factor  # gradients that cross ranks have each rank's share
                    backward(one if seed == 1 else one * seed, watched, take)
        return self._summed(loss, flats, buffers, sorted(strangers))

    def _values(self) -> dict[str, torch.Tensor]:
        """The sampled elements of the parameters."""
        return {n: p.elements(self.of.parameters[p.piece.name].detach()).clone() for n, p in self.of.probes.items()}

    def _states(self) -> dict[str, dict[str, Any]] | None:
        """The optimizer's state of the sampled elements; `None` where updates cannot be looked at by the element."""
        of, found = self.of, {}
        if not of.lasting.elementwise or of.lasting.has_loaded:
            return None
        for n, probe in of.probes.items():
            p = of.parameters[probe.piece.name]
            if not isinstance(state := of.lasting.optimizer.state.get(p, {}), Elsewhere):
                found[n] = {k: _sampled(k, v, p, probe) for k, v in state.items()}
        return found

    def _judge(self, found: Sequence[Difference], comparison: Comparison, how: str, begin: Callable[[], None]) -> None:
        """Raises where something differs by more than rounding moves it. `begin` puts back what was before the step."""
        of, wrong = self.of, {n: t for n, t in self._on_any_rank(found).items() if t > 1}
        if not wrong:
            return
        end = of.lasting.snapshot()
        begin()
        noise = self._rounding(comparison)
        # Buffers have one name for all, so each is looked at by itself: another's rounding says nothing of it.
        found = [d for d in found if not d.what.startswith("buffer") or d.times > ROUNDING * noise.get(d.what, 0.0)]
        most = self._on_any_rank(found)
        wrong = {n: most[n] for n in wrong if most[n] > max(1.0, ROUNDING * noise.get(_of_gradient(n), 0.0))}
        if not wrong or not math.isfinite(comparison.expected.loss):
            end()
            return
        if all(n.startswith(KIND) for n in wrong):  # own gradients are right
            raise VerificationError(blame_feedback(wrong, how, self._strategies(wrong)))
        if beyond := beyond_float16(of.groups, comparison.expected.seen):
            raise VerificationError(blame_wire(wrong, beyond))
        if of.eager is not None:
            raise VerificationError(blame(wrong, how, ""))
        with of.lasting.gathered():
            line = self._tracing_fault()
            # A rank whose batch does not show it, an empty one, says the same as the others.
            by_tracing = largest(torch.tensor(float(line is not None)), of.lasting.group)
            where = "" if by_tracing else self._where()
        if by_tracing:
            raise TracingError(blame_tracing(wrong, how, line or ""))
        raise VerificationError(blame(wrong, how, where))

    def _strategies(self, wrong: Iterable[str]) -> list[str]:
        """Those of the groups in which something does not add up."""
        named = {f"{KIND} '{m.slice}'": g.spec.strategy for g in self.of.groups for m in g.members}
        return sorted({named[n] for n in wrong})

    def _where(self) -> str:
        of, joint = self.of, self.of.graph.joint
        assert joint is not None
        return first_difference(
            of.lasting.model, of.lasting.loss_fn, self.batches[-1], joint, of.arguments(of.lasting.buffers), "step"
        )

    def _tracing_fault(self) -> str | None:
        """The line that PyTorch's own tracing gives other numbers for on this rank's last micro-batch, if it does."""
        of, joint, batch = self.of, self.of.graph.joint, self.batches[-1]
        assert joint is not None
        captured, trained = joint, {n: p for n, p in of.parameters.items() if n in joint.gradients}

        def eagerly(how: How) -> Ran:
            with of.lasting.random:
                return step_eagerly(
                    of.lasting.owners, of.lasting.loss_fn, batch, trained, [n for n, _ in captured.mutations], how
                )

        def by_graph() -> Ran:
            with of.lasting.random:
                return step_by_graph(captured, of.arguments(of.lasting.buffers))

        return tracing_fault(eagerly, by_graph, self.tolerance)

    def _on_any_rank(self, found: Sequence[Difference]) -> dict[str, float]:
        """The largest difference of each kind on any rank. What only some ranks can name goes by a common name."""
        kinds = ("the gradient of", "the updated", KIND)
        named = ["the loss", *(f"{what} '{n}'" for n in self.of.probes for what in kinds)]
        common = ["the clipping of gradients, or a gradient that was not captured", "a buffer"]
        most = dict.fromkeys([*named, *common], 0.0)
        for d in found:
            key = d.what if d.what in most else common[d.what.startswith("buffer")]
            most[key] = max(most[key], min(d.times, 1e30))
        whole = largest(torch.tensor(list(most.values()), dtype=torch.float64), self.of.lasting.group)
        return dict(zip(most, whole.tolist(), strict=True))

    def _rounding(self, comparison: Comparison) -> dict[str, float]:
        """How far the eager results move, in what is allowed, where each parameter moves by a rounding, and all that is
        passed back is rounded otherwise: gradients that add up to nothing show how large their terms are. Where 16 bits
        on the wire round what the forward pass reads, parameters move as far as these round."""
        found = self._moved(comparison)
        wire = rounded_forward(g.spec for g in self.of.groups)
        for draw in range(FORWARD_DRAWS if wire else 0):
            for n, far in self._moved(comparison, getattr(torch, wire), draw).items():
                found[n] = max(found[n], far * FORWARD_ROUNDING / ROUNDING)
        return found

    def _moved(self, comparison: Comparison, to: torch.dtype | None = None, draw: int = 0) -> dict[str, float]:
        of, expected = self.of, comparison.expected
        put_back = of.lasting.snapshot()
        with of.lasting.gathered():
            round_otherwise(of.parameters, to, draw)
            again = self._eagerly(_OTHERWISE)
        put_back()
        found = {}
        for n in of.probes:
            found[f"the gradient of '{n}'"] = comparison.rule.elements(n, again.seen[n].elements.tolist())
        for n, value in expected.buffers.items():
            found[f"buffer '{n}'"] = difference(again.buffers[n], value, self.tolerance)
        found["the loss"] = times(abs(again.loss - expected.loss), max(1.0, abs(expected.loss)) * self.tolerance)
        return found


def fits(subject: Subject) -> bool:
    """Whether all ranks have the memory to look: for a copy of the parameters and of the optimizer's state, and for the
    eager model's activations. Warns, on rank 0, where one has not. By all ranks together."""
    needed = 3 * subject.graph.parameter_bytes + max((n.live_bytes for n in subject.graph.compute), default=0)
    free = free_bytes(subject.lasting.device)
    short = summed(torch.tensor(float(free is not None and free < needed)), subject.lasting.group)
    if short and subject.lasting.group.rank == 0:
        warnings.warn(
            f"the first step is not compared with the model run eagerly: that takes {needed / 2**30:.1f} GiB besides "
            f"the step itself, and {int(short)} rank(s) have less. check='never' leaves it out without this word",
            AutoparWarning,
            stacklevel=4,
        )
    return not short


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def _of_gradient(what: str) -> str:
    return what.replace("the updated", "the gradient of")


def _sampled(key: str, value: Any, p: nn.Parameter, probe: Probe) -> Any:
    """The optimizer's value of the sampled elements; a counter of steps is one for all, as other single numbers are."""
    if not isinstance(value, torch.Tensor):
        return copy.copy(value)
    of_elements = value.shape == p.shape and (value.dim() > 0 or key != "step")
    return (probe.elements(value) if of_elements else value).clone()


def free_bytes(device: torch.device) -> int | None:
    """Memory that this rank may still take on its device; `None` where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)
    return None if free is None else free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
