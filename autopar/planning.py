"""From a model to a plan: the one way that `autopar.plan`, `autopar.optimize` and the command line take."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from torch import nn
from torch.optim import Optimizer

from autopar.errors import AutoparWarning, CaptureError, SignatureError, SpecError, did_you_mean
from autopar.formatting import size
from autopar.ir.batch import example_batch, flatten, inputs_and_target, module_batch
from autopar.ir.build import Unused, traced_step, training_graph
from autopar.ir.capture import JointGraph, Mode
from autopar.ir.outline import Outline
from autopar.ir.training_graph import TrainingGraph
from autopar.ir.weightless import first_without_values, lacks_values, outside_of_modes
from autopar.ops.context import Context
from autopar.runtime.compiled import Capture, Check, Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.losses.shares import example_of
from autopar.runtime.optimizers.joint_optimizer import each_of
from autopar.runtime.optimizers.kinds import kind_of
from autopar.runtime.optimizers.optimizer import Scope, context_for, optimizer_scope, updated_by
from autopar.runtime.profile import node_seconds
from autopar.runtime.uncaptured.look import settled
from autopar.search.constraints import NONE, Constraints
from autopar.search.options import SearchOptions
from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from autopar.spec.memory_use import MemoryUse
from autopar.spec.plan import Fidelity, Plan, Recompute
from autopar.spec.topology import topology_of

if TYPE_CHECKING:
    from autopar.cost_models import CostModel
    from autopar.cost_models.base import Lesson
    from autopar.search.base import SearchResult

Progress = Callable[[str, int, float], None]
"""Is told what the search does, how many plans it has priced, and the best step time so far in seconds."""


_CHOICES: dict[str, Any] = {
    "mode": Mode,
    "fidelity": Fidelity,
    "unused_parameters": Unused,
    "optimizer_acts_on": Scope,
    "check": Check,
    "capture": Capture,
}


def check_choices(**given: str | None) -> None:
    """Raises `SpecError` where an option has a value that is not one of its choices."""
    for name, value in given.items():
        choices: tuple[str, ...] = get_args(_CHOICES[name])
        if value is not None and value not in choices:
            known = ", ".join(map(repr, choices))
            raise SpecError(f"{name} is {value!r}, expected one of {known}{did_you_mean(str(value), choices)}")


class Training:
    """What is planned for: a model that is trained on batches like one of a rank's."""

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Any,
        settings: Settings,
        optimizer: Optimizer | None,
        mode: Mode,
        acts_on: Scope | None = None,
    ) -> None:
        """`example_inputs`: one rank's batch, with its target where there is a `loss_fn`; `None`: the model's own.
        `optimizer`: `None` in mode "step" where it is not known yet; then it costs what AdamW does. `mode`: whether the
        program runs the whole step, or only the passes of a drop-in module. `acts_on`: as in `optimizer_scope`.

        Raises `SignatureError` where the batch cannot be used, and `OptimizerError` where `acts_on` is needed."""
        with outside_of_modes():
            batch = example_batch(model) if example_inputs is None else example_inputs
        self._refused: CaptureError | None = None
        """Why the model cannot be captured, where that is known beforehand."""
        may_run = settings.capture != "always"
        if mode == "module":  # which is given no target
            inputs = inputs_and_target(batch, settings.loss_fn is not None)[0]
            try:
                self.batch = module_batch(model, inputs, needs_tensor=not may_run)
            except SignatureError:
                raise
            except CaptureError as e:
                self.batch, self._refused = flatten(inputs, needs_tensor=not may_run), e
        else:
            self.batch = flatten(example_of(settings.weight, batch), needs_tensor=not may_run)
        if self.batch.unseen or not self.batch.tensors:
            shows = f"the batch, a {type(batch).__name__}, shows no tensors to a graph"
            self._refused = self._refused or CaptureError(self.batch.unseen or shows)
        self.model = model
        self.settings = settings
        self.optimizer = optimizer
        self.mode = mode
        self._scope = optimizer_scope(optimizer, acts_on)
        self._graphs: dict[Recompute, TrainingGraph] = {}
        self._outline: TrainingGraph | None = None
        self._traced: JointGraph | None = None
        self._rows_said = False

    @property
    def without_values(self) -> str:
        """The name of the first parameter or buffer that has no values, as on the `meta` device; empty for none."""
        return first_without_values(self.model, self.settings.loss_fn)

    @property
    def eager(self) -> bool:
        """Whether the model runs eagerly, as was settled."""
        return self._outline is not None

    def settle(self, group: Group | None = None) -> None:
        """Decides whether the model is captured or runs eagerly, as `settings.capture` has it; on several ranks, by all
        together, for they must do the same. Warns, on rank 0, where the graph cannot be had. Raises `CaptureError`
        where it must be, or where the model cannot be trained eagerly either."""
        self._outline = settled(
            self.model, self.batch, self.settings, self.mode, self.optimizer, self.graph, group or Group(0, 1)
        )
        if self._outline is not None:
            self.settings = replace(self.settings, capture="never")

    def graph(self, recompute: Recompute = "none") -> TrainingGraph:
        """The captured step or module, captured once; of a model that runs eagerly, its outline. Raises
        `CaptureError`."""
        if self._outline is not None:
            return self._outline
        if self._refused is not None:
            raise self._refused
        if recompute not in self._graphs:
            loss_fn = self.settings.loss_fn if self.mode == "step" else None
            unused, passes = self.settings.unused_parameters, self.settings.passes
            if self._traced is None:
                self._traced = traced_step(self.model, self.batch, loss_fn, self.mode, self.settings.outputs)
            self._graphs[recompute] = training_graph(
                self.model,
                self.batch,
                loss_fn,
                self.mode,
                unused,
                recompute,
                passes,
                self.settings.outputs,
                updated_by(self.optimizer),
                traced=self._traced,
            )
            self._say_rows(self._graphs[recompute])
        return self._graphs[recompute]

    def _say_rows(self, graph: TrainingGraph) -> None:
        """Warns, once, where a batch without values leaves open how many rows of a table it names."""
        tables = [p.name for p in graph.parameters if p.table or (p.parts and p.parts.kind == "rows")]
        if tables and not self._rows_said and any(map(lacks_values, self.batch.tensors)):
            self._rows_said = True
            shown = f"'{tables[0]}'" + (f" and {len(tables) - 1} more" if len(tables) > 1 else "")
            warnings.warn(
                f"the batch has no values (it is on the meta device, or fake), so nobody can tell how often it looks "
                f"the same row of a table up: each index of {shown} is taken to name another row, and plans that send "
                "rows are priced so. Pass a batch with values; the model needs none",
                AutoparWarning,
                stacklevel=4,
            )

    def context(self, world_size: int, late_parameters: bool) -> Context:
        """What strategies may depend on."""
        clip, updates = self.settings.clip_grad_norm, self.mode == "step"
        is_scaled = self.settings.scaler is not None
        return context_for(world_size, self.optimizer, self._scope, clip, updates, late_parameters, is_scaled)

    def cost_model(
        self,
        cluster: ClusterSpec,
        calibration: Calibration | None,
        nodes: dict[str, float] | None = None,
        trials: Callable[[str], list[Lesson]] | None = None,
    ) -> CostModel:
        """`nodes`: seconds of the graph's nodes, as measured here, on a device of rank 0's kind. `trials`: what was
        learned on the cluster, as in `cost_model_for`. Raises `SpecError`
        where the calibration is of another cluster."""
        from autopar.cost_models import ADAMW, cost_model_for, optimizer_cost

        if calibration is not None:
            calibration.check_cluster(cluster.fingerprint)
        each = () if self.optimizer is None else each_of(self.optimizer)
        of = max(each, key=_elements, default=None)
        updates = ADAMW if of is None else optimizer_cost(type(of).__name__, of.param_groups[0])
        measured_s = None if nodes is None else {topology_of(cluster).ranks[0].device.kind: nodes}
        return cost_model_for(updates, measured_s, calibration, trials)


