"""Whether what compressed and delayed groups update with, and what they keep for later, add up to the gradients.

That is what error feedback is: of each element, what is updated with and the change of what all ranks keep are together
the sum of the ranks' own gradients, and of what momentums say that they add to them. All are looked at by probes, which
are linear, and summed over ranks once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import torch

from autopar.errors import AutoparWarning
from autopar.ops.base import Call
from autopar.ops.fragments import Fragment, fragments
from autopar.ops.group import Group
from autopar.ops.layouts import REPLICATE, Partial, Replicate, Varying, held_before
from autopar.runtime.proofs.differences import FLOOR, TOLERANCE, Difference, largest_of, times, tolerance_of
from autopar.runtime.proofs.probes import Seen
from autopar.runtime.proofs.rows import Held, Row, sum_rows
from autopar.runtime.proofs.subject import Subject
from autopar.strategies.base import HELD

KIND = "what is updated with and kept of"
"""What its differences begin with."""
_TRIED = 4
"""States that may or may not be residuals, of which all choices are tried."""


def adds_up(group: Group) -> bool:
    """Whether a group's own gradients must be found again in what it updates with and keeps, in this step."""
    doing = group.moment.doing
    return doing == "delayed" or (doing in ("synchronize", "plain") and group.label not in ("exact", "rounded"))


@dataclass(frozen=True)
class _Kept:
    """A state with a number for each of its group's elements."""

    call: Call
    tensor: torch.Tensor
    parts: tuple[Fragment, ...]
    """Of what this rank holds of it."""

    @property
    def is_momentum(self) -> bool:
        return self.call.op.momentum is not None

    @property
    def is_residual(self) -> bool:
        """Whether each rank has its own part of a sum, which is what a residual is, unless it is a momentum."""
        return isinstance(self.call.layout, Partial) and not self.is_momentum

    @property
    def is_own_residual(self) -> bool:
        """Whether a strategy keeps it, and not who delays gradients."""
        return self.is_residual and not str(self.call.op.state_key()).startswith(HELD)


class Feedback:
    """Looks at one step: made before it, shown what it updates with, and asked behind it."""

    def __init__(self, of: Subject) -> None:
        self.of = of
        self.groups = [g for g in of.groups if adds_up(g)]
        self._kept = {g.index: self._states(g) for g in self.groups}
        self._updates: list[tuple[Fragment, torch.Tensor, Seen]] = []
        self._before = self._look()

    def see(self, fragment: Fragment, gradient: torch.Tensor) -> None:
        """Is shown what is updated with, before it is clipped."""
        self._updates.append((fragment, *self.of.probes[str(fragment.piece)].of_fragment(fragment, gradient)))

    def differences(self, own: Held) -> list[Difference]:
        """Where it does not add up to the ranks' `own` gradients, times their number. Warns, on rank 0 and once for
        each group, where that cannot be seen. By all ranks together."""
        if not self.groups:
            return []
        rows, updates, after = self._rows(own), self._rows(self._updates), self._look()
        states = [row for looks in (self._before, after) for of in looks.values() for row in of.values()]
        every = [*rows.values(), *updates.values(), *states]
        sum_rows(every, self.of.lasting.group)
        found = []
        for group in self.groups:
            found += self._of_group(group, rows, updates, after)
        return found

    def _of_group(
        self, group: Group, own: Mapping[str, Row], updates: Mapping[str, Row], after: Mapping[Call, Mapping[str, Row]]
    ) -> list[Difference]:
        names = [n for n in _names(group) if self.of.probes[n].numel]
        kept = self._kept[group.index]
        if not all(own[n].held for n in names):
            return self._unseen(group, "its own gradients are not seen before they are sent")
        if any(c.op.keeps_shards for c in self.of.calls if c.group is group):
            return self._unseen(group, "its parameters' rows live on one rank each")
        states, tolerance = [k.call for k in kept], self._tolerance(group)
        terms = {n: _Terms(n, self.of, own[n], updates[n], states, self._before, after) for n in names}
        floor = FLOOR * max((t.size for t in terms.values()), default=0.0)
        tried = [
            {n: t.off(chosen, max(t.size, floor) * tolerance) for n, t in terms.items()} for chosen in _choices(kept)
        ]
        best = min(tried, key=lambda off: max(off.values(), default=0.0))
        loses = group.label not in ("exact", "rounded")
        if max(best.values(), default=0.0) > 1 and loses and not any(k.is_own_residual or k.is_momentum for k in kept):
            return self._unseen(
                group, "it keeps no residual, a state of its elements of which ranks have parts of a sum"
            )
        if max(best.values(), default=0.0) > 1 and group.label in ("stale", "local"):
            return self._unseen(group, f"its strategy is '{group.label}'")
        found = [Difference(f"{KIND} '{n}'", off) for n, off in best.items()]
        for fragment, which, seen in self._updates:  # replicas are updated alike
            if (name := str(fragment.piece)) in terms:
                mean, size = updates[name].elements, max(terms[name].size, floor)
                pairs = zip(seen.elements.tolist(), which.tolist(), strict=True)
                off = largest_of(value - mean[i] for value, i in pairs)
                found.append(Difference(f"{KIND} '{name}'", times(off, size * tolerance)))
        return found

    def _states(self, group: Group) -> list[_Kept]:
        """What can be compared of a group's states, on this rank."""
        found = []
        for call in self.of.calls:
            key = call.op.state_key()
            if call.group is not group or key is None or call.op.of_parameters:
                continue
            layout, of_numbers = call.layout, call.torch_dtype.is_floating_point or call.torch_dtype.is_complex
            whole = not isinstance(layout, Partial) or layout.of == REPLICATE
            if call.elements == group.elements and of_numbers and whole and not isinstance(layout, Varying):
                rank = self.of.lasting.group.rank
                begin = held_before(layout, call.elements, rank)
                parts = fragments(group, dict(self.of.parameters), begin, begin + call.held_elements(rank))
                found.append(_Kept(call, self.of.lasting.states.of(call, key), parts))
        return found

    def _look(self) -> dict[Call, dict[str, Row]]:
        """At what this rank holds of each state now."""
        found = {}
        for group in self.groups:
            for kept in self._kept[group.index]:
                probes = ((f, self.of.probes[str(f.piece)]) for f in kept.parts)
                seen = [(f, *probe.of_fragment(f, f.of(kept.tensor))) for f, probe in probes]
                found[kept.call] = self._rows(seen, _names(group))
        return found

    def _rows(self, held: Held, names: Sequence[str] | None = None) -> dict[str, Row]:
        names = [n for g in self.groups for n in _names(g)] if names is None else names
        rows = {n: Row(len(self.of.probes[n].indices)) for n in names}
        for fragment, which, seen in held:
            if (row := rows.get(str(fragment.piece))) is not None:
                row.add(fragment, which, seen)
        return rows

    def _tolerance(self, group: Group) -> float:
        """By the narrowest dtype of what the group computes, sends and keeps; numbers within messages of bytes may be
        float32."""
        dtypes = {c.torch_dtype for c in self.of.calls if c.group is group}
        narrowest = max(TOLERANCE[d] for d in (*(dtypes & TOLERANCE.keys()), torch.float32))
        return max(narrowest, tolerance_of(self.of.graph, [group]))

    def _unseen(self, group: Group, why: str) -> list[Difference]:
        if group.index not in self.of.told:
            self.of.told.add(group.index)
            if self.of.lasting.group.rank == 0:
                warnings.warn(
                    f"group {group.index}, '{group.spec.strategy}': the ranks' own gradients are compared with the "
                    f"model run eagerly, but not what becomes of them, as {why}. `python -m autopar.testing` looks at "
                    "a strategy by itself",
                    AutoparWarning,
                    stacklevel=6,
                )
        return []


