"""What is planned for: a model, trained on batches like one of a rank's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from autopar.errors import AutoparWarning, CaptureError, SignatureError
from autopar.ir.batch import example_batch, flatten, inputs_and_target, module_batch
from autopar.ir.build import traced_step, training_graph
from autopar.ir.capture import JointGraph, Mode
from autopar.ir.outline import Outline
from autopar.ir.training_graph import TrainingGraph
from autopar.ir.weightless import first_without_values, lacks_values, outside_of_modes
from autopar.ops.context import Context
from autopar.runtime.compiled import Settings
from autopar.runtime.job.process_group import Group
from autopar.runtime.losses.shares import example_of
from autopar.runtime.optimizers.joint_optimizer import each_of
from autopar.runtime.optimizers.optimizer import Scope, context_for, optimizer_scope, updated_by
from autopar.runtime.timing import Timing
from autopar.runtime.uncaptured.look import settled
from autopar.spec.calibration import Calibration
from autopar.spec.cluster import ClusterSpec
from autopar.spec.plan import Recompute
from autopar.spec.topology import topology_of

if TYPE_CHECKING:
    from autopar.cost_models import CostModel
    from autopar.cost_models.base import Lesson


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
        self.timing = Timing(model, self.batch, settings, self._largest_optimizer, self.graph)

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
        together, for they must do the same, and time at once what they time. Warns, on rank 0, where the graph cannot
        be had. Raises `CaptureError` where it must be, or where the model cannot be trained eagerly either."""
        ranks = self.timing.group = group or Group(0, 1)
        self._outline = settled(self.model, self.batch, self.settings, self.mode, self.optimizer, self.graph, ranks)
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

    @cached_property
    def _largest_optimizer(self) -> Optimizer | None:
        """The one that updates most elements, of several."""
        each = () if self.optimizer is None else each_of(self.optimizer)
        return max(each, key=_elements, default=None)

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
        graph: TrainingGraph,
        measures: bool = False,
        trials: Callable[[str], list[Lesson]] | None = None,
    ) -> CostModel:
        """`measures`: whether the nodes of `graph`, one of its own, are timed here, on a device of rank 0's kind, as is
        the optimizer; those of a model that runs eagerly always are. `trials`: what was learned on the cluster, as in
        `cost_model_for`. Raises `SpecError` where the calibration is of another cluster."""
        from autopar.cost_models import ADAMW, cost_model_for, optimizer_cost

        if calibration is not None:
            calibration.check_cluster(cluster.fingerprint)
        of = self._largest_optimizer
        updates = ADAMW if of is None else optimizer_cost(type(of).__name__, of.param_groups[0])
        kind = topology_of(cluster).ranks[0].device.kind
        if not measures and not isinstance(graph.joint, Outline):
            return cost_model_for(updates, None, calibration, trials)
        seconds, update_s = self.timing.seconds(graph), self.timing.update_s()
        if self.timing.group.world_size == 1 and calibration is not None:  # the cluster's ranks compute all at once
            longer = max(1.0, calibration.compute_at_once or 1.0)
            seconds = {name: longer * node_s for name, node_s in seconds.items()}
            update_s = None if update_s is None else longer * update_s
        return cost_model_for(updates.measured(kind, update_s), {kind: seconds}, calibration, trials)


def _elements(optimizer: Optimizer) -> int:
    return sum(p.numel() for g in optimizer.param_groups for p in g["params"])
