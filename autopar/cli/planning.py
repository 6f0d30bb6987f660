"""What `autopar plan` and `autopar search` share: the options that say what is planned for, and the way to a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from autopar.cli.console import (
    calibration_option,
    detail,
    json_option,
    output_option,
    progress,
    quiet_libraries,
    standard_options,
)
from autopar.cli.constraints import constraint_options
from autopar.cli.described import load_calibration
from autopar.cli.model_argument import OPTIMIZERS, ModelArgument, chosen_optimizer, weights_option, with_model
from autopar.cli.precision import autocast_option, dtype_option

if TYPE_CHECKING:
    from autopar.search import SearchOptions
    from autopar.spec.cluster import ClusterSpec
    from autopar.spec.plan import Fidelity, Plan

F = TypeVar("F", bound=Callable[..., Any])

FIDELITIES = ("exact", "rounded", "compressed", "stale", "local")


@dataclass(frozen=True)
class Asked:
    """What a user asked for by the options of `planning_options`."""

    fidelity: str
    late_parameters: bool
    optimizer: str | None
    memory_reserve: float
    pin: dict[str, str]
    forbid: tuple[str, ...]
    dtype: str | None
    autocast: str | None
    calibration: str | None
    measure_compute: bool
    weights: bool | None
    global_batch: int | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Asked:
        """Raises `UsageError` where two of the options do not go together."""
        asked = cls(**{field.name: options[field.name] for field in fields(cls)})
        if asked.measure_compute and asked.weights is False:
            raise click.UsageError("--measure-compute runs the model, which takes its weights: leave --no-weights out")
        return asked

    def plan(
        self,
        model: str,
        spec: ClusterSpec,
        *,
        time_budget_s: float,
        tell: Callable[[str, int, float], None],
        strategy: str | None = None,
        given: Plan | None = None,
        seed: int = 0,
        search: SearchOptions | None = None,
        trials: Path | None = None,
    ) -> Plan:
        """The plan for MODEL on the cluster `spec`, as `autopar.plan` finds it. `tell` is told how far it is."""
        measured = load_calibration(self.calibration)
        progress(f"importing {model}")
        from autopar.api import plan as make_plan
        from autopar.search import SearchOptions

        def planned(made: ModelArgument) -> Plan:
            chosen = chosen_optimizer(made, self.optimizer)
            detail(f"optimizer: {type(chosen).__name__ if chosen else 'none'}")
            progress(f"planning {type(made.model).__name__} on {spec.summary}")
            return make_plan(
                made.model,
                spec,
                example_inputs=made.example_inputs,
                loss_fn=made.loss_fn,
                optimizer=chosen,
                mode="module" if chosen is None else "step",
                fidelity=cast("Fidelity", self.fidelity),
                late_parameters=self.late_parameters,
                memory_reserve=self.memory_reserve,
                pin=self.pin,
                forbid=self.forbid,
                strategy=strategy,
                calibration=measured,
                measure_compute=self.measure_compute,
                time_budget_s=time_budget_s,
                seed=seed,
                search=replace(search or SearchOptions(), global_batch=self.global_batch),
                plan=given,
                trials=trials,
                progress=tell,
            )

        with quiet_libraries():
            return with_model(model, True if self.measure_compute else self.weights, planned, self.dtype, self.autocast)


def planning_options(function: F) -> F:
    """Adds the options of `Asked`, `-o`, `--json` and the standard ones."""
    options = (
        output_option,
        click.option(
            "--fidelity",
            type=click.Choice(FIDELITIES),
            default="exact",
            show_default=True,
            help="How far a plan may depart from the single-process result.",
        ),
        click.option(
            "--late-parameters",
            is_flag=True,
            help="Allow plans that leave updated parameters on their way while the next step begins.",
        ),
        click.option(
            "--optimizer",
            type=click.Choice(OPTIMIZERS),
            help="Default: the factory's own, else adamw. none: a drop-in module that leaves synchronized gradients.",
        ),
        constraint_options,
        dtype_option,
        autocast_option,
        calibration_option,
        click.option(
            "--measure-compute",
            is_flag=True,
            help="Time the model's passes on this machine, which stands for the cluster's devices of its kind.",
        ),
        weights_option,
        click.option(
            "--global-batch",
            type=click.IntRange(min=1),
            metavar="N",
            help="Share N samples out so that unequal devices compute equally long. Default: as many on each rank as "
            "the model's example has, or as the cluster description says.",
        ),
        json_option,
        standard_options,
    )
    for option in reversed(options):
        function = option(function)
    return function
