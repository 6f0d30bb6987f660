"""`autopar verify`: prove that a plan trains as one process would."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from autopar import errors
from autopar.cli.console import (
    json_option,
    progress,
    quiet_libraries,
    result,
    result_json,
    result_table,
    standard_options,
)
from autopar.cli.model_argument import load_model

if TYPE_CHECKING:
    from autopar.verification import Verification

MAX_PROCESSES = 256
"""That one machine is asked to start."""


@click.command("verify")
@click.argument("model")
@click.option("--plan", "plan_file", metavar="FILE", help="The plan to prove.")
@click.option("--strategy", metavar="NAME", help="Or a hand-written plan (ddp, ...). Default: search one.")
@click.option("--world-size", type=click.IntRange(min=1), help="Ranks. Default: the plan's, else 4.")
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True, help="Optimizer steps.")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float64", show_default=True)
@json_option
@standard_options
def command(
    model: str,
    plan_file: str | None,
    strategy: str | None,
    world_size: int | None,
    steps: int,
    dtype: str,
    as_json: bool,
) -> None:
    """Train MODEL with several gloo ranks and with one process, and compare.

    Both see the same global batches, drawn from the example inputs. Loss, every gradient and every parameter are
    compared after each step. Exits with 4 where they differ by more than rounding explains.
    """
    if plan_file is not None and strategy is not None:
        raise click.UsageError("give either --plan or --strategy, not both")
    from autopar.spec.plan import Plan

    plan = Plan.load(plan_file) if plan_file is not None else None
    if plan is not None and world_size is not None:
        plan.check_world_size(world_size)
    n = world_size or (plan.cluster.world_size if plan else 4)
    if n > MAX_PROCESSES:
        raise errors.SpecError(f"{n} ranks would be {n} processes on this machine; at most {MAX_PROCESSES} are started")
    make = Remake(model)
    with quiet_libraries():
        # What is wrong with the arguments is better said once than by every rank.
        made, _, loss_fn = make()
        if plan is not None:
            from autopar.ir.build import model_fingerprint

            plan.check_model(model_fingerprint(made, loss_fn))
        from autopar.verification import verify

        progress(f"training {model} on {n} gloo ranks and in one process, {steps} steps in {dtype}")
        try:
            found = verify(make, plan=plan, strategy=strategy, world_size=n, steps=steps, dtype=dtype)
        except Exception as e:
            raise cause(e) from e
    if as_json:
        result_json(asdict(found) | {"passed": found.passed})
    else:
        _show(found)
    found.raise_if_failed()


@dataclass(frozen=True)
class Remake:
    """Makes the model of a MODEL argument, in whichever process it is called."""

    argument: str

    def __call__(self) -> tuple[Any, Any, Any]:
        from autopar.ir.batch import example_batch

        made = load_model(self.argument)
        inputs = example_batch(made.model) if made.example_inputs is None else made.example_inputs
        return made.model, inputs, made.loss_fn


def cause(error: Exception) -> Exception:
    """The error of autopar that ended a rank, where that is what the text of the other process ends with."""
    matched = re.search(r"^autopar\.errors\.(\w+): (.*)\Z", str(error), re.MULTILINE | re.DOTALL)
    kind = getattr(errors, matched[1], None) if matched else None
    if matched is None or not (isinstance(kind, type) and issubclass(kind, errors.AutoparError)):
        return error
    return kind(matched[2].strip())


def _show(found: Verification) -> None:
    rows = [(str(s.step), f"{s.loss:.1e}", f"{s.gradient:.1e}", f"{s.parameter:.1e}", s.worst) for s in found.steps]
    result_table(("step", "loss", "gradient", "parameter", "most in"), rows, "rrrrl")
    largest = max(max(s.loss, s.gradient, s.parameter) for s in found.steps)
    verdict = "equal" if found.passed else "DIFFERENT"
    result(
        f"{verdict}: largest difference {largest:.1e}, allowed {found.tolerance:.1e} "
        f"({found.world_size} ranks, {found.dtype}, relative to the largest value of the tensor or to 1)"
    )
    for note in found.notes:
        result(f"note: {note}")
