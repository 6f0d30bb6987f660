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
@click.option(
    "--dtype",
    type=click.Choice(["both", "float64", "float32", "own"]),
    default="both",
    show_default=True,
    help="What the model computes in; 'own': as it was built; 'both': float64, then own.",
)
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

    Both see the same global batches, drawn from the example inputs. Loss, every gradient, every parameter and every
    buffer are compared after each step: in float64, which shows the smallest faults, and in the model's own dtypes, in
    which it will be trained. Exits with 4 where they differ by more than rounding explains.
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

        dtypes, said = _dtypes(dtype, make)
        for sentence in said:
            progress(sentence)
        found = []
        for one in dtypes:
            progress(f"training {model} on {n} gloo ranks and in one process, {steps} steps in {_in_words(one)}")
            try:
                found.append(verify(make, plan=plan, strategy=strategy, world_size=n, steps=steps, dtype=one))
            except Exception as e:
                raise cause(e) from e
            if not as_json:
                _show(found[-1])
    if as_json:
        each = [asdict(f) | {"passed": f.passed} for f in found]
        result_json({"passed": all(f.passed for f in found), "comparisons": each, "notes": said})
    else:
        for sentence in said:
            result(f"note: {sentence}")
    for f in found:
        f.raise_if_failed()


def _dtypes(wanted: str, make: Remake) -> tuple[list[str], list[str]]:
    """In which dtypes to compare, and, in sentences, why not in others."""
    from autopar.verification import refusal

    if wanted == "own":
        return ["own"], []
    why = refusal(make, "float64" if wanted == "both" else wanted)
    if why is None:
        return (["float64", "own"] if wanted == "both" else [wanted]), []
    if wanted != "both":
        raise errors.SpecError(f"the model does not run in {wanted} ({why}); --dtype own compares it in its own dtypes")
    return ["own"], [f"the model does not run in float64 ({why}), so it is compared in its own dtypes alone"]


def _in_words(dtype: str) -> str:
    return "the model's own dtypes" if dtype == "own" else dtype


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
    rows = [
        (str(s.step), *(f"{x:.1e}" for x in (s.loss, s.gradient, s.parameter, s.buffer)), s.worst) for s in found.steps
    ]
    result_table(("step", "loss", "gradient", "parameter", "buffer", "most in"), rows, "rrrrrl")
    verdict = "equal" if found.passed else "DIFFERENT"
    result(
        f"{verdict}: largest difference {max(s.largest for s in found.steps):.1e}, allowed {found.tolerance:.1e} "
        f"({found.world_size} ranks, {_in_words(found.dtype)}, computed in {found.computed_in})"
    )
    for note in found.notes:
        result(f"note: {note}")
