"""Which parameters had no gradient on any rank, of the step whose gradients a group updates with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from autopar.errors import AutoparWarning
from autopar.ops.group import Group
from autopar.ops.moments import Moment
from autopar.runtime.uncaptured.model import EagerModel
from autopar.spec.plan import Plan, SyncGroup
from autopar.strategies import strategy_named
from autopar.strategies.base import Options, Strategy


class UnusedParameters:
    """Of a model that runs eagerly: in this step, and in those before for groups that update with earlier gradients.

    Groups that keep what they have not sent update with it, so that a missing gradient counts as zeros there.
    Of steps before a checkpoint that was loaded, nothing is known: their gradients count as there.
    """

    def __init__(
        self,
        groups: Sequence[SyncGroup],
        now: Callable[[], tuple[EagerModel | None, int]],
        moment: Callable[[int], Moment],
    ) -> None:
        """`now`: the model, and the step that runs; `moment`: what a group does in it, by its index."""
        self._groups = groups
        self._kept = [_keeps(g) for g in groups]
        self._now, self._moment = now, moment
        self._longest = max((g.delay for g in groups), default=0)
        self._by_step: dict[int, frozenset[str]] = {}
        self._said = False

    def of(self, index: int) -> frozenset[str]:
        """What group `index` leaves as it is in this step."""
        model, step = self._now()
        if model is None:
            return frozenset()
        moment = self._moment(index)
        if self._kept[index] and (moment.doing != "plain" or strategy_named(self._groups[index].strategy).warms_up):
            return frozenset()
        if moment.doing == "delayed":
            return self._by_step.get(step - moment.slot, frozenset())
        if moment.doing in ("alone", "average"):
            self._say_of_own(model)
        return model.unused()

    def _say_of_own(self, model: EagerModel) -> None:
        """Warns, once on each rank that it happens on, where a rank updates alone without a gradient of its own."""
        missing = model.missing_here()
        if missing and not self._said:
            self._said = True
            warnings.warn(
                f"this rank has no gradient of '{min(missing)}', which another rank has, in a step in which each "
                "updates alone: it updates with zeros here, so that momentum and weight decay move it, where local "
                "training would leave it as it is. Synchronize such parameters in every step, or leave them unused on "
                "all ranks",
                AutoparWarning,
                stacklevel=2,
            )

    def note(self) -> None:
        """Keeps what this step has shown, behind it, for as long as a group may update with its gradients."""
        model, step = self._now()
        if model is not None and self._longest:
            self._by_step = {s: names for s, names in self._by_step.items() if s > step - self._longest}
            self._by_step[step] = model.unused()


def updated_with_more(groups: Sequence[Group]) -> set[str]:
    """Parts of parameters whose updates may hold something else than the step's gradients."""
    others = (g for g in groups if g.label not in ("exact", "rounded"))
    return {str(m.slice) for g in others if g.label != "compressed" or _keeps(g.spec) for m in g.members}


def move_frozen(plan: Plan) -> frozenset[str]:
    """Parameters that move although they are frozen for a while, by what their groups keep of earlier steps: residuals,
    gradients that are late, the momentum of an outer optimizer."""
    found = set[str]()
    for group in plan.groups if plan.cluster.cluster.world_size > 1 else ():
        strategy, options = _strategy_of(group)
        if group.delay or strategy.moves_frozen(options):
            found |= {member.name for member in group.members}
    return frozenset(found)


def _keeps(group: SyncGroup) -> bool:
    """Whether a group's strategy keeps gradients of a step for later ones."""
    strategy, options = _strategy_of(group)
    return strategy.keeps_gradients(options)


def _strategy_of(group: SyncGroup) -> tuple[Strategy, Options]:
    strategy = strategy_named(group.strategy)
    return strategy, strategy.options_type.model_validate(group.options)