def _elements(optimizer: Optimizer) -> int:
    return sum(p.numel() for g in optimizer.param_groups for p in g["params"])


@dataclass(frozen=True)
class Planner:
    """How a plan is found; `autopar.optimize` says what each field is."""

    strategy: str | None = None
    fidelity: Fidelity = "exact"
    late_parameters: bool = False
    calibration: Calibration | None = None
    measure_compute: bool = False
    time_budget_s: float = 10.0
    seed: int = 0
    progress: Progress | None = None
    given: Plan | None = None
    """A plan that is priced as it is."""
    constraints: Constraints = NONE
    searching: SearchOptions = field(default_factory=SearchOptions)
    trials: str | Path | None = None
    """A file of trials that were run on the cluster; see `autopar.cost_models.trial_log`."""
    may_not_fit: bool = False
    """Whether a plan by name that does not fit the devices is returned all the same, with a warning, since whoever runs
    it would see whether it does."""

    def plan(self, training: Training, cluster: ClusterSpec) -> Plan:
        """The plan that is given, priced; or one that keeps all activations; where none fits, one that computes some of
        them again, or most. Warns where it keeps less memory free than is asked. Raises `InfeasibleError` where none of
        these fits, `PlanError` where a constraint cannot be kept to, and `SpecError` where a model without values is to
        be timed, or a global batch cannot be shared out."""
        if self.measure_compute and training.without_values:
            raise SpecError(
                f"measure_compute times the model's passes, and '{training.without_values}' has no values (it is on "
                "the meta device, or fake): leave measure_compute out, and compute is priced from what the devices "
                "reach, or make the model with its weights"
            )
        rewrites = training.mode == "step" and not training.eager
        levels: tuple[Recompute, ...] = ("none", "selective", "full") if rewrites else ("none",)
        if self.searching.global_batch is not None:
            cluster = self._shared_out(training, cluster, self.searching.global_batch)
        if self.given is not None:
            plan = self._plan(training, cluster, self.given.recompute)
        elif self.strategy is not None:
            plan = self._named(training, cluster, levels)
        else:
            plan = self._searched(training, cluster, levels)
        if plan.memory is not None and plan.memory.short_bytes:
            _say_memory(plan, plan.memory)
        if cluster.batches:
            _say_batches(training.graph(plan.recompute), cluster)
        return plan

    def _shared_out(self, training: Training, cluster: ClusterSpec, samples: int) -> ClusterSpec:
        """The cluster with a batch on each device, `samples` together."""
        from autopar.search import with_shares

        graph = training.graph()
        context, cost_model = self.setting(training, cluster, graph)
        return with_shares(samples, graph, cluster, context, cost_model, self.constraints)

    def _searched(self, training: Training, cluster: ClusterSpec, levels: tuple[Recompute, ...]) -> Plan:
        """The first level's plan that keeps as much memory free as is asked; else the one that keeps most free."""
        from autopar.search.infeasible import NoPlanFits

        found: list[tuple[int, SearchResult]] = []
        failed: list[NoPlanFits] = []
        began = time.monotonic()
        for recompute in levels:
            try:
                one = self._search(training, cluster, recompute, time.monotonic() - began)
            except NoPlanFits as e:
                failed.append(e)
                continue
            memory = one.plan.memory
            found.append((0 if memory is None else memory.short_bytes, one))
            if not found[-1][0]:
                break
        if not found:  # what is computed again may take more than what is kept
            raise min(failed, key=lambda e: e.least_bytes)
        chosen = min(found, key=lambda one: one[0])[1]
        if self.searching.chooses is not None and training.optimizer is not None:
            return self.searching.chooses(chosen, kind_of(training.optimizer))
        return chosen.plan if self.searching.finalists is None else self.searching.finalists(chosen)

    def _named(self, training: Training, cluster: ClusterSpec, levels: tuple[Recompute, ...]) -> Plan:
        """The first level's plan that fits the devices."""
        from autopar.search import infeasible

        plans = []
        for recompute in levels:
            plan = self._plan(training, cluster, recompute)
            if plan.memory is None or not plan.memory.over_bytes:
                return plan
            plans.append(plan)
        if self.may_not_fit:
            return plans[0]
        graphs = [training.graph(recompute) for recompute in levels]
        context, cost_model = self.setting(training, cluster, graphs[0])
        assert self.strategy is not None
        raise infeasible(self.strategy, graphs, cluster, context, cost_model=cost_model, constraints=self.constraints)

    def setting(self, training: Training, cluster: ClusterSpec, graph: TrainingGraph) -> tuple[Context, CostModel]:
        """What strategies may depend on, and what prices plans for the graph."""
        settings = training.settings
        late = self.given is not None and any(g.options.get("late") for g in self.given.groups)
        context = training.context(cluster.world_size, self.late_parameters or late)
        nodes = None
        if isinstance(graph.joint, Outline):
            nodes = graph.joint.seconds
        elif self.measure_compute:
            nodes = node_seconds(graph, training.model, training.batch, settings.loss_fn, settings.compiler)
        return context, training.cost_model(cluster, self.calibration, nodes, self._taught(cluster))

    def _taught(self, cluster: ClusterSpec) -> Callable[[str], list[Lesson]] | None:
        """What trials of the cluster have taught, from what prices rest on; `None` where there are to be none."""
        from autopar.cost_models.corrected import shipped
        from autopar.cost_models.trial_log import lessons

        trials, of, running = self.trials, cluster.fingerprint, self.searching.finalists is not None
        if trials is None:
            return (lambda basis: []) if running else None
        return lambda basis: lessons(trials, of, basis, shipped().features, may_be_missing=running)

    def _plan(self, training: Training, cluster: ClusterSpec, recompute: Recompute) -> Plan:
        """The plan that is given, or named."""
        from autopar.search import build_plan, price

        graph = training.graph(recompute)
        context, cost_model = self.setting(training, cluster, graph)
        if self.given is not None:
            return price(self.given, graph, cluster, context, cost_model=cost_model, constraints=self.constraints)
        assert self.strategy is not None
        return build_plan(
            self.strategy,
            graph,
            cluster,
            context,
            fidelity=self.fidelity,
            cost_model=cost_model,
            constraints=self.constraints,
        )

    def _search(self, training: Training, cluster: ClusterSpec, recompute: Recompute, spent_s: float) -> SearchResult:
        """`spent_s`: of the time that the search may take."""
        from autopar.search import Budget, search_result, searcher_named

        graph = training.graph(recompute)
        context, cost_model = self.setting(training, cluster, graph)
        return search_result(
            graph,
            cluster,
            context,
            fidelity=self.fidelity,
            constraints=self.constraints,
            budget=Budget(max(0.0, self.time_budget_s - spent_s), self.searching.evaluations, self.searching.stop),
            seed=self.seed,
            cost_model=cost_model,
            searcher=searcher_named(self.searching.searcher),
            journal=self.searching.journal,
            resume=self.searching.resume,
            progress=self.progress,
        )


