"""A choice under a budget without ranks to try plans on: by what a run has found that could.

A plan that `optimize(..., budget=)` has chosen says of each plan that was looked at what its probe and its pilot came
to (`autopar.spec.quality`). What a method loses depends on the model, its optimizer and the number of ranks, and not on
the network: so the same evidence serves other clusters, where other methods are worth it. Plans without evidence are
not taken, and it is said what is to be run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path

from autopar.errors import SpecError
from autopar.quality.candidates import Candidate, Plans, begun_exactly, exactly, first_lossy, priced
from autopar.quality.methods import method_of
from autopar.quality.verdict import SHOWN, SLOWER, Shown
from autopar.search import Budget, SearchResult, search
from autopar.spec.plan import Plan
from autopar.spec.quality import Considered, QualityChoice

UNKNOWN = "no evidence"
MORE = "tried with more parameters synchronized exactly only"
NAMED = 4
"""Of plans that are not known, those that are named, at most."""


@dataclass(frozen=True)
class OnEvidence:
    """From a search for an exact plan to the one that is taken under a budget; for `SearchOptions.chooses`."""

    loss: float
    """What may be lost, as a part of what exact training gains."""
    steps: int
    """That the training will have."""
    evidence: str | Path | None = None
    """The file of a plan that `optimize(..., budget=)` has chosen."""
    again: Budget = field(default_factory=Budget)
    """What the search for the fastest plan that rounds may spend."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `SpecError` where the evidence is none."""
        plan = self._plan
        if plan is not None and (plan.quality is None or plan.was_edited):
            why = "was edited since" if plan.quality else "was chosen without a quality budget"
            raise SpecError(f"'{self.evidence}' holds no evidence, as its plan {why}: {self._to_run('the')}")

    @cached_property
    def _plan(self) -> Plan | None:
        """The plan that holds the evidence."""
        return None if self.evidence is None else Plan.load(self.evidence)

    def __call__(self, found: SearchResult, optimizer: str) -> Plan:
        """Raises `SpecError` where the evidence is of another training, and `PlanMismatchError` where it is of another
        model. `optimizer`: its kind."""
        of, known = found.problem, self._known(found, optimizer)
        if of.context.world_size == 1:
            return found.plan
        plans = Plans.of(
            of.graph,
            of.cluster,
            of.context,
            of.cost_model,
            of.constraints,
            lambda fidelity: found.plan if fidelity == "exact" else self._rounded(found),
        )
        exact, *others = priced(of.context, plans, self.steps)
        chosen, considered = exact, []
        for one in sorted(others, key=lambda c: c.training_step_s):
            verdict, said = self._verdict(one, known, found)
            if verdict == SHOWN and chosen is not exact:
                verdict = SLOWER
            elif verdict == SHOWN:
                chosen = one
            considered.append(self._considered(one, verdict, said, found))
        choice = QualityChoice(
            budget=self.loss,
            exact_step_s=exact.step_time_s,
            considered=tuple(considered),
            chance=None if known is None else known.chance,
            steps=0,
            note=self._note(found, considered),
            optimizer=optimizer,
        )
        plan = begun_exactly(chosen.plan, self.steps, of.context)
        plan = plan if plan.groups == chosen.plan.groups else plans.price(plan)
        return plan.model_copy(update={"name": chosen.name, "quality": choice})

    def _rounded(self, found: SearchResult) -> Plan:
        of = found.problem
        return search(
            of.graph,
            of.cluster,
            of.context,
            fidelity="rounded",
            constraints=of.constraints,
            budget=self.again,
            seed=self.seed,
            cost_model=of.cost_model,
        )

    def _known(self, found: SearchResult, optimizer: str) -> QualityChoice | None:
        """The evidence, where there is some, and it is of this training."""
        plan = self._plan
        if plan is None:
            return None
        assert plan.quality is not None, "looked at before"
        plan.check_model(found.problem.graph.model)
        theirs = f"{plan.cluster.world_size} ranks and {plan.quality.optimizer or 'an unknown optimizer'}"
        mine = f"{found.problem.context.world_size} ranks and {optimizer}"
        if theirs != mine:
            raise SpecError(
                f"'{self.evidence}' is of {theirs}, and what is planned has {mine}, which what a method loses depends "
                f"on: {self._to_run(str(found.problem.context.world_size))}"
            )
        return plan.quality

    def _verdict(
        self, one: Candidate, known: QualityChoice | None, found: SearchResult
    ) -> tuple[str, Considered | None]:
        said = None if known is None else next((c for c in known.considered if c.name == one.name), None)
        if known is None or said is None or said.exactly is None or not said.tried:
            return UNKNOWN, None
        if said.method and said.method != method_of(one.plan.groups, found.problem.context):
            return UNKNOWN, None
        if not set(said.exactly) <= set(exactly(one.plan, found.problem.context)):
            return MORE, None
        return Shown.of(said, known).verdict(self.loss), said

    def _considered(self, one: Candidate, verdict: str, said: Considered | None, found: SearchResult) -> Considered:
        context = found.problem.context
        return Considered(
            name=one.name,
            step_time_s=one.step_time_s,
            exact_steps=first_lossy(one.plan, self.steps, context),
            training_step_s=one.training_step_s,
            expected=said.expected if said else None,
            bound=said.bound if said else None,
            lost=said.lost if said else None,
            metric=said.metric if said else None,
            late=said.late if said else None,
            apart=said.apart if said else None,
            method=said.method if said else "",
            divergence=said.divergence if said else None,
            exactly=exactly(one.plan, context),
            tried=said is not None,
            verdict=verdict,
        )

    def _note(self, found: SearchResult, considered: list[Considered]) -> str:
        based = f"It rests on what a run has found, '{self.evidence}'." if self.evidence else ""
        faster = takewhile(lambda one: one.verdict != SHOWN, considered)
        unknown = [one.name for one in faster if not one.tried]
        if not unknown:
            return based
        more = f" and {len(unknown) - NAMED} more" if len(unknown) > NAMED else ""
        run = self._to_run(str(found.problem.context.world_size))
        return f"{based} To know of {', '.join(unknown[:NAMED])}{more}, which would be faster: {run}.".strip()

    def _to_run(self, ranks: str) -> str:
        """What gives evidence, in plain words."""
        return (
            f"on {ranks} ranks, run optimize(..., budget=autopar.QualityBudget({self.loss:g}, metric=..., batches=..., "
            f"steps={self.steps})) for the cluster that is planned for, which tries plans on copies of the model; save "
            "its plan, program.plan.save('evidence.json'), and pass --evidence evidence.json"
        )
