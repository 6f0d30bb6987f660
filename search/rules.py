"""Constraints on one model: which groups they admit, and how groups are changed so that pinned parameters go by their
pins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from autopar.errors import InfeasibleError, PlanError, did_you_mean
from autopar.ir.training_graph import Parameter, TrainingGraph
from autopar.ops.context import Context
from autopar.ops.group import Member
from autopar.search.builders.by_hand import DDP_BUCKET_BYTES, buckets
from autopar.search.builders.common import Piece, group, issue_order, whole
from autopar.search.constraints import Constraints, Pin
from autopar.spec.plan import FIDELITIES, Fidelity, OptionValue, SyncGroup
from autopar.strategies import strategy_named
from autopar.strategies.lowering import check_options, lower_plan

Groups = tuple[SyncGroup, ...]


class Rules:
    """Constraints, looked up for one model. With one rank there is nothing to synchronize: pins and forbidden
    strategies then change nothing."""

    def __init__(self, constraints: Constraints, graph: TrainingGraph, context: Context, fidelity: Fidelity) -> None:
        """Raises `PlanError`, with the reason, where a pin matches no parameter or cannot be used."""
        self.constraints = constraints
        self.graph = graph
        self.context = context
        several = context.world_size > 1
        self._forbidden = constraints.forbidden if several else frozenset[str]()
        self.pins: dict[str, Pin] = {}
        """By parameter."""
        for pin in constraints.pins:
            self.pins |= dict.fromkeys(_matched(pin, graph), pin)
        if not several:
            self.pins = {}
        self._values: dict[object, Mapping[str, object]] = {}
        self._grouped: dict[tuple[str, ...], Groups] = {}
        for name, pin in self.pins.items():
            self._check(graph.by_name[name], pin, fidelity)
        self._own(tuple(self.pins))

    @property
    def are_none(self) -> bool:
        """Whether all groups are admitted."""
        return not self.pins and not self._forbidden

    def allow(self, strategy: str, options: Mapping[str, OptionValue], names: Iterable[str]) -> bool:
        """Whether parameters of these names may be synchronized so."""
        if strategy in self._forbidden:
            return False
        return not self.pins or all(self._keeps(name, strategy, options) for name in names)

    def admit(self, groups: Groups) -> bool:
        """Whether no group uses a forbidden strategy, and all pinned parameters go by their pins."""
        return self.are_none or all(self.allow(g.strategy, g.options, (m.name for m in g.members)) for g in groups)

    def forbidden_in(self, groups: Groups) -> list[str]:
        """Forbidden strategies that the groups use."""
        return sorted({g.strategy for g in groups} & self._forbidden)

    def applied(self, groups: Groups) -> Groups:
        """The groups, where those parameters that do not go by their pins have left them for groups of their own."""
        strays = {m.name for g in groups for m in g.members if m.name in self.pins and not self._keeps_in(m.name, g)}
        if not strays:
            return groups
        kept: list[SyncGroup] = []
        for g in groups:
            stay = tuple(m for m in g.members if m.name not in strays)
            if len(stay) == len(g.members):
                kept.append(g)
            elif stay:
                kept.append(g.model_copy(update={"members": stay}))
        own = self._own(tuple(p.name for p in self.graph.parameters if p.name in strays))
        when = [g.timing for g in groups]
        if when[0] and all(w == when[0] for w in when):
            own = tuple(g.model_copy(update=when[0]) for g in own)
        return issue_order([*kept, *own], self.graph.parameters)

    def allowed(self, offered: Mapping[str, Mapping[str, OptionValue]]) -> Groups:
        """A plan of what is allowed, where all seeds are forbidden: each parameter by the strategy that most of them
        can use. `offered`: strategies, with options. Raises `InfeasibleError` where a parameter has none."""
        able = {
            name: {p.name for p in self.graph.parameters if self._why_not(p, name) is None}
            for name in offered
            if name not in self._forbidden
        }
        by: dict[str, list[Parameter]] = {}
        for p in self.graph.parameters:
            if p.name in self.pins:
                continue
            found = max((n for n in able if p.name in able[n]), key=lambda n: len(able[n]), default=None)
            if found is None:
                reasons = "; ".join(f"{n}: {self._why_not(p, n)}" for n in able)
                raise InfeasibleError(
                    f"no plan keeps to what is asked: no strategy is left for parameter '{p.name}'. Forbidden: "
                    f"{', '.join(sorted(self._forbidden))}; not usable: {reasons or 'none is left'}. Allow one of "
                    "those that are forbidden"
                )
            by.setdefault(found, []).append(p)
        groups = [g for name, parameters in by.items() for g in self._together(name, offered[name], parameters)]
        return issue_order([*groups, *self._own(tuple(self.pins))], self.graph.parameters)

    def _keeps_in(self, name: str, own: SyncGroup) -> bool:
        return self._keeps(name, own.strategy, own.options)

    def _keeps(self, name: str, strategy: str, options: Mapping[str, OptionValue]) -> bool:
        pin = self.pins.get(name)
        if pin is None:
            return True
        if pin.strategy != strategy:
            return False
        if not pin.options:
            return True
        mine, asked = self._read(strategy, options), self._read(strategy, pin.options)
        return all(mine.get(key) == asked[key] for key in pin.options)

    def _read(self, strategy: str, options: Mapping[str, OptionValue]) -> Mapping[str, object]:
        """All options, as the strategy reads them."""
        key = (strategy, *sorted(options.items()))
        if key not in self._values:
            spec = SyncGroup(strategy=strategy, members=(whole(self.graph.parameters[0])[0],), options=dict(options))
            self._values[key] = check_options(strategy_named(strategy), spec, self.context).model_dump()
        return self._values[key]

    def _why_not(self, parameter: Parameter, strategy: str) -> str | None:
        return strategy_named(strategy).applies(Member(*whole(parameter)), self.context)

    def _check(self, parameter: Parameter, pin: Pin, fidelity: Fidelity) -> None:
        strategy = strategy_named(pin.strategy)
        reason = self._why_not(parameter, pin.strategy)
        if reason is not None:
            raise PlanError(f"pin '{pin}': '{parameter.name}' cannot use {pin.strategy}: {reason}")
        try:
            self._read(pin.strategy, pin.options)
        except PlanError as e:
            raise PlanError(f"pin '{pin}': {e}") from e
        used = strategy.fidelity(strategy.options_type.model_validate(dict(pin.options)))
        if FIDELITIES.index(used) > FIDELITIES.index(fidelity):
            raise PlanError(
                f"pin '{pin}' is '{used}', but only '{fidelity}' is allowed: pass fidelity=\"{used}\"; under a quality "
                "budget, which chooses lossy strategies itself, leave the pin out"
            )

    def _own(self, names: tuple[str, ...]) -> Groups:
        """Groups of pinned parameters, as their pins have it."""
        if names not in self._grouped:
            found: list[SyncGroup] = []
            for pin in self.constraints.pins:
                parameters = [self.graph.by_name[name] for name in names if self.pins[name] is pin]
                plainest = next(iter(strategy_named(pin.strategy).options(self.context)), None)
                options = {**(plainest.model_dump(exclude_defaults=True) if plainest else {}), **pin.options}
                try:
                    found += self._together(pin.strategy, options, parameters) if parameters else []
                except PlanError as e:
                    raise PlanError(f"pin '{pin}': {e}") from e
            self._grouped[names] = tuple(found)
        return self._grouped[names]

    def _together(
        self, strategy: str, options: Mapping[str, OptionValue], parameters: Sequence[Parameter]
    ) -> list[SyncGroup]:
        """Groups of these parameters: as large as DDP's buckets, or as the strategy can have them. Raises `PlanError`
        where it cannot have them at all."""
        heads: dict[object, list[Piece]] = {}
        for p in parameters:
            heads.setdefault(p.head or p.name, []).append(whole(p))
        ways = [buckets(parameters, DDP_BUCKET_BYTES), list(heads.values()), [[whole(p)] for p in parameters]]
        for way in ways:
            groups = [group(strategy, pieces, options) for pieces in way]
            try:
                lower_plan(groups, self.graph, self.context)
            except PlanError as e:
                error = e
                continue
            return groups
        raise error


def _matched(pin: Pin, graph: TrainingGraph) -> list[str]:
    """Names of the trainable parameters that a pin matches, by any of their names."""
    specs = graph.model.parameters
    every = [n for p in specs for n in (p.name, *p.ties)]
    found = [p for p in specs if any(n == pin.pattern or fnmatchcase(n, pin.pattern) for n in (p.name, *p.ties))]
    if not found:
        deeper = f"{pin.pattern}.*"
        near = f"; did you mean '{deeper}'?" if any(fnmatchcase(n, deeper) for n in every) else ""
        shown = ", ".join(every[:5]) + (", ..." if len(every) > 5 else "")
        raise PlanError(
            f"pin '{pin}': no parameter of {graph.model.name} has such a name"
            f"{near or did_you_mean(pin.pattern, every)} (parameters: {shown})"
        )
    names = [p.name for p in found if p.name in graph.by_name]
    if not names:
        raise PlanError(f"pin '{pin}': '{found[0].name}' is frozen, so there is nothing to synchronize")
    return names