def _say_batches(graph: TrainingGraph, cluster: ClusterSpec) -> None:
    """Warns where ranks with other batches than the example are priced with that."""
    from autopar.cost_models.batches import unscaled

    why = unscaled(graph, [place.device.batch for place in cluster.ranks])
    if why is not None:
        warnings.warn(
            f"the cluster's devices have batches of their own ({cluster.batches}), but the plan is priced with the "
            f"example's on each rank: {why}. It trains any batches all the same",
            AutoparWarning,
            stacklevel=4,
        )


def _say_memory(plan: Plan, use: MemoryUse) -> None:
    """Warns of a plan that keeps less memory free than was asked, or takes more than there is."""
    taken = f"is predicted to take {size(use.peak_bytes)} on {use.device_text}"
    parts = f"It is taken by {use.parts_text}."
    if use.over_bytes:
        said = (
            f"plan '{plan.name}' {taken}, {size(use.over_bytes)} more than there is. {parts} It may run out of memory, "
            "as it would without autopar; a search, without a strategy by name, finds what takes less"
        )
    else:
        left = use.device_bytes - use.peak_bytes
        part = math.floor(1000 * left / use.device_bytes) / 1000
        said = (
            f"plan '{plan.name}' {taken}, which leaves {size(left)} free, where {size(use.reserve_bytes)} were to be "
            f"kept free for what no prediction counts, as fragmentation. {parts} memory_reserve={part:g} "
            f"(--memory-reserve {100 * part:.3g}%) asks for no more"
        )
    warnings.warn(said, AutoparWarning, stacklevel=4)