class _Terms:
    """What must add up, of one member."""

    def __init__(
        self,
        name: str,
        of: Subject,
        own: Row,
        update: Row,
        states: Sequence[Call],
        before: Mapping[Call, Mapping[str, Row]],
        after: Mapping[Call, Mapping[str, Row]],
    ) -> None:
        numel, ranks = of.probes[name].numel, of.lasting.group.world_size
        self.root = math.sqrt(numel)
        copies = update.held / numel
        self.is_whole = copies == round(copies)
        self.given = _value(own, own.held / numel)
        self.update = _value(update, max(1.0, copies))
        self.changes, sizes = {}, [_size(own, self.given, own.held), _size(update, self.update, update.held)]
        added = torch.zeros_like(self.given)
        for call in states:
            share = float(ranks) if isinstance(call.layout, Replicate) else 1.0
            rows = before[call][name], after[call][name]
            first, last = (_value(row, share) for row in rows)
            self.changes[call] = last - first
            if call.op.momentum is not None:
                added += call.op.momentum * first
            sizes += [_size(rows[0], first, numel), _size(rows[1], last, numel)]
        self.given = self.given + added
        self.size = max(sizes)
        """The largest of what is added up: by the root of its mean square, or by an element."""

    def off(self, chosen: Sequence[Call], allowed: float) -> float:
        """How many times what is allowed it is off, where these states are what is kept."""
        if not self.is_whole:
            return math.inf
        off = sum((self.changes[call] for call in chosen), self.update) - self.given
        elements, projections = off[:-_PROJECTED], off[-_PROJECTED:]
        return max(times(_largest(elements), allowed), times(_largest(projections), 3 * self.root * allowed))


_PROJECTED = 2


def _value(row: Row, copies: float) -> torch.Tensor:
    """The sampled elements and the projections, of which ranks have shown so many copies."""
    return torch.tensor([*row.sums, *row.projections], dtype=torch.float64) / copies


def _size(row: Row, value: torch.Tensor, held: float) -> float:
    return max(math.sqrt(row.square / max(1.0, held)), _largest(value[:-_PROJECTED]))


def _choices(kept: Sequence[_Kept]) -> Iterator[tuple[Call, ...]]:
    """Which states are what was not sent: all of which ranks have parts of a sum, and of the others none, some or all,
    for a strategy may also keep what is not (a momentum that it does not say it is, say)."""
    kept = [k for k in kept if not k.is_momentum]
    residuals, others = [k.call for k in kept if k.is_residual], [k.call for k in kept if not k.is_residual]
    counts = range(len(others) + 1) if len(others) <= _TRIED else (0, len(others))
    for some in chain.from_iterable(combinations(others, n) for n in counts):
        yield (*residuals, *some)


def _names(group: Group) -> list[str]:
    return [str(m.slice) for m in group.members]


def _largest(t: torch.Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0
