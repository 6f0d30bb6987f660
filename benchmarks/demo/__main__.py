"""`python -m benchmarks.demo`: plan for a language model, train it on four ranks, and compare with torch DDP."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.lab import Host, Lab, this_machine, unavailable_reason
from autopar.spec import units
from autopar.spec.plan import Fidelity

if TYPE_CHECKING:
    from autopar.spec.plan import Plan
    from benchmarks.demo.compare import Block
    from benchmarks.demo.task import Task

WARM_UP_STEPS = 2
BLOCK_STEPS = 3

console = Console(soft_wrap=True)


@click.command()
@click.option("--rate", default="1 Gbit/s", show_default=True, help="Rate of each host's link.")
@click.option("--ranks", default=4, show_default=True, type=click.IntRange(min=2, max=16))
@click.option("--steps", default=30, show_default=True, type=click.IntRange(min=2), help="Timed steps of each system.")
@click.option("--fidelity", default="exact", show_default=True, type=click.Choice(["exact", "rounded"]))
@click.option("--seed", default=0, show_default=True, help="Of the model and of the batches.")
@click.option("--loopback", is_flag=True, help="Do not use network namespaces even where they can be had.")
@click.option(
    "--out",
    default=Path("out/demo"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the plan, the report, the figures, and the tokens.",
)
@click.option("--check", is_flag=True, help="Exit with 1 where a figure misses its target.")
def main(rate: str, ranks: int, steps: int, fidelity: str, seed: int, loopback: bool, out: Path, check: bool) -> None:
    """Train a GPT-2 of Python's standard library with autopar and with torch DDP, in turn, and compare them."""
    started = time.monotonic()
    try:
        rate_bps = 8 * float(units.parse(rate, units.NETWORK_RATE))
    except ValueError as e:
        raise click.BadParameter(str(e), param_hint="--rate") from e
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    out.mkdir(parents=True, exist_ok=True)
    reason = "--loopback was given" if loopback else unavailable_reason()
    with ExitStack() as stack:
        lab = None if reason else stack.enter_context(Lab(rates_bps=[rate_bps] * ranks))
        network = f"{ranks} hosts, one network namespace each, links of {rate}" if lab else f"{ranks} ranks on loopback"
        console.print(f"[bold]Network[/]  {network}")
        if lab is None:
            console.print(
                f"         {reason}. Loopback has no network to save: what is sent costs next to nothing, so\n"
                "         there is little to gain, and its bytes are also those of other programs. Links of a given\n"
                "         rate need root on Linux with iproute2 (ip and tc)."
            )
        hosts = lab.hosts if lab else [this_machine()] * ranks
        task, text = _prepare(out, seed)
        plan = _plan(task, lab, ranks, cast("Fidelity", fidelity), out)
        warm_up, timed = _train(hosts, task, out / "plan.json", steps)

    from autopar.report import build_report
    from benchmarks.demo.outcome import Outcome

    outcome = Outcome.of(warm_up, timed)
    about = {"network": network, "rate": None if lab is None else rate, "ranks": ranks, "fidelity": fidelity}
    outcome.save(out / "results.json", {**about, "text": text, "timed_steps": steps, "seconds": _since(started)})
    measured = {plan.name: outcome.autopar.step_s, "ddp": outcome.ddp.step_s}
    build_report(plan, out / "report.html", measured=measured, commands=["make demo"])
    console.print()
    console.print(
        outcome.table(f"{network}; {WARM_UP_STEPS} steps to warm up, {steps} timed, in turns of {BLOCK_STEPS}")
    )
    if plan.prediction is not None:
        console.print(f"\nPredicted for autopar: {plan.prediction.step_time_s * 1e3:.0f} ms a step.")
    console.print(f"Losses of the two differ by at most {outcome.loss_difference:.1e} of their value.")
    console.print(f"Written: {', '.join(str(out / n) for n in ('plan.json', 'report.html', 'results.json'))}")
    console.print(f"Done in {_since(started):.0f} s.")
    if check and (short := outcome.shortfalls()):
        console.print("[bold red]Short of the target:[/]", *short, sep="\n  ")
        sys.exit(1)


def _prepare(out: Path, seed: int) -> tuple[Task, str]:
    with _said("Text"):
        from benchmarks.demo.task import Task
        from benchmarks.demo.text import VOCABULARY, standard_library, tokenize

        tokens = tokenize(standard_library(), out)
        task = Task(tokens=str(tokens.path.resolve()), seed=seed)
        parameters = sum(p.numel() for p in task.model().parameters())
    text = f"{tokens.files} files of Python's standard library, {tokens.text_bytes / 1e6:.1f} MB"
    console.print(f"         {text}: {tokens.count / 1e6:.2f} M tokens{' (from an earlier run)' * tokens.cached}")
    console.print(
        f"[bold]Model[/]    GPT-2, {parameters / 1e6:.1f} M parameters, vocabulary {VOCABULARY}, "
        f"{task.batch_size} x {task.sequence_length} tokens a rank and step, AdamW"
    )
    return task, text


def _plan(task: Task, lab: Lab | None, ranks: int, fidelity: Fidelity, out: Path) -> Plan:
    with _said("Plan") as say:
        from benchmarks.demo.planning import describe, make_plan

        def show(what: str, priced: int, best_s: float) -> None:
            say(f"{what}, {priced} plans priced, best {best_s * 1e3:.0f} ms a step")

        plan = make_plan(task, describe(lab, ranks, out / "cluster.yaml"), fidelity, show)
        plan.save(out / "plan.json")
    console.print(plan.explain(), markup=False, highlight=False)
    return plan


def _train(hosts: Sequence[Host], task: Task, plan: Path, steps: int) -> tuple[list[Block], list[Block]]:
    from benchmarks.demo import compare

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("[bold]Train[/]    starting ranks", total=2 * (WARM_UP_STEPS + steps))

        def show(block: Block) -> None:
            name = "torch DDP" if block.system == "ddp" else block.system
            state = f"[bold]Train[/]    {name:9} loss {block.losses[-1]:.3f}, {block.mean_step_s * 1e3:.0f} ms a step"
            if not console.is_terminal:  # where the bar is not drawn until the end
                console.print(state)
            progress.update(bar, advance=len(block.losses), description=state)

        with compare.started(hosts, task, str(plan.resolve())) as systems:
            return compare.alternate(systems, WARM_UP_STEPS, steps, BLOCK_STEPS, show)


@contextmanager
def _said(what: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done, and how long it took; gives a function that says how far it is."""
    start = time.monotonic()
    with console.status(f"[bold]{what}[/] ...") as status:
        yield lambda how_far: status.update(f"[bold]{what}[/] ... {how_far}")
    console.print(f"[bold]{what:8}[/] {time.monotonic() - start:.1f} s")


def _since(start: float) -> float:
    return time.monotonic() - start


if __name__ == "__main__":
    main()
